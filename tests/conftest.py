"""Shared fixtures: everything is made here, nothing is fetched."""

import functools
import gc
import os
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("MPLBACKEND", "Agg")

import commands
import pytest
import ranks
from tiny import SIZES, make_qwen2, make_tokenizer

os.fsync = lambda descriptor: None  # as in ranks.py
gc.set_threshold(200_000, 5, 5)


@functools.cache
def has_cuda():
    import torch

    return torch.cuda.is_available()


def pytest_addoption(parser):
    parser.addoption("--all", action="store_true", help="every case, not the samples of each test")


def sampled(items):
    """Those that a ``sample`` marker chooses by patterns of ids, and those that have none."""
    kept = []
    chosen = {(item.function, each) for item in items for each in sample_of(item)}
    for item in items:
        found = [each for each in sample_of(item) if fnmatch(item.callspec.id, each)]
        chosen -= {(item.function, each) for each in found}
        if found or not sample_of(item):
            kept.append(item)
    if chosen:
        raise pytest.UsageError(f"samples of no case: {[(f.__name__, each) for f, each in chosen]}")
    return kept


def sample_of(item):
    marker = item.get_closest_marker("sample")
    return marker.args if marker else ()


def pytest_collection_modifyitems(config, items):
    """On several workers files that start processes come first: none is left when the rest ends."""
    if has_cuda():
        gc.set_threshold(700, 10, 10)  # as ever: garbage there may hold a GPU's memory
    for item in items:
        if item.get_closest_marker("gpu") and not has_cuda():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
    is_named = any("[" in word for word in config.args)
    if not (config.option.all or is_named or has_cuda()):
        kept = sampled(items)
        config.hook.pytest_deselected(items=list(set(items) - set(kept)))
        items[:] = kept
    if not hasattr(config, "workerinput"):
        return
    started = (subprocess, ranks.run_ranks, commands.trainkit, commands.python)
    starts = set(map(id, started))
    slow = {
        item.module
        for item in items
        if "project" in item.fixturenames
        or not starts.isdisjoint(map(id, vars(item.module).values()))
    }
    items.sort(key=lambda item: item.module not in slow)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown():
    """Garbage goes between tests; what was imported stays, and no collection walks over it."""
    is_new = len(sys.modules) > pytest_runtest_teardown.num_modules + 20
    if is_new or gc.get_count()[0] > 20_000:
        gc.collect()
    if is_new:
        pytest_runtest_teardown.num_modules = len(sys.modules)
        gc.freeze()


pytest_runtest_teardown.num_modules = 0


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


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory, tiny_tokenizer):
    """Without biases, which 4-bit layers cannot take on a CPU."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    directory = tmp_path_factory.mktemp("tiny-llama")
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=len(tiny_tokenizer), max_position_embeddings=512, **SIZES)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(directory)
    tiny_tokenizer.save_pretrained(directory)
    return directory
