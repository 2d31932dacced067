"""A project as a user has it, and commands typed in it that may be killed."""

import json

import pytest
from commands import trainkit
from tiny import chat_lines

RECIPE = """\
model: {name_or_path: m, dtype: float32}
data: {train: [d.jsonl], eval: [d.jsonl], max_length: 64, packing: false, cache_dir: cache}
lora: {r: 4, alpha: 8}
training: {learning_rate: 1e-2, per_device_train_batch_size: 4, max_steps: 8, save_steps: 2,
  per_device_eval_batch_size: 24,
  save_total_limit: 9}
"""


def uneven_rows(numbers):
    """JSON lines of conversations whose prompts and answers differ in length."""
    return chat_lines(
        ("a" * (1 + number % 29), f"It is {number}{'!' * (number % 17)}") for number in numbers
    )


def make_uneven(root, model, recipe, **files):
    """A folder with a model ``m``, a recipe, and a file of uneven rows for each range."""
    for name, numbers in files.items():
        (root / f"{name}.jsonl").write_text(uneven_rows(numbers), encoding="utf-8")
    (root / "m").symlink_to(model)
    (root / "r.yaml").write_text(recipe)
    return root


def sft(root, *words, num_ranks=1):
    """``trainkit sft WORDS``, which must end well."""
    return trainkit(root, "sft", *words, num_ranks=num_ranks).well()


def logged(run):
    """The rows of a run, without what the clock and the memory say."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    timed = ("seconds", "per_second", "runtime", "memory", "mfu")
    return [{k: v for k, v in row.items() if not any(t in k for t in timed)} for row in rows]


class Project:
    """A folder with a tiny model ``m``, rows ``d.jsonl`` and a recipe ``r.yaml``."""

    def __init__(self, root):
        self.root = root

    def sft(self, *arguments, **options):
        """``trainkit sft ARGUMENTS``; the options are those of ``commands.trainkit``."""
        return trainkit(self.root, "sft", *arguments, **options)

    def launch(self, *arguments, num_ranks=2, **options):
        """``trainkit launch ARGUMENTS``, with so many processes."""
        options = {"launch": True, **options}
        return trainkit(self.root, *arguments, num_ranks=num_ranks, **options)

    def starts(self, run):
        lines = (self.root / run / "changes.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    def rates(self, run):
        lines = (self.root / run / "metrics.jsonl").read_text().splitlines()
        rows = [json.loads(line) for line in lines]
        return {row["step"]: row["learning_rate"] for row in rows if "loss" in row}


def make_project(root, model):
    """A project in an empty folder, with a link to the model."""
    text = chat_lines((f"Say {n}.", f"It is {n}{'!' * (n % 7)}") for n in range(24))
    (root / "d.jsonl").write_text(text, encoding="utf-8")
    (root / "m").symlink_to(model)
    (root / "r.yaml").write_text(RECIPE)
    return Project(root)


@pytest.fixture
def project(tmp_path, tiny_llama):
    return make_project(tmp_path, tiny_llama)
