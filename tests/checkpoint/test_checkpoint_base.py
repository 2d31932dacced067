"""An adapter merges into the base it was trained over: its weights, its vocabulary."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny import make_adapter, make_qwen2, make_tokenizer
from transformers import AutoModelForCausalLM

from trainkit import digests
from trainkit.checkpoint.merge.merge import MergeOptions, merge_adapter
from trainkit.checkpoint.weights.adapter import read_adapter
from trainkit.checkpoint.weights.base_fingerprint import (
    FILE_NAME,
    base_files,
    check_fingerprint,
    write_fingerprint,
)
from trainkit.errors import CheckpointError

VOCAB = 40


def write_base(directory, *, seed=0, dtype=torch.float32, **options):
    make_qwen2(VOCAB, seed=seed).to(dtype).save_pretrained(directory, **options)
    return directory


def write_adapter(base, directory, *, resize_to=None, **options):
    model = AutoModelForCausalLM.from_pretrained(base)
    if resize_to is not None:
        model.resize_token_embeddings(resize_to)
    make_adapter(model, directory, ["q_proj"], **options)
    return model.eval()


def merge(adapter, base, target, **options):
    told = []
    done = merge_adapter(read_adapter(adapter), base, target, MergeOptions(**options), told.append)
    return done, told


def flip(path, place):
    """One bit of one byte, as no clock tells: the times are those from before."""
    content, before = bytearray(path.read_bytes()), path.stat()
    content[place] ^= 1
    path.write_bytes(bytes(content))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.fixture
def copies(tmp_path):
    """A base with its tokenizer, an adapter over it, and a way to copy the base."""
    base = write_base(tmp_path / "base", max_shard_size="60KB")
    make_tokenizer().save_pretrained(base)
    write_adapter(base, tmp_path / "adapter")
    assert write_fingerprint(tmp_path / "adapter")
    return base, tmp_path / "adapter"


def test_every_byte_of_every_file_counts(copies, tmp_path, monkeypatch):
    """Whether the digests of before are in the cache or not, and on whatever path."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    base, adapter = copies
    assert check_fingerprint(adapter, base) is None
    known = base_files(base)
    assert {"config.json", "generation_config.json", "tokenizer.json"} < known.keys()
    shards = [name for name in known if name.endswith(".safetensors")]
    assert len(shards) > 2
    for path in base.iterdir():  # as if all had been written some time ago
        os.utime(path, ns=(10**18, 10**18))
    monkeypatch.setattr(digests, "_SETTLED_SECONDS", -1)
    random = np.random.default_rng(0)
    for name in known:
        whole = (base / name).read_bytes()
        places = {0, len(whole) - 1, *random.integers(len(whole), size=6).tolist()}
        for place in places if name in shards else [len(whole) // 2]:
            assert check_fingerprint(adapter, base) is None
            flip(base / name, place)
            with pytest.raises(CheckpointError, match=f"{name} was changed"):
                check_fingerprint(adapter, base)
            (base / name).write_bytes(whole)
    shutil.copytree(base, tmp_path / "moved")
    assert check_fingerprint(adapter, tmp_path / "moved") is None
    (base / "config.json").unlink()
    shutil.copy(base / shards[0], base / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"config\.json is missing"):
        check_fingerprint(adapter, base)


def test_other_shards_are_another_base(copies, tmp_path):
    """Its tensors may be the same: who knows where it has been in between."""
    base, adapter = copies
    other = shutil.copytree(base, tmp_path / "other")
    for path in other.glob("model*"):
        path.unlink()
    write_base(other)
    with pytest.raises(CheckpointError, match=r"-of-00007\.safetensors is missing"):
        check_fingerprint(adapter, other)


def test_a_file_is_read_once(copies, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    base, _ = copies
    read = []
    plain = Path.open

    def opened(self, *arguments, **keywords):
        read.append(self)
        return plain(self, *arguments, **keywords)

    monkeypatch.setattr(Path, "open", opened)
    monkeypatch.setattr(digests, "_SETTLED_SECONDS", 3600)
    known = base_files(base)
    weights = next(base.resolve() / name for name in known if name.endswith("safetensors"))
    read.clear()
    base_files(base)
    assert weights in read  # written just now: a change within the clock's tick would not be seen
    monkeypatch.setattr(digests, "_SETTLED_SECONDS", -1)
    base_files(base)
    read.clear()
    assert base_files(base) == known
    assert weights not in read
    for path in (tmp_path / "cache").rglob("*.json"):
        path.write_text("[]")
    assert base_files(base) == known
    assert weights in read


def test_base_with_other_weights_is_refused(tmp_path):
    base = write_base(tmp_path / "base")
    other = write_base(tmp_path / "other", seed=1)
    write_adapter(base, tmp_path / "adapter")
    assert write_fingerprint(tmp_path / "adapter")
    merge(tmp_path / "adapter", base, tmp_path / "merged", verify=False)
    assert json.loads((tmp_path / "merged" / "merge.json").read_text())["is_base_of_training"]
    with pytest.raises(CheckpointError, match=r"model\.safetensors was changed"):
        merge(tmp_path / "adapter", other, tmp_path / "wrong", verify=False)
    assert not (tmp_path / "wrong").exists()
    _, told = merge(tmp_path / "adapter", other, tmp_path / "asked", verify=False, any_base=True)
    assert "shapes only" in told[0]


def test_adapter_without_a_fingerprint_merges_with_a_note(tmp_path):
    base = write_base(tmp_path / "base")
    write_adapter(base, tmp_path / "adapter")
    _, told = merge(tmp_path / "adapter", base, tmp_path / "merged", verify=False)
    assert "shapes only" in told[0]
    assert (
        json.loads((tmp_path / "merged" / "merge.json").read_text())["is_base_of_training"] is None
    )


def test_base_that_cannot_be_read_leaves_no_fingerprint(tmp_path):
    base = write_base(tmp_path / "base")
    write_adapter(base, tmp_path / "adapter")
    shutil.rmtree(base)
    assert not write_fingerprint(tmp_path / "adapter")
    assert not write_fingerprint(tmp_path)  # no adapter at all
    assert not (tmp_path / "adapter" / FILE_NAME).exists()


@pytest.mark.parametrize(
    "text", ["[]", "{}", '{"schema_version": 3, "files": {"a": 3}}', '{"schema_version": 9}', "{"]
)
def test_damaged_fingerprint(tmp_path, text):
    base = write_base(tmp_path / "base")
    write_adapter(base, tmp_path / "adapter")
    (tmp_path / "adapter" / FILE_NAME).write_text(text)
    with pytest.raises(CheckpointError):
        merge(tmp_path / "adapter", base, tmp_path / "merged", verify=False)


@pytest.mark.parametrize(
    "options", [{}, {"modules_to_save": ["embed_tokens"]}], ids=["frozen", "trained"]
)
def test_resized_vocabulary(tmp_path, options):
    """peft saves a resized embedding whole, and next to a trained one its start values."""
    base = write_base(tmp_path / "base")
    model = write_adapter(base, tmp_path / "adapter", resize_to=VOCAB + 7, **options)
    done, _ = merge(tmp_path / "adapter", base, tmp_path / "merged")
    assert done.parity.num_same == 4
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    ids = torch.arange(VOCAB + 7)[None]
    with torch.inference_mode():
        ours, theirs = merged(ids).logits, model(ids).logits
    assert ours.shape[-1] == VOCAB + 7
    # Float32; base and update are added in another order.
    assert (ours - theirs).abs().max() <= 1e-5


@pytest.mark.parametrize(
    ("patterns", "said"),
    [
        (5, "rank_pattern: 5 is not an object of numbers by name"),
        (["q_proj"], "is not an object of numbers by name"),
        ({"(": 3}, "is no regular expression"),
        ({"(?i)q_proj": 3}, "patterns are damaged"),
    ],
)
def test_patterns_that_are_none(tmp_path, patterns, said):
    base = write_base(tmp_path / "base")
    write_adapter(base, tmp_path / "adapter")
    path = tmp_path / "adapter" / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "rank_pattern": patterns}))
    with pytest.raises(CheckpointError, match=said):
        read_adapter(tmp_path / "adapter")


@pytest.mark.parametrize("way", ["copied", "converted", "from-the-cache"])
def test_all_templates_of_a_tokenizer_travel(tmp_path, way):
    """Rows with tools are trained with the one called tool_use; without it they are served others.

    The hub's cache has links into its blobs.
    """
    from transformers import AutoTokenizer

    from trainkit.checkpoint.weights.companions import carry_companions, copy_companions

    tokenizer, templates = make_tokenizer(), {"default": "a", "tool_use": "b", "rag": "c"}
    tokenizer.chat_template = templates
    source, target = tmp_path / "models--a--b" / "snapshots" / "1f", tmp_path / "target"
    target.mkdir()
    tokenizer.save_pretrained(source)
    (source / "config.json").write_text("{}")
    if way == "from-the-cache":
        blobs = source.parents[1] / "blobs"
        blobs.mkdir()
        for number, path in enumerate(sorted(source.rglob("*.*"))):
            path.rename(blobs / f"{number:040x}")
            path.symlink_to(blobs / f"{number:040x}")
    if way == "converted":
        carry_companions(source, target, {}, {})
    else:
        copy_companions((source,), target)
    assert AutoTokenizer.from_pretrained(target).chat_template == templates


def test_how_a_base_reads_images_travels_with_what_is_trained_from_it(tmp_path):
    """Into checkpoints and ``final/``, and on into what is merged or exported; no code with it."""
    from trainkit.checkpoint.weights.companions import PROCESSORS, copy_companions
    from trainkit.train.checkpoints import remember_origin

    base, final, merged = (tmp_path / name for name in ("base", "final", "merged"))
    for directory in (base, final, merged):
        directory.mkdir()
    for name in PROCESSORS:
        settings = {"image_mean": [0.5], "auto_map": {"AutoImageProcessor": "code.Mine"}}
        (base / name).write_text(json.dumps(settings))
    remember_origin(final, base)
    copy_companions((final, base), merged)
    for directory in (final, merged):
        for name in PROCESSORS:
            assert json.loads((directory / name).read_text()) == {"image_mean": [0.5]}
    remember_origin(final, tmp_path / "on" / "the" / "hub")  # nothing there, and no harm
    chosen, size = tmp_path / "chosen", {"size": {"longest_edge": 9}}
    chosen.mkdir()
    (base / PROCESSORS[1]).write_text(json.dumps({"image_processor": {"image_mean": [0.5]}}))
    remember_origin(chosen, base, None, size)
    first, second, third = (json.loads((chosen / name).read_text()) for name in PROCESSORS)
    assert first == second["image_processor"] == {"image_mean": [0.5], **size}
    assert third == {"image_mean": [0.5]}, "videos are as they were"
