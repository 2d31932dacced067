"""Classes of silent faults as properties: each holds for any input, not for one example.

| class | where |
|---|---|
| what trains: weighting, accumulation, schedules, masks | test_invariance_recipes.py |
| switches of messages; cut turns are counted | tests/data/test_data_switches.py |
| packing: each sample once | tests/data/test_data_packing.py |
| held-out shares; stores; special tokens | tests/data/test_data_properties.py |
| streams go on from any position | tests/data/test_data_streaming.py |
| mixtures: weights and epochs in any order; sources draw by themselves; drawn rows nest | here |
| rows: names of question and answer | tests/data/read/test_data_user_files.py |
| pipes and devices in place of files | here |
| bases and checkpoints: any changed byte | tests/checkpoint/test_checkpoint_base.py |
| records: damaged rows stay where they were, and no whole row is lost | here |
| logging_steps: all readers agree; seeds go together | tests/run/test_run_logging_steps.py |
| secrets: any value, any assignment; twice is once | tests/run/test_run_secrets.py |
| what is printed holds no control characters | here |
| git: wherever a program is named | tests/run/test_run_git.py |
| DeepSpeed's files write inside the run | tests/parallel/test_parallel_deepspeed_file.py |
| bounds of numbers | tests/recipe/test_recipe_training_table.py |
| patterns: no end, and sizes | here, tests/lora |
| context length: one truth, never below the table's | here |
| what `new` writes is taken | tests/train/test_train_fit.py |
| warm-ups end before the run | here |
| permissions follow the umask | tests/run/test_run_directory.py |
| code that comes with a model | tests/infer/test_infer_own_code.py |
"""

import contextlib
import json
import os
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trainkit.data.datasets import Share, choose_rows, epoch_order, row_keys, stream_names
from trainkit.errors import CheckpointError, ModelError
from trainkit.models.context import context_of
from trainkit.patterns import refuse_endless
from trainkit.places import regular_files
from trainkit.recipe.schema import late_warmup
from trainkit.run.metrics import MetricsWriter, read_metrics
from trainkit.terminal import visible

QUICK = settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
SOURCES = st.lists(
    st.tuples(st.integers(0, 9), st.sampled_from([None, 0.0, 0.5, 1.0, 3.0]), st.integers(1, 3)),
    min_size=1,
    max_size=4,
)


def shares(sources):
    """Sources of so many rows, of the same file name in other folders."""
    names = stream_names(["d"] * len(sources), [f"{n}/d.jsonl" for n in range(len(sources))])
    return [
        Share(
            row_keys(["d.jsonl"], *np.array([[0] * size, range(size), [0] * size], int)),
            name, weight, float(epochs),
        )
        for name, (size, weight, epochs) in zip(names, sources, strict=True)
    ]  # fmt: skip


@QUICK
@given(sources=SOURCES, seed=st.integers(0, 99), epoch=st.integers(0, 3))
def test_weights_and_epochs_hold_in_any_order(sources, seed, epoch):
    mixed = shares(sources)
    of_files, shuffled = (epoch_order(mixed, seed=each, epoch=epoch) for each in (None, seed))
    owners = np.repeat(np.arange(len(sources)), [size for size, *_ in sources])
    counts = [Counter(owners[order].tolist()) for order in (of_files, shuffled)]
    assert counts[0] == counts[1]
    assert (np.diff(owners[of_files]) >= 0).all()
    is_weighted = any(weight is not None for _, weight, _ in sources)
    for number, (size, weight, epochs) in enumerate(sources):
        if not is_weighted:
            assert counts[0][number] == size * epochs
        elif weight == 0:
            assert not counts[0][number]


@QUICK
@given(size=st.integers(8, 60), seed=st.integers(0, 99), fewer=st.integers(0, 5))
def test_sources_of_one_file_name_draw_by_themselves_and_drawn_rows_nest(size, seed, fewer):
    one, other = shares([(size, None, 1), (size, None, 1)])
    orders = [epoch_order([each], seed=seed, epoch=0).tolist() for each in (one, other)]
    assert orders[0] != orders[1]
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(size))
    more, less = (
        choose_rows(one.keys, count, seed=seed, name=one.name) for count in (7, 7 - fewer)
    )
    assert (more.sum(), less.sum()) == (7, 7 - fewer)
    assert not (less & ~more).any()


@pytest.mark.parametrize(
    "name",
    [
        "config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json",
        "model.safetensors", "adapter_model.safetensors", "adapter_config.json", "merges.txt",
        "chat_template.jinja", "special_tokens_map.json", "model.safetensors.index.json",
    ],
)  # fmt: skip
def test_a_pipe_in_place_of_a_file_is_refused(name, tmp_path):
    (tmp_path / "other.json").write_text("{}")
    os.mkfifo(tmp_path / name)
    with pytest.raises(ModelError, match="pipe"):
        regular_files(tmp_path, ModelError)


@QUICK
@given(
    damaged=st.sets(st.integers(0, 11)),
    keep=st.integers(0, 12),
    junk=st.sampled_from(['{"step": 3', "null", "{}", '{"step": "x"}', '{"step": -1}', "\ufffd"]),
)
def test_damaged_rows_stay_and_no_whole_row_is_lost(damaged, keep, junk, tmp_path):
    file = tmp_path / f"{time.monotonic_ns()}.jsonl"
    lines = [junk if n in damaged else json.dumps({"step": n, "loss": 1.0}) for n in range(12)]
    file.write_text("".join(f"{line}\n" for line in lines))
    whole = [n for n in range(12) if n not in damaged]
    assert [row["step"] for row in read_metrics(file)] == whole
    with contextlib.closing(MetricsWriter(file, resume_step=keep)):
        pass
    assert [row["step"] for row in read_metrics(file)] == [n for n in whole if n <= keep]
    other = file.with_name("metrics.superseded.jsonl")
    set_aside = other.read_text().splitlines() if other.exists() else []
    assert Counter(file.read_text().splitlines() + set_aside) == Counter(lines)
    other.unlink(missing_ok=True)


@QUICK
@given(text=st.text())
def test_what_is_printed_holds_no_control_characters(text):
    shown = visible(text)
    assert not [sign for sign in shown if ord(sign) < 32 and sign not in "\n\t"]
    assert "\x7f" not in shown
    assert visible(shown) == shown


@pytest.mark.parametrize(
    ("key", "pattern"),
    [
        ("target_modules", "(a+)+x"),
        ("exclude_modules", "(.*a){20}x"),
        ("layers_pattern", "(a|a)*x"),
        ("rank_pattern", "((a|aa)+)+x"),
    ],
)
def test_a_pattern_without_an_end_is_refused_by_its_key(key, pattern):
    value = {pattern: 2} if key == "rank_pattern" else pattern
    with pytest.raises(CheckpointError, match=key):
        refuse_endless({key: value}, ["a" * 40], Path("adapter_config.json"))


@QUICK
@given(
    limit=st.integers(1, 2**20),
    factor=st.sampled_from([None, 0.5, 1.0, 4.0, float("nan"), float("inf"), "x"]),
    kind=st.sampled_from([None, "default", "llama3", "linear", "yarn", "dynamic"]),
    name=st.sampled_from(["rope_parameters", "rope_scaling"]),
    table=st.none() | st.integers(1, 4096),
)
def test_a_context_is_never_below_its_limit_and_a_table_is_its_end(
    limit, factor, kind, name, table
):
    config = {"max_position_embeddings": limit, name: {"rope_type": kind, "factor": factor}}
    found = context_of(config)
    assert limit <= found <= 4 * limit
    assert found == limit or kind in ("linear", "yarn", "dynamic")
    assert context_of({"text_config": config}) == found
    if table is not None:
        assert context_of({**config, "n_positions": table}) == table


@QUICK
@given(more=st.floats(-3, 3), last=st.integers(-1, 60))
def test_a_warm_up_that_outlasts_the_run_is_asked_back_and_no_other(more, last):
    warmup = max(last + more, 0.0)
    assert bool([*late_warmup(warmup, last)]) == (last > 0 and warmup > last)
