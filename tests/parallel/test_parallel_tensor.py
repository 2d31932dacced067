"""Matrix products that ranks share (AutoTP under ZeRO-1): numbers and files of one process."""

import shutil

import pytest
from project import logged, make_uneven, sft
from ranks import run_ranks
from safetensors.torch import load_file

RECIPE = """\
model: {name_or_path: m, dtype: float32}
data: {train: [d.jsonl], eval: [e.jsonl], max_length: 96, packing: true, cache_dir: cache}
kernels: true
global_batch_size: 4
training: {learning_rate: 1e-3, per_device_train_batch_size: 1, max_steps: 4, logging_steps: 1,
  save_steps: 2, save_total_limit: 9, eval_strategy: steps, eval_steps: 2, max_grad_norm: 0.5,
  gradient_checkpointing: true}
"""
SPREAD = ["parallel.shard=zero1", "parallel.tensor=2"]


@pytest.fixture(scope="module")
def project(tmp_path_factory, tiny_qwen2):
    """A recipe, and its run in one process and on four ranks, two of which share products."""
    root = tmp_path_factory.mktemp("project")
    make_uneven(root, tiny_qwen2, RECIPE, d=range(90), e=range(90, 106))
    sft(root, "--config", "r.yaml", "--output-dir", "one")
    sft(root, "--config", "r.yaml", "--output-dir", "shared", *SPREAD, num_ranks=4)
    return root


def test_shared_products_train_and_save_as_whole_ones(project):
    """fp32: only orders of sums differ, by far less than the 1e-5 and 1e-6 that are promised."""
    one, shared = (logged(project / name) for name in ("one", "shared"))
    assert len(shared) == len(one) == 6
    for found, wanted in zip(shared, one, strict=True):
        assert found.keys() == wanted.keys()
        assert found == pytest.approx(wanted, rel=1e-5)
    assert shared[0]["grad_norm"] == pytest.approx(one[0]["grad_norm"], rel=1e-6)
    for folder in ("final", "checkpoint-2"):
        names = [
            {path.name for path in (project / run / folder).iterdir()} for run in ("one", "shared")
        ]
        assert all(
            "global_step" in n or n in ("latest", "optimizer.pt") or "rank" in n or "rng" in n
            for n in names[0] ^ names[1]
        )
        wanted, found = (
            load_file(project / run / folder / "model.safetensors") for run in ("one", "shared")
        )
        assert found.keys() == wanted.keys()
        for name, value in wanted.items():
            assert found[name].dtype == value.dtype
            assert (found[name] - value).abs().max() < 1e-5, name
    assert (project / "one/final/config.json").read_text() == (
        project / "shared/final/config.json"
    ).read_text()


def test_a_run_goes_on_exactly(project):
    shutil.copytree(project / "shared", project / "again")
    sft(project, "--resume", "again/checkpoint-2", num_ranks=4)
    assert logged(project / "again") == logged(project / "shared")


def test_each_rank_has_a_part_of_the_layers_and_all_of_the_rest():
    for whole, split in run_ranks("parallel.tensor_cases:shapes"):
        parts = {name for name, shape in whole.items() if split[name] != shape}
        linear = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
        assert parts == {
            name
            for name in whole
            if any(part in name for part in linear) and not name.endswith("o_proj.bias")
        }
        for name in parts:
            dim = 1 if "o_proj" in name or "down_proj" in name else 0
            halved = list(whole[name])
            halved[dim] //= 2
            assert split[name] == halved


def test_models_without_a_plan_or_with_too_few_heads_are_refused():
    for said in run_ranks("parallel.tensor_cases:refusals"):
        assert [
            word in reason for reason, word in zip(said, ("no plan", "1 key heads"), strict=True)
        ] == [True, True]


SERVED = ("qwen3", "gemma2", "gpt_neox")  # norms of heads, soft caps, products together
REFUSED = {"phi3": "rowwise_split_input", "qwen3_moe": "packed_colwise", "gpt_oss": "no plan"}


def test_classes_of_each_kind_compute_the_same_or_are_refused():
    case = "parallel.tensor_cases:classes_of_each_kind"
    for found in run_ranks(case, names=[*SERVED, *REFUSED]):
        assert [found[name] for name in SERVED] == [""] * len(SERVED)
        assert all(word in found[name] for name, word in REFUSED.items())
    for found in run_ranks(case, names=["llama"], broken=True):
        assert "the gradient of" in found["llama"]
