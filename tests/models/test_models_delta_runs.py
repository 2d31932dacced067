"""Commands on a model with gated delta rules, as they are typed."""

import json

import pytest
import torch
from commands import trainkit
from evals.set_files import write_sets
from safetensors.torch import load_file, save_file
from tiny import DELTA_NET, chat_lines, train_bpe
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from trainkit.export.llama_process import QWEN2
from trainkit.quickstart import chatml_tokenizer
from trainkit.train.optimizer import decayed

DECAYS = ("linear_attn.A_log", "linear_attn.dt_bias")


def merging_tokenizer():
    """Byte level by Qwen2's rule, with some merges, without which llama.cpp loads none."""
    from tokenizers import Regex, pre_tokenizers

    parts = [
        pre_tokenizers.Split(Regex(QWEN2), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
    texts = ["say a word or some other words to the world"]
    cut = pre_tokenizers.Sequence(parts)
    return chatml_tokenizer(train_bpe(texts, cut, size=270, special=[]))


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """In bf16, but for the decays, which no bf16 number is equal to."""
    folder = tmp_path_factory.mktemp("delta")
    tokenizer = merging_tokenizer()
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    ends |= {"full_attention_interval": 2, "bos_token_id": None}  # llama.cpp reads it alone
    ends["rope_parameters"] = {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
        "mrope_section": [1, 1, 0],
    }
    sizes = {**DELTA_NET, "vocab_size": len(tokenizer), **ends}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3_5_text", **sizes))
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    for name in weights:
        if name.endswith(DECAYS):
            weights[name] = weights[name].float() * 1.001 + 1e-3
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    rows = [(f"say {n}", "word " * (n % 5 + 1)) for n in range(24)]
    (folder / "rows.jsonl").write_text(chat_lines(rows))
    return folder


def sft(folder, base, run, *words, dtype="float32", **options):
    """A run of four packed rows a step, on as many ranks."""
    ranks = options.get("num_ranks", 1)
    recipe = {
        "model": {"name_or_path": str(base), "dtype": dtype},
        "data": {"train": [str(base / "rows.jsonl")], "packing": True, "max_length": 96},
        "kernels": True,
        "training": {
            "max_steps": 3,
            "per_device_train_batch_size": 4 // ranks,
            "learning_rate": 1e-3,
            "save_steps": 1,
            "logging_steps": 1,
            "use_cpu": True,
        },
    }
    (folder / f"{run}.yaml").write_text(json.dumps(recipe))
    said = trainkit(
        folder, "sft", "--config", f"{run}.yaml", "--output-dir", run, *words, **options
    )
    assert said is None or said.code == 0, said.err
    return folder / run


def final(run):
    weights = {}
    for path in (run / "final").glob("*.safetensors"):
        weights |= load_file(path)
    return weights


def test_decays_train_in_fp32_and_no_weight_decay_shrinks_them(base, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(base)
    spared = set(dict(model.named_parameters())) - decayed(model)
    assert {name.partition("linear_attn.")[2] for name in spared} >= {"A_log", "dt_bias"}
    assert "model.layers.0.linear_attn.in_proj_a.weight" in decayed(model)
    words = ["training.learning_rate=1e-5", "training.weight_decay=0.9", "training.max_steps=1"]
    found = final(sft(tmp_path, base, "run", *words, dtype="bfloat16"))
    before = load_file(base / "model.safetensors")
    for name in (each for each in before if each.endswith(DECAYS)):
        moved = (found[name] - before[name]).abs()
        assert found[name].dtype == torch.float32
        assert 0 < moved.max() < 1.1e-5, name  # a step of Adam; bf16 would round by 4e-3
    assert found["model.layers.0.linear_attn.in_proj_a.weight"].dtype == torch.bfloat16


@pytest.mark.sample("zero3")
@pytest.mark.parametrize("shard", ["none", "zero2", "zero3", "fsdp2"])
def test_ranks_are_one_process_and_go_on_to_the_same_bytes(shard, base, tmp_path, alone):
    words = [f"parallel.shard={shard}"]
    whole = sft(tmp_path, base, "whole", *words, num_ranks=2)
    losses = [json.loads(line)["loss"] for line in (whole / "metrics.jsonl").open()]
    wanted = [json.loads(line)["loss"] for line in (alone / "metrics.jsonl").open()]
    assert losses == pytest.approx(wanted, rel=1e-6)
    ours, one = final(whole), final(alone)
    for name, value in one.items():
        torch.testing.assert_close(ours[name], value, rtol=0, atol=1e-5, msg=name)
    sft(tmp_path, base, "parts", *words, num_ranks=2, kill_at=3)
    said = trainkit(tmp_path, "sft", "--resume", "parts", num_ranks=2)
    assert said.code == 0, said.err
    again = final(tmp_path / "parts")
    assert all(torch.equal(again[name], value) for name, value in ours.items())


@pytest.fixture(scope="module")
def alone(base, tmp_path_factory):
    return sft(tmp_path_factory.mktemp("alone"), base, "alone")


@pytest.fixture(scope="module")
def adapted_alone(base, tmp_path_factory):
    return sft(tmp_path_factory.mktemp("adapted"), base, "alone", "lora.r=4")


@pytest.mark.parametrize("shard", ["zero3", "fsdp2"])
def test_adapters_begin_alike_wherever_the_base_is_made(shard, base, tmp_path, adapted_alone):
    """Its layers draw decays as they are made, before the checkpoint's are read."""
    run = sft(tmp_path, base, shard, "lora.r=4", f"parallel.shard={shard}", num_ranks=2)
    found, wanted = (
        [json.loads(line)["loss"] for line in (each / "metrics.jsonl").open()]
        for each in (run, adapted_alone)
    )
    assert found == pytest.approx(wanted, rel=1e-6)


def test_rows_that_ranks_share_are_refused(base, tmp_path):
    (tmp_path / "r.yaml").write_text(
        json.dumps(
            {
                "model": {"name_or_path": str(base)},
                "data": {"train": [str(base / "rows.jsonl")], "max_length": 96},
                "kernels": True,
                "parallel": {"sequence": 2},
                "training": {"use_cpu": True},
            }
        )
    )
    said = trainkit(tmp_path, "sft", "--config", "r.yaml", "--dry-run", num_ranks=2)
    assert said.code == 2
    assert "parallel.sequence" in said.err


def test_what_was_trained_answers(base, alone, tmp_path):
    """Prompts of two lengths at once, as plain transformers answers each alone; and the rest."""
    prompts = ["say 1", "a longer question than the other one"]
    (tmp_path / "prompts.txt").write_text("\n".join(prompts) + "\n")
    options = ["--max-new-tokens", 6, "--greedy", "--device", "cpu"]
    said = trainkit(tmp_path, "generate", alone, "--prompts", "prompts.txt", "-o", "out", *options)
    assert said.code == 0, said.err
    found = [json.loads(line)["answer"] for line in (tmp_path / "out").read_text().splitlines()]
    model = AutoModelForCausalLM.from_pretrained(alone / "final").eval()
    tokenizer = AutoTokenizer.from_pretrained(alone / "final")
    wanted = []
    for prompt in prompts:
        given = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}],
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
        )
        ids = model.generate(**given, max_new_tokens=6, do_sample=False)
        wanted.append(tokenizer.decode(ids[0, given["input_ids"].shape[1] :]))
    assert found == wanted
    write_sets(tmp_path / "sets")
    words = ["--tasks", "boolq", "--data", "sets", "--limit", 2, "--device", "cpu"]
    said = trainkit(tmp_path, "eval", alone, *words, "--json")
    assert said.code == 0, said.err
    for kind in ("vllm", "gguf"):  # the latter read by llama.cpp itself
        said = trainkit(tmp_path, "export", kind, alone, kind)
        assert said.code == 0, said.err
        certificate = json.loads((tmp_path / kind / "certificate.json").read_text())
        assert certificate["answers"]["agreement"] == 1.0
