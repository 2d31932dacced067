"""Muon for the hidden matrices, AdamW for everything else: one optimizer to everyone outside."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import TrainingArguments

from trainkit.options.optimizers import OPTIMIZERS

IS_HIDDEN = "is_hidden"
"""In a group of parameters: these are hidden matrices."""


def hidden_matrices(model: nn.Module) -> set[nn.Parameter]:
    """Trained weights of linear layers, the output layer excepted: what Muon is made for."""
    getter = getattr(model, "get_output_embeddings", None)
    head = getter() if callable(getter) else None
    tables = {m.weight for m in model.modules() if isinstance(m, nn.Embedding)}  # one may be tied
    if head is not None:
        tables.add(head.weight)
    return {
        parameter
        for module in model.modules()
        if not isinstance(module, nn.Embedding)
        for name, parameter in module.named_parameters(recurse=False)
        if name == "weight" and parameter.ndim == 2 and parameter.requires_grad
    } - tables


class MuonAdamW(torch.optim.Optimizer):
    """torch's Muon and its fused AdamW, each on its groups, with one state and one learning rate.

    Muon's update is scaled to AdamW's size (``match_rms_adamw``), so that a rate and a weight decay
    mean the same to both.

    Args:
        groups: of parameters; `IS_HIDDEN` says whose they are.
        muon: options of ``torch.optim.Muon``.
        adamw: options of ``torch.optim.AdamW``.
    """

    def __init__(
        self, groups: list[dict[str, Any]], muon: dict[str, Any], adamw: dict[str, Any]
    ) -> None:
        hidden = [group for group in groups if group[IS_HIDDEN]]
        others = [group for group in groups if not group[IS_HIDDEN]]
        self._muon = torch.optim.Muon(hidden, **muon) if hidden else None
        self._adamw = torch.optim.AdamW(others, **adamw) if others else None
        super().__init__(groups, {})  # in their order; both have added what they know to them

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for part, is_hidden in ((self._muon, True), (self._adamw, False)):
            if part is not None:
                part.state = self.state
                part.param_groups = [g for g in self.param_groups if g[IS_HIDDEN] is is_hidden]
                part.step()
        return loss


def make_muon(groups: list[dict[str, Any]], args: TrainingArguments) -> MuonAdamW:
    """By ``training``'s rate, decay, betas and ``optim_args``."""
    muon: dict[str, Any] = {"lr": args.learning_rate, "adjust_lr_fn": "match_rms_adamw"}
    muon |= OPTIMIZERS["muon"].read(args.optim_args)
    adamw = {
        "lr": args.learning_rate,
        "betas": (args.adam_beta1, args.adam_beta2),
        "eps": args.adam_epsilon,
        "fused": True,
    }
    return MuonAdamW(groups, muon, adamw)
