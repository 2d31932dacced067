"""The steps of CONTRIBUTING.md, followed with a format, a key, a strategy, a linear layer, an
optimizer and a command.

A family and an op: ``tests/families/test_families_add.py``. An objective:
``tests/objectives/test_objectives_table.py``.
"""

import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from commands import python
from torch import nn

from trainkit.data import fields, formats
from trainkit.data.formats import read_row
from trainkit.data.messages import Conversation, Message
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
    monkeypatch.setitem(fields.READS, "faq", ("question", "reply"))
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


class House:
    """A copy of the package, which additions are made to."""

    def __init__(self, folder):
        self.folder, self.touched = folder, set()
        # Compiled files too: they know their source's time.
        shutil.copytree(ROOT / "trainkit", folder / "trainkit")

    def write(self, name, text):
        self.touched.add(name)
        (self.folder / "trainkit" / name).write_text(text)

    def edit(self, name, old, new):
        text = (self.folder / "trainkit" / name).read_text()
        assert text.count(old) == 1, f"{name}: {old}"
        self.write(name, text.replace(old, new))

    def says(self, *command):
        environment = {"PYTHONPATH": f"{self.folder}{os.pathsep}{ROOT / 'tests'}"}
        said = python(*command, cwd=self.folder, env={**os.environ, **environment})
        return said.splitlines()


@pytest.fixture
def house(tmp_path):
    return House(tmp_path)


KEYS = """
from tiny import make_qwen2
from trainkit.lora import attach
from trainkit.recipe import key_references, load_recipe, on_resume
from trainkit.train.resume.given import settings_of
from trainkit.train.optimizer import make_optimizer
from transformers import TrainingArguments

loaded = load_recipe("r.yaml")
model = attach(make_qwen2(32), loaded.recipe.lora)
trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
print({name.split(".")[4] for name in trained}, any("lora_B" in name for name in trained))
print([settings_of(loaded)[f"lora.{key}"] for key in ("layers_to_transform", "freeze_b")])
print([row.type for row in key_references() if row.key == "lora.freeze_b"])
print(on_resume("lora.layers_to_transform")[:15], on_resume("lora.freeze_b"))
print("adagrad" in [row.type for row in key_references() if row.key == "training.optim"][0])
args = TrainingArguments("x", use_cpu=True, optim=loaded.recipe.training["optim"])
print(type(make_optimizer(model, args, engine_keeps_masters=False)).__name__)
"""


def test_a_key_of_a_recipe_is_a_field_and_a_reader_and_an_optimizer_is_a_row(house):
    """A key is known, shown, compared on resume, and acts; one that peft has needs no reader."""
    lines = (ROOT / "trainkit/options/model.py").read_text().splitlines(keepends=True)
    refused = next(n for n, line in enumerate(lines) if "layers_to_transform" in line)
    house.edit("options/model.py", "".join(lines[refused : refused + 2]), "")
    house.edit(
        "options/model.py",
        "    exclude_modules:",
        '    layers_to_transform: list[int] | None = Field(None, description="Adapted layers.")\n'
        "    freeze_b: Annotated[bool, OnResume(CONSENT)] = Field(\n"
        '        False, description="Train the first matrices alone."\n'
        "    )\n"
        "    exclude_modules:",
    )
    house.edit(
        "lora/adapter.py",
        "    if require_input_grads:\n",
        "    for name, parameter in wrapped.named_parameters():\n"
        "        parameter.requires_grad &= not (options.freeze_b and 'lora_B' in name)\n"
        "    if require_input_grads:\n",
    )
    assert house.touched == {"options/model.py", "lora/adapter.py"}
    table = "options/optimizers.py"
    (row,) = re.findall(
        r" {8}_torch\(\n +\"adagrad\".*\n {8}\),\n", (ROOT / "trainkit" / table).read_text()
    )
    house.edit(table, row, "")  # a house that does not know it yet
    house.touched.clear()
    house.edit(table, '        _blockwise("adamw_8bit"', f'{row}        _blockwise("adamw_8bit"')
    assert house.touched == {table}
    (house.folder / "r.yaml").write_text(
        "model: {name_or_path: m}\n"
        "data: {train: [a.jsonl]}\n"
        "lora: {target_modules: [q_proj], layers_to_transform: [1], freeze_b: true}\n"
        "training: {optim: adagrad}\n"
    )
    assert house.says("-c", KEYS) == [
        "{'1'} False",
        "[[1], True]",
        "['true or false']",
        "the saved state consent",
        "True",
        "Adagrad",
    ]


def test_a_command_is_a_file_and_a_row(house):
    house.write(
        "cli/commands/greet.py",
        """
import typer
from trainkit.cli.options import JsonObject, tell
app = typer.Typer()
@app.command()
def all(name: str, as_json: JsonObject = False) -> None:
    "Say hello."
    tell({"name": name}, as_json, f"hello {name}")
""",
    )
    row = '    "greet": Entry("greet:app", "Greet."),\n'
    house.edit("cli/app.py", '    "doctor": Entry(', f'{row}    "doctor": Entry(')
    assert len(house.touched) == 2
    assert house.says("-m", "trainkit", "greet", "all", "you") == ["hello you"]
    assert house.says("-m", "trainkit", "greet", "all", "you", "--json") == ['{"name": "you"}']
    for words, said in ((["--help"], "  greet "), (["greet", "--help"], "Say hello.")):
        assert said in "\n".join(house.says("-m", "trainkit", *words))
