"""What of a recipe decides whether a way of spreading a run over processes can serve it."""

from dataclasses import dataclass
from typing import Any

from trainkit.options.parallel import ParallelOptions
from trainkit.options.recompute import RecomputeOptions


@dataclass(frozen=True)
class Combination:
    """What of a recipe the rows look at.

    Attributes:
        parallel: how it is spread.
        model_dtype: as the recipe has it.
        quantize: what a frozen base is packed to, or None.
        has_adapters: LoRA.
        is_packed: several documents share a row.
        training: the recipe's ``training`` section.
        attention: the implementation's name.
        max_length: tokens of a row.
        computes_fp8: matrix products run in fp8.
        recompute: the recipe's ``recompute``, spelt out; None where nothing is recomputed.
        optim_in_backward: weights step in the backward pass.
        master_weights: of ``model``.
        objective: what is optimised.
        adds_tokens: the recipe extends the vocabulary.
        mixes_dtypes: adapters train in another dtype than modules that train whole next to them.
        tiles_mlp: feed-forward blocks compute some tokens at a time.
        lora: what of the adapters a pipeline cannot spread: its key, or None.
        offloads: the key that sends activations to the host, or None.
        measures: the keys that have the model asked questions while it trains.
    """

    parallel: ParallelOptions
    model_dtype: str = "bfloat16"
    quantize: str | None = None
    has_adapters: bool = False
    is_packed: bool = False
    training: dict[str, Any] | None = None
    attention: str = "auto"
    max_length: int = 0
    computes_fp8: bool = False
    recompute: RecomputeOptions | None = None
    optim_in_backward: bool = False
    master_weights: bool = True
    objective: str = "sft"
    adds_tokens: bool = False
    mixes_dtypes: bool = False
    tiles_mlp: bool = False
    lora: str | None = None
    offloads: str | None = None
    measures: tuple[str, ...] = ()

    @property
    def shard(self) -> str:
        """A strategy's name, or a file."""
        return self.parallel.shard

    @property
    def tensor(self) -> int:
        """Ranks that products are split over."""
        return self.parallel.tensor

    @property
    def sequence(self) -> int:
        """Ranks that rows are split over."""
        return self.parallel.sequence

    @property
    def pipeline(self) -> int:
        """Ranks that layers are split over."""
        return self.parallel.pipeline

    def of_training(self, name: str) -> Any:
        """A value of ``training``, None where nothing is said."""
        return (self.training or {}).get(name)
