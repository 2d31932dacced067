"""One table of strategies, and nobody else who asks which engine runs."""

import re
from pathlib import Path

import pytest

from trainkit.errors import RecipeError
from trainkit.options.parallel import ParallelOptions
from trainkit.parallel import STRATEGIES, Layout, ProcessRank, strategy_for

PACKAGE = Path(__file__).parents[2] / "trainkit"

ENGINES = re.compile(
    r"is_deepspeed(?!_available)|is_fsdp|\bds_(?!type\b)|full_tensor|deepspeed_config|integrations\.deepspeed"
    r"|import deepspeed|from deepspeed|import DTensor|is_zero3|has_deepspeed|recipe\.deepspeed"
)


def test_nothing_outside_the_package_asks_which_engine_runs():
    elsewhere = {"parallel", "translate"}  # and the settings of other tools, by their names
    files = [path for path in PACKAGE.rglob("*.py") if elsewhere.isdisjoint(path.parts)]
    found = [
        f"{path.relative_to(PACKAGE)}: {line.strip()}"
        for path in files
        for line in path.read_text(encoding="utf-8").splitlines()
        if ENGINES.search(line)
    ]
    assert not found


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_row_resolves(name):
    layout = Layout.of(STRATEGIES[name], ProcessRank(1, 1, 2))
    assert layout.fits_its_ranks_only == name.startswith("zero")
    assert (layout.data_rank, layout.data_size) == (1, 2)
    assert layout.optimizer_shards == (1 if name == "none" else 2)
    given = layout.engine.training_arguments(num_micro_batches=2)
    assert bool(given) == (STRATEGIES[name].config is not None)
    if given:
        assert given["deepspeed"]["data_types"] == {"grad_accum_dtype": "fp32"}
        alone = layout.engine.training_arguments(num_micro_batches=1)
        assert "data_types" not in alone["deepspeed"]  # nothing is summed, and no memory spent
    stays = layout.engine.loading_device("cpu") == "cpu"
    assert stays == (not name.startswith("zero3"))


@pytest.mark.parametrize(
    ("tensor", "sequence", "pipeline", "data_size"),
    [(1, 1, 1, 8), (2, 1, 1, 4), (1, 2, 1, 4), (1, 1, 2, 4), (2, 2, 2, 1), (2, 1, 2, 2)],
)
def test_each_rank_has_one_place_and_each_row_one_counting_rank(
    tensor, sequence, pipeline, data_size
):
    options = ParallelOptions(tensor=tensor, sequence=sequence, pipeline=pipeline)
    layouts = [Layout.of(STRATEGIES["none"], ProcessRank(r, r, 8), options) for r in range(8)]
    assert {one.data_size for one in layouts} == {data_size}
    places = [one.place for one in layouts]
    assert places == sorted(set(places))
    assert len(places) == 8
    counting = [one.data_rank for one in layouts if one.counts_rows]
    assert counting == list(range(data_size))


def test_processes_that_cannot_be_divided_are_refused():
    options = ParallelOptions(tensor=2, pipeline=3)
    with pytest.raises(
        RecipeError, match=r"8 processes cannot .* tensor 2 x pipeline 3"
    ) as refused:
        Layout.of(STRATEGIES["none"], ProcessRank(0, 0, 8), options)
    assert refused.value.where == "parallel.tensor"


@pytest.mark.parametrize(
    ("text", "shard", "origin"),
    [
        ("deepspeed: zero2", "zero2", "recipe.yaml:1"),
        ("parallel: {shard: zero3}", "zero3", "recipe.yaml:1"),
        ("deepspeed: null", "none", "recipe.yaml:1"),
        ("parallel: {}", "none", "default"),
        ("seedless: 1", None, None),
    ],
)
def test_the_short_form_and_the_section_mean_the_same(tmp_path, text, shard, origin):
    from trainkit.recipe import load_recipe

    path = tmp_path / "recipe.yaml"
    path.write_text(f"{text}\nmodel: {{name_or_path: gpt2}}\ndata: {{train: [a.jsonl]}}\n")
    if shard is None:
        with pytest.raises(RecipeError, match="seedless"):
            load_recipe(path)
        return
    loaded = load_recipe(path)
    assert loaded.recipe.parallel.shard == shard
    assert loaded.origins["parallel.shard"] == origin
    assert load_recipe(path, ["deepspeed=zero1"]).recipe.parallel.shard == "zero1"
    assert load_recipe(path, ["parallel.shard=zero1"]).recipe.parallel.shard == "zero1"
    cli = load_recipe(path, cli={"--deepspeed": "zero3"})
    assert (cli.recipe.parallel.shard, cli.origins["parallel.shard"]) == ("zero3", "--deepspeed")


def test_both_forms_in_one_file_are_refused_with_the_line(tmp_path):
    from trainkit.recipe import load_recipe

    path = tmp_path / "recipe.yaml"
    path.write_text("parallel: {shard: zero1}\ndeepspeed: zero2\n")
    with pytest.raises(RecipeError, match="short for parallel") as refused:
        load_recipe(path)
    assert refused.value.where == f"{path}:2"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no strategy"),
        ("[]", "not a JSON object"),
        ("{", "not JSON"),
        ('{"zero_optimization": {"stage": 2, "stage": 3}}', "'stage' is there twice"),
        ('{"zero_optimization": {"stage": "two"}}', "must be 1, 2 or 3"),
        ("{}", "nothing is sharded"),
        ('{"bf16": true}', "must be an object"),
    ],
)
def test_a_broken_file_is_named(tmp_path, content, message):
    path = tmp_path / "ds.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(RecipeError, match=message):
        strategy_for(str(path))
