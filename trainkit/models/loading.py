"""Loading the model, with errors that say what is missing and what to do.

The device that a command line names.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import huggingface_hub
import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import (
    AqlmConfig,
    AwqConfig,
    GgufConfig,
    GPTQConfig,
    Mxfp4Config,
    PreTrainedConfig,
)
from transformers.core_model_loading import ConversionOps, WeightConverter
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING
from transformers.quantizers.base import HfQuantizer

from trainkit.auto_class import auto_class, empty_model, text_alone
from trainkit.errors import ModelError
from trainkit.evaluation_mode import changed
from trainkit.models.linears import skipped_layers
from trainkit.models.tokenizer import explained, from_pretrained_arguments, load_config, new_tokens
from trainkit.models.vocabulary import grow
from trainkit.options.model import DTYPES, LoraOptions, ModelOptions
from trainkit.parallel.parameters import made_whole

if TYPE_CHECKING:
    from transformers import PreTrainedModel  # seconds of imports, which a tokenizer does not need

TORCH_DTYPES: Mapping[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPES}

UNPACKED_METHODS: Mapping[str, Callable[[], Any]] = {
    "mxfp4": partial(Mxfp4Config, dequantize=True),
    "awq": AwqConfig,
    "gptq": partial(GPTQConfig, bits=4),
    "aqlm": AqlmConfig,
}
"""Ways of storing weights that no backward pass takes: loaded, they are plain weights."""


class _Codes(HfQuantizer):
    """Files of AWQ, GPTQ and AQLM, read as plain weights without their kernels."""

    requires_calibration = True  # there is no packing by it
    is_trainable = True

    def __init__(self, quantization_config: Any, **more: Any) -> None:
        super().__init__(quantization_config, **more)
        quantization_config.dequantize = True
        names = ["qweight", "qzeros", "scales", "g_idx"]
        if quantization_config.quant_method == "aqlm":
            names = ["codes", "codebooks", "scales"]
        elif quantization_config.format not in ("gemm", "gptq", "gptq_v2"):
            raise ModelError(
                f"its weights are in the layout {quantization_config.format!s}; gemm of AWQ's and "
                "gptq are read here",
                where="model.name_or_path",
                fix="name the model's own files",
            )
        self.parts = names

    def update_weight_conversions(self, conversions: Any, model: Any = None) -> list[Any]:
        """Codes are read where a weight is, also below what joins experts' weights."""

        def reading(each: Any) -> Any:
            sources = getattr(each, "_original_source_patterns", [])
            if not isinstance(each, WeightConverter) or not all(
                source.endswith(".weight") for source in sources
            ):
                return each
            parts = [
                source.removesuffix("weight") + part for source in sources for part in self.parts
            ]
            make = getattr(each, "copy", WeightConverter)  # a method from transformers 5.23 on
            operations = [_FromCodes(self), *each.operations]
            return make(parts, each._original_target_patterns, operations=operations)

        own = WeightConverter(self.parts, "weight", [_FromCodes(self)])
        return [*map(reading, conversions), own]

    def is_serializable(self) -> bool:
        return True


_AWQ_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]
"""Where the eight numbers of a word of AWQ's are in it."""


class _FromCodes(ConversionOps):
    """The weights that codes stand for, as the tools' own code has them: in the scales' dtype."""

    def __init__(self, quantizer: _Codes) -> None:
        self.hf_quantizer = quantizer  # whose loader then casts nothing before
        self.settings: Any = quantizer.quantization_config

    def convert(self, input_dict: dict[str, Any], **more: Any) -> dict[str, Any]:
        dtype, made = more["model"].get_parameter(more["full_layer_name"]).dtype, {}
        first, *rest = self.hf_quantizer.parts
        read = self._of_books if first == "codes" else self._of_words
        for name in (each for each in input_dict if each.endswith(first)):
            names = [name, *(name.removesuffix(first) + part for part in rest)]
            parts = [input_dict[each] for each in names if each in input_dict]
            made[name] = [read(*each).to(dtype) for each in zip(*parts, strict=True)]
        return {more["full_layer_name"]: made[first][0]} if first in made else made

    def _of_books(self, codes: Tensor, books: Tensor, scales: Tensor) -> Tensor:
        """A sum of blocks, one of each book: (out blocks, in blocks, books) codes."""
        places = codes.long() % books.shape[1]
        blocks: Any = sum(book[places[..., n]] for n, book in enumerate(books))
        return (blocks * scales).transpose(1, 2).flatten(2).flatten(0, 1)

    def _of_words(self, words: Tensor, zeros: Tensor, scales: Tensor, *groups: Tensor) -> Tensor:
        """Words are (in, out / 8) of AWQ's in 4 bits, (in / 8, out) of GPTQ's."""
        is_awq = self.settings.quant_method == "awq"
        numbers = self._numbers(words) if is_awq else self._numbers(words.T).T
        base = self._numbers(zeros) + (self.settings.format == "gptq")  # zeros one too small
        each = torch.arange(len(numbers)) // (len(numbers) // len(scales))
        group = groups[0].long() if groups else each
        return ((numbers - base[group]) * scales[group]).T.contiguous()

    def _numbers(self, words: Tensor) -> Tensor:
        bits = self.settings.bits
        found = words[..., None] >> torch.arange(0, 32, bits) & 2**bits - 1
        return (found[..., _AWQ_ORDER] if self.settings.quant_method == "awq" else found).flatten(1)


AUTO_QUANTIZER_MAPPING |= dict.fromkeys(("awq", "gptq", "aqlm"), _Codes)

LoadPart = Callable[[type, Any, Callable[[type], tuple[Any, Any]]], tuple[Any, Any]]
"""`trainkit.parallel.engine.Engine.load_part`."""


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
    lora: LoraOptions | None = None,
    device: torch.device | None = None,
    load_part: LoadPart | None = None,
    reads_parts: Callable[[nn.Module], bool] | None = None,
    alone: bool = False,
    config: PreTrainedConfig | None = None,
) -> PreTrainedModel:
    """Load, or with ``init: random`` build, the model with the recipe's new tokens, without cache.

    Args:
        source: the recipe's ``model``.
        attention: transformers' ``attn_implementation``; None leaves it to transformers.
        quantization: a transformers quantization config, or None.
        lora: what that leaves in 16 bits; None for the output layer alone.
        device: where the weights go; None leaves them where the loader puts them.
        load_part: loads what this rank holds of the model; the rest is on the meta device.
        reads_parts: whether ranks read their parts of a model on the meta device, returned then.
        alone: as transformers' class of text alone, see `text_alone`; parts of a model are.
        config: the model's own, where it is known; it may become the model's.
    """
    source_path, options = from_pretrained_arguments(source)
    dtype = TORCH_DTYPES.get(source.dtype, "auto")
    with explained(source, "model"):
        config = text_alone(config or load_config(source), alone or load_part is not None)
        unpacked = _unpacked(config, options)
        quantization = _sparing(quantization, config, source, lora, unpacked) or unpacked
        loader, trusted = auto_class(config), source.trust_remote_code
        if source.init == "random":
            model = _random(loader, config, dtype, attention, device, load_part, trusted)
        else:
            packed: dict[str, Any] = {}
            if quantization is not None:  # these cannot be moved later; the others are moved below
                spot = device and {"": device}
                packed = {"quantization_config": quantization, "device_map": spot}

            def load(model_class: Any, **more: Any) -> Any:
                return model_class.from_pretrained(
                    source_path,
                    output_loading_info=True,
                    use_safetensors=None if "gguf_file" in options else True,
                    dtype=dtype,
                    attn_implementation=attention,
                    **(packed | options | more),
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
            _refuse_other_files(report, model, source)
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


def _sparing(
    quantization: Any,
    config: PreTrainedConfig,
    source: ModelOptions,
    lora: LoraOptions | None,
    unpacked: Any,
) -> Any:
    """What bitsandbytes is to pack: nothing that only sees images, or that the recipe leaves."""
    lora = lora or LoraOptions()
    is_plain = config.get_text_config() is config and not lora.quantize_skip
    if quantization is not None and unpacked is not None:
        raise ModelError(
            "its files hold codes, which are read into 16 bits and not packed again",
            where="lora.quantize",
            fix="remove it, or name the model's own files in model.name_or_path",
        )
    if quantization is None or (is_plain and not lora.quantize_head):
        return quantization
    from transformers.quantizers.base import get_keys_to_not_convert

    from trainkit.models.frozen import outside_linears

    with made_whole():
        empty = empty_model(config, trust_remote_code=source.trust_remote_code)
    left = [*outside_linears(empty), *skipped_layers(empty, lora.quantize_skip)]
    left += [] if lora.quantize_head else get_keys_to_not_convert(empty)
    quantization.llm_int8_skip_modules = left
    return quantization


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


def _refuse_other_files(
    report: Mapping[str, Iterable[str]], model: nn.Module, source: ModelOptions
) -> None:
    """Weights in no file would be random; biases left over are of another model, or zeros."""
    if missing := sorted(report["missing_keys"]):
        raise ModelError(
            f"{len(missing)} weights of the model are in none of its files, the first is "
            f"{missing[0]}",
            where=f"model.name_or_path: {source.name_or_path}",
            fix="fetch the files again; model.init: random trains from random weights",
        )
    layers = model.named_modules()
    weighted = (name for name, each in layers if getattr(each, "weight", None) is not None)
    biases = {f"{name}.bias" for name in weighted} & {*report["unexpected_keys"]}
    if biases and (strange := biases - _zeros_of(biases, source, model)):
        layer = min(strange).removesuffix(".bias")
        raise ModelError(
            f"its files have {layer}.bias, and {type(model).__name__} has {layer} without a bias",
            where=f"model.name_or_path: {source.name_or_path}",
            fix="put the model's own config.json back (model_type, attention_bias, mlp_bias)",
        )


def _zeros_of(names: Set[str], source: ModelOptions, model: Any) -> set[str]:
    """Those of the names under which the model's files hold zeros; each file is opened once."""
    from trainkit.models.skeleton import directory_of

    found: set[str] = set()
    for file in directory_of(from_pretrained_arguments(source)[0], model).glob("*.safetensors"):
        with safe_open(file, "pt") as stored:
            held = names & {*stored.keys()}
            found |= {name for name in held if not stored.get_tensor(name).any()}
    return found


def _unpacked(config: PreTrainedConfig, options: Mapping[str, Any]) -> Any | None:
    """How weights are read that are stored in a way that no backward pass takes, or None."""
    if "gguf_file" in options:
        return GgufConfig(dequantize=True)
    stored = getattr(config, "quantization_config", None)
    method = stored.get("quant_method") if isinstance(stored, dict) else None
    kind = UNPACKED_METHODS.get(str(method))
    return None if kind is None else kind()


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
