"""A continued run stands on the base that it was begun on, to the byte; else it names the file."""

import json
import re
import shutil
from types import SimpleNamespace

import pytest
from project import RECIPE

from trainkit.errors import ResumeRefusedError
from trainkit.recipe.schema import Recipe
from trainkit.train.checkpoints import ResumePoint
from trainkit.train.resume.begin import files_asked
from trainkit.train.resume.changes import review

LORA = "lora: {r: 4, alpha: 8}\n"
CHANGES = {
    "config.json": ('"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-05'),
    "generation_config.json": ("{", '{"temperature": 0.5,'),
}


@pytest.fixture
def begun(project, tiny_llama, request):
    """A run of four steps over a copy of the model."""
    (project.root / "m").unlink()
    shutil.copytree(tiny_llama, project.root / "m")
    text = RECIPE if request.param == "lora" else RECIPE.replace(LORA, "")
    (project.root / "r.yaml").write_text(text)
    project.sft("--config", "r.yaml", "--output-dir", "run", "training.max_steps=2").well()
    return project


def resumed(project, *arguments):
    return project.sft("--resume", "run", "training.max_steps=4", *arguments)


@pytest.mark.sample("lora")
@pytest.mark.parametrize("begun", ["lora", "full"], indirect=True)
def test_what_the_base_is_made_of_is_compared(begun, request):
    for name, (old, new) in CHANGES.items():
        path = begun.root / "m" / name
        whole = path.read_text()
        assert old in whole
        path.write_text(whole.replace(old, new, 1))
        refused = resumed(begun)
        assert refused.code == 1
        assert f"base.{name}: " in refused.err
        assert "--allow-changed base" in refused.err
        path.write_text(whole)
    if request.node.callspec.id == "full":
        assert resumed(begun).code == 0
        return
    path = begun.root / "m" / "model.safetensors"  # under an adapter they are compared as well
    whole = path.read_bytes()
    path.write_bytes(whole[:-3] + bytes([whole[-3] ^ 1]) + whole[-2:])
    refused = resumed(begun)
    assert refused.code == 1
    assert "base.model.safetensors: " in refused.err
    taken = resumed(begun, "--allow-changed", "base").well()
    assert "not as it was, and accepted: base.model.safetensors" in taken.err + taken.out


DPO = {"objective": "dpo", "data": {"train": ["pairs.jsonl"]}}
ASKED = {
    "base": DPO | {"preference": {"precompute_reference": False}},
    "teacher": {"objective": "distill", "distill": {"teacher": "m"}},
}


@pytest.mark.parametrize("asked", ASKED)
def test_weights_that_are_asked_along_the_way_are_compared(asked, tmp_path, tiny_llama):
    """A teacher, and the model before training next to one that trains whole."""
    place = shutil.copytree(tiny_llama, tmp_path / "m")
    plain = json.loads(json.dumps(ASKED[asked]).replace('"m"', json.dumps(str(place))))
    sections = {"model": {"name_or_path": str(place)}, "data": {"train": ["rows.jsonl"]}}
    run = SimpleNamespace(
        recipe=Recipe.model_validate(sections | plain),
        process=SimpleNamespace(local_rank=0),
        layout=SimpleNamespace(strategy=SimpleNamespace(config=None)),
    )
    before = files_asked(run)
    weights = place / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-3] + bytes([whole[-3] ^ 1]) + whole[-2:])
    point = ResumePoint(tmp_path, tmp_path / "checkpoint-2", 2, before)
    with pytest.raises(ResumeRefusedError, match=rf"{asked}\.model\.safetensors: ") as refused:
        review(point, {}, files_asked(run))
    assert f"--allow-changed {asked}" in str(refused.value)
    assert review(point, {}, files_asked(run), [asked]).accepted


def test_benchmarks_and_deepspeed_settings_are_compared(tmp_path):
    files = [
        tmp_path / name for name in ("mmlu/test.csv", "boolq/dev.jsonl", "own.yaml", "ds.json")
    ]
    for file in (*files, tmp_path / "gsm8k/test.jsonl"):
        file.parent.mkdir(exist_ok=True)
        file.write_text("{}")
    asked = {"tasks": ["boolq", "mmlu_anatomy", str(files[2])], "data": str(tmp_path), "every": 2}
    sections = {"model": {"name_or_path": "m", "init": "random"}, "data": {"train": ["r.jsonl"]}}
    run = SimpleNamespace(
        recipe=Recipe.model_validate({**sections, "eval_tasks": asked}),
        process=SimpleNamespace(local_rank=0),
        layout=SimpleNamespace(strategy=SimpleNamespace(config=files[3])),
    )
    point = ResumePoint(tmp_path, tmp_path / "checkpoint-2", 2, files_asked(run))
    (tmp_path / "gsm8k/test.jsonl").write_text("of a set that nobody asks")
    assert not review(point, {}, files_asked(run)).accepted
    for file in files:
        file.write_text("{ }")
        kind = "deepspeed" if file.suffix == ".json" else "data.evaluation"
        with pytest.raises(ResumeRefusedError, match=re.escape(f"{kind}.{file}: ")):
            review(point, {}, files_asked(run))
        file.write_text("{}")


JUDGED = "generation_eval={data: [asked.jsonl], max_new_tokens: 2, metrics: ['judge.py:score']}"


def test_what_judges_the_model_is_compared(project):
    """The best model, and an early end, may hang on evaluation data, questions and metrics."""
    rows = (project.root / "d.jsonl").read_text().rstrip("\n") + "\n"
    files = {"judge.py": "def score(answer, reference):\n    return 1.0\n"}
    files |= {"held.jsonl": rows, "asked.jsonl": rows.splitlines()[0] + "\n"}
    for name, text in files.items():
        (project.root / name).write_text(text)
    begin = ("training.max_steps=2", "data.eval=[held.jsonl]", JUDGED)
    project.sft("--config", "r.yaml", "--output-dir", "run", *begin).well()
    for name, text in files.items():
        (project.root / name).write_text(text + ("#" if name == "judge.py" else text))
    refused = resumed(project)
    assert refused.code == 1
    for name in files:
        assert f"data.evaluation.{name}: " in refused.err
    assert refused.err.count("--allow-changed data ") == 0
    assert "accept it with --allow-changed data\n" in refused.err
    resumed(project, "data.eval=[held.jsonl]", "--allow-changed", "data").well()
