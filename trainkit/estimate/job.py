"""What a model is made of, and what is put into it for a step. No torch."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from trainkit.options import DistillOptions, LoraOptions


@dataclass(frozen=True)
class Matrices:
    """Linear layers of one role in a decoder layer.

    Attributes:
        in_stack: they are experts in one parameter, which a packed base packs, too.
    """

    role: str
    inputs: int
    outputs: int
    number: int = 1
    in_stack: bool = False

    @property
    def numbers(self) -> int:
        return self.inputs * self.outputs * self.number


@dataclass(frozen=True)
class LayerKind:
    """Decoder layers that are equal but for their weights."""

    matrices: tuple[Matrices, ...]
    vectors: int

    @property
    def numbers(self) -> int:
        return self.vectors + sum(each.numbers for each in self.matrices)


@dataclass(frozen=True)
class ModelShape:
    """The sizes that decide memory and time.

    Args:
        name: where they are from, for the report.
        family: ``model_type``.
        config: the whole configuration, as JSON.
        kinds: of decoder layers.
        order: the kind of each layer.
        hidden: width between two layers.
        vocab: rows of the output layer, or of the embedding.
        head_size: of attention; 0 without it.
        tied: embedding and output layer are one.
        others: weights outside of layers, embedding and output layer.
        has_embeddings: not on a later stage of a pipeline.
        has_head: and what lies behind the layers; only on its last stage.
        tower: weights that see images or hear.
        ends: what the embedding, and an untied output layer, are called.
        stored: how the files hold the layers' weights, where they are quantised: ``nf4``, or the
            method's own name.
    """

    name: str
    family: str
    config: str
    kinds: tuple[LayerKind, ...]
    order: tuple[int, ...]
    hidden: int
    vocab: int
    head_size: int
    tied: bool
    others: int
    has_embeddings: bool = True
    has_head: bool = True
    tower: int = 0
    ends: tuple[str, ...] = ()
    stored: str | None = None

    @property
    def layers(self) -> int:
        return len(self.order)

    def total(self, of: Any) -> Any:
        """The sum of something over all layers, given a layer's kind."""
        return sum(of(self.kinds[kind]) * self.order.count(kind) for kind in set(self.order))

    @property
    def roles(self) -> tuple[str, ...]:
        """Of linear layers in any layer."""
        return tuple(dict.fromkeys(each.role for kind in self.kinds for each in kind.matrices))

    @property
    def matrix_numbers(self) -> int:
        """Weights of all layers' linear layers and experts."""
        return int(self.total(lambda kind: kind.numbers - kind.vectors))

    def numbers_of(self, roles: Collection[str]) -> int:
        """Weights of all layers' linear layers of some roles."""

        def of_kind(kind: LayerKind) -> int:
            return sum(each.numbers for each in kind.matrices if each.role in roles)

        return int(self.total(of_kind))

    @property
    def table(self) -> int:
        """Weights of the embedding, and of an untied head."""
        return self.vocab * self.hidden

    @property
    def tables(self) -> int:
        ends = self.has_embeddings + self.has_head
        return min(ends, 1) if self.tied else ends

    @property
    def outside(self) -> int:
        """Weights outside the decoder layers."""
        return self.tables * self.table + self.has_head * self.others

    @property
    def parameters(self) -> int:
        return int(self.total(lambda kind: kind.numbers)) + self.outside


def stored_as(quantization: Any) -> str | None:
    """How a ``quantization_config`` holds weights."""
    if not isinstance(quantization, Mapping):
        return None
    if quantization.get("load_in_4bit") or quantization.get("_load_in_4bit"):
        return "nf4"
    return str(quantization.get("quant_method", "unknown"))


_DECIDE = {
    *("r", "target_modules", "exclude_modules", "target_parameters", "experts"),
    *("modules_to_save", "dropout", "use_dora", "adapter_dtype", "quantize", "quantize_experts"),
    *("quantize_skip", "quantize_head", "vision", "peft", "rank_pattern"),
}
"""Keys of ``lora`` by which memory and time differ."""


@dataclass(frozen=True)
class Adapters:
    """LoRA, as far as memory depends on it.

    Attributes:
        lora: the recipe's section as JSON, so that it can be a key.
        offload: checkpointed activations wait in host memory.
    """

    lora: str
    offload: bool = False

    @classmethod
    def of(cls, options: LoraOptions | None = None, *, offload: bool = False) -> Adapters:
        return cls((options or LoraOptions()).model_dump_json(include=_DECIDE), offload)

    @functools.cached_property
    def options(self) -> LoraOptions:
        return LoraOptions.model_validate_json(self.lora)

    @property
    def element(self) -> int:
        return 4 if self.options.adapter_dtype == "float32" else 2


@dataclass(frozen=True)
class Job:
    """What is put into a model.

    Attributes:
        base: what weights are kept in: bfloat16, float32, nf4, int8, fp8.
        in_fp8: roles of linear layers whose products run in fp8.
        fp8_head: the output layer's, too.
        ops: trainkit's kernels that run.
        masked: rows are padded, and attention is handed a mask.
        upcast: everything that is not quantised is fp32.
        chunk_tokens: tokens whose logits the fused loss has at a time.
        tile_tokens: of which a feed-forward block computes at a time.
        keeps_gradient: the loss may be gone back through twice.
        tensor: ranks that share each matrix product.
        train: parts of the model, without adapters.
        has_images: among the rows, so that attention may need a mask of each row squared.
        distill: the loss of a distillation, and the rows and columns of the teacher's output layer.
    """

    config: str
    base: str = "bfloat16"
    adapters: Adapters | None = None
    in_fp8: frozenset[str] = frozenset()
    fp8_head: bool = False
    ops: frozenset[str] = frozenset()
    masked: bool = False
    upcast: bool = False
    chunk_tokens: int | None = None
    tile_tokens: int | None = None
    keeps_gradient: bool = True
    tensor: int = 1
    train: tuple[str, ...] = ("text",)
    has_images: bool = False
    distill: tuple[DistillOptions, int, int] | None = None

    @property
    def sees(self) -> bool:
        """Whether something that sees images trains."""
        if self.adapters is None:
            return self.train != ("text",)
        return self.adapters.options.vision
