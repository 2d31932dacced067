"""Put the fused adapters into a model that peft has adapted, say what was done, and undo it.

Four swaps: every adapted linear layer computes through ``lora_linear``; a block that was proved to
be a gated feed-forward (`models.proof`) through ``lora_mlp``; an attention block that reads three
layers together takes them from ``lora_qkv``; experts that run as one op take their adapters into
it. Parameters, names and the saved adapter stay peft's.

Whether a layer's state can be fused is checked at every call, because adapters are merged, switched
off and swapped at run time. What cannot runs peft's own forward, and the report says why.

``trainkit.patch`` calls `fuse`, after the kernels and after the adapters are attached.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, ClassVar

import torch
from peft.tuners.lora import LoraLayer
from peft.tuners.lora.layer import ParamWrapper
from torch import nn
from transformers import PreTrainedModel

from trainkit.auto_class import without_adapters
from trainkit.errors import PatchError, RecipeError
from trainkit.kernels.lora.function import lora_linear, lora_qkv
from trainkit.kernels.lora.mlp import lora_mlp
from trainkit.kernels.lora.products import Projection
from trainkit.models.linears import is_known_adapter, kind_of
from trainkit.models.patch import PatchReport, PatchRow, refuse_unknown
from trainkit.models.proof.gates import Experts
from trainkit.models.proof.norms import let_norms_quantize
from trainkit.models.proof.plan import plan_for
from trainkit.models.proof.replica import signature
from trainkit.models.proof.rewritten import Rewritten
from trainkit.models.swap import Swaps, plain_class, subclass_of
from trainkit.options.model import LORA_OPS as OPS
from trainkit.parallel.parameters import is_whole


def fuse(model: nn.Module, ops: Collection[str] = OPS) -> PatchReport:
    """Swap the fused adapters into a model with peft adapters, in place.

    It comes before DeepSpeed, DDP or FSDP wrap the model.
    """
    refuse_unknown(ops, OPS)
    modules = list(model.modules())
    if any(isinstance(module, _Fused) for module in modules):
        raise PatchError("the adapters are already fused", fix="call revert() on the first report")
    layers = [module for module in modules if isinstance(module, LoraLayer)]
    if not layers:
        raise PatchError("the model has no LoRA adapter to fuse", fix="attach one first")
    rows: list[PatchRow] = []
    plan: dict[nn.Module, type[nn.Module]] = {}
    for op, (find, otherwise) in zip(OPS, _FINDERS, strict=True):
        if op not in ops:
            rows.append(PatchRow(op, "off", "switched off"))
            continue
        reasons: Counter[str] = Counter()
        number = 0
        for found in find(model, modules):
            if isinstance(found, str):
                reasons[found] += 1
            else:
                module, mixin, own = found
                plan[module] = subclass_of(type(module), mixin, own)
                number += 1
        if number:
            left = "; ".join(f"{n} on peft's path: {reason}" for reason, n in reasons.items())
            rows.append(PatchRow(op, "on", left, (op,), number))
        else:
            rows.append(PatchRow(op, "off", "; ".join(reasons) or otherwise))
    swapped = Swaps(model, plan)
    let_norms_quantize(model)
    return PatchReport(None, rows, swapped)


def why_unfused(layer: Any) -> str | None:
    """Why a linear layer, adapted or plain, must run its own forward just now; None if it need not.

    The reasons are those of adapters whose arithmetic differs from ``W x + s B A x``, or of a base
    that the fused functions cannot read.
    """
    if not isinstance(layer, LoraLayer):
        return _why_unreadable(layer)
    return _why_other_arithmetic(layer) or _why_unreadable(layer.base_layer)


def _why_other_arithmetic(layer: Any) -> str | None:
    if layer.merged:
        return "adapters are merged"
    if layer.disable_adapters:
        return None
    active = layer.active_adapters
    if len(active) != 1:
        return f"{len(active)} adapters are active"
    name = active[0]
    if name not in layer.lora_A:
        return "the active adapter does not adapt this layer"
    if layer.lora_variant:
        return f"it is a variant of LoRA ({type(next(iter(layer.lora_variant.values()))).__name__})"
    if layer.training and not isinstance(layer, ParamWrapper) and dropout_of(layer):
        return "lora dropout is above 0"
    return "B has a bias (lora_bias)" if layer.lora_bias[name] else None


def dropout_of(layer: Any) -> float:
    """The largest of its adapters, also while evaluating."""
    rates = [getattr(each, "p", 0.0) for each in layer.lora_dropout.values()]
    return max(rates, default=0.0)


def _why_unreadable(base: Any) -> str | None:
    kind = kind_of(base)
    if kind is None or kind.unpacker is None:
        return f"its base layer is {type(base).__name__}"
    if base.weight.requires_grad or (base.bias is not None and base.bias.requires_grad):
        return "its base layer is trained"
    return None


def read(layer: nn.Module) -> Projection:
    """A layer's tensors as they are now; the weights are read here, inside the module's forward.

    With its adapters off it is its base in the same products: a reference rounds as the model does.
    """
    base: Any = layer.base_layer if isinstance(layer, LoraLayer) else layer
    kind = kind_of(base)
    assert kind is not None  # `why_unfused` returned None
    assert kind.unpacker is not None
    unpack = kind.unpacker(base)
    if not isinstance(layer, LoraLayer) or layer.disable_adapters:
        return Projection(base.weight, base.bias, unpack=unpack)
    name = layer.active_adapters[0]
    return Projection(
        base.weight,
        base.bias,
        layer.lora_A[name].weight,
        layer.lora_B[name].weight,
        layer.scaling[name],
        unpack,
    )


def _runs_own_forward(x: torch.Tensor) -> bool:
    """Calls that are better off unfused: one-token decoding, and graphs that a compiler fuses."""
    if torch.compiler.is_compiling():
        return True
    return x.shape[-2] == 1 and not torch.is_grad_enabled()


class _Fused(nn.Module):
    """Marks every generated class."""


class _FusedLinear(_Fused):
    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if args or kwargs or _runs_own_forward(x) or why_unfused(self):
            return super().forward(x, *args, **kwargs)
        return lora_linear(x, read(self))


class _FusedMLP(_Fused):
    """``linears`` are the names of gate, up and down, or of the packed one and down."""

    linears: ClassVar[tuple[str, ...]]
    activation: ClassVar[str] = "silu"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        layers = [getattr(self, name) for name in self.linears]
        if _runs_own_forward(x) or any(map(why_unfused, layers)):
            return super().forward(x)
        gate, *up, down = map(read, layers)
        return lora_mlp(x, gate, up[0] if up else None, down, activation=self.activation)


class _FusedAttention(_Fused):
    def read_linears(self, x: torch.Tensor, *layers: nn.Module) -> tuple[torch.Tensor, ...]:
        if len(layers) != 3 or _runs_own_forward(x) or any(map(why_unfused, layers)):
            return super().read_linears(x, *layers)  # type: ignore[misc]
        return lora_qkv(x, *map(read, layers))


class _FusedExperts(_Fused):
    """Over the outermost of peft's wrappers around some experts: one for each adapted stack."""

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        layers, experts = _unwrapped(self)
        if any(map(_why_other_arithmetic, layers)):
            return super().forward(x, *args, **kwargs)
        layers = [each for each in layers if not each.disable_adapters]
        dropout = max(map(dropout_of, layers), default=0.0) * self.training
        rank = max((layer.r[layer.active_adapters[0]] for layer in layers), default=0)
        whole = all(is_whole(getattr(experts, name)) for name in experts.weights)
        if kwargs or not whole or (not dropout and experts.keeps_own(x, rank)):
            if dropout:
                raise PatchError("experts in shards, or called by names, have no dropout")
            return super().forward(x, *args, **kwargs)
        factors: list[torch.Tensor | None] = []
        scaling, halves = [], 1
        for name in experts.weights:
            layer = next((each for each in layers if each.parameter_name == name), None)
            factors += _factors(layer, experts.transposed)
            used = None if layer is None else layer.active_adapters[0]
            scaling.append(1.0 if layer is None else layer.scaling[used])
            halves = max(halves, 1 if layer is None else getattr(layer.lora_B[used], "halves", 1))
        more = {"dropout": dropout, "halves": halves} if dropout else {}
        return experts.compute(x, args, factors, scaling=tuple(scaling), **more)


def _unwrapped(layer: Any) -> tuple[list[Any], Any]:
    """The wrappers around some experts, the outermost first, and the experts."""
    layers = []
    while isinstance(layer, ParamWrapper):
        layers.append(layer)
        layer = layer.base_layer
    return layers, layer


def _factors(layer: Any, transposed: bool) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """A (E, R, inputs) and B (E, outputs, R); peft keeps A expert by expert, B rank by rank.

    Where peft takes the weights for what they are not, its A is that of their transposes.
    """
    if layer is None:
        return None, None
    name = layer.active_adapters[0]
    a, b = layer.lora_A[name].weight, layer.lora_B[name].weight
    number = layer.num_experts
    a, b = a.view(number, -1, a.shape[1]), b.view(b.shape[0], -1, number).permute(2, 0, 1)
    if layer._did_swap_in_out_features == transposed:
        return b.transpose(1, 2), a.transpose(1, 2)
    return a, b


_Found = Iterator[str | tuple[nn.Module, type[_Fused], dict[str, Any]]]
"""What is fused, with which class and its attributes; of what is not, why."""


def _mlps(model: nn.Module, modules: Sequence[nn.Module]) -> _Found:
    try:
        plan = plan_for(model)
    except PatchError as error:
        yield error.what
        return
    kinds = {key[0] for key in plan.parts}
    parts = (
        (module, part.finding)
        for module in modules
        if plain_class(module) in kinds
        for part in plan.parts.get(signature(module), ())
        if part.finding.op == "swiglu"
    )
    for module, found in parts:
        names = found.settings.get("linears", ())
        layers = [module.get_submodule(name) for name in names]
        reason = plan.dropped.get("swiglu") or _first_reason(layers)
        if found.forward is None or found.settings.get("order", "gate_up") != "gate_up":
            reason = found.detail
        if reason:
            yield reason
        elif any(isinstance(layer, LoraLayer) for layer in layers):
            activation = getattr(found.forward, "activation", "silu")
            yield module, _FusedMLP, {"linears": names, "activation": activation}


def _attentions(model: nn.Module, modules: Sequence[nn.Module]) -> _Found:
    for module in modules:
        if not isinstance(module, Rewritten) or not module.turning:
            continue
        groups = [each for each in module.read_together if len(each) == 3]
        if not groups:
            yield "no three layers of its attention are read together"
        elif module.changes_in_place:
            yield "its attention may write into q, k or v"
            continue
        for names in groups:
            layers = [module.get_submodule(name) for name in names]
            if reason := _first_reason(layers):
                yield reason
            elif sum(isinstance(layer, LoraLayer) for layer in layers) > 1:
                yield module, _FusedAttention, {}


def _linears(model: nn.Module, modules: Sequence[nn.Module]) -> _Found:
    base = without_adapters(model)
    # The loss reads the weight of what gives the logits in its own ways.
    head = base.get_output_embeddings() if isinstance(base, PreTrainedModel) else None
    for module in modules:
        if not isinstance(module, LoraLayer) or isinstance(module, ParamWrapper):
            continue
        if module is head:
            yield "adapters on the output layer"
        else:
            reason = _why_never_fused(module) or why_unfused(module)
            yield reason or (module, _FusedLinear, {})


def _experts(model: nn.Module, modules: Sequence[nn.Module]) -> _Found:
    inner = {each.base_layer for each in modules if isinstance(each, ParamWrapper)}
    for module in modules:
        if isinstance(module, ParamWrapper) and module not in inner:
            yield _why_experts_stay(*_unwrapped(module)) or (module, _FusedExperts, {})


_FINDERS: tuple[tuple[Callable[[nn.Module, Sequence[nn.Module]], _Found], str], ...] = (
    (_mlps, "no adapter in a feed-forward block"),
    (_attentions, "the rope kernel is off, or fewer than two of q, k and v are adapted"),
    (_linears, "no adapted linear layer"),
    (_experts, "no adapted experts"),
)
"""In the order of `OPS`, and what is said where there is nothing to fuse."""


def _why_experts_stay(layers: Sequence[Any], experts: Any) -> str | None:
    if not isinstance(experts, Experts):
        return "the kernel of experts is off, or they are something else"
    if {layer.parameter_name for layer in layers} - set(experts.weights):
        return "another of their parameters is adapted"
    return next(filter(None, map(_why_other_arithmetic, layers)), None)


def refuse_undropped(model: nn.Module, *, sharded: bool) -> None:
    """Refuse dropout on experts whose adapters do not run in the op, which alone has it."""
    inner = {each.base_layer for each in model.modules() if isinstance(each, ParamWrapper)}
    for name, module in model.named_modules():
        if not isinstance(module, ParamWrapper) or module in inner:
            continue
        layers, experts = _unwrapped(module)
        if any(map(dropout_of, layers)) and (sharded or not isinstance(module, _FusedExperts)):
            reason = "they are in shards" if sharded else _why_experts_stay(layers, experts)
            raise RecipeError(
                f"dropout on the adapters of {name.removeprefix('base_model.model.')}, and "
                f"{reason or 'kernels of adapters are off'}",
                where="lora.dropout",
                fix="name them in lora.target_parameters, with lora.experts: false, which have "
                "none; or leave kernels on, and shard with zero2 at most",
            )


def _why_never_fused(layer: Any) -> str | None:
    """Why an adapted layer of this class is left to peft for good."""
    if not is_known_adapter(layer):
        return f"adapters on {type(layer).__name__} layers"
    if layer.fan_in_fan_out:
        return "its weight is stored transposed"
    return "lora dropout is above 0" if dropout_of(layer) else None


def _first_reason(layers: Sequence[nn.Module]) -> str | None:
    """Why a block of layers is not fused now: the first reason of a layer, or None."""
    for layer in layers:
        reason = _why_never_fused(layer) if isinstance(layer, LoraLayer) else None
        if reason := reason or why_unfused(layer):
            return reason
    return None
