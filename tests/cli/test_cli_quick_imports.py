"""Commands start without what they may never use, and what is asked for later is there."""

import json

from commands import python

CODE = """
import gc, sys
from types import SimpleNamespace
from trainkit.cli.app import main
from trainkit.cli.quick_imports import Later, _compiled_when_called, import_quantisation

model, rows = sys.argv[1:]
assert main(["data", "check", "--data", rows, "--model", model]) in (0, 2)
print("data:", type(sys.modules["torch"]) is Later, "torch._C" in sys.modules)

from trainkit.cli.commands.sft import _train

class Recipe(SimpleNamespace):
    training = {}

try:
    _train(SimpleNamespace(recipe=Recipe()), SimpleNamespace(resume=None), as_json=False)
except AttributeError as error:
    assert "trainkit.train.build" in sys.modules, error
print("run:", gc.isenabled(), gc.get_freeze_count() > 100_000)
print("run:", [each for each in ("sklearn", "scipy", "pandas", "datasets") if each in sys.modules])

import torch
at_once = torch.compile
import_quantisation()
assert torch.compile is at_once
import peft
print("peft:", "torch._inductor.compile_fx" in sys.modules, "bitsandbytes" in sys.modules)

from trainkit.models.loading import load_model
from trainkit.options import ModelOptions
import torch.nn as nn

loaded = load_model(ModelOptions(name_or_path=model), attention=None)
assert isinstance(loaded, nn.Module) and isinstance(loaded.config.dtype, torch.dtype)
with torch.no_grad():
    print("model:", loaded(torch.zeros(1, 3, dtype=torch.long)).logits.isfinite().all().item())

from accelerate import Accelerator

model = nn.Linear(1, 1)
assert Accelerator(cpu=True).unwrap_model(model) is model
print("deepspeed:", "deepspeed" in sys.modules)

class Engine(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.module = inner

sys.modules["deepspeed"] = type(sys)("deepspeed")
sys.modules["deepspeed"].DeepSpeedEngine = Engine
print("deepspeed:", Accelerator(cpu=True).unwrap_model(Engine(model)) is model)

calls = []
def compiler(function, **options):
    calls.append(options)
    return lambda x: function(x) + 1
@_compiled_when_called.__get__(compiler)(dynamic=True)
def double(x):
    return 2 * x
print("compiler:", len(calls), double(3), double(4), calls)
"""


def test_what_a_command_may_never_use_waits_and_what_it_asks_for_later_is_there(
    tiny_qwen2, tmp_path
):
    """Data is read without torch; nobody looks for garbage among what a run imports."""
    turns = [{"role": role, "content": "Count."} for role in ("user", "assistant")]
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"messages": turns}))
    said = [line for line in python("-c", CODE, tiny_qwen2, rows).splitlines() if ": " in line]
    assert said[-8:] == [
        "data: True False",
        "run: True True",
        "run: []",
        "peft: False True",
        "model: True",
        "deepspeed: False",
        "deepspeed: True",
        "compiler: 0 7 9 [{'dynamic': True}]",
    ]
