"""Commands start without what they may never use, and what is asked for later is there."""

import json

from commands import python

CODE = """
import sys
import torch
from trainkit.cli.quick_imports import import_quantisation

at_once = torch.compile
import_quantisation()
assert torch.compile is at_once
import peft
print("torch._inductor.compile_fx" in sys.modules, "bitsandbytes" in sys.modules)

from trainkit.cli.quick_imports import _compiled_when_called
calls = []
def compiler(function, **options):
    calls.append(options)
    return lambda x: function(x) + 1
@_compiled_when_called.__get__(compiler)(dynamic=True)
def double(x):
    return 2 * x
print(len(calls), double(3), double(4), calls)
"""


LEFT_OUT = """
import gc, sys
from types import SimpleNamespace
from trainkit.cli.commands.sft import _train

class Recipe(SimpleNamespace):
    training = {}

try:
    _train(SimpleNamespace(recipe=Recipe()), SimpleNamespace(resume=None), as_json=False)
except AttributeError as error:
    assert "trainkit.train.build" in sys.modules, error
print(gc.isenabled(), gc.get_freeze_count() > 100_000)
print([each for each in ("sklearn", "scipy", "pandas", "datasets") if each in sys.modules])

from accelerate import Accelerator
from torch import nn

model = nn.Linear(1, 1)
assert Accelerator(cpu=True).unwrap_model(model) is model
print("deepspeed" in sys.modules)

class Engine(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.module = inner

sys.modules["deepspeed"] = type(sys)("deepspeed")
sys.modules["deepspeed"].DeepSpeedEngine = Engine
print(Accelerator(cpu=True).unwrap_model(Engine(model)) is model)
"""


DATA = """
import sys
from trainkit.cli.app import main
from trainkit.cli.quick_imports import Later

model, rows = sys.argv[1:]
assert main(["data", "check", "--data", rows, "--model", model]) in (0, 2)
print(type(sys.modules["torch"]) is Later, "torch._C" in sys.modules)

from trainkit.models.loading import load_model
from trainkit.options import ModelOptions
import torch.nn

loaded = load_model(ModelOptions(name_or_path=model), attention=None)
assert isinstance(loaded, torch.nn.Module) and isinstance(loaded.config.dtype, torch.dtype)
with torch.no_grad():
    print(loaded(torch.zeros(1, 3, dtype=torch.long)).logits.isfinite().all().item())
"""


def test_data_is_read_without_torch_which_is_there_for_a_model(tiny_qwen2, tmp_path):
    turns = [{"role": role, "content": "Count."} for role in ("user", "assistant")]
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"messages": turns}))
    said = python("-c", DATA, tiny_qwen2, rows).splitlines()
    assert said[-2:] == ["True False", "True"]


def test_a_run_is_imported_without_what_it_may_never_use_and_deepspeed_is_there_when_loaded():
    """Nobody looks for garbage among what it imports, then or later."""
    assert python("-c", LEFT_OUT).split() == ["True", "True", "[]", "False", "True"]


def test_the_compiler_waits_until_it_is_called():
    imported, called = python("-c", CODE).splitlines()[-2:]
    assert imported == "False True"
    assert called == "0 7 9 [{'dynamic': True}]"
