"""What a training step is, as far as its memory and time depend on it. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field

from trainkit.estimate.shape import ModelShape

FUSED_OPS = frozenset({"rms_norm", "swiglu", "linear_cross_entropy"})
"""Kernels that change what is kept for the backward pass."""
FUSED_LORA = frozenset({"lora_mlp", "lora_qkv", "lora_linear"})
ALL_OPS = FUSED_OPS | FUSED_LORA

MIN_OFFLOAD_WIDTH = 2048
"""From which width on ``lora.offload_activations: auto`` offloads, as in ``lora.offload``."""


@dataclass(frozen=True)
class Adapters:
    """LoRA.

    Attributes:
        rank: of every adapter.
        targets: names of the adapted linear layers; None is all of them.
        element: bytes of an adapter's number.
        dropout: above 0 the fused backward is off, and masks are kept.
        offload: checkpointed activations wait in host memory.
        saved_tables: embedding and head that are trained in full (``modules_to_save``).
    """

    rank: int = 16
    targets: frozenset[str] | None = None
    element: int = 4
    dropout: float = 0.0
    offload: bool = False
    saved_tables: int = 0


@dataclass(frozen=True)
class Plan:
    """One micro-batch of one GPU, and what surrounds it.

    Attributes:
        shape: the model.
        batch_size: rows of a micro-batch.
        length: tokens of a row.
        accumulation: micro-batches in a step.
        base: what weights are kept in: bfloat16, float32, nf4, fp8.
        adapters: None trains all weights.
        fp8: share of the layers' numbers whose forward products run in fp8, and that a frozen
            base has in fp8. None is 16 bits.
        fp8_backward: share whose backward products do.
        fp8_head: the output layer's, too.
        in_16_bits: of these, roles that keep 16 bits.
        masked: rows are padded, and plain transformers hands attention a mask.
        ops: trainkit's kernels that run; none is plain transformers.
        recompute: 0 keeps every layer's activations, k recomputes every k-th layer.
        recompute_first: recomputes the first so many layers, as a budget does.
        offload: inputs of recomputed layers wait in host memory, with adapters or without.
        selective: recomputed layers keep products and attention.
        budget_gib: by which ``recompute_first`` was chosen, see `peak.keep_to_budget`.
        budget_offloads: what the budget does not hold may go to the host.
        stage: what is sharded: 1 optimizer states, 2 gradients too, 3 weights too; 0 is DDP, or
            one process without DeepSpeed.
        fsdp: torch's FSDP2 shards, at stage 3, and keeps trained weights as fp32 shards.
        offloads_optimizer: masters and optimizer states wait in host memory.
        offloads_weights: weights wait there, too.
        gpus: ranks that hold parts of one model, or compute parts of one batch.
        sequence: of them, those that share a row.
        tensor: ranks that share each matrix product; not among ``gpus``.
        stage_layers: of each stage of each rank of a pipeline; not among ``gpus``.
        schedule: of the pipeline.
        held: times what a rank's layers keep is there at once: micro-batches on their way.
        held_late: of them, those whose weights' part of the backward pass is still to come.
        wire: bytes of what is received from and sent to other stages.
        gpu_gib: memory of each; FSDP2 keeps a small model whole where there is room.
        trainer: trainkit's loop drives it, with fp32 masters; else a bare step.
        keeps_masters: trained half-precision weights have fp32 copies.
        one_pass: without them, one kernel steps and rounds them.
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
        """Bytes of a number that is computed with."""
        return 4 if self.base == "float32" and self.adapters is None else 2

    @property
    def stream(self) -> int:
        """Bytes of a number between two layers."""
        return 4 if self.upcast or self.base == "float32" else 2

    def fuses(self, op: str) -> bool:
        """Whether a kernel runs."""
        return op in self.ops and self.shape.traits.kernels

    @property
    def fuses_lora(self) -> bool:
        """Whether the adapters' own backward pass runs."""
        return (
            self.adapters is not None and self.adapters.dropout == 0 and bool(self.ops & FUSED_LORA)
        ) and self.shape.traits.kernels

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

    def adapted(self, name: str) -> bool:
        """Whether a linear layer has an adapter."""
        if self.adapters is None:
            return False
        return self.adapters.targets is None or name in self.adapters.targets

    def in_fp8(self, name: str) -> bool:
        """Whether a linear layer's products may run in fp8."""
        return self.fp8 is not None and name not in self.in_16_bits

    @property
    def adapter_numbers_per_layer(self) -> int:
        """Trained numbers of a decoder layer's adapters."""
        if self.adapters is None:
            return 0
        return self.adapters.rank * sum(
            inputs + outputs
            for name, (inputs, outputs) in self.shape.linears().items()
            if self.adapted(name)
        )

    @property
    def trained(self) -> int:
        if self.adapters is None:
            return self.shape.parameters
        tables = self.adapters.saved_tables * self.shape.table
        return self.adapter_numbers_per_layer * self.shape.layers + tables

    @property
    def trains_head(self) -> bool:
        """Whether the output layer's weight gets a gradient."""
        return self.shape.has_head and (self.adapters is None or self.adapters.saved_tables > 0)
