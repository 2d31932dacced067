"""Where a model is, given a run directory, a checkpoint, an adapter, or a plain model. No torch."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainkit.checkpoint.whole.atomic import newest_valid
from trainkit.errors import CheckpointError, ModelError
from trainkit.places import local_path, regular, regular_files
from trainkit.run.going_on import resume_command

ADAPTER_CONFIG = "adapter_config.json"
_WEIGHTS = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)


@dataclass(frozen=True)
class ModelPaths:
    """What to load, and from where.

    Attributes:
        model: directory or hub name of the plain weights.
        adapter: directory of an adapter over them, or None.
        tokenizer: directory or hub name of the tokenizer, the run's own where it has one.
        run: the run directory, or None for a model from elsewhere.
        directory: what was found: the final model, a checkpoint, an adapter or a plain model.
        stored: the base that the run named, where ``model`` was unpacked from it.
    """

    model: str
    adapter: Path | None
    tokenizer: str
    run: Path | None
    directory: Path | None
    stored: Path | None = None


def find_model(
    name: str, *, adapter: Path | None = None, base_model: str | None = None
) -> ModelPaths:
    """Find a model.

    Args:
        name: a run directory, a checkpoint, an adapter, a model directory, or a hub name.
        adapter: an adapter to put over it.
        base_model: the weights under an adapter, where the adapter's own word for them leads
            nowhere.

    Raises:
        ModelError: there is nothing usable there.
    """
    if adapter is not None and not (adapter / ADAPTER_CONFIG).is_file():
        raise ModelError("there is no adapter here", where=str(adapter))
    directory = local_path(name)
    if directory is None:
        _check_is_no_checkpoint(Path(name))
        tokenizer = str(adapter) if adapter is not None and _has_tokenizer(adapter) else name
        return ModelPaths(name, adapter, tokenizer, None, None)
    if not directory.exists():
        raise ModelError("there is nothing at this path", where=name)
    directory, run = locate(directory)
    if directory.is_dir():
        regular_files(directory, ModelError)
    if adapter is None and (directory / ADAPTER_CONFIG).is_file():
        adapter = directory
    if adapter == directory:
        model = base_model or _base_of(directory)
    elif _has_weights(directory):
        model = str(directory)
    else:
        raise _nothing_to_load(directory)
    spots = [spot for spot in (adapter, directory) if spot is not None and _has_tokenizer(spot)]
    return ModelPaths(model, adapter, str(spots[0]) if spots else model, run, directory)


def _check_is_no_checkpoint(directory: Path) -> None:
    """Refuse a part of a run that is not there, or no more: only the last checkpoints are kept."""
    run = directory.parent
    if not (run / "status.json").is_file():
        return  # a hub name looks like a path
    checkpoints = sorted(
        (each.name for each in run.glob("checkpoint-*")), key=lambda n: (len(n), n)
    )
    there = [name for name in (*checkpoints, "final") if (run / name).is_dir()]
    raise ModelError(
        "there is nothing at this path",
        where=str(directory),
        fix=f"this run has {', '.join(there)}" if there else "this run has no model yet",
    )


def weights_digest(paths: ModelPaths) -> str | None:
    """Tells whether the weights at given paths are those of an earlier call; None where unreadable.

    Every byte counts, of the configuration and the tokenizer too.
    """
    from trainkit.checkpoint.weights.base_fingerprint import base_files, file_digest

    directory, adapter = Path(paths.model).expanduser(), paths.adapter
    try:
        files: dict[str, str] = base_files(directory)
        for name in ("adapter_model.safetensors", "adapter_model.bin"):
            if adapter is not None and (adapter / name).is_file():
                files[f"adapter/{name}"] = file_digest(adapter / name)
    except (CheckpointError, OSError):
        return None  # a hub name
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()


def base_directory(adapter: Path, base_model: str | None = None) -> Path:
    """The directory, or .gguf file, with the weights under an adapter; a hub's is in the cache.

    Args:
        adapter: directory of the adapter.
        base_model: a directory or hub name that goes before the adapter's own word.

    Raises:
        ModelError: it is not on this machine and cannot be fetched.
    """
    name = base_model or _base_of(adapter)
    directory = local_path(name)
    if directory is not None and directory.is_dir():
        return regular_files(directory, ModelError)
    if directory is not None and directory.suffix == ".gguf" and directory.exists():
        regular(directory, ModelError)
        return directory
    if directory is not None:
        raise ModelError("there is no base model here", where=name, fix="check --base-model")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, ignore_patterns=["*.gguf", "*.bin", "*.pth", "*.onnx"]))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise ModelError(
            f"the base model {name} is not here and cannot be fetched: "
            f"{str(error).splitlines()[0]}",
            where=str(adapter),
            fix="give its directory with --base-model",
        ) from None


def locate(directory: Path) -> tuple[Path, Path | None]:
    """The directory that holds a model, and the run that it belongs to, if any.

    Args:
        directory: a run (its final model is taken, or its newest complete checkpoint), or another
            in one, or any other.

    Raises:
        ModelError: the run holds no model.
    """
    run = next((d for d in (directory, directory.parent) if (d / "status.json").is_file()), None)
    return (_model_in(directory) if run == directory else directory), run


def training_options(run: Path | None) -> Mapping[str, Any]:
    """How the run rendered its conversations, as its ``data.json`` says; empty if it does not.

    Returns:
        Fields of ``trainkit.data.DataOptions`` that decide what a prompt looks like.
    """
    record = _train_record(run)
    options = record.get("options")
    if not isinstance(options, dict):
        return {}
    if "system" in options:  # as runs before this version called it
        options = {"system_policy": options["system"], **options}
    kept = (
        "system_policy", "template_kwargs", "chat_template", "frozen_date", "escape_special",
        "thinking",
    )  # fmt: skip
    return {key: options[key] for key in kept if key in options}


def trained_stop_ids(run: Path | None) -> tuple[int, ...]:
    """The end-of-turn tokens that the run trained."""
    ends = _train_record(run).get("end_of_turn")
    values = ends.values() if isinstance(ends, dict) else ()
    return tuple(value for value in values if isinstance(value, int))


def is_trained_on_texts(run: Path | None) -> bool:
    """Whether the run trained on plain texts alone, so that its prompts have no template."""
    record = _train_record(run)
    formats = {
        name
        for file in record.get("files") or ()
        if isinstance(file, dict)
        for name in file.get("formats") or ()
    }
    plain = {"prompt_completion", "text", "tokens"}
    return bool(formats) and formats <= plain and not record.get("end_of_turn")


def _train_record(run: Path | None) -> dict[str, Any]:
    path = None if run is None else run / "data.json"
    if path is None or not path.is_file():
        return {}
    try:
        record = json.loads(path.read_text(encoding="utf-8"))["train"]
    except (ValueError, KeyError, TypeError):
        raise ModelError("the record of the run's data is damaged", where=str(path)) from None
    return record if isinstance(record, dict) else {}


def _model_in(run: Path) -> Path:
    """The final model, or the newest complete checkpoint of a run that has none yet."""
    final = run / "final"
    if final.is_dir():
        return final
    newest = newest_valid(run)
    if newest.path is None:
        damaged = f"; {newest.skipped[0][0].name}: {newest.skipped[0][1]}" if newest.skipped else ""
        raise ModelError(
            f"this run has no final model and no complete checkpoint{damaged}",
            where=str(run),
            fix=f"continue the run with: {resume_command(run)}",
        )
    return newest.path


def _base_of(adapter: Path) -> str:
    try:
        base = json.loads((adapter / ADAPTER_CONFIG).read_text("utf-8"))["base_model_name_or_path"]
    except (ValueError, KeyError, TypeError):
        base = None
    if not isinstance(base, str) or not base:
        raise ModelError(
            f"{ADAPTER_CONFIG} does not name its base model",
            where=str(adapter),
            fix="give it with --base-model",
        )
    path = local_path(base)
    if path is not None and not path.exists():
        raise ModelError(
            f"the adapter's base model is not at {base} any more",
            where=str(adapter),
            fix="give its new path with --base-model",
        )
    return base


def _nothing_to_load(directory: Path) -> ModelError:
    is_sharded = any(path.is_dir() for path in directory.glob("global_step*"))
    return ModelError(
        "it holds DeepSpeed shards only" if is_sharded else "it holds no model and no adapter",
        where=str(directory),
        fix="make a plain model of it first: trainkit merge"
        if is_sharded
        else "give a run directory, a checkpoint, an adapter or a model directory",
    )


def _has_weights(directory: Path) -> bool:
    return any((directory / name).exists() for name in _WEIGHTS)


def _has_tokenizer(directory: Path) -> bool:
    return (directory / "tokenizer_config.json").is_file()
