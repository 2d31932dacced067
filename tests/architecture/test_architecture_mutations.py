"""The table of mutations is true, and the script that tries them can tell a test that notices."""

import json
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
import mutate  # noqa: E402

from trainkit.recipe.document import read_document  # noqa: E402

MUTATIONS = mutate.load()


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_every_mutation_fits_the_code(mutation):
    """Code that moves takes its mutations along: text, file and tests are where the table says."""
    assert mutation.fault() is None
    assert mutation.explained is None or len(mutation.explained) > 20


def test_no_file_is_named_twice():
    """PyYAML keeps the last of them, and the mutations of the first would not be tried."""
    for table in mutate.TABLES.glob("*.yaml"):
        assert read_document(table).values


def test_the_table_is_wide_enough():
    names = [mutation.name for mutation in MUTATIONS]
    assert len(names) == len(set(names)) >= 60
    assert {mutation.area for mutation in MUTATIONS} == {
        *("answers", "kernels", "models", "data", "train", "results", "survival"),
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


TEST = "tests/recipe/test_recipe_accumulation.py::test_steps"
TABLE = """
trainkit/recipe/derived.py:
  - name: noticed
    old: "steps = total // a_pass"
    new: "steps = total // micro"
    tests: TEST
  - name: unnoticed
    old: 'else "data ranks"'
    new: 'else "ranks"'
    tests: TEST
""".replace("TEST", TEST)


def test_a_mutation_is_tried_from_end_to_end(tmp_path, monkeypatch):
    monkeypatch.setattr(mutate, "LIBRARIES", ("pytest",))  # the test that it runs needs no others
    (tmp_path / "one.yaml").write_text(TABLE)
    code = mutate.main(["--tables", str(tmp_path), "--json", str(tmp_path / "rows")])
    first, *rows = map(json.loads, (tmp_path / "rows").read_text().splitlines())
    assert code == 1
    assert [first[key] for key in ("mutations", "killed", "survived")] == [2, 1, 1]
    assert [row["status"] for row in rows] == ["killed", "survived"]
    assert "test_steps" in rows[0]["by"]
    assert "steps = total // a_pass" in (ROOT / "trainkit/recipe/derived.py").read_text()


def test_a_stale_row_is_an_error(tmp_path, capsys):
    (tmp_path / "one.yaml").write_text(TABLE.replace("total // a_pass", "gone // a_pass"))
    assert mutate.main(["--tables", str(tmp_path)]) == 2
    assert "noticed: trainkit/recipe/derived.py has its text 0 times" in capsys.readouterr().err


def test_an_explanation_that_is_not_true_is_an_error():
    mutation = mutate.Mutation("x", "a", "f", "o", "n", ("t",), explained="it changes nothing")
    assert mutate.judged(mutation, 1, "FAILED t - x")[0] == "error"
    assert mutate.judged(mutation, 0, "3 passed")[0] == "explained"
    assert mutate.judged(mutation, 0, "3 skipped")[0] == "error"
