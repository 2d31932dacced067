"""Checkpoints that lie, lead out, or want to run code: refused before any harm."""

import json
import os
import struct
from pathlib import Path

import pytest
import torch
from chaos.hostile_cases import Evil
from safetensors.torch import save_file

from trainkit.checkpoint.weights.plain_files import plain_file, read_json
from trainkit.checkpoint.weights.reader import WeightsReader
from trainkit.errors import CheckpointError

BODY = bytes(range(32))


def write_raw(path: Path, header, body: bytes = BODY, *, claimed=None) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if claimed is None else claimed) + text + body)


def entry(dtype="F32", shape=(2, 4), offsets=(0, 32)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def load_all(directory: Path) -> None:
    with WeightsReader(directory) as reader:
        for name in reader.tensors:
            reader.load(name)


def test_honest_file_is_read(tmp_path):
    tensors = {
        "a": torch.randn(3, 5),
        "b": torch.arange(4, dtype=torch.int8),
        "scalar": torch.tensor(2.5, dtype=torch.bfloat16),
        "none": torch.empty(0, 7),
        "flag": torch.tensor([True, False]),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    with WeightsReader(tmp_path) as reader:
        assert reader.tensors.keys() == tensors.keys()
        for name, tensor in tensors.items():
            loaded = reader.load(name)
            assert loaded.dtype == tensor.dtype
            assert torch.equal(loaded, tensor)


@pytest.mark.parametrize(
    "header",
    [
        {"w": entry(shape=(2, 5))},
        {"w": entry(shape=(2**40, 2**40))},
        {"w": entry(shape=(-2, -4))},
        {"w": entry(shape=(2.0, 4))},
        {"w": entry(dtype="F99")},
        {"w": entry(dtype="U16", shape=(16,))},  # known to the format, and to nothing here
        {"w": entry(offsets=(0, 64), shape=(16,))},
        {"w": entry(offsets=(16, 48))},
        {"w": entry(offsets=(32, 0))},
        {"w": entry(offsets=(0, 16), shape=(4,))},
        {"w": entry(), "v": entry()},
        {"w": "F32"},
        [],
        b"{",
        b"[" * 5000,
    ],
)
def test_lying_header(tmp_path, header):
    write_raw(tmp_path / "model.safetensors", header)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: it is not a whole safetensors"):
        load_all(tmp_path)


@pytest.mark.parametrize("claimed", [2**63, 10**9, 101, 40])
def test_header_longer_than_the_file(tmp_path, claimed):
    write_raw(tmp_path / "model.safetensors", b"{}", b"x" * 30, claimed=claimed)
    with pytest.raises(CheckpointError):
        load_all(tmp_path)


NO_PATHS = [
    *("../outside.safetensors", "/etc/passwd", "sub/model.safetensors", ".."),
    *(".hidden.safetensors", "a\x00.safetensors", "model.bin", 7, None),
]


@pytest.mark.parametrize(
    ("index", "said"),
    [
        *((json.dumps({"weight_map": {"w": file}}), "which is not a") for file in NO_PATHS),
        *((text, "no weight_map") for text in ("{}", '{"weight_map": {}}', '{"weight_map": []}')),
        ("[]", "no weight_map"),
        ("{,}", "not valid JSON"),
        (
            '{"weight_map": {"w": "s.safetensors", "v": "s.safetensors"}}',
            r"missing \['v'\], not listed \['extra'\]",
        ),
        ('{"weight_map": {"w": "gone.safetensors"}}', r"gone\.safetensors is missing"),
        (None, "no weights"),
    ],
)
def test_an_index_names_files_of_the_directory_and_what_they_hold(tmp_path, index, said):
    inside = tmp_path / "model"
    inside.mkdir()
    if index is not None:
        save_file({"w": torch.zeros(2)}, tmp_path / "outside.safetensors")
        save_file({"w": torch.zeros(2), "extra": torch.zeros(1)}, inside / "s.safetensors")
        (inside / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CheckpointError, match=said):
        load_all(inside)


def test_link_out_of_the_directory(tmp_path):
    save_file({"w": torch.zeros(2)}, tmp_path / "secret.safetensors")
    inside = tmp_path / "model"
    inside.mkdir()
    (inside / "model.safetensors").symlink_to(tmp_path / "secret.safetensors")
    with pytest.raises(CheckpointError, match="leads out"):
        load_all(inside)


def test_pipe_and_device_and_folder_are_no_files(tmp_path):
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="not a file"):
        load_all(tmp_path)
    (tmp_path / "config.json").mkdir()
    with pytest.raises(CheckpointError, match="not a file"):
        plain_file(tmp_path, "config.json")


def test_links_of_the_hub_cache_are_followed(tmp_path):
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "abc"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    blob = blobs / ("0" * 64)
    save_file({"w": torch.ones(2)}, blob)
    (snapshot / "model.safetensors").symlink_to(Path("../../blobs") / blob.name)
    load_all(snapshot)
    (snapshot / "config.json").symlink_to(Path("../../blobs") / "../../elsewhere")
    with pytest.raises(CheckpointError):
        plain_file(snapshot, "config.json")


@pytest.mark.parametrize("text", ['{"a": NaN}', '{"a": 1, "a": 2}', "[" * 100_000, "\xff"])
def test_bad_json(tmp_path, text):
    (tmp_path / "c.json").write_text(text, encoding="latin-1")
    with pytest.raises(CheckpointError, match="not valid JSON"):
        read_json(tmp_path / "c.json")


def test_pickles_are_not_opened(tmp_path):
    torch.save({"w": torch.zeros(2), "evil": Evil(tmp_path)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"no weights(.|\n)*save_pretrained"):
        load_all(tmp_path)
    assert not (tmp_path / "canary").exists()


def test_remote_code_beside_the_weights_is_never_imported(glm, tmp_path):
    from tiny_glm import write_chatglm

    from trainkit.checkpoint.convert.convert import ConvertOptions, convert_model

    source = write_chatglm(glm, tmp_path / "source")
    code = f"open({str(tmp_path / 'canary')!r}, 'w')"
    for name in ("configuration_chatglm.py", "modeling_chatglm.py", "tokenization_chatglm.py"):
        (source / name).write_text(code)
    convert_model(source, tmp_path / "target", "qwen2", ConvertOptions())
    assert not (tmp_path / "canary").exists()
    assert not list((tmp_path / "target").glob("*.py"))
    config = json.loads((tmp_path / "target" / "config.json").read_text())
    assert "auto_map" not in config
