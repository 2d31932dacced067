"""THE TABLE of what a linear layer may be made of, and nothing about a kind anywhere else.

A row recognises its layers, reads their weights, counts them, and says how a frozen base of the
kind is loaded. A new kind is a row here: fused functions, reports and the recipe's
``lora.quantize`` follow.
"""

from __future__ import annotations

import copy
import importlib.util
import logging
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import BitsAndBytesConfig

from trainkit.auto_class import holds_experts
from trainkit.errors import ModelError, RecipeError
from trainkit.options.section import ask, nearest
from trainkit.parallel.parameters import num_elements, whole_shape
from trainkit.patterns import has_part

if TYPE_CHECKING:
    from trainkit.kernels.lora.products import Unpack


@dataclass(frozen=True)
class LinearKind:
    """One row.

    Attributes:
        name: of the kind; ``lora.quantize`` names those that ``loading`` can make.
        unpacker: how to read the layer's weight: storage in, (N, K) in the wanted dtype out; None
            where the weight is stored as it is. A kind without one multiplies by itself alone.
        num_weights: how many weights a parameter of this kind stands for, where that is not its
            elements; None for another kind's.
        loading: the ``quantization_config`` for ``from_pretrained`` by compute dtype, or None.
        pack: one layer for a device and a compute dtype, where ``loading`` leaves experts plain.
        prepare: makes a loaded layer fit for training, where it is not.
        convert: packs a model that was loaded as it is saved, given the device that the codes go to
            and the names to leave out; for a kind without ``loading``.
        adapter: the name of peft's class for a layer of this kind with an adapter.
        packages: what the kind's numbers depend on, beyond torch.
        quantizes_rows: whether its forward product takes its input's rows in e4m3.
    """

    name: str
    recognises: Callable[[nn.Module], bool]
    unpacker: Callable[[Any], Unpack | None] | None
    num_weights: Callable[[nn.Parameter], int | None] = lambda parameter: None
    loading: Callable[[torch.dtype], Any] | None = None
    pack: Callable[[nn.Linear, torch.device, torch.dtype], nn.Module] | None = None
    prepare: Callable[[Any], None] | None = None
    convert: Callable[[nn.Module, torch.device, Collection[str]], None] | None = None
    adapter: str = "Linear"
    packages: tuple[str, ...] = ()
    quantizes_rows: bool = False

    @property
    def packs(self) -> bool:
        return self.loading is not None or self.convert is not None

    @property
    def packs_experts(self) -> bool:
        """Whether experts in stacks are kept so, too."""
        return self.pack is not None or self.convert is not None


def kind_of(module: nn.Module) -> LinearKind | None:
    """The row of a module, or None for what is not a linear layer that trainkit can read."""
    return next((kind for kind in LINEARS.values() if kind.recognises(module)), None)


def is_known_adapter(layer: nn.Module) -> bool:
    """Whether peft's class of an adapted layer is that of a row: it computes W x + s B A x."""
    of_peft = [kind for kind in type(layer).__mro__ if kind.__module__.startswith("peft.")]
    names = {kind.__name__ for kind in of_peft}
    return any(kind.adapter in names for kind in LINEARS.values())


def _shape_of(parameter: nn.Parameter) -> tuple[int, ...]:
    """Of the weights that a parameter stands for."""
    state = getattr(parameter, "quant_state", None)
    return whole_shape(parameter) if state is None else tuple(state.shape)


def expert_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Weights that hold all experts of a layer, by full name: (experts, out, in) or its transpose.

    Biases of experts, (experts, out), are not among them.
    """
    return {
        f"{name}.{key}": parameter
        for name, module in model.named_modules()
        if holds_experts(name, module)
        for key, parameter in module.named_parameters(recurse=False)
        if len(_shape_of(parameter)) == 3
    }


def layers_named(names: Iterable[str], parts: Iterable[str], where: str) -> set[str]:
    """Those of the layers' names that have one of some parts, between dots.

    Raises:
        ModelError: a part is in none of them.
    """
    found: set[str] = set()
    names = [*names]
    for part in parts:
        named = {name for name in names if has_part(name, [part])}
        if not named:
            raise ModelError(
                f"no linear layer of the model has {part} in its name",
                where=where,
                fix=ask(nearest(part, sorted({name.rpartition(".")[2] for name in names})))
                or "give names as in the model's weights, or parts between dots, as layers.0",
            )
        found |= named
    return found


def skipped_layers(model: nn.Module, parts: Collection[str]) -> set[str]:
    """The linear layers, and modules of experts in stacks, that ``lora.quantize_skip`` names."""
    linears = (name for name, module in model.named_modules() if isinstance(module, nn.Linear))
    stacks = (name.rpartition(".")[0] for name in expert_parameters(model))
    return layers_named([*linears, *stacks], parts, "lora.quantize_skip")


def is_packed(parameter: nn.Parameter) -> bool:
    """Whether a parameter holds codes that stand for weights, and no numbers."""
    return any(kind.num_weights(parameter) is not None for kind in LINEARS.values())


def not_finite(model: nn.Module) -> str | None:
    """The first weight that holds NaN or infinity; the codes of a packed one only look so."""
    weights = ((name, each) for name, each in model.named_parameters() if not is_packed(each))
    return next((name for name, weight in weights if not weight.isfinite().all()), None)


def num_weights(parameter: nn.Parameter) -> int:
    counts = (kind.num_weights(parameter) for kind in LINEARS.values())
    return next((count for count in counts if count is not None), num_elements(parameter))


def count_parameters(model: nn.Module) -> tuple[int, int]:
    """Count (trainable, all) parameters; a packed 4-bit weight counts as what it stands for."""
    trainable = total = 0
    for parameter in model.parameters():
        number = num_weights(parameter)
        total += number
        trainable += number if parameter.requires_grad else 0
    return trainable, total


def prepare_for_training(model: nn.Module) -> None:
    for module in model.modules():
        kind = kind_of(module)
        if kind is not None and kind.prepare is not None:
            kind.prepare(module)


def packed_kind(quantize: str) -> LinearKind:
    """The row that ``lora.quantize`` names."""
    kind = LINEARS.get(quantize)
    if kind is None or not kind.packs:
        known = ", ".join(name for name, kind in LINEARS.items() if kind.packs)
        raise RecipeError(f"quantize {quantize!r} is not one of {known}", where="lora.quantize")
    missing = [name for name in kind.packages if importlib.util.find_spec(name) is None]
    if missing:
        raise RecipeError(
            f"a base in {quantize} needs {missing[0]}, which is not installed",
            where="lora.quantize",
            fix="pip install 'trainkit[qlora]'",
        )
    return kind


def quantization_config(
    quantize: str = "nf4", compute_dtype: torch.dtype = torch.bfloat16
) -> BitsAndBytesConfig | None:
    """The ``quantization_config`` for ``from_pretrained`` of a frozen base."""
    kind = packed_kind(quantize)
    return None if kind.loading is None else kind.loading(compute_dtype)


def _is_of_bitsandbytes(module: nn.Module, name: str) -> bool:
    kind = type(module)
    return kind.__name__ == name and kind.__module__.startswith("bitsandbytes")


def _nf4_unpacker(linear: Any) -> Unpack:
    """The quantisation state is taken now, the storage when the weight is used.

    Sharded storage has no state of its own; the layer has.
    """
    state = getattr(linear.weight, "quant_state", None) or linear.quant_state
    return lambda storage, dtype: read_nf4(storage, state, dtype)


def read_nf4(codes: torch.Tensor, state: Any, dtype: torch.dtype) -> torch.Tensor:
    """The weights that codes of bitsandbytes stand for; the kernel writes the dtype directly."""
    from bitsandbytes.functional import dequantize_4bit

    if state.dtype != dtype:
        state = copy.copy(state)
        state.dtype = dtype
    found: torch.Tensor = dequantize_4bit(codes, state)
    return found


def _nf4_prepare(linear: Any) -> None:
    """Keep bitsandbytes from repacking the weight for inference on a CPU.

    With AVX-512 it does so at the first forward in evaluation mode (a self-check, an evaluation),
    for good; the repacked weight passes no gradient to what comes before, and a layer with a bias
    then fails.
    """
    if hasattr(linear, "support_avx512bf16_for_cpu"):
        linear.support_avx512bf16_for_cpu = False


def _nf4_num_weights(parameter: nn.Parameter) -> int | None:
    state = getattr(parameter, "quant_state", None)  # bitsandbytes packs two weights a byte
    return None if state is None else int(state.shape.numel())


def _nf4_loading(compute_dtype: torch.dtype) -> BitsAndBytesConfig:
    """The storage has the compute dtype: ZeRO-3 and FSDP shard floating parameters only."""
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,  # quantises the scales, too: 0.37 bit a weight less
        bnb_4bit_compute_dtype=compute_dtype,
        bnb_4bit_quant_storage=compute_dtype,
    )


def _nf4_pack(linear: nn.Linear, device: torch.device, dtype: torch.dtype) -> nn.Module:
    import bitsandbytes as bnb

    options: dict[str, Any] = {"quant_type": "nf4", "quant_storage": dtype}
    size = (linear.in_features, linear.out_features, False, dtype)
    packed = bnb.nn.Linear4bit(*size, device="meta", **options)
    weight = linear.weight.detach().to(dtype)
    packed.weight = bnb.nn.Params4bit(weight, False, module=packed, **options).to(device)
    return packed


def _int8_pack(linear: nn.Linear, device: torch.device, dtype: torch.dtype) -> nn.Module:
    import bitsandbytes as bnb

    _do_not_warn_of_casts()
    options: dict[str, Any] = {"has_fp16_weights": False, "threshold": 6.0}
    size = (linear.in_features, linear.out_features, False)
    packed = bnb.nn.Linear8bitLt(*size, device="meta", **options)
    packed.weight = bnb.nn.Int8Params(linear.weight.detach().to(dtype), False).to(device)
    return packed


def _int8_loading(compute_dtype: torch.dtype) -> BitsAndBytesConfig:
    del compute_dtype
    _do_not_warn_of_casts()
    return BitsAndBytesConfig(load_in_8bit=True)


def _do_not_warn_of_casts() -> None:
    """Int8 is rounded from fp16, as it multiplies: each call would warn."""
    logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)


def _is_ours(module: nn.Module, place: str, name: str) -> bool:
    """Whether it is of a class that a plain run does not import."""
    imported = sys.modules.get(place)
    return imported is not None and isinstance(module, getattr(imported, name))


def _fp8_gradient(linear: Any) -> Unpack:
    from trainkit.kernels.fp8.linear import Fp8Gradient

    return Fp8Gradient()


def _quantize_to_fp8(model: nn.Module, device: torch.device, kept: Collection[str]) -> None:
    from trainkit.models.fp8.base import quantize_to_fp8
    from trainkit.models.frozen import outside_linears

    quantize_to_fp8(model, device, [*kept, *outside_linears(model)])


LINEARS: Mapping[str, LinearKind] = {
    kind.name: kind
    for kind in (
        LinearKind(
            "plain",
            recognises=lambda module: type(module) is nn.Linear,
            unpacker=lambda linear: None,
        ),
        LinearKind(
            "nf4",
            lambda module: _is_of_bitsandbytes(module, "Linear4bit"),
            _nf4_unpacker,
            _nf4_num_weights,
            _nf4_loading,
            _nf4_pack,
            _nf4_prepare,
            adapter="Linear4bit",
            packages=("bitsandbytes",),
        ),
        LinearKind(
            "int8",  # LLM.int8: the rows of the input in int8, too, but for columns of outliers
            recognises=lambda module: _is_of_bitsandbytes(module, "Linear8bitLt"),
            unpacker=None,
            num_weights=lambda p: p.numel() if type(p).__name__ == "Int8Params" else None,
            loading=_int8_loading,
            pack=_int8_pack,
            adapter="Linear8bitLt",
            packages=("bitsandbytes",),
        ),
        LinearKind(
            "fp8",
            recognises=lambda module: _is_ours(module, "trainkit.models.fp8.base", "Fp8Linear"),
            unpacker=lambda linear: linear.reader(),
            convert=_quantize_to_fp8,
            quantizes_rows=True,
        ),
        LinearKind(
            "fp8_trained",  # 16 bits, multiplied in 8; see `models.fp8`
            recognises=lambda module: _is_ours(module, "trainkit.models.fp8.trained", "TrainedFp8"),
            unpacker=_fp8_gradient,  # a frozen one: only its backward pass is
            quantizes_rows=True,
        ),
    )
}
