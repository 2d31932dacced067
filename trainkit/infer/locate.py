"""Where a model is, given a run directory, a checkpoint, an adapter, or a plain model. No torch.

A model's place, its revision and whether code that comes with it may run travel together, in
``ModelPaths.source``: whatever loads a part of a model takes it from there.
"""

import hashlib
import json
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainkit.checkpoint.whole.atomic import newest_valid
from trainkit.errors import CheckpointError, ModelError
from trainkit.hub import check_hub
from trainkit.models.files import PICKLED_WEIGHTS
from trainkit.options import ImageOptions, LoraOptions, ModelOptions
from trainkit.options.data import SCALING
from trainkit.places import WEIGHTS, local_path, refuse_file, regular, regular_files
from trainkit.run.status import resume_command
from trainkit.terminal import visible

ADAPTER_CONFIG = "adapter_config.json"
_FROM_A_COPY = "take it from a copy of the run; a copy of final/ elsewhere is asked without it"


@dataclass(frozen=True)
class ModelPaths:
    """What to load, and from where.

    Attributes:
        source: the plain weights: directory or hub name, revision, and whether code that comes
            with them may run.
        tokenizer: directory or hub name of the tokenizer, the run's own where it has one.
        run: the run directory, or None for a model from elsewhere.
        directory: what was found: the final model, a checkpoint, an adapter or a plain model.
        stored: the base that the run named, where ``source`` was unpacked from it.
    """

    source: ModelOptions
    adapter: Path | None
    tokenizer: str
    run: Path | None
    directory: Path | None
    stored: Path | None = None

    @property
    def model(self) -> str:
        """Directory or hub name of the plain weights."""
        return self.source.name_or_path

    def at(self, place: str | Path) -> ModelOptions:
        """Another directory of the same model, such as its tokenizer's or a copy of it."""
        is_of_hub = local_path(str(place)) is None
        revision = self.source.revision if is_of_hub else None
        return self.source.replace(name_or_path=str(place), revision=revision)


def find_model(
    name: str,
    *,
    adapter: Path | None = None,
    base_model: str | None = None,
    trust_remote_code: bool = False,
) -> ModelPaths:
    """Find a model.

    Args:
        name: a run directory, a checkpoint, an adapter, a model directory, or a hub name.
        adapter: an adapter to put over it.
        base_model: the weights under an adapter, where the adapter's own word for them leads
            nowhere.
        trust_remote_code: run the code that comes with the model or its tokenizer. What a run
            was allowed is no permission for what reads it later.
    """
    if adapter is not None:
        refuse_file(adapter, ModelError)
    if adapter is not None and not (adapter / ADAPTER_CONFIG).is_file():
        raise ModelError("there is no adapter here", where=str(adapter))
    directory = local_path(name)
    if directory is None:
        _check_is_no_checkpoint(Path(name))
        tokenizer = str(adapter) if adapter is not None and _has_tokenizer(adapter) else name
        source = ModelOptions(name_or_path=name, trust_remote_code=trust_remote_code)
        refuse_code(source, (tokenizer,), None)
        return ModelPaths(source, adapter, tokenizer, None, None)
    if not directory.exists():
        raise ModelError("there is nothing at this path", where=name)
    directory, run = locate(directory)
    if directory.is_dir():
        regular_files(directory, ModelError)
    if adapter is None and (directory / ADAPTER_CONFIG).is_file():
        adapter = directory
    if adapter == directory:
        source = base_of(directory, base_model, trust_remote_code=trust_remote_code)
    elif directory.suffix == ".gguf" or any(
        (directory / name).exists() for name in (*WEIGHTS, *PICKLED_WEIGHTS)
    ):
        source = ModelOptions(name_or_path=str(directory), trust_remote_code=trust_remote_code)
    else:
        raise _nothing_to_load(directory)
    spots = [spot for spot in (adapter, directory) if spot is not None and _has_tokenizer(spot)]
    tokenizer = str(spots[0]) if spots else source.name_or_path
    refuse_code(source, (tokenizer,), run)
    return ModelPaths(source, adapter, tokenizer, run, directory)


def refuse_code(source: ModelOptions, places: Iterable[str], run: Path | None) -> None:
    """Refuse a model that needs code of its own, where nobody has allowed it; nothing is loaded.

    A model that transformers knows as well runs by transformers' code, unless its run did not.
    """
    if source.trust_remote_code:
        return
    for place in dict.fromkeys((source.name_or_path, *places)):
        for name in ("config.json", "tokenizer_config.json"):
            file = _file_of(place, name, source.revision)
            settings = _settings_in(file)
            if file is None or not isinstance(code := settings.get("auto_map"), dict) or not code:
                continue
            was_run = run_settings(run).trust_remote_code
            if was_run or (name == "config.json" and not _is_known(settings.get("model_type"))):
                kind, entry = next(iter(code.items()))
                raise ModelError(
                    f"{'its run used' if was_run else 'it needs'} code that comes with the model: "
                    f"auto_map names {entry} as its {kind}",
                    where=str(file),
                    fix="read that code; to let it run here, add --trust-remote-code",
                )


def _file_of(place: str, name: str, revision: str | None) -> Path | None:
    """A file of a directory, or of the hub's copy on this disk."""
    directory = local_path(place)
    if directory is not None:
        return directory / name if (directory / name).is_file() else None
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(place, name, revision=revision)
    return Path(found) if isinstance(found, str) else None


def _settings_in(file: Path | None) -> Mapping[str, Any]:
    try:
        content = json.loads(regular(file, ModelError).read_bytes()) if file else {}
    except ValueError:
        content = {}  # for its loader to say
    return content if isinstance(content, dict) else {}


def _is_known(model_type: object) -> bool:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    return model_type in CONFIG_MAPPING_NAMES


@dataclass(frozen=True)
class RunSettings:
    """What a run's own recipe says that a later command must know.

    Attributes:
        quantize: ``nf4``, ``int8``, ``fp8``, or None for plain weights.
        dtype: of the weights in memory, or None where it is not known.
        trust_remote_code: the run ran code that came with its model.
        lora: its adapters, and with them what of the base was kept so.
    """

    quantize: str | None = None
    dtype: str | None = None
    trust_remote_code: bool = False
    lora: LoraOptions = field(default_factory=LoraOptions)


def run_settings(run: Path | None) -> RunSettings:
    """Read a run's resolved recipe; empty without a run."""
    from trainkit.recipe import load_recipe

    if run is None:
        return RunSettings()
    resolved = run / "resolved.yaml"
    if not resolved.is_file():
        raise ModelError("the run's recipe is missing", where=str(resolved), fix=_FROM_A_COPY)
    recipe = load_recipe(resolved).recipe
    model, lora = recipe.model, recipe.lora
    lora = lora or LoraOptions()
    return RunSettings(lora.quantize, model.dtype, model.trust_remote_code, lora)


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
    from trainkit.checkpoint.weights.reader import ADAPTER_WEIGHTS

    directory, adapter = Path(paths.model).expanduser(), paths.adapter
    try:
        files: dict[str, str] = base_files(directory)
        if adapter is not None and (adapter / ADAPTER_WEIGHTS).is_file():
            files["adapter"] = file_digest(adapter / ADAPTER_WEIGHTS)
    except (CheckpointError, OSError):
        return None  # a hub name
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()


def base_directory(source: ModelOptions) -> Path:
    """The directory, or .gguf file, with the weights under an adapter; a hub's is in the cache."""
    name = source.name_or_path
    directory = local_path(name)
    if directory is not None and directory.is_dir():
        return regular_files(directory, ModelError)
    if directory is not None and directory.suffix == ".gguf" and directory.exists():
        regular(directory, ModelError)
        return directory
    if directory is not None:
        refuse_file(directory, ModelError)
        raise ModelError("there is no base model here", where=name, fix="check --base-model")
    fix = "give its directory with --base-model"
    check_hub(name, ModelError, f"the base model: {name}", fix)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        unread = ["*.gguf", "*.bin", "*.pth", "*.onnx"]
        return Path(snapshot_download(name, revision=source.revision, ignore_patterns=unread))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise ModelError(
            f"the base model {name} is not here and cannot be fetched: "
            f"{str(error).splitlines()[0]}",
            where=name,
            fix=fix,
        ) from None


def locate(directory: Path) -> tuple[Path, Path | None]:
    """The directory that holds a model, and the run that it belongs to, if any.

    Of a run its final model is taken, or its newest complete checkpoint.
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
    kept = ("system_policy", "template_kwargs", "chat_template", "escape_special", "thinking")
    found = {key: options[key] for key in kept if key in options}
    images = options.get("images")
    scaling = {key: images.get(key) for key in SCALING} if isinstance(images, dict) else {}
    return found | ({"images": ImageOptions(**scaling)} if any(scaling.values()) else {})


def trained_stop_ids(run: Path | None) -> tuple[int, ...]:
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
    if run is None:
        return {}
    path = run / "data.json"
    try:
        record = json.loads(path.read_text(encoding="utf-8"))["train"]
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        raise ModelError(
            "the record of the run's data is damaged, or missing", where=str(path), fix=_FROM_A_COPY
        ) from None
    return record if isinstance(record, dict) else {}


def _model_in(run: Path) -> Path:
    """The final model, or the newest complete checkpoint of a run that has none yet."""
    final = run / "final"
    if final.is_dir():
        return final
    newest = newest_valid(run)
    damaged = "".join(f"; {path.name}: {reason}" for path, reason in newest.skipped)
    if newest.path is None:
        raise ModelError(
            f"this run has no final model and no complete checkpoint{damaged}",
            where=str(run),
            fix=f"continue the run with: {resume_command(run)}",
        )
    if os.environ.get("RANK", "0") == "0":
        said = f"{run} has no final model yet; taken is its {newest.path.name}{damaged}"
        sys.stderr.write(f"{visible(said)}\n")
    return newest.path


def base_of(
    adapter: Path, base_model: str | None = None, *, trust_remote_code: bool = False
) -> ModelOptions:
    if base_model is not None:
        return ModelOptions(name_or_path=base_model, trust_remote_code=trust_remote_code)
    settings = _settings_in(adapter / ADAPTER_CONFIG)
    base, revision = settings.get("base_model_name_or_path"), settings.get("revision")
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
    return ModelOptions(
        name_or_path=base,
        revision=revision if isinstance(revision, str) and path is None else None,
        trust_remote_code=trust_remote_code,
    )


def _nothing_to_load(directory: Path) -> ModelError:
    refuse_file(directory, ModelError)
    is_sharded = any(path.is_dir() for path in directory.glob("global_step*"))
    return ModelError(
        "it holds DeepSpeed shards only" if is_sharded else "it holds no model and no adapter",
        where=str(directory),
        fix="make a plain model of it first: trainkit merge"
        if is_sharded
        else "give a run directory, a checkpoint, an adapter or a model directory",
    )


def _has_tokenizer(directory: Path) -> bool:
    return (directory / "tokenizer_config.json").is_file()
