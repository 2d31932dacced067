"""Which weights an adapter was trained over: a digest of samples, kept next to the adapter.

Shapes tell a model from one of another size, but not a base model from its chat version. The digest
takes values from several positions of every tensor, rounded to bfloat16, so that it costs
milliseconds and does not depend on shards or on whether the same weights are stored in float32 or
in bfloat16.
"""

import hashlib
import json
import math
from pathlib import Path

import torch

from trainkit.checkpoint.weights.adapter import CONFIG_NAME
from trainkit.checkpoint.weights.plain_files import plain_file, read_json
from trainkit.checkpoint.weights.reader import WeightsReader
from trainkit.checkpoint.weights.writer import tensor_bytes
from trainkit.errors import CheckpointError

FILE_NAME = "base_fingerprint.json"
SCHEMA_VERSION = 2
_NUM_VALUES = 64  # from each position
_NUM_PLACES = {1: 1, 2: 8}  # by schema version; version 1 took four times as many values from one
_HEAD, _EMBEDDING = "lm_head.weight", "embed_tokens.weight"


def fingerprint(base: Path, version: int = SCHEMA_VERSION) -> str:
    """The digest of a model directory's weights.

    Args:
        base: the directory.
        version: of the record to compare with.

    Raises:
        CheckpointError: there are no weights that can be read.
    """
    digest = hashlib.sha256()
    with WeightsReader(base) as reader:
        samples: dict[str, bytes] = {}
        for name in sorted(reader.tensors):
            if name.endswith("inv_freq"):
                continue  # frequencies follow from the config
            shape = list(reader.tensors[name].shape)
            samples[name] = f"{shape}\n".encode() + _sample(reader, name, version)
        embeddings = {value for name, value in samples.items() if name.endswith(_EMBEDDING)}
        for name, value in samples.items():
            # A tied output matrix is stored by some and not by others.
            is_tied = name.endswith(_HEAD) and (version == 1 or value in embeddings)
            if not is_tied:
                digest.update(f"{name} ".encode() + value)
    return digest.hexdigest()


def _sample(reader: WeightsReader, name: str, version: int) -> bytes:
    """Values from equally spaced positions, the first and the last one included."""
    count, places = math.prod(reader.tensors[name].shape), _NUM_PLACES[version]
    size = _NUM_VALUES if places > 1 else 4 * _NUM_VALUES
    last = max(count - size, 0)
    starts = sorted({last * place // max(places - 1, 1) for place in range(places)})
    values = torch.cat([reader.load_part(name, size, start) for start in starts])
    return bytes(tensor_bytes(values.to(torch.bfloat16) if values.is_floating_point() else values))


def write_fingerprint(adapter: Path) -> bool:
    """Keep the digest of an adapter's base next to the adapter.

    Args:
        adapter: directory; its adapter_config.json names the base.

    Returns:
        Whether it was written. False for what is not an adapter, and where the base has no
        weight files that can be read
        here (a GGUF).
    """
    try:
        base = str(read_json(plain_file(adapter, CONFIG_NAME))["base_model_name_or_path"] or "?")
        found = fingerprint(base_on_disk(base))
    except (CheckpointError, OSError, LookupError, TypeError):
        return False
    text = (
        json.dumps({"schema_version": SCHEMA_VERSION, "base": base, "sha256": found}, indent=2)
        + "\n"
    )
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
    version = record.get("schema_version") if isinstance(record, dict) else None
    if not isinstance(wanted, str) or type(version) is not int or version not in _NUM_PLACES:
        raise CheckpointError(f"{FILE_NAME} is damaged", where=str(adapter))
    if fingerprint(base, version) != wanted:
        raise CheckpointError(
            f"{base} has other weights than the base that the adapter was trained over "
            f"({record.get('base')})",
            where=str(adapter),
            fix="give that base with --base-model, or take this one all the same with --any-base",
        )
    return True


def base_on_disk(name: str) -> Path:
    """Where a base model's files are: the directory itself, or the hub's local copy.

    Raises:
        CheckpointError: it is not a name that the hub could have.
        OSError: there is no local copy.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    directory = Path(name).expanduser()
    if directory.is_dir():
        return directory
    try:
        return Path(snapshot_download(name, local_files_only=True))
    except HFValidationError as error:
        raise CheckpointError(f"{name!r} is not a model: {error}") from None
