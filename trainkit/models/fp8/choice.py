"""Which groups of layers run in fp8: as much time as possible for as much loss as allowed.

Of all sets of groups whose increases add up to no more than the budget the one is taken that saves
most time. It is then measured together, and less or more is allowed until that uses the budget.

Which linear layers could run in fp8, in groups that are chosen together.

A group is one role (the last part of the layers' names: q_proj, down_proj) in one part of the
depth. The first and the last layer stand alone, since they are the most sensitive ones; what is
between them is cut into equal parts.

What fp8 costs is by how much the loss rises when a group rounds its forward product. It is
estimated by the divergence KL(p || q) of the model's predictions in fp8, q, from those in 16 bits,
p. That is what the loss rises by where the text is as likely as the model thinks, and a few
thousand tokens are enough to see it: on 4096 tokens of SmolLM2-135M with every product in fp8 it is
0.035 +- 0.001, and the difference of the losses 0.027 +- 0.005. Groups add up. A model in 16 bits
rounds so much itself that any change in it, another order of sums, moves its predictions. That is
measured for each part of the depth as well, and does not count.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.conv import _ConvNd
from transformers.pytorch_utils import Conv1D

from trainkit.auto_class import ROUTERS
from trainkit.errors import ModelError
from trainkit.kernels.fp8.function import fits_fp8
from trainkit.models.fp8.savings import Saving
from trainkit.models.fp8.trained import swap_in
from trainkit.models.frozen import outside_linears
from trainkit.models.linears import layers_named
from trainkit.models.swap import Swaps, plain_class, subclass_of
from trainkit.options.data import IGNORE_INDEX
from trainkit.options.model import ALL, Fp8Options
from trainkit.parallel.parameters import whole_shape
from trainkit.patterns import ends_in

BOTH = "fp8"
BACKWARD = "backward in fp8"
FORWARD = "forward in fp8"
PLAIN = "16 bits"

_MEASUREMENTS = 8
"""Of groups together, at most."""
_SHARES = 2000
"""Of a budget: how finely costs are added up."""

_DIRECTIONS = {
    BOTH: (True, True),
    BACKWARD: (False, True),
    FORWARD: (True, False),
    PLAIN: (False, False),
}


@dataclass(frozen=True)
class ChosenGroup:
    """One group and how it runs.

    Attributes:
        loss_increase: what its forward products cost, in nats; None where that was not measured.
        forward_ms: saved in a micro-batch by forward products in fp8.
        runs: ``fp8``, ``backward in fp8``, ``forward in fp8`` or ``16 bits``.
        reason: why not all of it is in fp8; empty where it is.
    """

    group: str
    layers: tuple[str, ...]
    loss_increase: float | None
    forward_ms: float
    backward_ms: float
    runs: str
    reason: str = ""

    @property
    def saved_ms(self) -> float:
        forward, backward = _DIRECTIONS[self.runs]
        return self.forward_ms * forward + self.backward_ms * backward

    @property
    def most_ms(self) -> float:
        return max(self.forward_ms, 0.0) + max(self.backward_ms, 0.0)


@dataclass(frozen=True)
class Fp8Choice:
    """Which products run in fp8, what that saves and what it costs; as ``kernels.json`` has it.

    Attributes:
        kept: why other linear layers keep 16 bits, and how many.
        loss: of the plain model, in nats; None where nothing was measured.
    """

    policy: Mapping[str, Any]
    groups: tuple[ChosenGroup, ...]
    kept: Mapping[str, int]
    timing: str
    loss: float | None = None
    num_tokens: int = 0
    loss_increase: float | None = None
    seen_increase: float | None = None

    @property
    def directions(self) -> dict[str, tuple[bool, bool]]:
        """Layers with products in fp8: forward and backward."""
        return {
            name: _DIRECTIONS[group.runs]
            for group in self.groups
            for name in group.layers
            if group.runs != PLAIN
        }

    def to_dict(self) -> dict[str, Any]:
        plain = asdict(self)
        return {
            **plain,
            "groups": [{**asdict(group), "layers": list(group.layers)} for group in self.groups],
            "saved_ms": sum(group.saved_ms for group in self.groups),
            "most_ms": sum(group.most_ms for group in self.groups),
        }

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> Fp8Choice:
        known = {name: plain[name] for name in cls.__dataclass_fields__}
        groups = tuple(
            ChosenGroup(**{**group, "layers": tuple(group["layers"])}) for group in plain["groups"]
        )
        return cls(**{**known, "groups": groups})

    def describe(self) -> list[str]:
        counts = {
            runs: sum(len(group.layers) for group in self.groups if group.runs == runs)
            for runs in _DIRECTIONS
        }
        text = ", ".join(f"{number} {runs}" for runs, number in counts.items() if number)
        saved, most = (
            sum(getattr(group, name) for group in self.groups) for name in ("saved_ms", "most_ms")
        )
        kept = "; ".join(f"{number} {reason}" for reason, number in self.kept.items())
        lines = [
            f"fp8: of {sum(counts.values())} layers {text}"
            + (f" (others keep 16 bits: {kept})" if kept else ""),
            f"  saves {saved:.3g} of {most:.3g} ms a micro-batch ({self.timing})",
        ]
        if self.loss is not None and self.loss_increase is not None:
            share = self.loss_increase / max(self.loss, 1e-9)
            lines.append(
                f"  costs {self.loss_increase:.4f} nats before training, {share:.2%} of the loss "
                f"{self.loss:.4f} on {self.num_tokens} tokens (budget "
                f"{self.policy['loss_budget']:.2%})"
            )
        return lines


def choose(
    candidates: Candidates,
    options: Fp8Options,
    savings: Mapping[str, Saving],
    timing: str,
    probe: Probe | None,
    *,
    frozen: bool = False,
) -> Fp8Choice:
    """Make the choice.

    Without ``probe`` no budget limits the choice. A ``frozen`` weight is kept either in fp8, for
    both directions, or in 16 bits.
    """
    groups = [_timed(group, savings, frozen) for group in group_layers(candidates.layers)]
    choice = Fp8Choice(options.model_dump(), tuple(groups), dict(candidates.kept), timing)
    if probe is None or options.loss_budget == ALL:
        return replace(choice, groups=tuple(_taken(group, frozen) for group in groups))
    few = probe.part()
    measured = [
        replace(group, loss_increase=few.increase(group.layers).expected) for group in groups
    ]
    limit = float(options.loss_budget) * probe.loss
    labels, together = _within(measured, limit, probe.increase)
    return replace(
        choice,
        groups=tuple(
            _taken(group, frozen) if group.group in labels else _left(group) for group in measured
        ),
        loss=probe.loss,
        num_tokens=probe.num_tokens,
        loss_increase=together.expected,
        seen_increase=together.seen,
    )


def _timed(group: Group, savings: Mapping[str, Saving], frozen: bool) -> ChosenGroup:
    found = [savings[name] for name in group.layers]
    forward, backward = sum(one.forward for one in found), sum(one.backward for one in found)
    made = ChosenGroup(group.label, group.layers, None, forward, backward, PLAIN)
    gains = forward + (min(backward, 0.0) if frozen else 0.0) > 0
    return made if gains else replace(made, reason="would not be faster")


def _taken(group: ChosenGroup, frozen: bool) -> ChosenGroup:
    """With everything in fp8 that gains."""
    if frozen:
        return _left(group) if group.reason else replace(group, runs=BOTH)
    faster = (group.forward_ms > 0, group.backward_ms > 0)
    runs = next(name for name, directions in _DIRECTIONS.items() if directions == faster)
    return replace(group, runs=runs, reason="" if runs == BOTH else "would not be faster")


def _left(group: ChosenGroup) -> ChosenGroup:
    """Without its forward product in fp8."""
    reason = group.reason or "not within the budget"
    return replace(group, runs=PLAIN if group.backward_ms <= 0 else BACKWARD, reason=reason)


def _within(
    groups: Sequence[ChosenGroup], limit: float, measure: Callable[[Iterable[str]], Increase]
) -> tuple[set[str], Increase]:
    """The labels of the groups to take, and what they cost together."""
    able = [group for group in groups if not group.reason and _cost(group) < math.inf]
    best: tuple[set[str], Increase] = set(), Increase(0.0, 0.0)
    # Sums of what groups cost one by one: one that fits together, and one that does not.
    fits, over = -1.0, math.inf
    allowed = limit
    for _ in range(_MEASUREMENTS):
        taken = _most_time(able, allowed)
        alone = sum(map(_cost, taken))
        if not taken or alone <= fits:
            break
        together = measure([name for group in taken for name in group.layers])
        if together.expected <= limit:
            fits, best = alone, ({group.group for group in taken}, together)
        else:
            over = min(over, alone)
        allowed = alone * limit / together.expected if together.expected > 0 else 2 * alone
        if not max(fits, 0.0) < allowed < over:
            allowed = (max(fits, 0.0) + min(over, 2 * alone)) / 2
    return best


def _cost(group: ChosenGroup) -> float:
    cost = math.inf if group.loss_increase is None else group.loss_increase
    return math.inf if math.isnan(cost) else cost


def _most_time(groups: Sequence[ChosenGroup], allowed: float) -> list[ChosenGroup]:
    """Those that save most time, of all sets whose costs add up to no more than what is allowed.

    A knapsack, solved for costs rounded to a share of what is allowed; of equals the cheapest.
    """
    if allowed <= 0:
        return [group for group in groups if _cost(group) == 0]
    # What each number of shares can save, the costs, and by which groups.
    best: list[tuple[float, float, tuple[int, ...]]] = [(0.0, 0.0, ())] * (_SHARES + 1)
    for index, group in enumerate(groups):
        cost, gain = _cost(group), group.forward_ms
        if cost > allowed:
            continue
        needed = round(cost / allowed * _SHARES)
        with_it = [
            (saved + gain, spared - cost, (*taken, index))
            for saved, spared, taken in best[: len(best) - needed]
        ]
        best[needed:] = map(max, best[needed:], with_it)
    return [groups[index] for index in best[-1][2]]


_PARTS_BETWEEN = 5
OUTSIDE = "weights outside linear layers, as of experts"
"""Why those keep 16 bits."""
_DEPTH = re.compile(r"\.(\d+)\.")


@dataclass(frozen=True)
class Group:
    """Layers that are chosen together.

    Attributes:
        label: for people: ``down_proj of layers 1-6``.
    """

    label: str
    layers: tuple[str, ...]


@dataclass(frozen=True)
class Candidates:
    """The linear layers of a model.

    Attributes:
        layers: those that could run in fp8, by name.
    """

    layers: Mapping[str, nn.Linear]
    kept: Mapping[str, int]
    head: str = ""


def find_candidates(
    model: nn.Module, options: Fp8Options, *, frozen: bool = False, whole: Collection[str] = ()
) -> Candidates:
    """Look at every linear layer.

    Without ``frozen``, of a base under adapters, layers that are not trained keep 16 bits;
    ``whole`` are the ends of the names of modules that train next to the adapters.
    """
    get_head = getattr(model, "get_output_embeddings", None)
    head = None if get_head is None else get_head()
    layers: dict[str, nn.Linear] = {}
    kept: dict[str, int] = {}
    linears = {n: m for n, m in model.named_modules() if plain_class(m) is nn.Linear}
    skipped = layers_named(linears, options.skip, "model.fp8.skip")
    away = set(outside_linears(model))
    for name, module in model.named_modules():
        if name not in linears:
            if number := _num_other_matrices(module):
                kept[OUTSIDE] = kept.get(OUTSIDE, 0) + number
            continue
        assert isinstance(module, nn.Linear)
        is_skipped = name in skipped
        reason = "named in skip" if is_skipped else _why_not(name, module, head, options, frozen)
        if ends_in(name, whole):
            reason = "trained whole (modules_to_save)"
        if name in away:
            reason = "sees images"
        if reason:
            kept[reason] = kept.get(reason, 0) + 1
        else:
            layers[name] = module
    if not layers:
        reasons = "; ".join(f"{number}: {reason}" for reason, number in kept.items())
        raise ModelError(
            f"no linear layer can run in fp8 ({reasons or 'there is none'})",
            where="lora.quantize" if frozen else "model.fp8",
            fix=f"remove {'lora.quantize' if frozen else 'model.fp8'}",
        )
    of_head = next((name for name, module in layers.items() if module is head), "")
    return Candidates(layers, kept, of_head)


def _num_other_matrices(module: nn.Module) -> int:
    """How many weights of a module multiply, though it is no linear layer."""
    if isinstance(module, _ConvNd):
        return 0
    fewest = 2 if isinstance(module, Conv1D) else 3
    return sum(len(whole_shape(one)) >= fewest for one in module.parameters(recurse=False))


def _why_not(
    name: str, layer: nn.Linear, head: nn.Module | None, options: Fp8Options, frozen: bool
) -> str:
    """Why a layer keeps 16 bits; empty where it need not."""
    if layer is head and options.head == "bf16":
        return "the output layer"
    if name.rpartition(".")[2] in ROUTERS:
        return "chooses experts"
    if not frozen and not layer.weight.requires_grad:
        return "not trained"
    if not fits_fp8(layer.out_features, layer.in_features):
        return "the tensor cores take multiples of 16 only"
    if min(layer.out_features, layer.in_features) < options.min_size:
        return f"narrower than min_size {options.min_size}"
    return ""


def group_layers(names: Iterable[str]) -> list[Group]:
    """Roles by parts of the depth, in the order of the names."""
    names = list(names)
    found_in = {name: _DEPTH.search(f"{name}.") for name in names}
    depths = {name: int(match[1]) for name, match in found_in.items() if match}
    parts = _parts(sorted({*depths.values()}))
    found: dict[str, list[str]] = {}
    for name in names:
        label = name
        if name in depths:
            first, *between = next(part for part in parts if depths[name] in part)
            span = f"layers {first}-{between[-1]}" if between else f"layer {first}"
            label = f"{name.rpartition('.')[2]} of {span}"
        found.setdefault(label, []).append(name)
    return [Group(label, tuple(layers)) for label, layers in found.items()]


def _parts(depths: Sequence[int]) -> list[Sequence[int]]:
    if len(depths) <= 2:
        return [[depth] for depth in depths]
    between = depths[1:-1]
    number = min(_PARTS_BETWEEN, len(between))
    cuts = [len(between) * i // number for i in range(number + 1)]
    return [depths[:1], *[between[a:b] for a, b in itertools.pairwise(cuts)], depths[-1:]]


MOST_LOGITS = 2**29
"""Of the plain model, kept to compare with: 1 GiB in bf16."""
_ROWS_AT_ONCE = 1024
_TOKENS_A_PASS = 2048


@dataclass
class Probe:
    """A model and the text that it is judged on.

    Attributes:
        batches: ``input_ids`` and ``labels`` (B, S) each, on the model's device.
        loss: of the plain model, in nats a trained token.
        agree: ranks compute alike, but not to the last bit; the first one's numbers count.
    """

    model: nn.Module
    batches: Sequence[Mapping[str, Tensor]]
    loss: float = 0.0
    num_tokens: int = 0
    agree: Callable[[Any], Any] = lambda value: value
    _plain: list[Tensor] = field(default_factory=list)
    _floors: dict[str, float] = field(default_factory=dict)

    def begin(self) -> None:
        total = 0.0
        for batch in self.batches:
            logits, labels = self._trained_logits(batch)
            self._plain.append(logits)
            self.num_tokens += len(labels)
            for rows, wanted in _pieces(logits, labels):
                total += functional.cross_entropy(rows.float(), wanted, reduction="sum").item()
        self.loss = self.agree(total / max(self.num_tokens, 1))

    def part(self) -> Probe:
        """A third of the text, which ranks groups as well."""
        few = Probe(self.model, self.batches[: -(-len(self.batches) // 3)], agree=self.agree)
        few.begin()
        return few

    def increase(self, layers: Iterable[str]) -> Increase:
        """What fp8 forward products in these layers cost, all other layers plain."""
        layers = list(layers)
        found = self._with(
            swap_in(self.model, dict.fromkeys(layers, (True, True)), in_evaluation=True)
        )
        floor = self._floor(layers[0])
        increase: Increase = self.agree(Increase(max(found.expected - floor, 0.0), found.seen))
        return increase

    def _floor(self, layer: str) -> float:
        """What another order of sums in a layer, and so in all that follow, does."""
        part = layer.rpartition(".")[0]  # its block: the roles in it begin at the same depth
        if part not in self._floors:
            module = self.model.get_submodule(layer)
            other = subclass_of(type(module), _OtherOrder)
            self._floors[part] = self._with(Swaps(self.model, {module: other})).expected
        return self._floors[part]

    def _with(self, swaps: Swaps) -> Increase:
        """How predictions and loss differ from the plain model's, with swaps that it reverts."""
        divergence = loss = 0.0
        try:
            for batch, plain in zip(self.batches, self._plain, strict=True):
                logits, labels = self._trained_logits(batch)
                for rows, other, wanted in _pieces(logits, plain, labels):
                    ours, theirs = (
                        functional.log_softmax(each.float(), dim=-1) for each in (rows, other)
                    )
                    divergence += (theirs.exp() * (theirs - ours)).sum().item()
                    loss += functional.nll_loss(ours, wanted, reduction="sum").item()
        finally:
            swaps.revert()
        count = max(self.num_tokens, 1)
        return Increase(divergence / count, loss / count - self.loss)

    def _trained_logits(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """(T, V) and (T,) of the tokens that are trained on."""
        logits = self.model(input_ids=batch["input_ids"], use_cache=False).logits[:, :-1]
        labels = batch["labels"][:, 1:]
        trained = labels >= 0
        return logits[trained], labels[trained]


class _OtherOrder(nn.Module):
    """A linear layer whose products are summed in two halves."""

    weight: nn.Parameter
    bias: nn.Parameter | None

    def forward(self, x: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        first = functional.linear(x[..., :half], self.weight[:, :half], self.bias)
        return first + functional.linear(x[..., half:], self.weight[:, half:])


@dataclass(frozen=True)
class Increase:
    """By how much the loss rises, in nats.

    Attributes:
        expected: the divergence of the predictions, without what any change of rounding does.
        seen: the difference of the losses on the very text; noisier.
    """

    expected: float
    seen: float


def _pieces(*tensors: Tensor) -> Iterable[Any]:
    return zip(*(tensor.split(_ROWS_AT_ONCE) for tensor in tensors), strict=True)


def probe_batches(
    samples: Iterable[Mapping[str, Tensor]], vocab_size: int, device: torch.device
) -> list[Mapping[str, Tensor]]:
    """As many samples as a measurement needs, on the device; short ones padded side by side.

    The memory that their logits take limits the tokens; each sample is read as one document.

    Args:
        samples: ``input_ids`` and ``labels`` (1, S) each; read as one document.
        vocab_size: limits the tokens by the memory that their logits take.
        device: where the model is.
    """
    wanted = 8192 if device.type == "cuda" else 1024
    wanted = max(1, min(wanted, MOST_LOGITS // max(vocab_size, 1)))
    passes: list[list[dict[str, Tensor]]] = []
    for sample in samples:
        length = min(_TOKENS_A_PASS, wanted + 1)
        row = {name: sample[name][0, :length] for name in ("input_ids", "labels")}
        trained = int((row["labels"][1:] >= 0).sum())
        if not trained:
            continue
        together = [row, *passes[-1]] if passes else []
        longest = max((len(each["labels"]) for each in together), default=0)
        if not passes or longest * (len(passes[-1]) + 1) > _TOKENS_A_PASS:
            passes.append([])
        passes[-1].append(row)
        wanted -= trained
        if wanted <= 0:
            break
    return [
        {
            # What is added behind a row is not trained on, and no earlier token sees it.
            name: nn.utils.rnn.pad_sequence(
                [row[name] for row in rows], batch_first=True, padding_value=value
            ).to(device)
            for name, value in (("input_ids", 0), ("labels", IGNORE_INDEX))
        }
        for rows in passes
    ]
