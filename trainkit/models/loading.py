"""Loading the model and its tokenizer, with errors that say what is missing and what to do.

The device that a command line names.
"""

from __future__ import annotations

import contextlib
import pickle
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import huggingface_hub
import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoTokenizer,
    GenerationConfig,
    GgufConfig,
    Mxfp4Config,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
)

from trainkit.auto_class import auto_class
from trainkit.errors import ModelError, TrainkitError
from trainkit.evaluation_mode import changed
from trainkit.hub import check_hub
from trainkit.models.files import (
    MOST,
    check_model_files,
    check_tokenizer_files,
    refuse_counts,
    with_sound_normalizer,
)
from trainkit.models.vocabulary import NewTokens, grow, teach
from trainkit.options.model import DTYPES, ModelOptions
from trainkit.places import local_path, regular, regular_files

if TYPE_CHECKING:
    from transformers import PreTrainedModel  # seconds of imports, which a tokenizer does not need

TORCH_DTYPES: Mapping[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPES}

UNPACKED_METHODS: Mapping[str, Any] = {"mxfp4": Mxfp4Config}
"""Ways of storing weights that no backward pass takes: loaded, they are plain weights."""

LoadPart = Callable[[type, Any, Callable[[type], tuple[Any, Any]]], tuple[Any, Any]]
"""`trainkit.parallel.engine.Engine.load_part`."""


def from_pretrained_arguments(source: ModelOptions) -> tuple[str, dict[str, Any]]:
    """The path or name and the keyword arguments that every ``from_pretrained`` takes.

    A directory is given as a full path: peft writes it into the adapter, which then finds its base
    from any working directory, and never takes a hub's model of the same name for it.
    """
    path = local_path(source.name_or_path) or Path(source.name_or_path)
    if path.is_dir():
        regular_files(path, ModelError)
    source_path = str(path.absolute()) if path.is_dir() else source.name_or_path
    options: dict[str, Any] = {
        "revision": source.revision or "main",
        "trust_remote_code": source.trust_remote_code,
    }
    if source.gguf_file is not None:
        return source_path, {**options, "gguf_file": source.gguf_file}
    if path.suffix == ".gguf":
        return str(path.parent.absolute()), {**options, "gguf_file": path.name}
    return source_path, options


def check_exists(source: ModelOptions, *, is_model: bool = True) -> None:
    """Refuse a path that looks local and is not there, before anything is imported or fetched.

    An adapter's directory serves where only the tokenizer is loaded.
    """
    path = local_path(source.name_or_path)
    if path is None:
        check_hub(
            source.name_or_path,
            ModelError,
            f"model.name_or_path: {source.name_or_path}",
            "check the spelling of the directory; without a network, download the model elsewhere "
            "(hf download NAME --local-dir DIR) and give DIR",
        )
        return
    if path.is_dir():
        regular_files(path, ModelError)
        if is_model and source.gguf_file is None:
            check_model_files(path, with_weights=source.init != "random")
        return
    if path.exists():
        regular(path, ModelError)
        return
    raise ModelError(
        f"there is no model at {path.absolute()}",
        where="model.name_or_path",
        fix="give a directory that save_pretrained wrote, a .gguf file, or a hub name",
    )


def load_tokenizer(source: ModelOptions) -> PreTrainedTokenizerBase:
    source_path, options = from_pretrained_arguments(source)
    directory = with_sound_normalizer(Path(source_path))
    with _explained(source, "tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(source_path, **options)
    if tokenizer is not None and directory.is_dir() and "gguf_file" not in options:
        check_tokenizer_files(directory, tokenizer)
    if tokenizer is None or not len(tokenizer):
        raise ModelError(
            "there is no tokenizer next to the model",
            where=source.name_or_path,
            fix="copy tokenizer.json and tokenizer_config.json there",
        )
    _check_template(tokenizer.chat_template, source)
    if source.adds_tokens:
        teach(tokenizer, source)
    return tokenizer


def _check_template(template: object, source: ModelOptions) -> None:
    """One text, or several by name; transformers takes what the file has."""
    texts = list(template.values()) if isinstance(template, dict) else [template or ""]
    if not all(isinstance(text, str) for text in texts):
        raise ModelError(
            "the tokenizer's chat_template is neither a text nor texts by name",
            where=source.name_or_path,
            fix="correct chat_template in tokenizer_config.json, or remove it",
        )


def new_tokens(source: ModelOptions) -> NewTokens:
    """What the recipe's tokens are to the model's own tokenizer."""
    plain = source.replace(add_tokens=None, add_special_tokens=None)
    return teach(load_tokenizer(plain), source)


def stop_token_ids(source: ModelOptions) -> tuple[int, ...]:
    """What the model's own generation settings stop at; empty where it has none."""
    source_path, options = from_pretrained_arguments(source)
    if "gguf_file" in options:
        return ()
    try:
        settings = GenerationConfig.from_pretrained(source_path, revision=options["revision"])
    except Exception as error:  # transformers looks at few of its values before it uses them
        path = Path(source_path) / "generation_config.json"
        if isinstance(error, OSError) and not path.is_file():
            return ()
        raise ModelError(
            f"the generation settings cannot be read: {type(error).__name__}: {error}"[:400],
            where=str(path),
            fix="correct that file, or remove it",
        ) from None
    stops = settings.eos_token_id
    found = () if stops is None else tuple(stops) if isinstance(stops, list) else (stops,)
    size = getattr(load_config(source).get_text_config(), "vocab_size", None) or MOST
    for stop in found:
        if not isinstance(stop, int) or not 0 <= stop < size:
            raise ModelError(
                f"generation_config.json ends answers at the token {str(stop)[:20]}, and the "
                f"model's tokens are 0 to {size - 1}",
                where=source.name_or_path,
                fix="correct eos_token_id there, or remove it",
            )
    return found


def load_config(source: ModelOptions) -> PreTrainedConfig:
    source_path, options = from_pretrained_arguments(source)
    with _explained(source, "configuration"):
        config = AutoConfig.from_pretrained(source_path, **options)
        text = config.get_text_config()  # of several text models it knows none
    refuse_counts(vars(text), source.name_or_path)
    return config


def can_set_attention(config: PreTrainedConfig) -> bool:
    """Whether a loaded model of this kind can be given another attention; older classes cannot.

    Of a class with code of its own nothing is known: False.
    """
    model_class = _model_class(auto_class(config), config)
    return model_class is not None and bool(model_class._can_set_attn_implementation())


def load_model(
    source: ModelOptions,
    *,
    attention: str | None,
    quantization: Any | None = None,
    device: torch.device | None = None,
    load_part: LoadPart | None = None,
    reads_parts: Callable[[nn.Module], bool] | None = None,
) -> PreTrainedModel:
    """Load (or, with ``init: random``, build) the model; ``use_cache`` is off for training.

    Embedding and head have rows for the tokens that the recipe adds.

    Args:
        source: where from.
        attention: transformers' ``attn_implementation``; None leaves it to transformers.
        quantization: a transformers quantization config, or None.
        device: where the weights go; None leaves them where the loader puts them.
        load_part: loads what this rank holds of the model; the rest is on the meta device.
        reads_parts: says of a model on the meta device whether ranks read their parts of it when
            it is sharded; it is then returned without weights, if its files can be read so.
    """
    source_path, options = from_pretrained_arguments(source)
    dtype = TORCH_DTYPES.get(source.dtype, "auto")
    with _explained(source, "model"):
        config = load_config(source)
        unpacked = _unpacked(config, options)
        quantization = quantization or unpacked
        loader, trusted = auto_class(config), source.trust_remote_code
        if source.init == "random":
            model = _random(loader, config, dtype, attention, device, load_part, trusted)
        else:

            def load(model_class: Any, **more: Any) -> Any:
                return model_class.from_pretrained(
                    source_path,
                    output_loading_info=True,
                    dtype=dtype,
                    attn_implementation=attention,
                    # 4-bit weights cannot be moved later; the others are moved below.
                    **(
                        {"quantization_config": quantization, "device_map": device and {"": device}}
                        if quantization is not None
                        else {}
                    ),
                    **options,
                    **more,
                )

            if reads_parts is not None and not (quantization or source.adds_tokens):
                from trainkit.models.skeleton import skeleton

                place = device or torch.device("cpu")
                found = skeleton(partial(load, loader), source_path, place, reads_parts)
                if found is not None:
                    set_use_cache(found.config, False)
                    return found
            if load_part is not None and "gguf_file" in options:
                raise ModelError(
                    "a GGUF file is read as a whole, and a rank of a pipeline reads its own layers",
                    where="model.name_or_path",
                    fix="convert it to safetensors, or remove parallel.pipeline",
                )
            if load_part is None:
                model, report = load(loader)
            else:
                model, report = load_part(_model_class(loader, config), config, load)
            _refuse_missing(report["missing_keys"], source)
            if changes := vars(model).get("_weight_conversions"):  # ZeRO-3: unused ones, too
                model._weight_conversions = [each for each in changes if each.was_used()]
    if unpacked is not None and quantization is unpacked:
        model = _as_plain_model(model, _stored_path(source_path, options))
    if source.adds_tokens:
        grow(model, new_tokens(source))
    if device is not None and getattr(model, "hf_quantizer", None) is None:
        move(model, device)
    # Packing is isolated only without a cache, and training never needs one.
    set_use_cache(model.config, False)
    return model


_DECAYS = frozenset({"A_log", "dt_bias"})


def exact_decays(config: PreTrainedConfig, wanted: bool) -> AbstractContextManager[None]:
    """Within, what a gated recurrence forgets by stays fp32 as models are loaded in less.

    bf16 rounds A_log to 0.4%: a rate of decay, and with it how long a state lasts, is off by as
    much, and a training step is smaller than the rounding.
    """
    from transformers import PreTrainedModel

    types: list[str] = getattr(config.get_text_config(), "layer_types", None) or []
    strict = {*(PreTrainedModel._keep_in_fp32_modules_strict or ()), *_DECAYS}
    is_wanted = wanted and "linear_attention" in types
    name = "_keep_in_fp32_modules_strict"
    return changed([(PreTrainedModel, name, strict)] if is_wanted else [])


def _random(
    loader: Any,
    config: PreTrainedConfig,
    dtype: torch.dtype | str,
    attention: str | None,
    device: torch.device | None,
    load_part: LoadPart | None,
    trusted: bool,
) -> PreTrainedModel:
    """Random weights, of the whole model or of what this rank holds of it."""
    from trainkit.models.skeleton import random_model, random_part

    made = {
        "dtype": config.dtype or torch.float32 if dtype == "auto" else dtype,
        "attn_implementation": attention,
    }
    if load_part is None:
        model = random_model(loader, config, device, trust_remote_code=trusted, **made)
        for name, parameter in model.named_parameters():
            if name.rpartition(".")[2] in _DECAYS & model._keep_in_fp32_modules_strict:
                parameter.data = parameter.data.float()
        return model
    place = device or torch.device("cpu")

    def draw(model_class: Any) -> Any:
        return random_part(model_class, config, place, **made), None

    part: PreTrainedModel = load_part(_model_class(loader, config), config, draw)[0]
    return part


def _model_class(loader: Any, config: PreTrainedConfig) -> Any:
    """The class that an Auto class would take; None where it knows none."""
    found = loader._model_mapping.get(type(config), None)
    return found[0] if isinstance(found, tuple) else found


def move(model: nn.Module, device: torch.device) -> None:
    """Move what has memory here; the rest of a model that is on several ranks stays as it is."""
    place = torch.empty(0, device=device).device  # "cuda" alone is another GPU on another thread
    own = threading.local()

    def copy(parameter: nn.Parameter) -> None:
        parameter.data = _copied(parameter.data, place, own)

    with ThreadPoolExecutor(_COPIES) as pool:
        list(pool.map(copy, (each for each in model.parameters() if not each.is_meta)))
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and not buffer.is_meta:
                module._buffers[name] = buffer.to(place)


_STAGE, _COPIES = 2**24, 4
"""Bytes of pinned memory on the way, and threads that fill it. A GPU reads pinned memory ten times
as fast as one thread reads a mapped file, which is what a plain copy waits for."""


def _copied(source: Tensor, device: torch.device, own: threading.local) -> Tensor:
    if device.type != "cuda" or source.is_cuda or not source.is_contiguous():
        return source.to(device)
    if not hasattr(own, "stage"):
        own.stage = torch.empty(_STAGE, dtype=torch.uint8, pin_memory=True)
    target = torch.empty_like(source, device=device)
    here, there = (each.view(-1).view(torch.uint8).split(_STAGE) for each in (source, target))
    for part, goal in zip(here, there, strict=True):
        staged = own.stage[: len(part)].copy_(part)
        goal.copy_(staged, non_blocking=True)
        torch.cuda.current_stream(device).synchronize()
    return target


def set_use_cache(config: PreTrainedConfig, value: bool) -> None:
    """Switch the key/value cache, also for the text model inside a larger one."""
    config.use_cache = value
    config.get_text_config().use_cache = value


def _refuse_missing(names: Iterable[str], source: ModelOptions) -> None:
    """Weights that no file holds would be random numbers."""
    missing = sorted(names)
    if missing:
        raise ModelError(
            f"{len(missing)} weights of the model are in none of its files, the first is "
            f"{missing[0]}",
            where=f"model.name_or_path: {source.name_or_path}",
            fix="fetch the files again; model.init: random trains from random weights",
        )


def _unpacked(config: PreTrainedConfig, options: Mapping[str, Any]) -> Any | None:
    """How weights are read that are stored in a way that no backward pass takes, or None."""
    if "gguf_file" in options:
        return GgufConfig(dequantize=True)
    stored = getattr(config, "quantization_config", None)
    method = stored.get("quant_method") if isinstance(stored, dict) else None
    kind = UNPACKED_METHODS.get(str(method))
    return None if kind is None else kind(dequantize=True)


def _stored_path(place: str, options: Mapping[str, Any]) -> str:
    """What peft writes into an adapter: of a GGUF transformers keeps the directory only."""
    file = options.get("gguf_file")
    if file is None:
        return place
    if Path(place).is_dir():
        return str(Path(place, file).absolute())
    return str(huggingface_hub.try_to_load_from_cache(place, file, revision=options["revision"]))


def _as_plain_model(model: PreTrainedModel, place: str) -> PreTrainedModel:
    """Forget that the weights were stored otherwise, so that saving writes an ordinary model."""
    if getattr(model.config, "quantization_config", None) is not None:
        del model.config.quantization_config
        plain = type(model)(model.config).to(model.dtype)
        plain.load_state_dict(model.state_dict())
        plain.generation_config = model.generation_config
        model = plain
    vars(model).pop("_weight_conversions", None)  # saving would turn them back
    model.name_or_path = model.config._name_or_path = place
    return model


@contextlib.contextmanager
def _explained(source: ModelOptions, part: str) -> Any:
    """Turn transformers' and the hub's errors into one sentence with a way out."""
    try:
        yield
    except (TrainkitError, ImportError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # tokenizers raises nothing narrower, unpickling nearly anything
        first_line = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
        if isinstance(error, pickle.UnpicklingError):
            first_line = "a pickle of its weights is damaged, or holds more than plain tensors"
        elif not isinstance(error, (OSError, ValueError)):
            first_line = f"{type(error).__name__}: {first_line}"
        is_local = local_path(source.name_or_path) is not None
        if isinstance(error, ValueError) and "`trust_remote_code=True`" in str(error):
            raise ModelError(
                f"the {part} needs code that comes with it (auto_map)",
                where=f"model.name_or_path: {source.name_or_path}",
                fix="read that code; then a recipe lets it run with model.trust_remote_code: true, "
                "and a command on a trained model with --trust-remote-code",
            ) from None
        raise ModelError(
            f"the {part} cannot be loaded: {first_line}",
            where=f"model.name_or_path: {source.name_or_path}",
            fix=f"check that the directory holds a complete {part} as save_pretrained writes it"
            if is_local
            else "check the spelling; without a network, download the model elsewhere "
            "(hf download NAME --local-dir DIR) and give DIR",
        ) from error


def device_named(name: str | None) -> torch.device:
    """``cpu``, ``cuda``, ``cuda:1``; the GPU if there is one for ``auto`` and None."""
    if name in (None, "auto"):
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    fix = "write cpu, cuda, or cuda:1 for the second GPU"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ModelError(f"{name!r} is no device", where="--device", fix=fix) from None
    count = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= count:
        has = {0: "no GPU", 1: "one GPU"}.get(count, f"{count} GPUs")
        raise ModelError(f"{name}: torch finds {has} here", where="--device", fix=fix)
    return device
