"""Plain models and adapters out of ZeRO checkpoints."""

import json
from pathlib import Path

from trainkit.checkpoint.weights.adapter import CONFIG_NAME, PREFIX, read_adapter_config
from trainkit.checkpoint.weights.companions import copy_companions
from trainkit.checkpoint.weights.export import DTYPES, export_plain
from trainkit.checkpoint.weights.plain_files import read_config
from trainkit.checkpoint.weights.writer import save_tensors
from trainkit.checkpoint.zero.zero import ZeroReader
from trainkit.errors import CheckpointError

_ADAPTER_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")


def needs_adapter_from_shards(checkpoint: Path) -> bool:
    """Whether a checkpoint's adapter is in its shards only."""
    has_config = (checkpoint / CONFIG_NAME).is_file()
    return has_config and not any((checkpoint / name).exists() for name in _ADAPTER_WEIGHTS)


def export_zero(
    folder: Path,
    checkpoint: Path,
    target: Path,
    *,
    dtype: str | None = None,
    max_shard_bytes: int = 5 * 10**9,
) -> int:
    """Write the float32 masters of a ZeRO checkpoint as a plain model, rounded once.

    Args:
        folder: the shards, as ``find_zero_folder`` found them.
        checkpoint: holds config.json and the tokenizer.
        target: must not exist.
        dtype: of the result; None takes what config.json says, else bfloat16.
        max_shard_bytes: size of a weights file.

    Returns:
        The number of tensors.

    Raises:
        CheckpointError: the shards are incomplete, damaged or hostile; the disk is full.
    """
    config = read_config(checkpoint)
    own = str(config.get("dtype", config.get("torch_dtype")))
    with ZeroReader(folder) as reader:
        return export_plain(
            reader,
            checkpoint,
            target,
            dtype=dtype or (own if own in DTYPES else "bfloat16"),
            max_shard_bytes=max_shard_bytes,
        )


def extract_adapter(folder: Path, checkpoint: Path, target: Path) -> Path:
    """Write the adapter that a ZeRO checkpoint holds in its shards, as peft would have saved it.

    Args:
        folder: the shards.
        checkpoint: holds adapter_config.json.
        target: an empty directory.

    Raises:
        CheckpointError: the shards hold no adapter.
    """
    config = read_adapter_config(checkpoint, with_peft=True)
    with ZeroReader(folder) as reader:
        tensors = {
            name.replace(".default", ""): reader.load(name)
            for name in reader.tensors
            if name.startswith(PREFIX) and (".lora_" in name or ".modules_to_save." in name)
        }
    if not tensors:
        raise CheckpointError("the shards hold no adapter", where=str(folder))
    save_tensors(target / "adapter_model.safetensors", tensors)
    (target / CONFIG_NAME).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    copy_companions((checkpoint,), target)
    return target
