"""Rows that several ranks share: each attends for some heads, and the numbers are one process's."""

import shutil

import pytest
from project import logged, make_uneven, sft
from ranks import run_ranks
from safetensors.torch import load_file
from tiny import SINCE_5_18

RECIPE = """\
model: {name_or_path: m, dtype: float32}
data: {train: [a.jsonl, b.jsonl], eval: [e.jsonl], max_length: 96, cache_dir: cache}
kernels: true
global_batch_size: 8
training: {learning_rate: 1e-3, per_device_train_batch_size: 2, max_steps: 4, logging_steps: 1,
  save_steps: 2, save_total_limit: 9, eval_strategy: steps, eval_steps: 2, max_grad_norm: 0.5,
  gradient_checkpointing: true}
"""
RUNS = {
    "packed": (
        2,
        # One data rank: its own denominator is that of all.
        ["parallel.shard=zero3", "training.average_tokens_across_devices=false"],
        ["data.packing=true"],
    ),
    "padded": (
        4,
        ["parallel.shard=none"],
        ["kernels=false", "training.label_smoothing_factor=0.1", "lora.r=4"],
    ),
}
"""Ranks, how they are spread besides, and what one process is told as well."""


@pytest.fixture(scope="module")
def project(tmp_path_factory, tiny_qwen2):
    root = tmp_path_factory.mktemp("project")
    return make_uneven(root, tiny_qwen2, RECIPE, a=range(60), b=range(60, 120), e=range(120, 136))


@pytest.mark.parametrize("kind", RUNS)
def test_shared_rows_train_as_whole_ones(kind, project):
    """fp32: only orders of sums differ, by far less than the 1e-5 and 1e-6 that are promised."""
    num_ranks, spread, words = RUNS[kind]
    words = ["--config", "r.yaml", *words]
    sft(project, *words, "--output-dir", f"{kind}-one")
    sft(
        project,
        *(*words, "--output-dir", f"{kind}-shared", "parallel.sequence=2", *spread),
        num_ranks=num_ranks,
    )
    one, shared = (logged(project / f"{kind}-{name}") for name in ("one", "shared"))
    assert len(shared) == len(one) == 6
    for found, wanted in zip(shared, one, strict=True):
        assert found.keys() == wanted.keys()
        assert found == pytest.approx(wanted, rel=1e-5), kind
    assert shared[0]["grad_norm"] == pytest.approx(one[0]["grad_norm"], rel=1e-6)
    weights = [
        load_file(next(project.glob(f"{kind}-{n}/final/*.safetensors"))) for n in ("one", "shared")
    ]
    assert all((weights[0][name] - weights[1][name]).abs().max() < 1e-5 for name in weights[0])


def test_a_run_goes_on_exactly(project):
    run = project / "packed-shared"
    shutil.copytree(run, project / "again")
    sft(project, "--resume", "again/checkpoint-2", num_ranks=2)
    assert logged(project / "again") == logged(run)


def test_each_rank_attends_for_some_heads_with_all_tokens():
    shapes = [(4, 4), (4, 2), (4, 1), (8, 2), (12, 3)]
    for world_size in (2, 4):
        case = "parallel.row_cases:attention_of_all_heads"
        for found in run_ranks(case, world_size=world_size, shapes=shapes):
            for (heads, _), (sizes, difference) in zip(shapes, found, strict=True):
                assert sizes == [[heads, 6], [heads // world_size, 6 * world_size]]
                assert difference < 1e-13  # fp64, rows of 24 tokens


@pytest.mark.parametrize("broken", [None, "positions", "exchange", "documents"])
def test_what_parts_of_rows_get_wrong_stops_the_run_before_its_first_step(broken):
    for rows, documents in run_ranks("parallel.row_cases:proofs", broken=broken):
        assert isinstance(rows, float) == (broken in (None, "documents")), rows
        assert isinstance(documents, float) == (broken in (None, "positions")), documents


def test_models_whose_rows_are_more_than_their_parts_are_refused():
    for said in run_ranks("parallel.row_cases:refusals"):
        words = ("", "eager", "mean loss", "routers", "longrope", "dynamic", "7 heads")
        for reason, word in zip(said, words, strict=True):
            assert word in reason
            assert bool(word) == bool(reason)


SERVED = (
    *(
        "gpt_oss",
        "mimo_v2_flash",
        "gemma2",
        "gemma3",
        "llama4_text",
    ),  # sinks, caps, windows, chunks
    *("deepseek_v3", "qwen3_moe"),  # values of another size, experts
)
REFUSED = {
    **({"doge": "reads its mask"} if SINCE_5_18 else {}),
    "qwen3_next": "recurrence",
    "lfm2": "convolution",
    "gptj": "differ",  # attention of its own
    "bart": "differ",  # positions of its own
}


def test_classes_of_each_kind_share_rows_right_or_are_refused():
    """fp32 gradients against a backward pass over whole rows: a few dozen roundings apart."""
    names = [*SERVED, *REFUSED]
    for found in run_ranks("parallel.row_cases:classes_of_each_kind", names=names):
        for name in SERVED:
            assert isinstance(found[name], float), found[name]
            assert found[name] < 5e-6, name
        for name, word in REFUSED.items():
            assert word in str(found[name]), name
