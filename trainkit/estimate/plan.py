"""What a training step is, as far as its memory and time depend on it. No torch."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from trainkit.estimate.job import Adapters, Job, Matrices, ModelShape
from trainkit.options import DistillOptions
from trainkit.options.model import ALL, LORA_OPS, OPS, Fp8Options

if TYPE_CHECKING:
    from trainkit.estimate.record import Layer, Recording, Seen

ALL_OPS = frozenset((*OPS, *LORA_OPS))
"""Trainkit's kernels."""

MIN_OFFLOAD_WIDTH = 2048
"""From which width on ``lora.offload_activations: auto`` offloads, as in ``lora.offload``."""


@dataclass(frozen=True)
class Plan:
    """One micro-batch of one GPU, and what surrounds it.

    Attributes:
        base: what weights are kept in: bfloat16, float32, nf4, int8, fp8.
        adapters: None trains all weights.
        fp8: share of the layers' numbers whose forward products run in fp8, and that a frozen
            base has in fp8. None is 16 bits.
        fp8_backward: share whose backward products do.
        fp8_head: the output layer's, too.
        in_16_bits: of these, roles that keep 16 bits.
        masked: rows are padded, and plain transformers hands attention a mask.
        ops: trainkit's kernels that run; none is plain transformers.
        recompute: 0 keeps every layer's activations, k recomputes every k-th layer.
        offload: inputs of recomputed layers wait in host memory, with adapters or without.
        selective: recomputed layers keep products and attention.
        budget_gib: by which ``recompute_first`` was chosen, see `peak.keep_to_budget`.
        budget_offloads: what the budget does not hold may go to the host.
        stage: what is sharded: 1 optimizer states, 2 gradients too, 3 weights too; 0 is DDP, or
            one process without DeepSpeed.
        fsdp: torch's FSDP2 shards, at stage 3, and keeps trained weights as fp32 shards.
        offloads_optimizer: masters and optimizer states wait in host memory.
        gpus: ranks that hold parts of one model, or compute parts of one batch.
        tensor: ranks that share each matrix product; not among ``gpus``.
        stage_layers: of each stage of each rank of a pipeline; not among ``gpus``.
        held: times what a rank's layers keep is there at once: micro-batches on their way.
        held_late: of them, those whose weights' part of the backward pass is still to come.
        wire: bytes of what is received from and sent to other stages.
        gpu_gib: memory of each; FSDP2 keeps a small model whole where there is room.
        trainer: trainkit's loop drives it, with fp32 masters; else a bare step.
        keeps_masters: trained half-precision weights have fp32 copies.
        in_backward: each weight steps in the backward pass, and its gradient is gone.
        flat: weights, gradients and states are in one buffer each.
        optimizer: bytes of optimizer state per trained number; None where no optimizer runs.
        paged: bytes of it per trained number that wait in pages of host memory, besides these.
        stepping: bytes of temporaries of an optimizer's step: for every trained number while all
            step together, and for every number of the largest weight.
        slower: what the optimizer's step takes on top of reading and writing all numbers once: see
            `options.optimizers.Optimizer`.
        chunk_tokens: tokens whose logits the fused loss has at a time; None is its default.
        tile_tokens: of which a feed-forward block computes at a time; None is all of them.
        upcast: everything that is not quantised is fp32 (peft's prepare_model_for_kbit_training).
        train: parts of the model, without adapters.
        image_tokens: of a micro-batch, those that stand for images.
        distill: as `Job` has it.
        second: bytes of the weights of a teacher, or of the model before training, on each rank.
    """

    shape: ModelShape
    batch_size: int
    length: int
    accumulation: int = 1
    sequence: int = 1
    tensor: int = 1
    stage_layers: tuple[tuple[int, ...], ...] = ()
    schedule: str = "1f1b"
    held: float = 1.0
    held_late: float = 0.0
    wire: float = 0.0
    base: str = "bfloat16"
    adapters: Adapters | None = None
    fp8: float | None = None
    fp8_backward: float = 1.0
    fp8_head: bool = False
    in_16_bits: frozenset[str] = frozenset()
    masked: bool = False
    ops: frozenset[str] = field(default=ALL_OPS)
    recompute: int = 0
    recompute_first: int = 0
    offload: bool = False
    selective: bool = False
    budget_gib: float | None = None
    budget_offloads: bool = True
    stage: int = 0
    fsdp: bool = False
    offloads_optimizer: bool = False
    offloads_weights: bool = False
    gpus: int = 1
    gpu_gib: float = 79.2
    trainer: bool = True
    keeps_masters: bool = True
    one_pass: bool = False
    in_backward: bool = False
    flat: bool = False
    optimizer: float | None = 8.0
    paged: float = 0.0
    stepping: tuple[float, float] = (0.0, 0.0)
    slower: tuple[float, float, float] = (0.0, 0.0, 0.0)
    chunk_tokens: int | None = None
    tile_tokens: int | None = None
    upcast: bool = False
    train: tuple[str, ...] = ("text",)
    image_tokens: int = 0
    distill: tuple[DistillOptions, int, int] | None = None
    second: float = 0.0

    @property
    def dealt(self) -> list[list[int]]:
        """The layers of each rank of a pipeline: stage after stage, there, or there and back."""
        ranks = len(self.stage_layers)
        found: list[list[int]] = [[] for _ in range(ranks)]
        start = 0
        for number in range(len(self.stage_layers[0])):
            back = number % 2 and self.schedule == "zbv"
            for rank in reversed(range(ranks)) if back else range(ranks):
                count = self.stage_layers[rank][number]
                found[rank] += range(start, start + count)
                start += count
        return found

    @property
    def tokens(self) -> int:
        """Of a micro-batch, on one rank: ranks that share a row have equal parts of it."""
        return -(-self.batch_size * self.length // self.sequence)

    @property
    def ranks(self) -> int:
        return self.gpus * self.tensor * max(len(self.stage_layers), 1)

    @property
    def is_tiled(self) -> bool:
        """Whether feed-forward blocks compute some of the tokens at a time."""
        return self.tile_tokens is not None and self.tile_tokens < self.tokens

    @property
    def element(self) -> int:
        return 4 if self.base == "float32" and self.adapters is None else 2

    @property
    def trained_element(self) -> int:
        """Bytes of a number that trains."""
        return self.element if self.adapters is None else self.adapters.element

    @property
    def stream(self) -> int:
        """Bytes of a number between two layers."""
        return 4 if self.upcast or self.base == "float32" else 2

    @functools.cached_property
    def job(self) -> Job:
        """What is put into the model whose step is recorded."""
        roles: frozenset[str] = frozenset()
        if self.fp8 is not None:
            roles = frozenset(self.shape.roles) - self.in_16_bits
        return Job(
            self.shape.config,
            base=self.base,
            adapters=self.adapters and replace(self.adapters, offload=False),
            in_fp8=roles,
            fp8_head=self.fp8_head,
            ops=self.ops,
            masked=self.masked,
            upcast=self.upcast,
            chunk_tokens=self.chunk_tokens,
            tile_tokens=self.tile_tokens,
            keeps_gradient=not self.in_backward,
            tensor=self.tensor,
            train=self.train,
            has_images=self.image_tokens > 0,
            distill=self.distill,
        )

    @functools.cached_property
    def recorded(self) -> Recording:
        """A step on this rank's tokens, of a model with a few layers."""
        from trainkit.estimate.record import record  # which needs torch

        return record(self.job, self.batch_size, -(-self.length // self.sequence))

    @functools.cached_property
    def seen(self) -> Seen | None:
        """What images take; None without any."""
        if not self.image_tokens:
            return None
        from trainkit.estimate.record import record_images

        return record_images(self.job, self.image_tokens, recompute=self.recompute == 1)

    def fuses(self, op: str) -> bool:
        return op in self.ops and self.recorded.plain is None

    def is_recomputed(self, layer: int) -> bool:
        """Whether a layer (from 0) is computed again in the backward pass."""
        if layer < self.recompute_first:
            return True
        return self.recompute > 0 and layer % self.recompute == 0

    @property
    def recomputed_share(self) -> float:
        """Of the layers, that are computed again."""
        return sum(map(self.is_recomputed, range(self.shape.layers))) / self.shape.layers

    @property
    def offloads_inputs(self) -> bool:
        """Whether inputs of recomputed layers wait in host memory."""
        wants = self.offload or (self.adapters is not None and self.adapters.offload)
        return wants and not self.selective and self.recomputed_share > 0

    def over_layers(self, of: Callable[[Layer], float]) -> float:
        """The sum of something over this rank's layers, as they are recorded."""
        kinds = self.recorded.kinds
        order = self.shape.order
        return sum(order.count(kind) * of(kinds[kind]) for kind in set(order))

    @property
    def trained(self) -> int:
        """Numbers, on this rank."""
        shape = self.shape
        if self.adapters is None and self.train == ("text",):
            return shape.parameters
        recorded = self.recorded
        if self.adapters is None:
            return ("text" in self.train) * shape.parameters + recorded.trained_tower
        found = self.over_layers(lambda layer: layer.trained)
        found += shape.has_embeddings * recorded.trained_embeddings + recorded.trained_tower
        return int(found + shape.has_head * recorded.trained_head)

    @property
    def trains_head(self) -> bool:
        """Whether the output layer's weight gets a gradient."""
        if not self.shape.has_head or self.adapters is None:
            return self.shape.has_head
        ends = self.recorded.trained_head + self.shape.tied * self.recorded.trained_embeddings
        return ends >= self.shape.table


TAKEN: Mapping[str, float] = {
    "q_proj": 0.02,
    "k_proj": 0.02,
    "v_proj": 0.0,
    "o_proj": 0.3,
    "gate_proj": 0.93,
    "up_proj": 0.53,
    "down_proj": 0.85,
    "qkv_proj": 0.01,
    "gate_up_proj": 0.73,
}
"""Share of a role's layers whose forward products the default budget took, the mean of full
fine-tuning and a frozen base, which differ in ``o_proj`` and ``down_proj``. Of packed roles the
mean of their parts."""

BY_BUDGET = (
    (0.0, 0.0),
    (0.0005, 0.07),
    (0.002, 0.26),
    (0.003, 0.37),
    (0.004, 0.48),
    (0.005, 0.58),
    (0.006, 0.67),
    (0.008, 0.81),
    (0.01, 0.90),
    (0.015, 1.0),
)
"""Share of all forward products by budget; the last is where it would be whole."""

GAINS_FORWARD, GAINS_BACKWARD = 430, 620
"""From which inputs x outputs / (inputs + outputs) on a product is faster in fp8: what it saves
grows with the product of its sizes, what quantising takes with their sum. 896 x 896 gained forward
only, 896 x 4864 both ways, and 576 x 1536 nothing."""


def within_budget(plan: Plan, options: Fp8Options) -> Plan:
    """A plan with the products in fp8 that a run of these options is expected to choose.

    Roles that are skipped, too narrow or no faster keep 16 bits.
    """
    shape = plan.shape
    total = max(shape.matrix_numbers, 1)
    forward = backward = 0.0
    out: set[str] = set()
    for number, kind in enumerate(shape.kinds):
        layers = [at for at, each in enumerate(shape.order) if each == number]
        taken = sum(f"layers.{at}" not in options.skip for at in layers)
        for each in kind.matrices:
            gain = _together(each, kind.matrices)
            fits = min(each.inputs, each.outputs) >= options.min_size
            fits &= not (each.inputs % 16 or each.outputs % 16 or each.in_stack)
            if each.role in options.skip or not fits or gain < GAINS_FORWARD:
                out.add(each.role)
                continue
            backward += taken * each.numbers * (gain >= GAINS_BACKWARD)
            forward += taken * each.numbers * _taken(each.role, options.loss_budget)
    return replace(
        plan,
        fp8=forward / total,
        fp8_backward=backward / total,
        fp8_head=options.head == "fp8" and options.loss_budget != 0,
        in_16_bits=frozenset(out),
    )


def _together(each: Matrices, others: Sequence[Matrices]) -> float:
    """Of the layers that read the same input, whose rows are quantised once."""
    roles = ("q_proj", "k_proj", "v_proj")
    together = [o for o in others if each.role in roles and o.role in roles] or [each]
    outputs = sum(o.outputs for o in together)
    return each.inputs * outputs / (each.inputs + outputs)


MEAN_TAKEN = 0.5
"""Of a role that is in no measured model."""


def _taken(role: str, budget: float | str) -> float:
    if budget == ALL:
        return 1.0
    whole, usual = _at(float(budget)), TAKEN.get(role, MEAN_TAKEN)
    return min(usual * whole / _at(Fp8Options().loss_budget), 1.0) if whole < 1 else 1.0


def _at(budget: float | str) -> float:
    for (less, low), (more, high) in itertools.pairwise(BY_BUDGET):
        if float(budget) <= more:
            return low + (high - low) * (float(budget) - less) / (more - less)
    return 1.0
