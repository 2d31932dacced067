"""The loss inside the language-model head: hidden states and labels in, a loss out, no logits.

`LossHead` goes over the output layer and `CausalLM` over the model around it, whose own forward
runs: asked for logits, the head gives `LazyLogits`, and asked for the loss of these, it is called
with labels. Its weight is read in its own forward, so the hooks of DDP, ZeRO-3 and FSDP gather it
and reduce its gradient as they do for any module. Where somebody needs logits, they are computed
and the reason is logged once.

B batch, S sequence, H hidden.
"""

import functools
import inspect
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss

from trainkit.kernels import linear_cross_entropy_counted, linear_token_losses
from trainkit.models.fp8.trained import directions_of
from trainkit.models.loss.lazy_logits import LazyLogits, LogitsChange, LossCall
from trainkit.models.proof.forward import KernelForward
from trainkit.models.swap import plain_class

logger = logging.getLogger(__name__)

IGNORE_INDEX = -100

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
        scale: float = 1.0,
        softcap: float | None = None,
    ) -> torch.Tensor:
        """Logits (B, S, V), or with labels (B, S), aligned with the hidden states, the loss.

        With ``token_losses`` it is each token's own, (B, S), and neither divided nor counted. The
        loss is that of ``softcap * tanh(logits * scale / softcap)``.
        """
        if labels is None:
            return super().forward(hidden_states)
        bias: torch.Tensor | None = self.bias
        if scale != 1.0:
            hidden_states = hidden_states * scale
            bias = None if bias is None else bias * scale
        if token_losses:
            return self._token_losses(
                hidden_states, labels, bias, softcap, num_trained, ignore_index
            )
        counted = linear_cross_entropy_counted(
            hidden_states,
            self.weight,
            labels,
            bias=bias,
            softcap=softcap,
            num_items=num_items,
            num_trained=num_trained,
            ignore_index=ignore_index,
            label_smoothing=self.loss_options.label_smoothing,
            z_loss=self.loss_options.z_loss,
            chunk_tokens=self.loss_options.chunk_tokens,
            keeps_gradient=self.loss_options.keeps_gradient,
            in_fp8=directions_of(self),
        )
        if self.tallies is None:
            self.tallies = {True: Tally(), False: Tally()}
        self.tallies[self.training].add(counted.num_correct, counted.num_trained)
        if self.keeps_row_losses:
            self.row_losses = counted.row_losses
        return counted.loss

    def _token_losses(
        self,
        hidden_states: torch.Tensor,
        labels: torch.Tensor,
        bias: torch.Tensor | None,
        softcap: float | None,
        num_trained: int | None,
        ignore_index: int,
    ) -> torch.Tensor:
        options = self.loss_options
        if options.label_smoothing or options.z_loss:
            raise ValueError("the tokens' own losses know no label smoothing and no z-loss")
        return linear_token_losses(
            hidden_states,
            self.weight,
            labels,
            bias=bias,
            ignore_index=ignore_index,
            softcap=softcap,
            num_trained=num_trained,
            chunk_tokens=options.chunk_tokens,
            in_fp8=directions_of(self),
        )


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
        for_tokens = given.pop("token_losses", None)
        if reason is not None:
            if for_tokens:
                raise RuntimeError(f"the head cannot give the tokens' own losses: {reason}")
            if given.get("labels") is not None:
                _log_once(reason)
            given.pop("num_trained_tokens", None)
            return super().forward(**given)
        options = {name: given.pop(name, None) for name in _LOSS_INPUTS}
        labels = given["labels"]
        if for_tokens:  # neither a router's loss nor a mean is in them
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
            if for_tokens:
                outputs.loss = call.token_losses(outputs.logits, labels)
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
        """Why this call must compute logits, or None."""
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
    if plain_class(head) is not nn.Linear:
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

    Args:
        heads: of one model (peft may keep a trained copy next to the original).

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


def take_counts(model: nn.Module, *, training: bool = True) -> torch.Tensor | None:
    """Correct and trained tokens since the last call, (2,) int64 on the device, without waiting.

    Args:
        model: holds the head, under any wrapper.
        training: the counts of training mode, or those of evaluation mode.

    Returns:
        None when no loss has come out of a head since.
    """
    for module in model.modules():
        if isinstance(module, LossHead) and module.tallies is not None:
            return module.tallies[training].take()
    return None
