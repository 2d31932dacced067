"""What loads when: help, recipe errors and the record of a run never wait for torch; no circles."""

import ast
import functools
import graphlib
from pathlib import Path

import pytest
from commands import python

HEAVY = ("torch", "triton", "transformers", "datasets", "deepspeed", "peft", "accelerate")
OF_MODELS = ("transformers.modeling_utils", "torch.distributed.tensor", "torch._dynamo")


def loaded_by(code, then=""):
    """The heavy modules behind ``code`` in a fresh interpreter; those of models behind both."""
    probe = "\nimport sys; print([m for m in {} if m in sys.modules])\n"
    said = python("-c", code + probe.format(HEAVY) + then + probe.format(OF_MODELS))
    return said.splitlines()[-2:]


def test_light_modules_stay_light():
    light = "trainkit, trainkit.recipe, trainkit.run, trainkit.errors, trainkit.cli.app"
    assert loaded_by(f"import {light}")[0] == "[]"


def test_kernels_bring_torch_and_triton_only_and_what_needs_a_tokenizer_brings_no_models():
    """Half of the processor time of `trainkit data check` went there."""
    code = "import trainkit.train.images; from trainkit.models.tokenizer import load_tokenizer"
    of_kernels, of_models = loaded_by("import trainkit.kernels", code)
    assert set(eval(of_kernels)) <= {"torch", "triton"}
    assert of_models == "[]"


ROOT = Path(__file__).parents[2]


def imported_at_once(module):
    """All that the import of a module of trainkit imports, by reading the sources."""
    seen, waiting = set(), [module]
    while waiting:
        name = waiting.pop()
        seen.add(name)
        for target in targets_of(name):
            parts = target.split(".")
            parents = {".".join(parts[:end]) for end in range(1, len(parts) + 1)}
            waiting += sorted(parents - seen)
            seen |= parents
    return seen


@functools.cache
def targets_of(name):
    """What the top level of one module imports; nothing for a module of another package."""
    path = ROOT.joinpath(*name.split("."))
    file = next((f for f in (path / "__init__.py", path.with_suffix(".py")) if f.exists()), None)
    found = []
    for node in ast.parse(file.read_text(encoding="utf-8")).body if file else ():
        if isinstance(node, ast.ImportFrom) and node.module:
            found += [node.module, *(f"{node.module}.{each.name}" for each in node.names)]
        elif isinstance(node, ast.Import):
            found += [each.name for each in node.names]
    return found


@pytest.mark.parametrize(
    "module",
    [
        "infer.engine",
        "infer.benchmark",
        "infer.sampling",
        "evals.run",
        "evals.tasks",
        "evals.model",
    ],
)
def test_a_model_without_an_adapter_answers_without_the_adapters_library(module):
    """It brings bitsandbytes and torch's compiler: a third of the time of a start."""
    found = imported_at_once(f"trainkit.{module}")
    assert "trainkit.errors" in found  # they were read
    assert not found & {"peft", "bitsandbytes", "deepspeed"}


def test_no_imports_run_in_a_circle():
    """Those inside functions and for types included."""
    files = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts): path
        for path in (ROOT / "trainkit").rglob("*.py")
        if path.name != "__init__.py"
    }
    needs = {
        name: {
            target
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            if isinstance(node, ast.ImportFrom) and node.module
            for target in (node.module, *(f"{node.module}.{each.name}" for each in node.names))
            if target in files
        }
        for name, path in files.items()
    }
    assert list(graphlib.TopologicalSorter(needs).static_order())
