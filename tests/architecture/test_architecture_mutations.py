"""The table of mutations is true, and as wide as what is promised."""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
import mutate  # noqa: E402

from trainkit.recipe.document import read_document  # noqa: E402

MUTATIONS = mutate.load()


def test_every_mutation_fits_the_code():
    """Code that moves takes its mutations along: text, file and tests are where the table says."""
    assert not {each.name: fault for each in MUTATIONS if (fault := each.fault())}
    explained = {each.name: each.explained for each in MUTATIONS if each.explained is not None}
    assert not [name for name, why in explained.items() if len(why) <= 20]


def test_no_file_is_named_twice():
    """PyYAML keeps the last of them, and the mutations of the first would not be tried."""
    for table in mutate.TABLES.glob("*.yaml"):
        assert read_document(table).values


def test_the_table_is_wide_enough():
    names = [mutation.name for mutation in MUTATIONS]
    assert len(names) == len(set(names)) >= 60
    assert {mutation.area for mutation in MUTATIONS} == {
        *("answers", "kernels", "models", "data", "train", "results", "survival")
    }


def test_every_promise_was_undone_once():
    """Each test of the table of what a run survives was seen to fail without what it promises."""
    lines = (ROOT / "docs/guides/survival.md").read_text().splitlines()
    promised = {line.split("`")[-2] for line in lines if line.startswith("| ") and "::" in line}
    promised |= set(re.findall(r"`(tests/\S+\.py)` \|$", "\n".join(lines), re.M))
    tried = {test.partition("[")[0] for mutation in MUTATIONS for test in mutation.tests}
    tried |= {name.partition("::")[0] for name in tried}
    assert len(promised) >= 30
    assert promised <= tried
