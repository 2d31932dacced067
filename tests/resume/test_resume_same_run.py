"""Killed and continued, a run ends with the bytes of the one that was never stopped.

Nothing is set by hand that users leave out: the second command is ``sft --resume RUN``.
"""

import json
from pathlib import Path

import pytest
from pictures import make_model_directory, write_rows
from resume.record import record

CONFIGS = Path(__file__).parents[2] / "configs"

VARIANTS = {
    "full in fp32": ["lora=null"],
    "full in bf16": ["lora=null", "model.dtype=bfloat16"],
    "some layers frozen": ["lora=null", 'model.frozen=["embed_tokens","0"]'],
    "4-bit base": ["model.dtype=bfloat16", "lora.quantize=nf4"],
    "fp8 base": ["lora.quantize=fp8"],
    "full in fp8": ["lora=null", "model.fp8=true", "kernels=true", "training.logging_steps=5"],
    "streamed": ["data.streaming=8", "data.packing=true", "training.logging_steps=3"],
    "evaluated each epoch": (
        ["training.num_train_epochs=2", "training.max_steps=-1", "training.eval_on_start=true"]
    ),
    "a tied head in full": ["lora.modules_to_save=[lm_head]"],
}
ON_TWO_RANKS = {
    "ddp": ["lora=null"],
    "zero1": ["lora=null", "deepspeed=zero1"],
    "zero2": ["deepspeed=zero2"],
    "fp8 base": ["lora.quantize=fp8"],
    "fp8 base under zero3": ["lora.quantize=fp8", "deepspeed=zero3"],
    "full in fp8 under zero3": ["lora=null", "model.fp8=all", "deepspeed=zero3"],
    "zero3": ["lora=null", "deepspeed=zero3", "training.logging_steps=3"],
    "layers frozen under zero3": ["deepspeed=zero3", *VARIANTS["some layers frozen"]],
}


def broken_and_whole(project, arguments, num_ranks=1, config="r.yaml", again=False, steps=4):
    """Records of a run that is killed, twice where ``again`` says so, and of one that is not."""
    arguments = ["--config", str(config), f"training.max_steps={steps}", *arguments]
    project.sft(*arguments, "--output-dir", "whole", num_ranks=num_ranks).well()
    begin = (*arguments, "--output-dir", "parts")
    assert project.sft(*begin, num_ranks=num_ranks, kill_at=3) is None
    if again:
        assert project.sft("--resume", "parts", num_ranks=num_ranks, kill_at=5) is None
    project.sft("--resume", "parts", num_ranks=num_ranks).well()
    return record(project.root / "parts"), record(project.root / "whole")


@pytest.mark.sample("full in bf16", "4-bit base", "full in fp8", "eval*")
@pytest.mark.parametrize("variant", VARIANTS)
def test_one_process(project, variant):
    given = {"again": True, "steps": 6} if variant == "full in bf16" else {}
    parts, whole = broken_and_whole(project, VARIANTS[variant], **given)
    assert parts == whole


@pytest.mark.sample("zero3", "fp8 base under*")
@pytest.mark.parametrize("variant", ON_TWO_RANKS)
def test_two_processes(project, variant):
    parts, whole = broken_and_whole(project, ON_TWO_RANKS[variant], num_ranks=2)
    assert parts == whole


def pair(number):
    right = f"It is {number}{'!' * (number % 7)}"
    return {"prompt": f"Say {number}.", "chosen": right, "rejected": "No." * (1 + number % 3)}


def rated(number):
    return {"prompt": f"Say {number}.", "completion": f"It is {number}.", "label": number % 2 > 0}


ANSWERS = {**dict.fromkeys(("dpo", "orpo", "simpo", "reward"), pair), "kto": rated}
"""By the objective that a shipped recipe is named after: a row of its data."""


@pytest.mark.sample("quickstart-dpo", "glm4*")
@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_recipes(project, path):
    """Each as it is, but for the model, the data and the number of steps."""
    arguments = [
        "model.name_or_path=m", "data.train=[d.jsonl]", "data.eval=[d.jsonl]",
        "data.max_length=128", "data.cache_dir=cache", "data.chat_template=null",
        "generation_eval=null", "training.save_strategy=steps", "training.save_steps=2",
        "training.per_device_train_batch_size=1",
    ]  # fmt: skip
    text = path.read_text(encoding="utf-8")
    if "global_batch_size" in text:
        arguments.append("global_batch_size=2")
    if "teacher:" in text:
        arguments.append("distill.teacher=m")
    if rows := ANSWERS.get(path.stem.partition("-")[2]):
        lines = "\n".join(json.dumps(rows(number)) for number in range(24))
        (project.root / "d.jsonl").write_text(lines, encoding="utf-8")
    if "vision" in text:
        (project.root / "sees").mkdir()
        make_model_directory("qwen2_5_vl", project.root / "sees")
        write_rows(project.root, 16)
        arguments += ["model.name_or_path=sees", "data.train=[rows.jsonl]"]
        arguments += ["data.eval=[rows.jsonl]", "data.max_length=512"]
    parts, whole = broken_and_whole(project, arguments, config=path)
    assert parts == whole
