"""The loss inside the language-model head: hidden states and labels in, a loss out, no logits.

`LossHead` goes over the output layer and `CausalLM` over the model around it, whose own forward
runs as it is written. Asked for logits, the head gives `LazyLogits`: slices, scales, soft caps and
casts are remembered, and asked for the loss of these, the head is called with labels. Its weight is
read in its own forward, so the hooks of DDP, ZeRO-3 and FSDP gather it and reduce its gradient as
they do for any module. Where somebody needs logits, they are computed and the reason is logged
once.

B batch, S sequence, H hidden, V vocabulary.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import cross_entropy, pad
from transformers import PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss

from trainkit.models.linears import LINEARS
from trainkit.models.swap import KernelForward, plain_class
from trainkit.options.data import IGNORE_INDEX

logger = logging.getLogger(__name__)

_LOSS_INPUTS = ("shift_labels", "num_items_in_batch", "num_trained_tokens", "ignore_index")
"""What only the loss takes, and a model's forward need not know."""


@dataclass(frozen=True)
class LossOptions:
    """What is added to the plain loss, and how much memory it may take.

    Args:
        label_smoothing: share of the target spread evenly over the vocabulary.
        z_loss: weight of the squared log-partition.
        chunk_tokens: tokens whose logits exist at a time; None takes the kernel's default.
        keeps_gradient: a second backward pass through the loss is right; it costs the memory of
            the head's gradient.
    """

    label_smoothing: float = 0.0
    z_loss: float = 0.0
    chunk_tokens: int | None = None
    keeps_gradient: bool = True


class Tally:
    """Tokens predicted right and tokens trained since the last `take`, summed on the device."""

    def __init__(self) -> None:
        self._sums: torch.Tensor | None = None

    def add(self, num_correct: torch.Tensor, num_trained: torch.Tensor) -> None:
        """Add one batch; nothing waits for the device."""
        counts = torch.stack((num_correct, num_trained))
        self._sums = counts if self._sums is None else self._sums + counts

    def take(self) -> torch.Tensor | None:
        """(2,) int64, correct and trained, on the head's device; None if there was no batch."""
        sums, self._sums = self._sums, None
        return sums


class LossHead(KernelForward):
    """An ``nn.Linear`` that turns hidden states and labels into their loss.

    Without labels it is the linear layer it was.
    """

    uses = ("linear_cross_entropy",)
    weight: nn.Parameter
    bias: nn.Parameter | None
    loss_options: LossOptions = LossOptions()
    tallies: Mapping[bool, Tally] | None = None
    keeps_row_losses: bool = False
    row_losses: torch.Tensor | None = None
    """(B, S) fp32, each row's own loss in the last batch, where ``keeps_row_losses`` is set."""
    loss_call: LossCall | None = None
    """Set while the model computes a loss; asked for logits, the head then gives lazy ones."""

    def __call__(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Without a loss to compute, what any module does; hooks wait for the call with labels."""
        if self.loss_call is None or args or kwargs:
            return super().__call__(hidden_states, *args, **kwargs)
        return LazyLogits(hidden_states, self.loss_call, LogitsChange())

    def forward(
        self,
        hidden_states: torch.Tensor,
        labels: torch.Tensor | None = None,
        *,
        num_items: torch.Tensor | int | None = None,
        num_trained: int | None = None,
        ignore_index: int = IGNORE_INDEX,
        token_losses: bool = False,
        teacher: TeacherHead | None = None,
        scale: float = 1.0,
        softcap: float | None = None,
    ) -> Any:
        """Logits (B, S, V), or with labels (B, S), aligned with the hidden states, the loss.

        With ``token_losses`` it is each token's own, (B, S), and neither divided nor counted; with
        a teacher, what `linear_divergence` returns. The loss is that of
        ``softcap * tanh(logits * scale / softcap)``.
        """
        if labels is None:
            return super().forward(hidden_states)
        bias: torch.Tensor | None = self.bias
        hidden_states, bias = _times(scale, hidden_states, bias)
        weight: Tensor = self.weight
        if (nf4 := LINEARS["nf4"]).recognises(self) and nf4.unpacker is not None:
            weight = nf4.unpacker(self)(weight, hidden_states.dtype)  # type: ignore[misc]
        from trainkit import kernels

        options = self.loss_options
        common: dict[str, Any] = {
            "bias": bias,
            "softcap": softcap,
            "num_trained": num_trained,
            "ignore_index": ignore_index,
            "chunk_tokens": options.chunk_tokens,
            # Which products run in fp8, where the layer trains in it.
            "in_fp8": self.directions() if getattr(self, "runs_fp8", False) else None,  # type: ignore[operator]
        }
        if token_losses:
            if options.label_smoothing or options.z_loss:
                raise ValueError("the tokens' own losses know no label smoothing and no z-loss")
            return kernels.linear_token_losses(hidden_states, weight, labels, **common)
        if teacher is not None:
            common |= {**teacher.options, "keeps_gradient": options.keeps_gradient}
            return kernels.linear_divergence(
                hidden_states, weight, labels, *teacher.logits, **common
            )
        counted = kernels.linear_cross_entropy_counted(
            hidden_states,
            weight,
            labels,
            num_items=num_items,
            label_smoothing=options.label_smoothing,
            z_loss=options.z_loss,
            keeps_gradient=options.keeps_gradient,
            **common,
        )
        if self.tallies is None:
            self.tallies = {True: Tally(), False: Tally()}
        self.tallies[self.training].add(counted.num_correct, counted.num_trained)
        if self.keeps_row_losses:
            self.row_losses = counted.row_losses
        return counted.loss


class CausalLM(KernelForward):
    """A causal language model whose loss comes out of its head.

    Its forward keeps the signature of the one it replaces: ``generate`` and Trainer read it.
    """

    uses = ("linear_cross_entropy",)

    config: Any
    tp_size: int | None

    _positional: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if len(cls.__bases__) != 2 or cls.__bases__[0] is not CausalLM:
            return
        below: Any = cls.__bases__[1]
        original = below.forward

        @functools.wraps(original)
        def forward(self: CausalLM, *args: Any, **kwargs: Any) -> Any:
            return self._forward(**dict(zip(cls._positional, args, strict=False)), **kwargs)

        cls._positional = tuple(inspect.signature(original).parameters)[1:]
        cls.forward = forward

    @property
    def loss_function(self) -> Callable[..., torch.Tensor]:
        """The model's own; while it computes the plain loss, that which comes out of the head."""
        plain: Callable[..., torch.Tensor] = PreTrainedModel.loss_function.fget(self)
        call = getattr(_head_of(self), "loss_call", None)
        return plain if call is None else functools.partial(call.causal_loss, plain)

    @loss_function.setter
    def loss_function(self, value: Callable[..., torch.Tensor]) -> None:
        PreTrainedModel.loss_function.fset(self, value)

    def _forward(self, **given: Any) -> Any:
        reason = self.why_logits(given)
        of_head: Mapping[str, Any] | None = given.pop("of_head", None)
        if reason is not None:
            if of_head is not None:
                raise RuntimeError(f"the head cannot serve the call: {reason}")
            if given.get("labels") is not None:
                _log_once(reason)
            given.pop("num_trained_tokens", None)
            return super().forward(**given)
        options = {name: given.pop(name, None) for name in _LOSS_INPUTS}
        labels = given["labels"]
        if of_head is not None:  # neither a router's loss nor a mean is in it
            given["labels"] = None
        outer, head = self.get_output_embeddings(), _head_of(self)  # type: ignore[operator]
        head.loss_call = call = LossCall(
            outer,
            super(LossHead, head).__call__,  # type: ignore[misc]
            head.out_features,
            options["num_items_in_batch"],
            options["num_trained_tokens"],
            options["shift_labels"],
            options["ignore_index"],
        )
        try:
            outputs = super().forward(**given)
            if of_head is not None:
                outputs.loss = call.result(outputs.logits, labels, of_head)
        finally:
            head.loss_call = None
        if call.num_computed:
            _log_once("the model does something else with its logits")
        if isinstance(outputs.get("logits"), LazyLogits):
            # Setting it to None would leave it among the output's items.
            kept = {name: value for name, value in outputs.items() if name != "logits"}
            outputs = type(outputs)(**kept)
        if head.row_losses is not None:
            head.row_losses = _in_rows(head.row_losses, labels)
        return outputs

    def why_logits(self, given: Mapping[str, Any]) -> str | None:
        if given.get("labels") is None:
            return "there are no labels"
        head = _head_of(self)
        if not isinstance(head, LossHead):
            return f"lm_head has become a {type(head).__name__}"
        if PreTrainedModel.loss_function.fget(self) is not ForCausalLMLoss:
            return "the model has been given its own loss function"
        keep = given.get("logits_to_keep")
        if isinstance(keep, torch.Tensor) or keep not in (None, 0):
            return "logits_to_keep asks for some of the logits"
        wants_object = given.get("return_dict")  # peft passes None for "as configured"
        if not (self.config.return_dict if wants_object is None else wants_object):
            return "the caller expects a tuple"
        return None


def _in_rows(losses: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """(B, S): a model that flattens its logits leaves each row's last place out."""
    if losses.dim() == 2 or losses.numel() == labels.numel():
        return losses.view(labels.shape)
    return nn.functional.pad(losses.view(len(labels), -1), (0, 1))


def _head_of(model: Any) -> Any:
    return head_at_work(model.get_output_embeddings())


def why_no_loss_head(model: Any) -> str | None:
    """Why this model's loss cannot come out of its head, or None."""
    outer = model.get_output_embeddings()
    if outer is None:
        return "the model has no output layer"
    head = head_at_work(outer)
    if plain_class(head) is not nn.Linear and not LINEARS["nf4"].recognises(head):
        return f"lm_head is a {type(head).__module__}.{type(head).__name__}, not a plain Linear"
    if model.loss_function is not ForCausalLMLoss:
        return "the model has its own loss function"
    if model.tp_size is not None:
        return "tensor parallelism splits lm_head"
    return None


def head_at_work(head: Any) -> nn.Module:
    """The head that computes: where peft trains it whole (``modules_to_save``), peft's copy of it.

    peft's wrapper hands all arguments on to the copy, or, with its adapters off, to the original.
    """
    copies = getattr(head, "modules_to_save", None)
    if not isinstance(copies, nn.ModuleDict):
        plain: nn.Module = head
        return plain
    names: Any = [] if head.disable_adapters else head.active_adapters
    chosen: nn.Module = copies[names[0]] if len(names) == 1 else head.original_module
    return chosen


@functools.cache
def _log_once(reason: str) -> None:
    logger.info("computing logits and the plain loss: %s", reason)


def take_row_losses(heads: Iterable[LossHead]) -> torch.Tensor | None:
    """(B, S) the row losses of the batch just computed, aligned with the hidden states.

    peft may keep a trained copy next to the original head.

    Returns:
        None when no loss has come out of a head that ``keeps_row_losses`` since the last call.
    """
    for head in heads:
        if head.row_losses is not None:
            losses, head.row_losses = head.row_losses, None
            return losses
    return None


def configure(model: nn.Module, options: LossOptions) -> int:
    """Give every loss head in ``model`` these options; returns how many there are."""
    heads = [module for module in model.modules() if isinstance(module, LossHead)]
    for head in heads:
        head.loss_options = options
    return len(heads)


def takes_loss_from_head(model: nn.Module) -> bool:
    """Whether a batch with labels gets its loss from the head, without logits."""
    models = [module for module in model.modules() if isinstance(module, CausalLM)]
    return bool(models) and all(each.why_logits({"labels": ()}) is None for each in models)


def take_counts(modules: Iterable[nn.Module], *, training: bool = True) -> torch.Tensor | None:
    """Correct and trained tokens since the last call, (2,) int64 on the device; None for none."""
    for module in modules:
        if isinstance(module, LossHead) and module.tallies is not None:
            return module.tallies[training].take()
    return None


_ONE = 1e-12
"""A cap divides and multiplies by the same number, which leaves a rounding of fp64."""


@dataclass(frozen=True)
class LogitsChange:
    """What happens to logits between the head and the loss: ``cap * tanh(logits * scale / cap)``.

    Attributes:
        softcap: None where there is none.
    """

    scale: float = 1.0
    softcap: float | None = None

    def times(self, factor: float) -> LogitsChange | None:
        """With one factor more; None for one that a cap cannot take in."""
        if self.softcap is None:
            return LogitsChange(_rounded(self.scale * factor))
        if factor <= 0:
            return None
        return LogitsChange(_rounded(self.scale * factor), self.softcap * factor)

    def of(self, logits: Tensor) -> Tensor:
        """The change made to numbers."""
        logits = logits if self.scale == 1.0 else logits * self.scale
        if self.softcap is None:
            return logits
        return torch.tanh(logits / self.softcap) * self.softcap


def _rounded(scale: float) -> float:
    return 1.0 if abs(scale - 1.0) < _ONE else scale


def _times(scale: float, hidden: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    if scale == 1.0:
        return hidden, bias
    return hidden * scale, None if bias is None else bias * scale


@dataclass(frozen=True)
class TeacherHead:
    """A teacher's logits, not computed yet, and how a student is held against them.

    Attributes:
        logits: hidden states (B, S, H) and the weight (V, H).
        options: of `linear_divergence`.
    """

    logits: tuple[Tensor, Tensor]
    options: Mapping[str, Any]


@torch.no_grad()
def head_of_teacher(
    teacher: nn.Module, inputs: Mapping[str, Any], options: Mapping[str, Any]
) -> TeacherHead:
    """What a frozen teacher whose loss comes out of its head says of a batch with labels."""
    lazy = teacher(**inputs, of_head={})["loss"]
    head = head_at_work(teacher.get_output_embeddings())  # type: ignore[operator]
    hidden, bias = _times(lazy.change.scale, lazy.hidden, head.bias)  # type: ignore[arg-type]
    more = {"teacher_bias": bias, "teacher_softcap": lazy.change.softcap}
    return TeacherHead((hidden, head.weight), {**options, **more})  # type: ignore[arg-type]


class LazyLogits:
    """(..., V) logits of hidden states (..., H)."""

    def __init__(self, hidden: Tensor, call: LossCall, change: LogitsChange) -> None:
        self.hidden, self.call, self.change = hidden, call, change

    def computed(self) -> Tensor:
        self.call.num_computed += 1
        return self.change.of(self.call.linear(self.hidden))

    def _with(self, hidden: Tensor) -> LazyLogits:
        return LazyLogits(hidden, self.call, self.change)

    def _times(self, factor: Any) -> LazyLogits | None:
        if isinstance(factor, Tensor) and not factor.dim() and not factor.requires_grad:
            factor = factor.item()
        if not isinstance(factor, int | float):
            return None
        change = self.change.times(float(factor))
        return None if change is None else LazyLogits(self.hidden, self.call, change)

    def __mul__(self, factor: Any) -> Any:
        found = self._times(factor)
        return self.computed() * factor if found is None else found

    __rmul__ = __imul__ = __mul__

    def __truediv__(self, by: Any) -> Any:
        found = self._times(1.0 / by) if isinstance(by, int | float) and by else None
        return self.computed() / by if found is None else found

    __itruediv__ = __truediv__

    def __add__(self, other: Any) -> Any:
        return self.computed() + other

    __radd__ = __iadd__ = __add__

    def __sub__(self, other: Any) -> Any:
        return self.computed() - other

    def __neg__(self) -> Any:
        return -self.computed()

    def __getitem__(self, key: Any) -> Any:
        keys = key if isinstance(key, tuple) else (key,)
        rank = self.hidden.dim()
        if all(each is Ellipsis or isinstance(each, slice) for each in keys):
            if Ellipsis in keys:
                at = keys.index(Ellipsis)
                keys = (*keys[:at], *[slice(None)] * (rank - len(keys) + 1), *keys[at + 1 :])
            size = self.shape[-1]
            if len(keys) < rank or keys[rank - 1].indices(size) == (0, size, 1):
                return self._with(self.hidden[keys[: rank - 1]])
        return self.computed()[key]

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.hidden.shape[:-1], self.call.vocab_size))

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        return self.hidden.dim()

    @property
    def ndim(self) -> int:
        return self.hidden.dim()

    @property
    def device(self) -> torch.device:
        return self.hidden.device

    @property
    def dtype(self) -> torch.dtype:
        return self.hidden.dtype

    def float(self) -> LazyLogits:
        """The loss is taken in fp32 at least."""
        return self

    def contiguous(self) -> LazyLogits:
        """There is nothing to move."""
        return self

    def to(self, *args: Any, **kwargs: Any) -> LazyLogits:
        """The labels come to where the hidden states are."""
        return self

    def view(self, *shape: Any) -> Any:
        """As a tensor's; rows of V stay uncomputed."""
        if len(shape) == 1 and not isinstance(shape[0], int):
            shape = tuple(shape[0])
        if len(shape) == 2 and shape[1] == self.call.vocab_size:
            return self._with(self.hidden.reshape(-1, self.hidden.shape[-1]))
        return self.computed().view(*shape)

    reshape = view

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("hidden", "call", "change"):
            raise AttributeError(name)
        return getattr(self.computed(), name)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        first = args[0] if args else given.get("input")
        if isinstance(first, LazyLogits):
            change = first.change
            if func is torch.tanh and change.softcap is None:
                return LazyLogits(first.hidden, first.call, LogitsChange(change.scale, 1.0))
            if func is functional.cross_entropy:
                loss = first.call.cross_entropy(first, args[1:], given)
                if loss is not None:
                    return loss
        return func(
            *map(_computed, args), **{name: _computed(each) for name, each in given.items()}
        )


def _aligned(labels: Tensor, shifted: Tensor | None, ignore_index: int) -> Tensor:
    """What each place is to predict; nowhere else are labels shifted."""
    if shifted is not None:
        return shifted
    return functional.pad(labels[..., 1:], (0, 1), value=ignore_index)


def _computed(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(map(_computed, value))
    return value.computed() if isinstance(value, LazyLogits) else value


@dataclass
class LossCall:
    """One call of a causal language model with labels.

    Attributes:
        head: what the model calls for logits: the output layer, or peft's wrapper of it.
        linear: hidden states to logits, by the layer that has the weight.
        num_items: what the loss is divided by; None for the number of trained tokens.
        shift_labels: labels that are aligned already, (B, S).
        ignore_index: the label of what is not trained; None for the usual.
        num_computed: how many times somebody wanted the numbers.
    """

    head: Callable[..., Tensor]
    linear: Callable[[Tensor], Tensor]
    vocab_size: int
    num_items: Tensor | int | None = None
    num_trained: int | None = None
    shift_labels: Tensor | None = None
    ignore_index: int | None = None
    num_losses: int = 0
    num_computed: int = 0

    def causal_loss(
        self,
        plain: Callable[..., Tensor],
        logits: Any,
        labels: Tensor,
        vocab_size: int,
        **options: Any,
    ) -> Tensor:
        """What transformers' ``ForCausalLMLoss`` is for logits.

        Args:
            plain: that function, for logits that somebody has computed.
            logits: (B, S, V).
            labels: (B, S), not shifted.
            vocab_size: V.
            options: whatever the model hands over.
        """
        named = {"num_items_in_batch": self.num_items, "shift_labels": self.shift_labels}
        if self.ignore_index is not None:
            named["ignore_index"] = self.ignore_index
        options = {**{name: each for name, each in named.items() if each is not None}, **options}
        if not isinstance(logits, LazyLogits) or vocab_size != self.vocab_size:
            return plain(_computed(logits), labels, vocab_size, **options)
        ignore_index = options.get("ignore_index", -100)
        targets = _aligned(labels, options.get("shift_labels"), ignore_index)
        num_items = options.get("num_items_in_batch")
        return self.loss(
            logits,
            targets,
            ignore_index=ignore_index,
            num_items=num_items,
            num_trained=self.num_trained,
        )

    def cross_entropy(
        self, logits: LazyLogits, args: tuple[Any, ...], options: dict[str, Any]
    ) -> Tensor | None:
        """``torch.nn.functional.cross_entropy`` of rows; None for what the head cannot do."""
        known = ("weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")
        given = dict(zip(("target", *known), args, strict=False)) | options
        targets = given.pop("target", None)
        given.pop("input", None)
        reduction = given.pop("reduction", "mean")
        ignore_index = given.pop("ignore_index", -100)
        if (
            reduction not in ("mean", "sum")
            or any(isinstance(each, Tensor) or each for each in given.values())
            or logits.hidden.dim() != 2
            or targets is None
            or targets.dim() != 1
        ):
            return None
        num_items = 1 if reduction == "sum" else None
        return self.loss(logits, targets, ignore_index=ignore_index, num_items=num_items)

    def result(self, logits: Any, labels: Tensor, of_head: Mapping[str, Any]) -> Any:
        """What the head makes of its hidden states with these options; lazy logits without any."""
        if not of_head:
            return logits
        ignore_index = -100 if self.ignore_index is None else self.ignore_index
        targets = _aligned(labels, self.shift_labels, ignore_index)
        given = {"ignore_index": ignore_index, "num_trained": self.num_trained, **of_head}
        return self.loss(logits, targets, **given)

    def loss(self, logits: LazyLogits, targets: Tensor, **options: Any) -> Any:
        self.num_losses += 1
        return self.head(
            logits.hidden,
            targets.to(logits.device),
            scale=logits.change.scale,
            softcap=logits.change.softcap,
            **options,
        )


_CHUNK_ELEMENTS = 1 << 26
"""Logits widened to fp32 at a time: 256 MiB."""


def token_losses(model: nn.Module, inputs: Mapping[str, Any]) -> torch.Tensor:
    """What preference objectives are made of: the negative log-probability of each label.

    A router's auxiliary loss is not in it.

    Args:
        model: a causal language model, patched or plain, under any wrapper.
        inputs: of its forward; ``labels`` (B, S) are not shifted, ``IGNORE_INDEX`` where a token
            does not count; ``num_trained_tokens``, those that do, saves a patched model the others.

    Returns:
        (B, S) in fp32 (fp64 for fp64): at each place the loss of the next token; 0 where that one
        has no label, so also in the last place. The patched model keeps no logits for it.
    """
    given = dict(inputs)
    if takes_loss_from_head(model):
        losses: torch.Tensor = model(**given, of_head={"token_losses": True})["loss"]
        return losses
    labels = given.pop("labels")
    given.pop("num_trained_tokens", None)
    logits = model(**given)["logits"]
    return pad(losses_of_logits(logits[:, :-1], labels[:, 1:]), (0, 1))


def losses_of_logits(
    logits: torch.Tensor, targets: torch.Tensor, label_smoothing: float = 0.0
) -> torch.Tensor:
    """The loss of each target, (B, S) in fp32 (fp64 for fp64).

    Args:
        logits: (B, S, V).
        targets: (B, S), each the label of the token that its logits predict.
        label_smoothing: share of the target spread evenly over the vocabulary.
    """
    rows = logits.flatten(0, 1)
    wanted = targets.flatten().to(rows.device)
    chunk = max(1, _CHUNK_ELEMENTS // rows.shape[1])
    wide = torch.promote_types(rows.dtype, torch.float32)
    losses = [
        cross_entropy(
            part.to(wide),
            chosen,
            reduction="none",
            ignore_index=IGNORE_INDEX,
            label_smoothing=label_smoothing,
        )
        for part, chosen in zip(rows.split(chunk), wanted.split(chunk), strict=True)
    ]
    return torch.cat(losses).view(targets.shape).to(targets.device)
