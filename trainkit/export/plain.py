"""The trained model as one plain directory: an adapter merged, weights copied, nothing to run."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainkit.checkpoint.merge.merge import MergeOptions, merge_adapter, own_base
from trainkit.checkpoint.weights.adapter import read_adapter
from trainkit.checkpoint.weights.companions import NAMED_TEMPLATES, copy_companions
from trainkit.checkpoint.weights.export import (
    CastWeights,
    dtype_named,
    write_config,
    write_weights,
)
from trainkit.checkpoint.weights.plain_files import (
    is_plain_name,
    plain_file,
    read_config,
    read_json,
)
from trainkit.checkpoint.weights.reader import WeightsReader
from trainkit.checkpoint.whole.manifest import MANIFEST_NAME
from trainkit.errors import ModelError
from trainkit.export.source import Source
from trainkit.infer.locate import ModelPaths, base_directory

MAX_SHARD_BYTES = 5 * 10**9


def stored_bytes(paths: ModelPaths) -> int:
    """Bytes of the weights as they are on the disk; only headers are read."""
    with WeightsReader(weights_directory(paths)) as reader:
        return sum(info.num_bytes for info in reader.tensors.values())


def weights_directory(paths: ModelPaths) -> Path:
    """Where the model's weights, or those under its adapter, are."""
    if paths.adapter is not None:
        return base_directory(paths.adapter, paths.model)
    directory = Path(paths.model).expanduser()
    if not directory.is_dir():
        raise ModelError(
            "only a model in a directory can be exported",
            where=paths.model,
            fix="fetch it first: hf download",
        )
    return directory


def write_plain(
    source: Source, target: Path, *, dtype: str | None = None, say: Callable[[str], None]
) -> None:
    """Write a directory that ``from_pretrained`` and servers load.

    Args:
        source: see there.
        target: must not exist.
        dtype: of the weights; None keeps each tensor's own.
        say: called with one line about each stage.

    Raises:
        CheckpointError: the weights cannot be read, or the adapter cannot be merged.
    """
    adapter = source.paths.adapter
    directory = weights_directory(source.paths)
    if adapter is not None:
        options = MergeOptions(
            quantize=source.quantize,
            compute_dtype=source.compute_dtype,
            base=own_base(source.quantize),
            dtype=dtype,
            max_shard_bytes=MAX_SHARD_BYTES,
            verify=False,  # the certificate asks more
            any_base=source.any_base,
        )
        taken = read_adapter(adapter, with_peft=True)
        merge_adapter(taken, directory, target, options, say)
        (target / MANIFEST_NAME).unlink()  # the export writes one over all
    else:
        target.mkdir()
        with WeightsReader(directory) as reader:
            cast = CastWeights(reader, dtype_named(dtype))
            write_weights(cast, target, max_shard_bytes=MAX_SHARD_BYTES)
        write_config(target, read_config(directory), dtype)
        copy_companions((Path(source.paths.tokenizer), directory), target)
    make_servable(target, source)


def make_servable(directory: Path, source: Source) -> None:
    """Put the trained template and stop tokens into a directory, and take out what names code."""
    for name in ("config.json", "tokenizer_config.json"):
        if (directory / name).exists():
            settings = read_json(plain_file(directory, name))
            settings.pop("auto_map", None)
            settings.pop("chat_template", None)  # the file next to it counts
            _write(directory / name, settings)
    if source.template is not None:
        (directory / "chat_template.jinja").write_text(source.template, encoding="utf-8")
    for name, text in source.named_templates.items():
        if not is_plain_name(name):
            raise ModelError(f"the chat template {name!r} has no plain name", where=str(directory))
        (directory / NAMED_TEMPLATES).mkdir(exist_ok=True)
        (directory / NAMED_TEMPLATES / f"{name}.jinja").write_text(text, encoding="utf-8")
    path = directory / "generation_config.json"
    settings = read_json(plain_file(directory, path.name)) if path.exists() else {}
    settings["eos_token_id"] = list(source.stop_ids)
    _write(path, settings)


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
