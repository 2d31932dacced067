"""What is put into a model whose step is recorded. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from trainkit.options import LoraOptions


@dataclass(frozen=True)
class Adapters:
    """LoRA, as far as memory depends on it.

    Attributes:
        rank: of every adapter.
        targets: names of the adapted linear layers, or peft's pattern for them.
        excluded: of these, that are not.
        parameters: ``target_parameters``.
        element: bytes of an adapter's number.
        dropout: above 0 the fused backward is off, and masks are kept.
        dora: directions and magnitudes.
        offload: checkpointed activations wait in host memory.
        saved: ``modules_to_save``.
    """

    rank: int = 16
    targets: str | tuple[str, ...] = "all-linear"
    excluded: str | tuple[str, ...] | None = None
    parameters: tuple[str, ...] = ()
    element: int = 4
    dropout: float = 0.0
    dora: bool = False
    offload: bool = False
    saved: tuple[str, ...] = ()

    @property
    def options(self) -> LoraOptions:
        """As a recipe has them."""
        listed = {
            key: value if value is None or isinstance(value, str) else list(value)
            for key, value in (("target_modules", self.targets), ("exclude_modules", self.excluded))
        }
        return LoraOptions(
            r=self.rank,
            **listed,
            target_parameters=list(self.parameters),
            modules_to_save=list(self.saved),
            dropout=self.dropout,
            use_dora=self.dora,
            adapter_dtype="float32" if self.element == 4 else "bfloat16",
        )


@dataclass(frozen=True)
class Job:
    """What is put into a model.

    Attributes:
        config: of the model, as JSON.
        base: what weights are kept in: bfloat16, float32, nf4, fp8.
        adapters: None trains all weights.
        in_fp8: roles of linear layers whose products run in fp8.
        fp8_head: the output layer's, too.
        ops: trainkit's kernels that run.
        masked: rows are padded, and attention is handed a mask.
        upcast: everything that is not quantised is fp32.
        chunk_tokens: tokens whose logits the fused loss has at a time.
        tile_tokens: of which a feed-forward block computes at a time.
        keeps_gradient: the loss may be gone back through twice.
        tensor: ranks that share each matrix product.
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
