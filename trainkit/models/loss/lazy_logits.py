"""Logits that nobody has computed: hidden states, a head, and what was done to them since.

A model's own forward runs as it is written. Its head gives these instead of numbers; slices,
scales, soft caps and casts are remembered, and when the loss is asked for, the head computes it
from hidden states. Whoever wants the numbers gets them, computed then.

B batch, S sequence, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

_ONE = 1e-12
"""A cap divides and multiplies by the same number, which leaves a rounding of fp64."""


@dataclass(frozen=True)
class LogitsChange:
    """What happens to logits between the head and the loss: ``cap * tanh(logits * scale / cap)``.

    Attributes:
        scale: all factors in one.
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


class LazyLogits:
    """(..., V) logits of hidden states (..., H).

    Args:
        hidden: the hidden states.
        call: the call of the model that these are of.
        change: what was done to them.
    """

    def __init__(self, hidden: Tensor, call: LossCall, change: LogitsChange) -> None:
        self.hidden, self.call, self.change = hidden, call, change

    def computed(self) -> Tensor:
        """The numbers."""
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
                keys = (
                    *keys[:at],
                    *[slice(None)] * (rank - len(keys) + 1),
                    *keys[at + 1 :],
                )
            size = self.shape[-1]
            if len(keys) < rank or keys[rank - 1].indices(size) == (0, size, 1):
                return self._with(self.hidden[keys[: rank - 1]])
        return self.computed()[key]

    @property
    def shape(self) -> torch.Size:
        """(..., V)."""
        return torch.Size((*self.hidden.shape[:-1], self.call.vocab_size))

    def size(self, dim: int | None = None) -> Any:
        """As a tensor's."""
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        """As a tensor's."""
        return self.hidden.dim()

    @property
    def ndim(self) -> int:
        """As a tensor's."""
        return self.hidden.dim()

    @property
    def device(self) -> torch.device:
        """Where the hidden states are."""
        return self.hidden.device

    @property
    def dtype(self) -> torch.dtype:
        """What the hidden states have."""
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
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
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
        vocab_size: V.
        num_items: what the loss is divided by; None for the number of trained tokens.
        num_trained: trained tokens, where somebody has counted them.
        shift_labels: labels that are aligned already, (B, S).
        ignore_index: the label of what is not trained; None for the usual.
        num_losses: how many losses have come out of the head.
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

    def token_losses(self, logits: Any, labels: Tensor) -> Tensor:
        """Each token's own loss, (B, S), neither divided nor counted; 0 in the last place."""
        ignore_index = -100 if self.ignore_index is None else self.ignore_index
        targets = _aligned(labels, self.shift_labels, ignore_index)
        return self.loss(
            logits,
            targets,
            ignore_index=ignore_index,
            num_trained=self.num_trained,
            token_losses=True,
        )

    def loss(self, logits: LazyLogits, targets: Tensor, **options: Any) -> Tensor:
        """The head's own loss of aligned targets."""
        self.num_losses += 1
        return self.head(
            logits.hidden,
            targets.to(logits.device),
            scale=logits.change.scale,
            softcap=logits.change.softcap,
            **options,
        )
