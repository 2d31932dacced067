"""The projection to many GPUs is drawn from the rows that there are."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def projection():
    sys.path.insert(0, str(ROOT / "scripts"))
    import projection

    yield projection
    sys.path.remove(str(ROOT / "scripts"))


def test_picture_and_table_are_of_the_rows(projection):
    """Draw it anew with ``python scripts/projection.py``, and put its table into the guide."""
    assert projection.PICTURE.read_text(encoding="utf-8") == projection.picture()
    guide = (ROOT / "docs/guides/speed.md").read_text(encoding="utf-8")
    assert "\n".join(projection.table()) in guide


def test_links_that_are_fast_enough_cost_nothing_and_others_all(projection):
    way = projection.Way("", "", "", tokens=8192, weights=7.6e9)
    assert way.on_paper(1000.0, 512) == 1000.0
    slow = way.on_paper(1e9, 512)
    assert slow == pytest.approx(8192 / (8 * 7.6e9 * 511 / 512 / 50e9))
    once = projection.Way("", "", "", tokens=8192, weights=7.6e9, micro_batches=2)
    assert once.on_paper(1e9, 512) == pytest.approx(2 * slow, rel=1e-4)
