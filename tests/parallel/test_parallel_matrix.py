"""The table of what cannot be combined, and the script that holds the rest against one process."""

from pathlib import Path

import pytest

from benchmarks import parity
from trainkit.errors import RecipeError
from trainkit.parallel.matrix import REFUSALS

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_the_script_walks_every_way_that_as_many_ranks_can_be_spread(ranks):
    """A cell that the table refuses has its reason, and nothing else is left out."""
    cells = list(parity.cells(ranks, "", parity.SWITCHES["all"]))
    assert len({cell.name for cell in cells}) == len(cells)
    for cell in cells:
        reason = parity.refused(cell, bf16=False)
        is_refused = "tensor" in cell.way and cell.kind != "full"
        is_refused |= "pipeline" in cell.way and cell.kind == "nf4"
        assert bool(reason) == is_refused, cell.name
    ways = {cell.way for cell in cells}
    fitting = {
        way
        for way, spread in parity.WAYS.items()
        if ranks % (spread.get("tensor", 1) * spread.get("sequence", 1) * spread.get("pipeline", 1))
        == 0
    }
    assert ways == fitting


def test_the_guide_has_the_table_of_the_rows():
    """Make it with ``python -m benchmarks parity --table``."""
    guide = (ROOT / "docs/guides/parallel.md").read_text(encoding="utf-8")
    assert parity.guide_table() in guide


@pytest.mark.parametrize("row", REFUSALS, ids=lambda row: f"{row.key}-{row.why[:20]}")
def test_each_refusal_says_what_to_write_instead_and_is_in_the_guide(row):
    guide = (ROOT / "docs/guides/parallel.md").read_text(encoding="utf-8")
    assert row.fix
    assert row.key.rpartition(".")[2].split("_")[0] in guide


@pytest.mark.parametrize("shard", ["zero1", "zero2", "zero3", "zero3_offload", "none", "fsdp2"])
@pytest.mark.parametrize("packed", ["nf4", "fp8"])
@pytest.mark.parametrize(("key", "dtype"), [("bf16", "bfloat16"), ("fp16", "float16")])
def test_deepspeed_casts_no_codes(key, dtype, packed, shard):
    """float16's codes, cast to bfloat16, have as many bytes: a run trained on another base."""
    from trainkit.recipe import Recipe

    def recipe(model_dtype):
        return Recipe(
            model={"name_or_path": "m", "dtype": model_dtype},
            data={"train": ["a"]},
            lora={"quantize": packed},
            parallel={"shard": shard},
            training={key: True},
        )

    for other in {"float32", "float16", "bfloat16", "auto"} - {dtype}:
        if shard.startswith("zero"):
            with pytest.raises(RecipeError, match=f"training.{key}.*codes"):
                recipe(other)
        elif (shard, key) != ("fsdp2", "fp16") and other != "float16":
            recipe(other)
    if (shard, key) != ("fsdp2", "fp16"):
        recipe(dtype)
