"""Hostile files are refused by name: no code of theirs runs, nothing reaches the terminal raw."""

import re
from pathlib import Path

import chaos.hostile_inputs  # noqa: F401 (adds its cases)
import pytest
from chaos.hostile_cases import CASES, home
from commands import trainkit, trainkit_each

SOURCES = Path(__file__).parents[2] / "trainkit"
RECIPE = """\
model: {name_or_path: m, dtype: bfloat16}
data: {train: [d.jsonl], max_length: 64, packing: false, cache_dir: cache}
lora: {r: 4, alpha: 8}
training: {learning_rate: 1e-2, per_device_train_batch_size: 2, max_steps: 6, save_steps: 2}
"""
ROW = '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n'
COMMANDS_OF_A_TERMINAL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")


@pytest.fixture(scope="module")
def parts(tmp_path_factory, tiny_llama):
    """A model, rows, a recipe and two runs that were killed."""
    root = tmp_path_factory.mktemp("parts")
    home(root, tiny_llama)
    (root / tiny_llama.name).rename(root / "m")
    (root / "d.jsonl").write_text(ROW * 8)
    (root / "r.yaml").write_text(RECIPE)
    sft = ("sft", "r.yaml", "--output-dir")
    trainkit(root, *sft, "run", kill_at=5)
    trainkit(root, *sft, "zero", "--deepspeed", "zero2", kill_at=5)
    return [root / name for name in ("m", "d.jsonl", "r.yaml", "run", "zero")]


@pytest.fixture(scope="module")
def heard(parts, tmp_path_factory):
    """What each case's command said, and the folder that it was typed in."""
    roots = {name: home(tmp_path_factory.mktemp("case"), *parts) for name in CASES}
    commands = [CASES[name](root) for name, root in roots.items()]
    said = trainkit_each(list(roots.values()), commands)
    return dict(zip(CASES, zip(roots.values(), said, strict=True), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_it_is_refused_by_name(name, heard):
    root, said = heard[name]
    assert not (root / "canary").exists()
    assert said.code in (1, 2), said
    assert "bug in trainkit" not in said.err, said.err[-3000:]
    assert "Traceback" not in said.err, said.err[-3000:]
    assert re.search("^error: .", said.err, re.MULTILINE), said.err
    assert not COMMANDS_OF_A_TERMINAL.search((said.out + said.err).replace("\r", "")), said.err


def test_every_reader_of_adapters_tries_their_patterns_first():
    """peft and `re` compare them with every name of a model, and nothing can stop them."""
    reads = re.compile(r"Peft(Model|Config)\.from_pretrained\(|\.load_adapter\(|re\.match\(rf")
    found = [path for path in SOURCES.rglob("*.py") if reads.search(path.read_text())]
    trying = [path for path in found if "refuse_endless(" in path.read_text()]
    # The card of a model has the line for its reader, and the check itself tries in a process.
    assert {path.name for path in set(found) - set(trying)} == {"report.py"}
    assert len(trying) >= 4
