"""Models without memory: the whole one for its sizes, and a short one that takes a step.

The short one has the first layers, as many as show every kind, on fake tensors, with what a run
puts into it: packed or fp8 linear layers, adapters, kernels, tiles. Kernels are proved on numbers,
of which a fake model has none: on a model of the same classes that is narrower.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import logging
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from transformers import (
    CONFIG_MAPPING,
    AttentionInterface,
    AttentionMaskInterface,
    PreTrainedConfig,
)

from trainkit.auto_class import FAILURES, empty_model
from trainkit.errors import ModelError, TrainkitError
from trainkit.estimate.job import Job, LayerKind, Matrices, ModelShape, stored_as
from trainkit.kernels.autocast import compute_dtype
from trainkit.kernels.launch import KERNEL_DTYPES, by_reference
from trainkit.models.attention import attention_heads
from trainkit.models.fp8.base import Fp8Linear, why_not_fp8
from trainkit.models.fp8.trained import KeptCodes, swap_in
from trainkit.models.frozen import outside_linears, outside_text
from trainkit.models.linears import LINEARS, expert_parameters, packed_kind, skipped_layers
from trainkit.models.loss import LossOptions, configure
from trainkit.models.packed_experts import RowState, put_codes, read_where_they_run, states_of
from trainkit.models.proof.norms import let_norms_quantize
from trainkit.models.proof.plan import give_plan, plan_for
from trainkit.models.proof.replica import code_signature, shorten_tower, signature, with_layers
from trainkit.models.tiled import tile
from trainkit.models.vision import choose_parts
from trainkit.models.vocabulary import vocabulary_ends
from trainkit.options.model import LORA_OPS, OPS, LoraOptions
from trainkit.patching import patch

NAME = "shapes"
"""Of the attention that fake models have: what a fused kernel keeps, and nothing computed."""


# -- The whole model, without numbers -------------------------------------------------------------


def config_of(text: str) -> Any:
    values = json.loads(text)
    family = values.get("model_type")
    for key in ("quantization_config", "compression_config"):  # counted as what they stand for
        values.pop(key, None)
    if values.get("auto_map"):
        raise ModelError(
            "no estimate for a model whose code comes with it",
            where="model.name_or_path",
            fix="`trainkit sft --dry-run` measures one real step",
        )
    _check_sizes(values)
    if not isinstance(family, str) or family not in CONFIG_MAPPING:
        raise ModelError(
            f"no estimate for model_type {family!r}: this transformers does not know it",
            where="model.name_or_path",
            fix="correct its config.json, or use a newer transformers",
        )
    decode = getattr(PreTrainedConfig, "_decode_special_floats", lambda given: given)
    try:
        return CONFIG_MAPPING[family].from_dict(decode(values))
    except FAILURES as error:  # its fields are checked in many ways
        raise ModelError(
            f"no estimate for model_type {family!r}: {first_line(error)}",
            where="model.name_or_path",
            fix=_cure(error),
        ) from error


_MOST = {"num_hidden_layers": 10_000}
_SIZES = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "vocab_size", "head_dim"),
)


def _check_sizes(values: Mapping[str, Any]) -> None:
    """Refuse what no layer can have by its key; a class may say less, or build for ever."""
    for name in ("text_config", "vision_config"):
        if not isinstance(values.get(name) or {}, Mapping):
            raise ModelError(f"{name} is {values[name]!r:.40}, and must be an object")
    values = {**values, **(values.get("text_config") or {})}
    for key in _SIZES:
        each = values.get(key)
        most = _MOST.get(key, 100_000_000)
        is_size = isinstance(each, int) and not isinstance(each, bool) and 1 <= each <= most
        # Or every layer has its own.
        of_layers = isinstance(each, list) and len(each) > 1 and {*map(type, each)} == {int}
        if each is not None and not is_size and not of_layers:
            said = f"{each!r:.40}, and must be a whole number from 1 to {most:,}"
            raise ModelError(f"{key} is {said}", where="config.json")
    heads, shared = values.get("num_attention_heads"), values.get("num_key_value_heads")
    if isinstance(heads, int) and isinstance(shared, int) and heads % shared:
        raise ModelError(f"{heads} num_attention_heads cannot share {shared} num_key_value_heads")


def first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip()}".splitlines()[0][:200]


def _cure(error: BaseException) -> str:
    is_package = isinstance(error, ImportError)
    return "install the package that it names" if is_package else "correct its config.json"


def _built(config: Any) -> Any:
    try:
        with quiet():
            return empty_model(config, trust_remote_code=False)
    except FAILURES as error:
        raise ModelError(
            f"no estimate for model_type {config.model_type!r}: transformers cannot build it: "
            f"{first_line(error)}",
            where="model.name_or_path",
            fix=_cure(error),
        ) from error


def layers_of(model: Any) -> list[nn.Module]:
    """The decoder layers: of the lists of layers that lie in no other, the heaviest."""
    away = set(map(id, outside_text(model).values()))
    best: tuple[int, list[nn.Module]] = (0, [])
    inside: set[int] = set()
    for module in model.modules():
        if not isinstance(module, nn.ModuleList) or id(module) in inside:
            continue
        inside |= {id(each) for each in module.modules()}
        weight = sum(p.numel() for p in module.parameters() if id(p) not in away)
        best = max(best, (weight, list(module)), key=lambda found: found[0])
    return best[1]


@functools.cache
def shape_of(text: str, name: str) -> ModelShape:
    config = config_of(text)
    model = _built(config)
    tower = outside_text(model)
    kinds: dict[Any, int] = {}
    found: list[LayerKind] = []
    order = []
    layers = layers_of(model)
    stacks = {id(p) for p in expert_parameters(model).values()}
    for layer in layers:
        shapes = tuple((name, tuple(p.shape)) for name, p in layer.named_parameters())
        key = signature(layer), shapes
        if key not in kinds:
            kinds[key] = len(found)
            found.append(_kind(layer, stacks))
        order.append(kinds[key])
    head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
    table = getattr(head, "weight", None)
    first = getattr(embeddings, "weight", None)
    ends = table if table is not None else first
    vocab, hidden = ends.shape if ends is not None and ends.dim() == 2 else (1, 1)
    hidden = getattr(config.get_text_config(), "hidden_size", hidden)
    tied = table is None or table is first
    total = sum(p.numel() for p in model.parameters())
    away = sum(p.numel() for p in tower.values())
    in_layers = sum(found[kind].numbers for kind in order)
    head_size = 0
    with contextlib.suppress(*FAILURES):
        head_size = max((size for _, size in attention_heads(config.get_text_config())), default=0)
    return ModelShape(
        name=name,
        family=config.model_type,
        config=text,
        kinds=tuple(found),
        order=tuple(order),
        hidden=hidden,
        vocab=vocab,
        head_size=head_size,
        tied=tied,
        others=total - away - in_layers - (1 if tied else 2) * vocab * hidden,
        tower=away,
        ends=tuple(name.rpartition(".")[2] for name in vocabulary_ends(model)),
        stored=stored_as(json.loads(text).get("quantization_config")),
    )


def _kind(layer: nn.Module, stacks: set[int]) -> LayerKind:
    """Its matrices, those of one role and size together."""
    matrices: dict[tuple[Any, ...], Matrices] = {}
    vectors = 0
    for path, parameter in layer.named_parameters():
        parent, _, last = path.rpartition(".")
        in_stack = id(parameter) in stacks
        if in_stack or (parameter.dim() == 2 and last == "weight"):
            count = len(parameter) if in_stack else 1
            module = layer.get_submodule(parent)
            outputs, inputs = parameter.shape[-2:]
            if type(module).__name__ == "Conv1D":
                outputs, inputs = inputs, outputs
            role = last if in_stack else parent.rpartition(".")[2]
            key = role, inputs, outputs, in_stack
            known = matrices.get(key, Matrices(role, inputs, outputs, 0, in_stack))
            matrices[key] = replace(known, number=known.number + count)
        else:
            vectors += parameter.numel()
    return LayerKind(tuple(matrices.values()), vectors)


_SPLIT = ("num_attention_heads", "num_key_value_heads", "intermediate_size")


@functools.cache
def split_config(text: str, ranks: int) -> str:
    """The configuration of what each of some ranks has where they share products."""
    if ranks == 1:
        return text
    values = json.loads(text)
    config = config_of(text)
    inner = values["text_config"] if isinstance(values.get("text_config"), dict) else values
    known = config.get_text_config()
    size = getattr(known, "head_dim", None)
    inner["head_dim"] = size or known.hidden_size // known.num_attention_heads
    for key in _SPLIT:
        if isinstance(getattr(known, key, None), int):
            inner[key] = max(getattr(known, key) // ranks, 1)
    return json.dumps(values, sort_keys=True)


# -- The short one, on fake tensors ---------------------------------------------------------------


@dataclass
class Built:
    """A short model on fake tensors.

    Attributes:
        config: of the whole model, as JSON; where ranks share products, of a rank's share.
        plain: why kernels could not be proved, if they could not.
    """

    config: str
    fake: FakeTensorMode
    model: Any
    layers: list[nn.Module]
    known: list[Tensor]
    plain: str | None = None


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)  # of what a model says of itself when it is built
    fakes = logging.getLogger(FakeTensorMode.__module__)
    fakes.disabled = True  # it says a traceback of every operation that fails
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
        fakes.disabled = False


def num_needed(order: tuple[int, ...]) -> int:
    """How many of the first layers show every kind, and two of the one that is last."""
    first = {kind: order.index(kind) for kind in set(order)}
    return min(max(first.values(), default=0) + 2, len(order))


ATTENTIONS = (NAME, "sdpa", "eager", None)
"""What is tried, the next where a model's own code does not take one; None leaves it to it."""


@functools.lru_cache(maxsize=32)
def built(job: Job, attention: str | None) -> Built:
    whole = split_config(job.config, job.tensor)
    config, shape = config_of(whole), shape_of(whole, "")
    is_listed = getattr(config.get_text_config(), "num_hidden_layers", None) == shape.layers
    num_layers = num_needed(shape.order) if is_listed else None
    config = with_layers(config, num_layers)
    plan, why = _proved(whole, num_layers) if job.ops else (None, None)
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with quiet():
        model = _assembled(config, job, attention, plan)
        _become_fake(model, fake)
        base = model.get_base_model() if job.adapters is not None else model
        known = [*model.parameters(), *model.buffers()]
        if (job.adapters is None and job.in_fp8) or job.fp8_head:
            with fake:
                known += _train_in_fp8(model, job)
        model.train()
    return Built(whole, fake, model, layers_of(base), known, why)


def _assembled(config: Any, job: Job, attention: str | None, plan: Any) -> Any:
    """On the meta device, with all that a run puts into it."""
    if job.base in ("nf4", "int8"):
        packed_kind(job.base)  # refused where its package is missing
    dtype = torch.float32 if job.base == "float32" and job.adapters is None else torch.bfloat16
    attends = {} if attention is None else {"attn_implementation": attention}
    model = empty_model(config, trust_remote_code=False, dtype=dtype, **attends)
    for each in {id(c): c for c in (model.config, model.config.get_text_config())}.values():
        each.use_cache = False
    choose_parts(model, job.train)
    lora = LoraOptions() if job.adapters is None else job.adapters.options
    with torch.device("meta"):
        if job.base in _PACKS:
            make, codes_of = _PACKS[job.base]
            _pack(model, make, job.in_fp8, lora)
            if lora.quantize_experts:
                _pack_experts(model, codes_of, lora)
            model.is_loaded_in_4bit, model.is_loaded_in_8bit = job.base == "nf4", job.base == "int8"
        if job.upcast:
            for parameter in model.parameters():
                if not hasattr(parameter, "quant_state"):
                    parameter.data = parameter.data.float()
        by_path = None if plan is None else _by_path(model, plan)
        if job.adapters is not None:
            from trainkit.lora.adapter import attach  # peft, which full fine-tuning does without

            model = attach(model, job.adapters.options)
        if by_path is not None:
            give_plan(model, by_path)
            patch(model, {op: False for op in (*OPS, *LORA_OPS) if op not in job.ops} or True)
            keeps = job.keeps_gradient
            configure(model, LossOptions(chunk_tokens=job.chunk_tokens, keeps_gradient=keeps))
        if job.tile_tokens is not None:
            tile(model, job.tile_tokens)
    return model


def _pack_experts(
    model: Any, make: Callable[[torch.Size], tuple[Tensor, Any, str]], lora: LoraOptions
) -> None:
    skipped = skipped_layers(model, lora.quantize_skip)
    for name in expert_parameters(model):
        owner, _, key = name.rpartition(".")
        if owner in skipped:
            continue
        holder = model.get_submodule(owner)
        codes, state, scales = make(getattr(holder, key).shape)
        put_codes(holder, key, codes, state)
        holder.register_buffer(f"of_state_{key}", getattr(state, scales))
    read_where_they_run(model)


def _become_fake(model: nn.Module, fake: FakeTensorMode) -> None:
    """Its tensors as ones that are on a device and have no numbers."""
    made: dict[int, Tensor] = {}

    def fake_of(tensor: Tensor) -> Tensor:
        if id(tensor) not in made:
            plain: Tensor = FakeTensor(fake, tensor.detach(), torch.device("cpu"))
            if isinstance(tensor, nn.Parameter):
                plain = nn.Parameter(plain, tensor.requires_grad)
                vars(plain).update(vars(tensor))
            made[id(tensor)] = plain
        return made[id(tensor)]

    def convert(values: dict[str, Any]) -> None:
        for name, value in values.items():
            if isinstance(value, Tensor) and value.is_meta and not isinstance(value, FakeTensor):
                values[name] = fake_of(value)

    for module in model.modules():
        for values in (module._parameters, module._buffers, vars(module)):
            convert(values)
        held = (getattr(module, key, None) for key in ("quant_state", "state"))
        for outer in (*held, *states_of(module).values()):
            state = outer
            while hasattr(state, "__dict__"):
                convert(vars(state))
                state = getattr(state, "state2", None)


def _pack(model: Any, make: Any, roles: frozenset[str], lora: LoraOptions) -> None:
    """Linear layers, all that the recipe does not leave, or those of some roles, as packed ones."""
    head = None if lora.quantize_head else model.get_output_embeddings()
    away = {*outside_linears(model), *skipped_layers(model, lora.quantize_skip)}
    for name, module in list(model.named_modules()):
        parent, _, last = name.rpartition(".")
        is_other = type(module) is not nn.Linear or module is head or name in away
        if is_other or (roles and last not in roles):
            continue
        if make is _fp8 and (why_not_fp8(name, module, head, ()) or not roles):
            continue
        setattr(model.get_submodule(parent), last, make(module))


def _nf4_codes(shape: torch.Size) -> tuple[Tensor, Any, str]:
    """Of weights of a shape: codes, the state that they are read with, and where it has scales."""
    import bitsandbytes as bnb

    numbers = shape.numel()
    blocks = -(-numbers // 64)
    inner = bnb.functional.QuantState(
        absmax=torch.empty(-(-blocks // 256)), blocksize=256, code=torch.empty(256),
        dtype=torch.float32,
    )  # fmt: skip
    state = bnb.functional.QuantState(
        absmax=torch.empty(blocks, dtype=torch.uint8), shape=shape, code=torch.empty(16),
        blocksize=64, quant_type="nf4", dtype=torch.bfloat16, offset=torch.empty(()), state2=inner,
    )  # fmt: skip
    return torch.empty(-(-numbers // 4), 1, dtype=torch.bfloat16), state, "absmax"


def _empty(linear: nn.Linear, kind: str) -> Any:
    make: Any = LINEARS[kind].pack
    return make(linear, torch.device("meta"), torch.bfloat16)


def _nf4(linear: nn.Linear) -> nn.Module:
    """Bitsandbytes' layer, with storage and state as it makes them."""
    packed = _empty(linear, "nf4")
    codes, state, _ = _nf4_codes(linear.weight.shape)
    storage: Any = nn.Parameter(codes, False)
    inner = state.state2
    storage.quant_state, storage.quant_type, storage.compress_statistics = state, "nf4", True
    packed.weight, packed.bias = storage, linear.bias
    packed.quant_state, packed.compute_type_is_set = state, True
    if hasattr(packed, "support_avx512bf16_for_cpu"):
        packed.support_avx512bf16_for_cpu = False
    for name, each in (("absmax", state.absmax), ("absmax2", inner.absmax)):
        packed.register_buffer(f"of_state_{name}", each)
    return packed


def _int8(linear: nn.Linear) -> nn.Module:
    """Bitsandbytes' layer without outliers, whose number depends on the rows."""
    packed = _empty(linear, "int8")
    packed.weight = nn.Parameter(torch.empty(linear.weight.shape, dtype=torch.int8), False)
    packed.state.threshold, packed.state.CB = 0.0, packed.weight.data
    packed.state.SCB = torch.empty(linear.out_features)
    packed.weight.CB, packed.bias = None, linear.bias
    return packed


def _fp8(linear: nn.Linear) -> nn.Module:
    """Codes and scales, without the errors that only numbers have."""
    packed = Fp8Linear.__new__(Fp8Linear)
    nn.Module.__init__(packed)
    packed.in_features, packed.out_features = linear.in_features, linear.out_features
    packed.weight = nn.Parameter(torch.empty(linear.weight.shape, dtype=torch.uint8), False)
    scales = torch.empty(linear.out_features, 1, dtype=torch.int32)
    packed.register_buffer("scale_bits", scales)
    packed.bias = None if linear.bias is None else nn.Parameter(linear.bias.detach(), False)
    return packed


def _row_codes(kind: str, shape: torch.Size) -> tuple[Tensor, Any, str]:
    rows, dtype = shape[:-1].numel(), torch.int8 if kind == "int8" else torch.uint8
    state = RowState(kind, torch.empty(rows, 1), shape, torch.bfloat16)
    return torch.empty(rows, shape[-1], dtype=dtype), state, "scales"


_PACKS: dict[str, tuple[Any, Any]] = {
    "nf4": (_nf4, _nf4_codes),
    "int8": (_int8, functools.partial(_row_codes, "int8")),
    "fp8": (_fp8, functools.partial(_row_codes, "fp8")),
}
"""By what a base is kept in: a layer, and the codes of a stack of a shape."""


def _train_in_fp8(model: Any, job: Job) -> list[Tensor]:
    """The products of some roles in fp8; the codes that are kept between steps."""
    head, trains = model.get_output_embeddings(), job.adapters is None
    wanted = {
        name: (True, True)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and (job.fp8_head if module is head else trains and name.rpartition(".")[2] in job.in_fp8)
    }
    swap_in(model, wanted)
    let_norms_quantize(model)
    if not trains:
        return []
    kept = KeptCodes(model)
    from trainkit.kernels.launch import shapes_only

    with shapes_only(), torch.no_grad():
        return [
            code
            for layer in model.modules()
            if getattr(layer, "kept", None) is kept and layer is not head
            for code in kept.of(layer, layer.weight)
        ]


# -- What kernels go in, proved on a narrow model -------------------------------------------------

_WIDE = re.compile(r"(intermediate|ffn|inner|feed_forward|d_ff|mlp)")
_HIDDEN = re.compile(r"^(hidden_size|d_model|n_embd|dim|embedding_size|word_embed_proj_dim)$")
_HEADS = re.compile(r"^(num|n)_.*head(s)?$|^n_head$|^mamba_n_heads$|heads$")
_MOST_PROVED = 60_000_000
"""Weights of a model that a proof takes a second or two for."""


@functools.cache
def _narrow(text: str, factor: int) -> Any:
    config = config_of(text)
    shorten_tower(config)
    for part in {id(each): each for each in (config, config.get_text_config())}.values():
        for key, value in list(vars(part).items()):
            if not isinstance(value, int) or isinstance(value, bool):
                continue
            if _WIDE.search(key) and value > 128:
                setattr(part, key, 128)
            elif factor > 1 and (_HIDDEN.match(key) or _HEADS.search(key)):
                setattr(part, key, max(value // factor, 1))
            elif re.search(r"experts$", key) and value > 16:
                setattr(part, key, 16)
            elif key.startswith("vocab_size") and value > 512:
                setattr(part, key, 512)
            elif key in ("pad_token_id", "bos_token_id", "eos_token_id") and value >= 512:
                setattr(part, key, 0)
    return config


@functools.lru_cache(maxsize=8)
def _proved(text: str, num_layers: int | None) -> tuple[Any, str | None]:
    """The widest narrow model that can be proved, and its plan; else why there is none."""
    why = None
    for factor in (16, 8, 4, 2, 1):
        try:
            config = with_layers(copy.deepcopy(_narrow(text, factor)), num_layers)
            with quiet():
                model = empty_model(config, trust_remote_code=False)
            away = set(outside_text(model).values())
            if sum(p.numel() for p in model.parameters() if p not in away) > _MOST_PROVED:
                continue
            with quiet(), by_reference(*KERNEL_DTYPES):  # no kernel is compiled for these sizes
                plan = plan_for(model)
        except (*FAILURES, TrainkitError) as error:
            why = first_line(error)
            continue
        if plan.parts or plan.loss is not None:
            return (model, plan), None
        why = next(iter(plan.missing.values()), None)
    return None, why or "no narrow model of its kind could be built"


def _by_path(model: Any, proved: tuple[Any, Any]) -> Any:
    """The narrow model's plan for a model of the same modules at other sizes."""
    narrow, plan = proved
    modules = dict(narrow.named_modules())
    parts = {}
    for path, module in model.named_modules():
        small = modules.get(path)
        if small is None or type(small) is not type(module):
            continue
        key = plan.key_of(small)
        if key in plan.parts:
            own = code_signature if key == code_signature(small) else signature
            parts[own(module)] = plan.parts[key]
    return replace(plan, parts=parts)


# -- Attention as a fused kernel has it -----------------------------------------------------------


class _Attention(torch.autograd.Function):
    """Keeps q, k, v, the output and a number a row; goes back with q's gradient in fp32."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
        batch, heads, length, size = q.shape
        out = q.new_empty(batch, length, heads, v.shape[-1])
        sums = q.new_empty(batch, heads, length, dtype=torch.float32)
        ctx.save_for_backward(q, k, v, out, sums)
        ctx.flops = _pairs(length, window) * batch * heads * (size + v.shape[-1])
        kept = out.numel() * out.element_size() + 4.0 * sums.numel()
        attention_notes.append((2.0 * ctx.flops, kept))
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        q, k, v, _, _ = ctx.saved_tensors
        found = [torch.empty_like(each) for each in (q, k, v)]
        q.new_empty(q.shape, dtype=torch.float32)
        attention_notes.append((5.0 * ctx.flops, 0.0))
        return *found, None


def _pairs(length: int, window: int | None) -> float:
    """Of tokens that see each other."""
    seen = min(length, window or length)
    return seen * (length - seen / 2)


attention_notes: list[tuple[float, float]] = []
"""Floating-point operations of attention, and bytes of results, since somebody took them."""


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **more: Any
) -> tuple[Tensor, None]:
    dtype = compute_dtype(query)
    query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    window = more.get("sliding_window") or getattr(module, "sliding_window", None)
    window = window if isinstance(window, int) else None
    result: Tensor = _Attention.apply(query, key, value, window)
    return result, None


AttentionInterface.register(NAME, _attend)
AttentionMaskInterface.register(NAME, lambda *args, **kwargs: None)
