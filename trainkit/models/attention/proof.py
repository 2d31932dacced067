"""Proof at start that the chosen attention is the model's: it and transformers' eager one agree.

One small batch goes through the model twice, with the attention that was chosen and with the eager
one that every class of transformers brings along: as padded rows, and packed where packing is on.
The truth for packed rows is each document alone.

The logits show whether the whole is right, up to what rounding through all layers explains; each
layer by itself, on its own inputs, shows what that would hide. How far two right
implementations may lie apart is measured, not guessed: for the logits eager runs once more with the
result of every module moved by a rounding of the dtype.

Over a whole model rounding adds up, until an effect of a few percent drowns in it. Here each layer
answers for itself: what it hands to the chosen attention (queries, keys, values) goes to
transformers' eager one as well, in a wider dtype, and each document alone. The queries are scaled
to scores of order one, so that masks, caps, sinks and scales act in models whose own scores are
tiny or huge.

Shapes: B batch, H heads, S sequence, D head size, T tokens that are compared, V vocabulary.
"""

from __future__ import annotations

import contextlib
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from trainkit.auto_class import without_adapters
from trainkit.errors import ModelError, ProofError, TrainkitError
from trainkit.evaluation_mode import changed, evaluation_mode
from trainkit.models.attention.choice import NAME, Attention, Installed, install
from trainkit.models.attention.forward import NO_INFLUENCE
from trainkit.models.attention.packable import decoder_of, kept_apart, state_of
from trainkit.models.leak_test import LENGTHS, ROW, on, packed_inputs
from trainkit.models.linears import not_finite
from trainkit.models.proof.replica import make_replica
from trainkit.parallel.parameters import is_whole

_NARROWED = {"sliding_window": 8, "attention_chunk_size": 8, "index_topk": 8}
"""Tokens: a window of thousands would be left out of a small batch."""

_ROUNDINGS = 2.0
"""Allowed over the measured noise, which moves each module's result by at most half an eps. Between
two results an implementation rounds about four times (scores, scaled scores, shares, product), at
random, which adds up to twice one rounding."""

_FLOOR = {torch.bfloat16: 2.0, torch.float16: 2.0, torch.float32: 64.0, torch.float64: 64.0}
"""In eps, always allowed: sums may run in another order. They are kept in fp32, so that it is two
roundings of a narrow result, and a few dozen eps of a wide one. One layer alone gets half of it."""

_TF32 = 2.0**-10
"""What a GPU may round the factors of an fp32 product to."""

_WORDS = {
    "padded": "its logits differ by {:.2e} from eager attention's, where rounding explains {:.2e}",
    "packed": "the logits of packed documents differ by {:.2e} from those of each document alone, "
    "where rounding explains {:.2e}",
}
_LAYER_WORDS = (
    "its layer {} differs by {:.2e} from eager attention on the same {} states, where rounding "
    "explains {:.2e}"
)

_FAILURES = (TrainkitError, RuntimeError, ValueError, TypeError, KeyError, AttributeError,
             IndexError, NotImplementedError, ImportError)  # fmt: skip


@dataclass(frozen=True)
class ProofRow:
    """One batch through one implementation.

    Args:
        attention: the implementation, with its engine.
        batch: "padded" or "packed".
        compared: "logits", or "layers: N", each on its own inputs.
        error: the distance from eager's, relative to the size; the worst layer's; None where the
            model did not run.
        allowed: what rounding explains.
        status: "ok" or "failed".
        detail: the reason of a failure.
    """

    attention: str
    batch: str
    compared: str
    error: float | None
    allowed: float
    status: str
    detail: str


class AttentionProofError(ModelError, ProofError):
    """The attention that the recipe names is not the model's."""

    part = "attention_checks"

    def __init__(self, rows: list[dict[str, object]], attention: str) -> None:
        self.rows = rows
        failed = next(row for row in rows if row["status"] == "failed")
        super().__init__(
            f"attention {attention} does not compute what the model's own eager one does on "
            f"{failed['batch']} rows: {failed['detail']}",
            where="model.attn_implementation",
            fix="set it to auto, or to eager"
            + (", or data.packing to false" if failed["batch"] == "packed" else ""),
        )


def require_proof(attention: Attention) -> None:
    """Stop where the attention that a recipe names has failed its proof."""
    if any(row["status"] == "failed" for row in attention.checks):
        raise AttentionProofError(list(attention.checks), attention.name)


def settle(
    model: PreTrainedModel,
    wanted: Attention,
    *,
    packed: bool,
    is_auto: bool,
    is_proved: bool = True,
    apart: bool = False,
) -> Attention:
    """Give the model the attention that was chosen, or the next that computes the same as eager.

    Args:
        model: freshly loaded, on its device; it is left with the attention that is returned.
        wanted: the first choice.
        packed: whether documents share a row.
        is_auto: whether another one may be taken; if not, failures are in ``checks``.
        is_proved: False takes the first choice as it is: of a model whose numbers are known to be
            bad no two computations are equal.
        apart: layers whose kernel keeps documents apart run it in the proof; they will later.
    """
    subject = model
    if not all(is_whole(each) for each in model.parameters()):  # in pieces: a few random layers
        subject = make_replica(model)
    with kept_apart(subject, packed and apart):
        return _settled(model, subject, wanted, packed, is_auto, is_proved)


def _settled(
    model: PreTrainedModel,
    subject: PreTrainedModel,
    wanted: Attention,
    packed: bool,
    is_auto: bool,
    is_proved: bool,
) -> Attention:
    if packed and (state := state_of(subject)) is not None:
        raise _cannot_pack(model, f"{state}, which carries state from one document into the next")
    if not is_proved:
        if _exchangeable(subject):
            _apply(model, wanted)
        return wanted
    if not is_auto and not _exchangeable(subject):
        detail = f"the attention of {type(subject).__name__} cannot be exchanged to compare it"
        row = ProofRow(wanted.name, "padded", "logits", None, 0.0, "skipped", detail)
        return replace(wanted, checks=(asdict(row),))
    reference = _Reference(subject, packed=packed)
    refused: list[ProofRow] = []
    for candidate in _candidates(subject, wanted, is_auto=is_auto):
        rows = _prove(subject, candidate, reference)
        failed = [row for row in rows if row.status == "failed"]
        if not failed or not is_auto:
            reason = candidate.reason
            if refused:
                reason += f"; {refused[0].attention} was refused: {refused[0].detail}"
            if not failed:  # else it may be what cannot even be set
                _apply(model, candidate)
            checks = tuple(asdict(row) for row in [*refused, *rows])
            return replace(candidate, reason=reason, checks=checks)
        refused += [replace(row, status="refused") for row in failed]
    broken = not_finite(subject)
    if broken or not all(each.isfinite().all() for each in reference.logits.values()):
        what = f"the weight {broken} holds" if broken else "with any attention its logits hold"
        raise ModelError(
            f"{what} NaN or infinity, so the model predicts nothing",
            where="model.name_or_path",
            fix="take the files, config.json too, from where they came from again, or an earlier "
            "checkpoint",
        )
    last = next(row for row in reversed(refused) if row.compared == "logits")
    if last.batch == "packed":
        raise _cannot_pack(model, f"even with {last.attention} attention, {last.detail}")
    raise ModelError(
        f"{type(subject).__name__} does not run: {last.detail}",
        where="model.attn_implementation",
        fix="report this with the model's config.json and the version of transformers",
    )


def _candidates(model: PreTrainedModel, wanted: Attention, *, is_auto: bool) -> list[Attention]:
    if not is_auto:
        return [wanted]
    if not _exchangeable(model):
        reason = f"{type(model).__name__} has its own attention, which cannot be exchanged"
        return [Attention("eager", reason)]
    found = [wanted]
    if wanted.engine == "varlen":
        found.append(replace(wanted, engine="flex", reason="flex attention with a block mask"))
    if wanted.engine in ("varlen", "flex"):
        found.append(replace(wanted, engine="blocks", reason="SDPA, document by document"))
    return [
        *found,
        Attention("sdpa", "transformers' own SDPA attention"),
        Attention("eager", "transformers' own eager attention"),
    ]


def _exchangeable(model: PreTrainedModel) -> bool:
    """Whether the class looks its attention up; older ones have their own."""
    return type(model)._can_set_attn_implementation()


def _cannot_pack(model: PreTrainedModel, reason: str) -> ModelError:
    return ModelError(
        f"{model.config.model_type} cannot be trained on packed rows: {reason}",
        where="data.packing",
        fix="set data.packing to false",
    )


def _apply(model: PreTrainedModel, attention: Attention) -> Installed | None:
    """Let the model attend so; returns the hooks, if it needs any."""
    if _exchangeable(model):
        model.set_attn_implementation(attention.name)
    return install(model, attention.engine) if attention.name == NAME else None


class _Reference:
    """Eager attention's logits on the small batch, and how far rounding moves them."""

    def __init__(self, model: PreTrainedModel, *, packed: bool) -> None:
        self.batches = small_batches(model, packed=packed)
        self.logits: dict[str, Tensor] = {}
        self.allowed: dict[str, float] = {}
        self.layers: dict[str, EagerCalls] = {}
        parameter = next(each for each in model.parameters() if each.is_floating_point())
        eps, floor = roundings(parameter.dtype, parameter.device)
        _apply(model, Attention("eager", ""))
        with evaluation_mode(model), _narrowed(model):
            for name, batch in self.batches.items():
                self.layers[name] = EagerCalls(model, batch, floor * eps / 2)
                with self.layers[name].recorded():
                    self.logits[name] = batch.eager(model)
                with rounded(model, eps):
                    moved = batch.eager(model)
                noise = distance(moved, self.logits[name], has_experts(model))
                self.allowed[name] = allowed(noise, eps, floor)


def _prove(model: PreTrainedModel, attention: Attention, reference: _Reference) -> list[ProofRow]:
    label = attention.name if attention.engine is None else f"{attention.name} ({attention.engine})"
    rows: list[ProofRow] = []
    no_layers: list[LayerError] = []
    hooks = None
    name = next(iter(reference.batches))
    try:
        hooks = _apply(model, attention)
        for name, batch in reference.batches.items():
            # Eager's own function is the truth of each layer: its masks show in the logits.
            is_truth = attention.name == "eager"
            layers = (
                contextlib.nullcontext(no_layers) if is_truth else reference.layers[name].compared()
            )
            with evaluation_mode(model), _narrowed(model), layers as worst:
                found = batch.chosen(model)
            error = distance(found, reference.logits[name], has_experts(model))
            limit = reference.allowed[name]
            words = _WORDS[name].format(error, limit)
            rows.append(_row(label, name, "logits", error, limit, words))
            for layer in worst:
                words = _LAYER_WORDS.format(layer.layer, layer.error, name, layer.allowed)
                compared = f"layers: {layer.compared}"
                rows.append(_row(label, name, compared, layer.error, layer.allowed, words))
    except torch.OutOfMemoryError:
        raise
    except _FAILURES as failure:
        said = failure.what if isinstance(failure, TrainkitError) else str(failure)
        lines = said.strip().splitlines() or [repr(failure)]
        limit = reference.allowed[name]
        detail = f"it cannot run: {lines[0]} ({type(failure).__name__})"
        rows.append(ProofRow(label, name, "logits", None, limit, "failed", detail))
    finally:
        if hooks is not None:
            hooks.remove()
    return rows


def require_shared_prompts(model: Any, *, attention: str, dtype: torch.dtype) -> None:
    """Compute two answers to one prompt with the prompt once, and with a prompt each.

    ``model`` attends as in training, to packed rows; ``dtype`` is what it computes in.

    Raises:
        ModelError: the answers differ by more than rounding explains.
    """
    state = state_of(without_adapters(model), split=True)
    if state is not None:
        raise _cannot_share(
            f"{state}: it would begin from nothing behind a prompt that lies in front"
        )
    place = next(model.parameters())
    prompt, first, second = _tokens(model)[0][:47].split((20, 15, 12))
    again = torch.arange(19)  # the last token of the prompt is each answer's own
    bounds = torch.tensor([0, 35, 48], dtype=torch.int32)
    once = {
        "input_ids": torch.cat((prompt, first, prompt[-1:], second))[None],
        "position_ids": torch.cat((torch.arange(35), torch.arange(19, 32)))[None],
        "cu_seq_lens_q": bounds,
        "cu_seq_lens_k": bounds + torch.tensor([0, 0, 19], dtype=torch.int32),
        "shared_keys": torch.cat((torch.arange(35), again, torch.arange(35, 48))),
        "max_length_q": 35,
        "max_length_k": 35,
    }
    twice = {"input_ids": torch.cat((prompt, first, prompt, second))[None]}
    twice |= packed_inputs([[35, 32]], 67)
    row, own = torch.zeros(48, dtype=torch.int64), torch.tensor([*range(35), *range(54, 67)])
    places = (row, torch.arange(48)), (row, own)
    batch = SmallBatch(on(place.device, once), on(place.device, twice), *places)
    eps, floor = roundings(dtype, place.device)
    with evaluation_mode(model), _narrowed(without_adapters(model)):
        truth, found = batch.eager(model), batch.chosen(model)
        with rounded(model, eps):
            moved = batch.eager(model)
    error, noise = (distance(each, truth, has_experts(model)) for each in (found, moved))
    limit = allowed(noise, eps, floor)
    if not error <= limit:
        raise _cannot_share(
            f"logits of answers that share a prompt differ by {error:.2e} from those of answers "
            f"with a prompt each, where rounding explains {limit:.2e} (attention {attention})"
        )


def _cannot_share(reason: str) -> ModelError:
    return ModelError(reason, where="preference.share_prompts", fix="set it to false")


def _row(label: str, batch: str, compared: str, error: float, limit: float, words: str) -> ProofRow:
    is_right = error <= limit
    shown = error if math.isfinite(error) else None
    status, detail = ("ok", "") if is_right else ("failed", words)
    return ProofRow(label, batch, compared, shown, limit, status, detail)


def roundings(dtype: torch.dtype, device: torch.device) -> tuple[float, float]:
    """The relative step between two numbers of what is computed in, and how many are allowed."""
    if device.type == "cuda" and dtype == torch.float32:
        return _TF32, _FLOOR[torch.bfloat16]
    return torch.finfo(dtype).eps, _FLOOR.get(dtype, 2.0)


def allowed(noise: float, eps: float, floor: float) -> float:
    """How far two right computations may be apart, given how far one rounding moves one."""
    return _ROUNDINGS * noise + floor * eps


def distance(found: Tensor, truth: Tensor, has_experts: bool) -> float:
    """How far the logits are apart, relative to their size: root mean squares over the tokens.

    What is wrong with an attention shows in most tokens, and a mean is a steadier measure than the
    worst; that no document sees another is proved to the last bit, by `leak_test`.

    Args:
        found: (T, V).
        truth: (T, V).
        has_experts: a rounding may send a token to other experts, so the worst quarter is left out.
    """
    apart = (found.double() - truth.double()).norm(dim=-1)
    size = truth.double().norm(dim=-1).square().mean().sqrt()
    if has_experts:
        apart = apart.sort().values[: -(len(apart) // 4)]
    return (apart.square().mean().sqrt() / size).item() if apart.isfinite().all() else float("nan")


def has_experts(model: nn.Module) -> bool:
    """Whether something is chosen by its score: experts for a token, or keys by an indexer."""
    choosing = {"experts", "indexer"}
    return any(name.rpartition(".")[2] in choosing for name, _ in model.named_modules())


@contextlib.contextmanager
def _narrowed(model: PreTrainedModel) -> Iterator[None]:
    """Make windows, chunks and top-k narrower than the small batch, wherever they are kept."""
    decoder = decoder_of(model)
    owners = [model.config, model.config.get_text_config(), decoder.config, *decoder.modules()]
    with changed(
        (owner, name, narrow)
        for owner in {id(each): each for each in owners}.values()
        for name, narrow in _NARROWED.items()
        if isinstance(value := vars(owner).get(name), int) and value > narrow
    ):
        yield


@contextlib.contextmanager
def rounded(model: nn.Module, eps: float) -> Iterator[None]:
    """Move the result of every innermost module by up to one rounding."""
    generators: dict[torch.device, torch.Generator] = {}

    def move(module: nn.Module, args: Any, output: Any) -> Any:
        if not isinstance(output, Tensor) or not output.is_floating_point():
            return None
        generator = generators.setdefault(
            output.device, torch.Generator(output.device).manual_seed(0)
        )
        wide = output.float()
        shift = torch.rand(wide.shape, generator=generator, device=wide.device)
        return (wide * (1 + eps * (shift - 0.5))).to(output.dtype)

    leaves = [each for each in model.modules() if not any(True for _ in each.children())]
    with contextlib.ExitStack() as hooks:
        for each in leaves:
            hooks.enter_context(each.register_forward_hook(move))
        yield


_SCORES = 2.0
"""Root mean square of the scores that are compared: high enough for a scale or a cap to act, low
enough that a token looks at more than its one favourite."""

_SOFTCAP = 1.0
"""Soft caps are tried lowered to this as well: one of 50 changes nothing in scores of order one,
and under a low one a wrong scale hardly shows."""

_SERVED = frozenset({"scaling", "softcap", "s_aux", "dropout", "is_causal"}) | NO_INFLUENCE
"""Arguments that mean the same in any layout of the documents; another tensor (a bias, the indices
of chosen keys) belongs to the rows as they lie, and such a layer is left to the logits."""

Function = Callable[..., Any]
_Watcher = Callable[[Function, Function, nn.Module, "Call"], None]


@dataclass(frozen=True)
class Call:
    """What a layer hands to its attention.

    Args:
        states: query (B, H, S, D), key and value (B, key heads, S, D).
        mask: as the implementation makes it.
        options: the other arguments.
    """

    states: tuple[Tensor, Tensor, Tensor]
    mask: Any
    options: Mapping[str, Any]


@dataclass(frozen=True)
class LayerError:
    """The worst layer of a batch."""

    layer: str
    error: float
    allowed: float
    compared: int


class EagerCalls:
    """Masks and options of each layer under eager attention, from a run of one batch."""

    def __init__(self, model: nn.Module, batch: SmallBatch, floor: float) -> None:
        self._names = {id(module): name for name, module in model.named_modules()}
        self._batch = batch
        self._floor = floor
        self._calls: dict[int, list[Call]] = defaultdict(list)

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        """Remember what each layer hands to eager attention meanwhile."""

        def remember(function: Function, eager: Function, module: nn.Module, call: Call) -> None:
            self._calls[id(module)].append(call)

        with _watched(remember):
            yield

    @contextlib.contextmanager
    def compared(self) -> Iterator[list[LayerError]]:
        """Compare what each layer hands to its attention meanwhile; the list gets the worst."""
        found: list[LayerError] = []
        worst: list[LayerError] = []
        seen: dict[int, int] = defaultdict(int)

        def compare(function: Function, eager: Function, module: nn.Module, call: Call) -> None:
            number = seen[id(module)]
            seen[id(module)] += 1
            earlier = self._calls.get(id(module), [])
            # Where scores of its own decide what may be looked at, ties fall as the rows lie.
            chooses = any(f".{each}".endswith(".indexer") for each, _ in module.named_modules())
            if number < len(earlier) and not chooses and self._comparable(call, earlier[number]):
                name = self._names.get(id(module), type(module).__name__)
                for first, second in _capped(call, earlier[number]):
                    found.append(self._measure(name, function, eager, module, first, second))

        with _watched(compare):
            yield worst
        if found:
            each = max(found, key=lambda one: one.error / one.allowed)
            num_layers = len({one.layer for one in found})
            worst.append(replace(each, compared=num_layers))

    def _comparable(self, call: Call, earlier: Call) -> bool:
        shape = self._batch.inputs["input_ids"].shape
        options = [*call.options.items(), *earlier.options.items()]
        return all(
            states.dim() == 4 and (states.shape[0], states.shape[2]) == shape
            for states in call.states
        ) and not any(isinstance(value, Tensor) and name not in _SERVED for name, value in options)

    def _measure(
        self,
        name: str,
        function: Function,
        eager: Function,
        module: nn.Module,
        call: Call,
        earlier: Call,
    ) -> LayerError:
        query, key, value = call.states
        alone = [self._alone(states) for states in call.states]
        strength = _strength(alone[0], alone[1], earlier.options.get("scaling"))
        alone[0] = alone[0] * strength
        results = function(module, query * strength, key, value, call.mask, **call.options)
        found = results[0][self._batch.places].double()
        truths = [
            eager(
                module,
                *(states.to(dtype) for states in alone),
                _to(earlier.mask, dtype),
                **earlier.options,
            )[0][self._batch.eager_places].double()
            for dtype in (_wide(query.dtype), query.dtype)
        ]
        truth, rounded = truths
        size = truth.square().mean().sqrt()
        noise, error = (
            (each - truth).square().mean((0, 2)).sqrt() / size for each in (rounded, found)
        )
        allowed = _ROUNDINGS * noise + self._floor
        share = (error / allowed).nan_to_num(nan=float("inf"))
        head = int(share.argmax())
        return LayerError(name, error[head].item(), allowed[head].item(), 1)

    def _alone(self, states: Tensor) -> Tensor:
        """The tokens laid out as eager's batch has them; zeros elsewhere."""
        batch_size, length = self._batch.eager_inputs["input_ids"].shape
        laid = states.new_zeros(batch_size, length, states.shape[1], states.shape[3])
        laid[self._batch.eager_places] = states.transpose(1, 2)[self._batch.places]
        return laid.transpose(1, 2)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype in (torch.float32, torch.float64) else torch.float32


def _to(mask: Any, dtype: torch.dtype) -> Any:
    is_added = isinstance(mask, Tensor) and mask.is_floating_point()
    # The most negative number of a narrow dtype is as good in a wide one.
    return mask.to(dtype) if is_added else mask


def _capped(*calls: Call) -> Iterator[tuple[Call, ...]]:
    """The calls, and once more with their soft cap lowered if they have one."""
    yield calls
    if calls[0].options.get("softcap") is not None:
        yield tuple(replace(one, options={**one.options, "softcap": _SOFTCAP}) for one in calls)


def _strength(query: Tensor, key: Tensor, scaling: float | None) -> float:
    """A power of two (exact in every dtype) that brings the scores to `_SCORES`."""
    wide = _wide(query.dtype)
    keys = key.to(wide).repeat_interleave(query.shape[1] // key.shape[1], 1)
    scores = torch.tril(query.to(wide) @ keys.transpose(2, 3))
    scores = scores * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    size = scores[scores != 0].square().mean().sqrt()
    if not size.isfinite():
        return 1.0
    return float((_SCORES / size).log2().round().exp2())


@contextlib.contextmanager
def _watched(watcher: _Watcher) -> Iterator[None]:
    """Show the watcher each call that goes through transformers' table of attentions.

    Layers ask the table for their function and hand their own eager one over as the default, which
    is the only place where both are known.
    """
    original = AttentionInterface.get_interface

    def get_interface(self: AttentionInterface, name: str, default: Function) -> Function:
        function = original(self, name, default)

        def watched(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            named = dict(zip(("query", "key", "value", "attention_mask"), args, strict=False))
            if len(args) <= len(named) and not named.keys() & kwargs.keys():
                given = {**named, **kwargs}
                states = tuple(given.pop(each, None) for each in ("query", "key", "value"))
                mask = given.pop("attention_mask", None)
                if all(isinstance(each, Tensor) for each in states):
                    watcher(function, default, module, Call(states, mask, given))
            return function(module, *args, **kwargs)

        return watched

    with changed([(AttentionInterface, "get_interface", get_interface)]):
        yield


@dataclass(frozen=True)
class SmallBatch:
    """One batch as the chosen attention gets it and as eager does, and the tokens to compare."""

    inputs: Mapping[str, Any]
    eager_inputs: Mapping[str, Any]
    places: tuple[Tensor, Tensor]
    eager_places: tuple[Tensor, Tensor]

    def chosen(self, model: nn.Module) -> Tensor:
        """(T, V)."""
        return self._logits(model, self.inputs)[self.places]

    def eager(self, model: nn.Module) -> Tensor:
        """(T, V)."""
        return self._logits(model, self.eager_inputs)[self.eager_places]

    def _logits(self, model: nn.Module, inputs: Mapping[str, Any]) -> Tensor:
        with torch.no_grad():
            return model(**inputs, use_cache=False).logits.float()


def small_batches(model: PreTrainedModel, *, packed: bool) -> dict[str, SmallBatch]:
    device = next(model.parameters()).device
    tokens = _tokens(model)
    lengths = torch.tensor([ROW, sum(LENGTHS[1])])
    mask = (torch.arange(ROW) < lengths[:, None]).long()
    padded = on(device, {"input_ids": tokens, "attention_mask": mask})
    places = _nonzero(mask)
    found = {"padded": SmallBatch(padded, padded, places, places)}
    if packed:
        found["packed"] = _packed(tokens, device)
    return found


def _packed(tokens: Tensor, device: torch.device) -> SmallBatch:
    """Two packed rows, and each of their documents alone in a padded row."""
    inputs = on(device, {"input_ids": tokens, **packed_inputs(LENGTHS, ROW)})
    inside = torch.zeros_like(tokens)
    rows: list[Tensor] = []
    for index, lengths in enumerate(LENGTHS):
        inside[index, : sum(lengths)] = 1
        rows += tokens[index, : sum(lengths)].split(lengths)
    alone = nn.utils.rnn.pad_sequence(rows, batch_first=True)
    sizes = torch.tensor([len(each) for each in rows])
    mask = (torch.arange(alone.shape[1]) < sizes[:, None]).long()
    eager = on(device, {"input_ids": alone, "attention_mask": mask})
    return SmallBatch(inputs, eager, _nonzero(inside), _nonzero(mask))


def _nonzero(mask: Tensor) -> tuple[Tensor, Tensor]:
    rows, columns = mask.nonzero(as_tuple=True)
    return rows, columns


def _tokens(model: PreTrainedModel) -> Tensor:
    """(2, ROW) ordinary tokens: none that stands for an image or ends a text."""
    configs = [model.config, model.config.get_text_config()]
    special = {
        value
        for config in configs
        for name, value in vars(config).items()
        if name.endswith(("token_id", "token_index")) and isinstance(value, int)
    }
    vocab_size = configs[1].vocab_size
    ordinary = torch.tensor([each for each in range(vocab_size) if each not in special])
    generator = torch.Generator().manual_seed(0)
    return ordinary[torch.randint(0, len(ordinary), (2, ROW), generator=generator)]
