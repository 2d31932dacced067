"""After training: weights that do not fit on the disk, and final weights that are cut short."""

import os
import shutil

import pytest
from commands import Said, trainkit, trainkit_each
from evals.set_files import write_sets
from ranks import run_ranks

RECIPE = """\
model: {name_or_path: m, dtype: bfloat16}
data: {train: [d.jsonl], max_length: 64, packing: false, cache_dir: cache}
training: {learning_rate: 1e-2, per_device_train_batch_size: 2, max_steps: 2}
"""
ROW = '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n'
MOST = 60_000
"""Bytes: every file but the weights is smaller."""


@pytest.fixture(scope="module")
def made(tmp_path_factory, tiny_llama):
    """A full run and a LoRA run that are done, and a stopped one whose optimizer is sharded."""
    root = tmp_path_factory.mktemp("made")
    (root / "m").symlink_to(tiny_llama)
    (root / "d.jsonl").write_text(ROW * 8)
    (root / "p.jsonl").write_text('{"prompt": "a"}\n')
    (root / "r.yaml").write_text(RECIPE)
    write_sets(root / "sets")
    sft = ("sft", "r.yaml", "--output-dir")
    assert trainkit(root, *sft, "full").code == 0
    assert trainkit(root, *sft, "lora", "lora.r=4").code == 0
    assert trainkit(root, *sft, "zero", "--deepspeed", "zero2").code == 0
    return root


def is_refused(said, what):
    assert said.code in (1, 2), said
    assert "bug in trainkit" not in said.err, said.err[-3000:]
    assert "Traceback" not in said.err, said.err[-3000:]
    assert what in said.err, said.err


WRITERS = ("merge lora", "merge zero/checkpoint-2", "export vllm lora", "export fp8 full")


def test_weights_that_do_not_fit_leave_nothing(made):
    before = sorted(made.iterdir())
    argvs = [[*words.split(), "-o", "out"] for words in WRITERS]
    given = {"cwds": [str(made)] * len(argvs), "argvs": argvs, "most": MOST}
    (found,) = run_ranks("chaos.disk_cases:run", world_size=1, **given)
    for said in found:
        is_refused(Said(*said), "disk is full")
    assert sorted(made.iterdir()) == before


READERS = (
    "chat full",
    "eval full --tasks boolq --data sets",
    "generate lora --prompts p.jsonl -o o.jsonl",
    "merge lora -o out",
    "export vllm lora -o out",
)


def test_final_weights_that_are_cut_short_are_named(made, tmp_path):
    shutil.copytree(made, tmp_path, symlinks=True, dirs_exist_ok=True)
    for path in tmp_path.glob("*/final/*model.safetensors"):
        os.truncate(path, path.stat().st_size // 2)
    said = trainkit_each(tmp_path, [words.split() for words in READERS])
    for words, each in zip(READERS, said, strict=True):
        is_refused(each, "adapter_model.safetensors" if "lora" in words else "model.safetensors")
    assert not (tmp_path / "out").exists()
