"""From ``model.fp8`` to the layers that run in fp8: measured, agreed over ranks, recorded."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from trainkit.errors import ModelError, RecipeError
from trainkit.evaluation_mode import evaluation_mode
from trainkit.kernels.fp8.function import why_no_fp8
from trainkit.kernels.fp8.trained import quantize_weight
from trainkit.models.fp8.base import Fp8Errors, describe_errors, layer_errors
from trainkit.models.fp8.choice import (
    Candidates,
    Fp8Choice,
    Probe,
    choose,
    find_candidates,
    probe_batches,
)
from trainkit.models.fp8.savings import measure_savings
from trainkit.models.fp8.trained import swap_in
from trainkit.models.proof.norms import let_norms_quantize
from trainkit.models.swap import Swaps
from trainkit.options.model import ALL, Fp8Options
from trainkit.parallel.parameters import is_whole


@dataclass(frozen=True)
class Fp8Setup:
    """What a choice needs besides the model.

    Attributes:
        samples: ``input_ids`` and ``labels`` (1, S) of the run's own data.
        num_tokens: of a micro-batch, for the time that fp8 saves.
        recorded: what an earlier start of the run chose, by the same options.
        agree: gives every rank the first one's value.
        gathering: within, a model whose weights are sharded can run.
    """

    options: Fp8Options
    samples: Iterable[Mapping[str, Tensor]] = ()
    num_tokens: int = 1
    recorded: Mapping[str, Any] | None = None
    agree: Callable[[Any], Any] = lambda value: value
    gathering: Callable[[nn.Module], AbstractContextManager[None]] = lambda _: nullcontext()


@dataclass(frozen=True)
class Fp8Training:
    """A model that trains in fp8.

    Attributes:
        errors: of the layers, for ``kernels.json``; empty where weights are sharded.
    """

    choice: Fp8Choice
    swaps: Swaps
    errors: Mapping[str, Any]


def train_in_fp8(model: nn.Module, setup: Fp8Setup, device: torch.device) -> Fp8Training:
    """Choose the layers of a model whose weights train, and swap fp8 products in."""
    choice = decide(model, setup, device)
    layers: dict[str, Any] = {name: model.get_submodule(name) for name in choice.directions}
    errors = describe_errors(
        ((layer.out_features, layer.in_features), _checked(name, layer))
        for name, layer in layers.items()
        if is_whole(layer.weight)
    )
    swaps = swap_in(model, choice.directions)
    let_norms_quantize(model)
    return Fp8Training(choice, swaps, errors)


def refuse_unfit(device: torch.device) -> None:
    """Refuse fp8 where it cannot run, before anything is loaded."""
    if reason := why_no_fp8(device):
        raise RecipeError(reason, where="model.fp8", fix="remove model.fp8")


def refuse_too_large(model: nn.Module, device: torch.device) -> None:
    """Refuse to measure what a base loses in fp8 where it does not fit in 16 bits."""
    if device.type != "cuda":
        return
    size = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    free, _ = torch.cuda.mem_get_info(device)
    if size > 0.8 * free:
        raise ModelError(
            f"what fp8 costs is measured on the base in 16 bits, which takes {size / 2**30:.1f} "
            f"GiB of {free / 2**30:.1f} free",
            where="model.fp8",
            fix="write model.fp8: all, which keeps every layer in fp8 and measures nothing",
        )


def decide(
    model: nn.Module,
    setup: Fp8Setup,
    device: torch.device,
    *,
    frozen: bool = False,
    whole: Collection[str] = (),
) -> Fp8Choice:
    """Which layers run in fp8; every rank comes to the same."""
    candidates = find_candidates(model, setup.options, frozen=frozen, whole=whole)
    if (known := _recorded(setup, candidates)) is not None:
        return known
    savings, timing = setup.agree(
        measure_savings(
            candidates.layers, setup.num_tokens, device, trained=not frozen, head=candidates.head
        )
    )
    if setup.options.loss_budget == ALL:
        return choose(candidates, setup.options, savings, timing, None, frozen=frozen)
    gaining = any(max(one.forward, one.forward + one.backward) > 0 for one in savings.values())
    with evaluation_mode(model), setup.gathering(model), torch.no_grad():
        probe = Probe(model, _text(setup, model, device), agree=setup.agree)
        if gaining:
            probe.begin()
        return choose(
            candidates, setup.options, savings, timing, probe if gaining else None, frozen=frozen
        )


def _recorded(setup: Fp8Setup, candidates: Candidates) -> Fp8Choice | None:
    if setup.recorded is None:
        return None
    known = Fp8Choice.of(setup.recorded)
    layers = {name for group in known.groups for name in group.layers}
    fits = layers == set(candidates.layers) and known.policy == setup.options.model_dump()
    return known if fits else None


def _text(setup: Fp8Setup, model: nn.Module, device: torch.device) -> list[Mapping[str, Tensor]]:
    embeddings: Any = model.get_input_embeddings()  # type: ignore[operator]
    batches = probe_batches(setup.samples, int(embeddings.num_embeddings), device)
    if not batches:
        raise ModelError(
            "there is no trained token to measure a loss budget on",
            where="model.fp8",
            fix="write model.fp8: all, or look at the data with trainkit data check",
        )
    return batches


def _checked(name: str, layer: Any) -> Fp8Errors:
    codes, scales = quantize_weight(layer.weight)
    errors = layer_errors(layer.weight.detach(), codes, scales, trained=True)
    if not errors.ok:
        raise ModelError(
            f"{name} in fp8 is off by {errors.weight:.1%} (weight), {errors.forward:.1%} (output), "
            f"{errors.backward:.1%} (input gradient) and {errors.weight_gradient:.1%} (weight "
            "gradient), which is more than rounding explains",
            where="model.fp8",
            fix="look for NaN in the weights; train without model.fp8",
        )
    return errors
