"""ZeRO-1, 2 and 3 checkpoints become plain models without DeepSpeed, a GPU, or trust."""

import os
import shutil
from pathlib import Path

import pytest
import torch
from chaos.hostile_cases import Evil
from ranks import run_ranks
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from trainkit.checkpoint.weights.adapter import adapter_from_tensors, read_adapter_config
from trainkit.checkpoint.weights.export import export_plain
from trainkit.checkpoint.zero import ZeroReader, find_zero_folder
from trainkit.errors import CheckpointError

CASES = {
    "zero1": {"stage": 1},
    "zero1-fp32-sums": {"stage": 1, "sums": "fp32"},
    "zero2": {"stage": 2, "frozen": True},
    "zero3": {"stage": 3},
    "zero3-frozen": {"stage": 3, "frozen": True},
    "zero1-lora": {"stage": 1, "lora": True},
    "zero2-lora": {"stage": 2, "lora": True},
    "zero3-lora": {"stage": 3, "lora": True},
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Each case's checkpoint, made by two real ranks on first use."""
    made = {}

    def get(case) -> Path:
        if case not in made:
            root = tmp_path_factory.mktemp(case)
            run_ranks("checkpoint.zero_cases:save", root=str(root), **CASES[case])
            made[case] = root
        return made[case]

    return get


@pytest.mark.sample("zero1-fp32-sums", "zero[23]", "zero[23]-lora")
@pytest.mark.parametrize("case", CASES)
def test_weights_are_the_masters_bit_for_bit(saved, case):
    root = saved(case)
    truth = load_file(root / "truth.safetensors")
    with ZeroReader(find_zero_folder(root / "checkpoint-2")) as reader:
        assert reader.tensors.keys() == truth.keys()
        for name, tensor in truth.items():
            assert torch.equal(reader.load(name).float(), tensor), name


@pytest.mark.parametrize("case", ["zero2", "zero3"])
def test_export_loads_as_a_plain_model(saved, case, tmp_path):
    root = saved(case)
    with ZeroReader(find_zero_folder(root / "checkpoint-2")) as reader:
        export_plain(reader, root / "checkpoint-2", tmp_path / "plain", dtype="bfloat16")
    model, info = AutoModelForCausalLM.from_pretrained(
        tmp_path / "plain", dtype="auto", output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert model.dtype == torch.bfloat16
    truth = load_file(root / "truth.safetensors")
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, truth[name].to(torch.bfloat16))
    assert (tmp_path / "plain" / "tokenizer.json").exists()


def test_lora_shards_become_an_adapter(saved):
    root = saved("zero2-lora")
    config = read_adapter_config(root / "checkpoint-2")
    with ZeroReader(find_zero_folder(root / "checkpoint-2")) as reader:
        parts = {name: reader.load(name) for name in reader.tensors if ".lora_" in name}
    adapter = adapter_from_tensors(root, config, parts)
    assert len(adapter.modules) == 4
    assert all(part.delta().abs().max() > 0 for part in adapter.modules.values())


def damaged(root: Path, target: Path) -> Path:
    shutil.copytree(root / "checkpoint-2", target)
    return find_zero_folder(target)


SHARDS = {
    "optimizer missing": ("zero3", "*rank_1*optim_states.pt", Path.unlink, "shards"),
    "model missing": ("zero3", "*rank_1*model_states.pt", Path.unlink, "shards"),
    "of a larger run": (
        "zero2",
        "*rank_1*optim_states.pt",
        lambda path: shutil.copy(path, path.with_name(path.name.replace("rank_1", "rank_2"))),
        "3 optimizer shards",
    ),
    "cut": (
        "zero2",
        "*rank_0*optim_states.pt",
        lambda path: os.truncate(path, path.stat().st_size // 2),
        "damaged or hostile",
    ),
}


@pytest.mark.parametrize("what", SHARDS)
def test_other_shards_than_were_saved(saved, tmp_path, what):
    case, pattern, damage, said = SHARDS[what]
    folder = damaged(saved(case), tmp_path / "c")
    for path in [*folder.glob(pattern)]:
        damage(path)
    with pytest.raises(CheckpointError, match=said):
        ZeroReader(folder)


@pytest.mark.parametrize("where", ["optimizer", "scaler", "model"])
def test_hostile_shard_runs_nothing(saved, tmp_path, where):
    folder = damaged(saved("zero2"), tmp_path / "c")
    canary = tmp_path / "canary"
    pattern = "*model_states.pt" if where == "model" else "*rank_1*optim_states.pt"
    path = next(folder.glob(pattern))
    content = torch.load(path, weights_only=False)
    if where == "scaler":
        content["optimizer_state_dict"]["loss_scaler"] = Evil(tmp_path)
    else:
        content["extra"] = Evil(tmp_path)
    torch.save(content, path)
    with pytest.raises(CheckpointError, match="hostile"):
        ZeroReader(folder)
    assert not canary.exists()


@pytest.mark.parametrize("key", ["param_slice_mappings", "single_partition_of_fp32_groups"])
@pytest.mark.parametrize("value", [None, 3, [[]], [torch.zeros(2)]])
def test_nonsense_inside_is_a_clean_error(saved, tmp_path, key, value):
    folder = damaged(saved("zero2"), tmp_path / "c")
    path = next(folder.glob("*rank_1*optim_states.pt"))
    content = torch.load(path, weights_only=False)
    content["optimizer_state_dict"][key] = value
    torch.save(content, path)
    with pytest.raises(CheckpointError):
        ZeroReader(folder)
