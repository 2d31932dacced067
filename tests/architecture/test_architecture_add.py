"""The steps of CONTRIBUTING.md, followed with a format, a key, a strategy and a linear layer.

A family and an op: ``tests/families/test_families_add.py``. An objective:
``tests/objectives/test_objectives_table.py``.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import torch
from torch import nn

from trainkit.data.read import formats, row_fields
from trainkit.data.read.formats import read_row
from trainkit.data.read.messages import Conversation, Message
from trainkit.models import linears
from trainkit.options import Source
from trainkit.options.data import ROW_FORMATS
from trainkit.parallel import strategies
from trainkit.parallel.engine import Engine
from trainkit.parallel.layout import Layout
from trainkit.parallel.process import ProcessRank


def parse_faq(row):
    return Conversation((Message("user", row["question"]), Message("assistant", row["reply"])))


def test_a_format_is_a_function_and_a_row(monkeypatch):
    monkeypatch.setitem(formats.FORMATS, "faq", parse_faq)
    monkeypatch.setitem(row_fields.READS, "faq", ("question", "reply"))
    monkeypatch.setitem(ROW_FORMATS, "faq", "a question and its reply")
    assert Source(path="a.jsonl", format="faq").format == "faq"
    parsed = read_row({"question": "2 + 2?", "reply": "4", "note": "easy"}, "faq")
    assert [message.content for message in parsed.messages] == ["2 + 2?", "4"]
    assert parsed.ignored == ("note",)


class Shelf(Engine):
    """Keeps fp32 weights in half-precision training, as an engine of a new strategy might."""

    keeps_masters = True


def test_a_strategy_is_an_engine_and_a_row(monkeypatch):
    new = strategies.Strategy("shelf", "weights wait on a shelf", f"{__name__}:Shelf")
    monkeypatch.setitem(strategies.STRATEGIES, "shelf", new)
    layout = Layout.of(strategies.strategy_for("shelf"), ProcessRank(1, 1, 2))
    assert layout.engine.keeps_masters
    assert not layout.engine.shards_optimizer


class HalfLinear(nn.Linear):
    """Stores its weight as halves of it."""


def test_a_kind_of_linear_layer_is_a_row(monkeypatch):
    kind = linears.LinearKind(
        "half",
        recognises=lambda module: type(module) is HalfLinear,
        unpacker=lambda linear: lambda storage, dtype: (2 * storage).to(dtype),
        num_weights=lambda parameter: None,
        loading=lambda dtype: {"half": dtype},
    )
    assert linears.kind_of(HalfLinear(2, 2)) is None
    monkeypatch.setitem(linears.LINEARS, "half", kind)
    layer = HalfLinear(2, 3)
    assert linears.kind_of(layer) is kind
    unpacked = kind.unpacker(layer)(layer.weight, torch.float64)
    assert torch.equal(unpacked, 2 * layer.weight.double())
    assert linears.quantization_config("half", torch.bfloat16) == {"half": torch.bfloat16}


ROOT = Path(__file__).parents[2]
KEY = """\
    layers_to_transform: list[int] | None = Field(None, description="Numbers of adapted layers.")
    exclude_modules:"""
PROBE = """
from tiny import make_qwen2

from trainkit.lora import attach
from trainkit.recipe import key_references, load_recipe
from trainkit.train.resume.given import settings_of

loaded = load_recipe("r.yaml")
model = attach(make_qwen2(32), loaded.recipe.lora)
print({name.split(".")[4] for name, _ in model.named_parameters() if "lora_A" in name})
print(settings_of(loaded)["lora.layers_to_transform"])
print([row.type for row in key_references() if row.key == "lora.layers_to_transform"])
"""


def test_a_key_of_a_recipe_is_a_field(tmp_path):
    """In a copy of the package: peft's key is known, shown, compared on resume, and acts."""
    package = tmp_path / "trainkit"
    shutil.copytree(ROOT / "trainkit", package)  # compiled files too: they know their source's time
    section = package / "options" / "model.py"
    lines = section.read_text().splitlines(keepends=True)
    start = next(n for n, line in enumerate(lines) if "layers_to_transform" in line)
    del lines[start : start + 2]
    section.write_text("".join(lines).replace("    exclude_modules:", KEY))
    (tmp_path / "r.yaml").write_text(
        "model: {name_or_path: m}\n"
        "data: {train: [a.jsonl]}\n"
        "lora: {target_modules: [q_proj], layers_to_transform: [1]}\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", PROBE],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT / 'tests'}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.splitlines() == ["{'1'}", "[1]", "['list or null']"], done.stderr
