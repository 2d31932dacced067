"""Base weights with an adapter in them, computed when asked for.

Each update is computed in float32 and rounded once, into the result's dtype. peft's own merge
computes the update in the adapter's dtype and adds it in the base's, which rounds twice.
"""

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from trainkit.checkpoint.weights.adapter import Adapter, ModuleAdapter
from trainkit.checkpoint.weights.export import TensorSource, cast
from trainkit.checkpoint.weights.reader import TensorInfo
from trainkit.errors import CheckpointError
from trainkit.kernels.fp8.function import fits_fp8, fp8_quantize
from trainkit.kernels.fp8.linear import Fp8Weight
from trainkit.options import LoraOptions
from trainkit.patterns import has_part

# -- The base that a run over a quantised base saw: weights through 4 or 8 bits and back ----------


def quantized_names(
    directory: Path,
    lora: LoraOptions | None = None,
    *,
    trust_remote_code: bool = False,
) -> set[str]:
    """The weights that a quantised base packs: of linear layers and experts, as ``lora`` says.

    Where it packs experts, routers stay as they are. The model is built without memory.
    """
    from transformers import AutoConfig

    from trainkit.auto_class import ROUTERS, empty_model, holds_experts

    config = AutoConfig.from_pretrained(directory, trust_remote_code=trust_remote_code)
    model = empty_model(config, trust_remote_code=trust_remote_code)
    lora = lora or LoraOptions()
    head = None if lora.quantize_head else model.get_output_embeddings()
    stacks = {
        f"{name}.{key}"
        for name, module in model.named_modules()
        for key, parameter in module.named_parameters(recurse=False)
        if lora.quantize_experts and parameter.dim() == 3 and holds_experts(name, module)
        if not has_part(name, lora.quantize_skip)
    }
    stay = ROUTERS if stacks else ()
    return stacks | {
        f"{name}.weight"
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and module is not head
        if name.rpartition(".")[2] not in stay and not has_part(name, lora.quantize_skip)
    }


def through_fp8(weight: Tensor, compute_dtype: torch.dtype) -> Tensor:
    """Quantise to e4m3 with a scale a row and back, as a run over an fp8 base saw the weight.

    A shape that stays in 16 bits comes back as it is.
    """
    weight = weight.to(compute_dtype)
    if weight.dim() == 2 and not fits_fp8(*weight.shape):
        return weight
    codes, scales = fp8_quantize(weight.reshape(-1, weight.shape[-1]))
    return Fp8Weight(scales)(codes.view(torch.uint8), compute_dtype).view(weight.shape)


def through_int8(weight: Tensor, compute_dtype: torch.dtype) -> Tensor:
    """Round each row to 8 bits, from fp16 as bitsandbytes does; what its products stand for."""
    rows = weight.to(compute_dtype).half().float()
    scales = rows.abs().amax(dim=-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
    return (rows * (127.0 / scales)).round() * (scales / 127.0)


def through_nf4(weight: Tensor, compute_dtype: torch.dtype) -> Tensor:
    """Pack to nf4 with packed scales and unpack again, as a QLoRA run's forward does."""
    if importlib.util.find_spec("bitsandbytes") is None:
        raise CheckpointError(
            "the 4-bit base needs bitsandbytes, which is not installed",
            fix="pip install 'trainkit[qlora]', or merge into the base as it was: --base original",
        )
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    packed, state = quantize_4bit(
        weight.to(compute_dtype).contiguous(), quant_type="nf4", compress_statistics=True
    )
    unpacked = dequantize_4bit(packed, state)
    assert isinstance(unpacked, Tensor)
    return unpacked


THROUGH: Mapping[str, Callable[[Tensor, torch.dtype], Tensor]] = {
    "nf4": through_nf4,
    "int8": through_int8,
    "fp8": through_fp8,
}
"""By ``lora.quantize``: a weight (N, K) and the dtype it was loaded in, to what training saw."""


Base = Literal["original", "dequantized"]
_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_MAX_NAMED = 6


@dataclass(frozen=True)
class ModuleChange:
    """What the merge did to one tensor.

    Attributes:
        relative_update: norm of the update over norm of the weight, in float32.
        changed_fraction: share of the values that differ after rounding.
        error_dequantized: of the merged weight against what training computed with, relative,
            when merged into the unpacked 4-bit base. None without a 4-bit base.
    """

    name: str
    relative_update: float
    changed_fraction: float
    error_dequantized: float | None = None
    error_original: float | None = None


@dataclass(frozen=True)
class Packing:
    """The quantised base that an adapter was trained over.

    Attributes:
        base: whether the adapter is merged into the unpacked weights or the original ones.
    """

    quantize: str
    names: set[str]
    compute_dtype: torch.dtype
    base: Base


class MergedWeights:
    """A source of merged tensors; ``changes`` fills up as they are loaded."""

    def __init__(
        self,
        base: TensorSource,
        adapter: Adapter,
        config: Mapping[str, Any],
        *,
        dtype: torch.dtype | None = None,
        packing: Packing | None = None,
    ) -> None:
        self._base, self._adapter, self._packing = base, adapter, packing
        is_tied = bool(config.get("tie_word_embeddings")) and _HEAD not in base.tensors
        self.is_untied = is_tied and self._must_untie()
        self._check_fit(is_tied=is_tied)
        self.changes: list[ModuleChange] = []
        names = [*base.tensors, *([_HEAD] if self.is_untied else [])]
        self.tensors: Mapping[str, TensorInfo] = {name: self._result(name, dtype) for name in names}

        self._check_vocabulary()

    @property
    def vocab_size(self) -> int | None:
        """Rows of the embedding; None where the model names it otherwise."""
        info = self.tensors.get(_EMBEDDING)
        return None if info is None else info.shape[0]

    def load(self, name: str) -> Tensor:
        dtype = self.tensors[name].dtype
        original = self._base.load(self._source_name(name))
        whole = self._adapter.replaced.get(name)
        module, _, kind = name.rpartition(".")
        part = self._adapter.modules.get(module)
        if part is not None and kind == "weight":
            # peft saves the base's embedding next to its adapter; a resized one lives only there.
            return self._with_update(name, original if whole is None else whole, part, dtype)
        if whole is not None:
            return self._finish(name, original.float(), whole.float(), dtype)
        if part is not None and kind == "bias" and part.bias is not None:
            total = original.float() + part.scaling * part.bias.float()
            return self._finish(name, original.float(), total, dtype)
        return cast(name, self._start(name, original), dtype)

    def _with_update(
        self, name: str, original: Tensor, part: ModuleAdapter, dtype: torch.dtype
    ) -> Tensor:
        start = self._start(name, original)
        errors: tuple[float, ...] = ()
        if self._packing is not None and name in self._packing.names:
            # Training computed with the unpacked weight and the adapter: that is the truth.
            truth = part.merged(self._unpacked(original))
            errors = (
                _relative(truth.to(dtype), truth),
                _relative(part.merged(original).to(dtype), truth),
            )
        return self._finish(name, start.float(), part.merged(start), dtype, *errors)

    def _finish(
        self, name: str, before: Tensor, exact: Tensor, dtype: torch.dtype, *errors: float
    ) -> Tensor:
        result = cast(name, exact, dtype)
        self.changes.append(change_of(name, before, exact, result, *errors))
        return result

    def _start(self, name: str, original: Tensor) -> Tensor:
        packing = self._packing
        if packing is None or packing.base == "original" or name not in packing.names:
            return original
        return self._unpacked(original)

    def _unpacked(self, original: Tensor) -> Tensor:
        assert self._packing is not None
        return THROUGH[self._packing.quantize](original, self._packing.compute_dtype)

    def _source_name(self, name: str) -> str:
        return _EMBEDDING if self.is_untied and name == _HEAD else name

    def _result(self, name: str, dtype: torch.dtype | None) -> TensorInfo:
        own = self._base.tensors[self._source_name(name)]
        whole = self._adapter.replaced.get(name)
        shape = own.shape if whole is None else tuple(whole.shape)
        is_cast = dtype is not None and own.dtype.is_floating_point
        return TensorInfo(name, dtype if is_cast and dtype is not None else own.dtype, shape)

    def _must_untie(self) -> bool:
        """Whether the adapter treats the two ends of a tied embedding differently."""
        ends = {end.removesuffix(".weight") for end in (_HEAD, _EMBEDDING)}
        if ends & self._adapter.modules.keys():
            return True
        head, embedding = (self._adapter.replaced.get(end) for end in (_HEAD, _EMBEDDING))
        if head is not None and embedding is not None:
            return not torch.equal(head, embedding)
        return head is not None or embedding is not None

    def _check_vocabulary(self) -> None:
        head = self.tensors.get(_HEAD)
        if head is not None and self.vocab_size not in (None, head.shape[0]):
            raise CheckpointError(
                f"the embedding would have {self.vocab_size} rows and the output matrix "
                f"{head.shape[0]}: only one of them was resized",
                where=str(self._adapter.directory),
            )

    def _check_fit(self, *, is_tied: bool) -> None:
        known = {*self._base.tensors, *([_HEAD] if is_tied else [])}
        wanted = {f"{module}.weight" for module in self._adapter.modules}
        if unknown := sorted((wanted | self._adapter.replaced.keys()) - known):
            raise CheckpointError(
                f"the base has no {', '.join(unknown[:_MAX_NAMED])}: the adapter belongs to "
                "another model",
                where=str(self._adapter.directory),
                fix=f"the adapter names {self._adapter.base_name!r} as its base",
            )
        for module, part in self._adapter.modules.items():
            shape = self._base.tensors[self._source_name(f"{module}.weight")].shape
            if shape != part.delta_shape:
                raise CheckpointError(
                    f"{module} is {list(shape)} in the base and {list(part.delta_shape)} in the "
                    "adapter: it belongs to another model",
                    where=str(self._adapter.directory),
                )
            if part.bias is not None and f"{module}.bias" not in self._base.tensors:
                raise CheckpointError(
                    f"the adapter has a bias for {module}, the base has none",
                    where=str(self._adapter.directory),
                    fix="use it as an adapter (trainkit chat), or train without lora_bias",
                )


def change_of(
    name: str, before: Tensor, exact: Tensor, result: Tensor, *errors: float
) -> ModuleChange:
    if not torch.isfinite(result).all():
        raise CheckpointError(f"{name} is not finite after the merge: the adapter is broken")
    update = changed = 1.0
    if before.shape == exact.shape:  # else a resized vocabulary, trained in full
        update = _relative(exact, before)
        changed = (before.to(result.dtype) != result).float().mean().item()
    return ModuleChange(name, update, changed, *errors)


def _relative(value: Tensor, truth: Tensor) -> float:
    norm = torch.linalg.vector_norm(truth.double()).item()
    error = torch.linalg.vector_norm(value.double() - truth.double()).item()
    return error / norm if norm else error
