"""Shared fixtures: everything is made here, nothing is fetched."""

import os
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("MPLBACKEND", "Agg")

import pytest
from tiny import make_qwen2, make_tokenizer


@pytest.fixture(scope="session")
def tiny_tokenizer():
    return make_tokenizer()


@pytest.fixture(scope="session")
def tiny_qwen2(tmp_path_factory, tiny_tokenizer) -> Path:
    """A directory with a tiny random Qwen2 and its tokenizer, as save_pretrained leaves it."""
    directory = tmp_path_factory.mktemp("tiny-qwen2")
    make_qwen2(len(tiny_tokenizer)).save_pretrained(directory)
    tiny_tokenizer.save_pretrained(directory)
    return directory
