"""Which weights an adapter was trained over: a digest of samples, kept beside the adapter.

Shapes tell a model from one of another size, but not a base model from its chat version. The digest
takes the first values of every tensor, rounded to bfloat16, so that it costs milliseconds and does
not depend on shards or on whether the same weights are stored in float32 or in bfloat16.
"""

import hashlib
import json
from pathlib import Path

import torch

from trainkit.checkpoint.adapter import CONFIG_NAME
from trainkit.checkpoint.plain_files import plain_file, read_json
from trainkit.checkpoint.reader import WeightsReader
from trainkit.checkpoint.writer import tensor_bytes
from trainkit.errors import CheckpointError

FILE_NAME = "base_fingerprint.json"
_NUM_VALUES = 256
# A tied output matrix is stored by some and not by others; frequencies follow from the config.
_LEFT_OUT = ("lm_head.weight", "inv_freq")


def fingerprint(base: Path) -> str:
    """The digest of a model directory's weights.

    Raises:
        CheckpointError: there are no weights that can be read.
    """
    digest = hashlib.sha256()
    with WeightsReader(base) as reader:
        for name in sorted(reader.tensors):
            if name.endswith(_LEFT_OUT):
                continue
            values = reader.load_start(name, _NUM_VALUES)
            if values.is_floating_point():
                values = values.to(torch.bfloat16)
            digest.update(f"{name} {list(reader.tensors[name].shape)}\n".encode())
            digest.update(tensor_bytes(values))
    return digest.hexdigest()


def write_fingerprint(adapter: Path) -> bool:
    """Keep the digest of an adapter's base beside the adapter.

    Args:
        adapter: directory; its adapter_config.json names the base.

    Returns:
        Whether it was written: it is no adapter, or its base has no weight files that can be read
        here (a GGUF), otherwise.
    """
    try:
        base = str(read_json(plain_file(adapter, CONFIG_NAME))["base_model_name_or_path"] or "?")
        directory = Path(base).expanduser()
        found = fingerprint(directory if directory.is_dir() else _cached(base))
    except (CheckpointError, OSError, LookupError, TypeError):
        return False
    text = json.dumps({"schema_version": 1, "base": base, "sha256": found}, indent=2) + "\n"
    (adapter / FILE_NAME).write_text(text, encoding="utf-8")
    return True


def check_fingerprint(adapter: Path, base: Path) -> bool:
    """Compare the base at hand with the one that the adapter was trained over.

    Returns:
        False if the adapter does not say.

    Raises:
        CheckpointError: they are different weights.
    """
    if not (adapter / FILE_NAME).exists():
        return False
    record = read_json(plain_file(adapter, FILE_NAME))
    wanted = record.get("sha256") if isinstance(record, dict) else None
    if not isinstance(wanted, str):
        raise CheckpointError(f"{FILE_NAME} is damaged", where=str(adapter))
    if fingerprint(base) != wanted:
        raise CheckpointError(
            f"{base} has other weights than the base that the adapter was trained over "
            f"({record.get('base')})",
            where=str(adapter),
            fix="give that base with --base-model, or merge all the same with --any-base",
        )
    return True


def _cached(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    try:
        return Path(snapshot_download(name, local_files_only=True))
    except HFValidationError as error:
        raise CheckpointError(f"{name!r} is no model: {error}") from None
