"""Runs as ``trainkit sft`` leaves them, on conversations of every kind; made once."""

import json

import pytest
from commands import trainkit
from exported import RECIPE, merging_tokenizer, rows
from tiny import make_qwen2


@pytest.fixture(scope="session")
def lora_run(tmp_path_factory):
    """A finished LoRA run over a base of its own, with ``enable_thinking: false`` in its recipe."""
    root = tmp_path_factory.mktemp("exported")
    tokenizer = merging_tokenizer()
    make_qwen2(len(tokenizer), hidden_size=128).save_pretrained(root / "base")
    tokenizer.save_pretrained(root / "base")
    (root / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows()))
    (root / "r.yaml").write_text(RECIPE)
    said = trainkit(root, "sft", "r.yaml")
    assert said.code == 0, said.err
    return next(path.parent for path in root.rglob("status.json"))
