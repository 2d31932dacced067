"""THE TABLE: one row per strategy of sharding a run over processes. No torch.

``parallel: {shard: NAME}`` in a recipe names a row, or a DeepSpeed configuration file.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from trainkit.errors import RecipeError
from trainkit.options.parallel import NONE
from trainkit.places import regular

_CONFIGS = Path(__file__).parents[1] / "configs" / "deepspeed"


@dataclass(frozen=True)
class Strategy:
    """One row.

    Attributes:
        engine: ``module:class`` of the engine, imported when a run begins.
    """

    name: str
    about: str
    engine: str
    config: Path | None = None

    @property
    def reads_precision(self) -> bool:
        """Whether the engine computes in what ``training.bf16`` and ``training.fp16`` say."""
        return self.engine == _DEEPSPEED


_DDP = "trainkit.parallel.engine:Engine"
_DEEPSPEED = "trainkit.parallel.zero.engine:DeepSpeed"
_FSDP2 = "trainkit.parallel.fsdp:Fsdp2"
TENSOR = "trainkit.parallel.zero.tensor:TensorParallel"
"""The engine of a DeepSpeed strategy whose matrix products are split."""

STRATEGIES: Mapping[str, Strategy] = {
    row.name: row
    for row in (
        Strategy(NONE, "each rank holds everything (DDP)", _DDP),
        Strategy(
            "zero1", "optimizer states are sharded (DeepSpeed)", _DEEPSPEED, _CONFIGS / "zero1.json"
        ),
        Strategy("zero2", "and gradients", _DEEPSPEED, _CONFIGS / "zero2.json"),
        Strategy("zero3", "and weights", _DEEPSPEED, _CONFIGS / "zero3.json"),
        Strategy(
            "zero3_offload",
            "and all of it waits in host memory",
            _DEEPSPEED,
            _CONFIGS / "zero3_offload.json",
        ),
        Strategy("fsdp2", "weights, gradients and optimizer states are sharded (torch)", _FSDP2),
    )
}


def strategy_for(shard: str) -> Strategy:
    """The row of a name; a file is a DeepSpeed configuration."""
    if shard in STRATEGIES:
        return STRATEGIES[shard]
    path = Path(shard).expanduser()
    try:
        content = json.loads(
            regular(path, RecipeError).read_text(encoding="utf-8"), object_pairs_hook=_each_key_once
        )
    except OSError as error:
        raise RecipeError(
            f"there is no strategy {shard!r} and no file {path.absolute()}"
        ) from error
    except (ValueError, RecursionError) as error:
        raise RecipeError(f"{path} is not JSON: {error}") from error
    _check(content, path)
    return Strategy(shard, "as the file says (DeepSpeed)", _DEEPSPEED, path)


def _each_key_once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """An object of a JSON file; json itself takes the last of two equal keys, and says nothing."""
    found = dict(pairs)
    for key, _ in pairs:
        if sum(key == other for other, _ in pairs) > 1:
            raise ValueError(f"the key {key!r} is there twice")
    return found


def _check(content: object, path: Path) -> None:
    """Refuse what DeepSpeed would fail on late, or take for something else."""
    if not isinstance(content, dict):
        raise RecipeError(f"{path} is not a JSON object")
    for key in ("zero_optimization", "fp16", "bf16", "optimizer", "scheduler"):
        if not isinstance(content.get(key, {}), dict):
            raise RecipeError(f"{path}: {key}: {content[key]!r} must be an object")
    checkpoint = content.get("checkpoint") or {}
    if not isinstance(checkpoint, dict):
        raise RecipeError(f"{path}: checkpoint: {checkpoint!r} must be an object")
    for key in ("load_universal", "writer"):
        if checkpoint.get(key):
            raise RecipeError(
                f"{path}: checkpoint.{key}: trainkit writes and reads DeepSpeed's files itself, so "
                "that nothing in them can run; leave it out"
            )
    stage = content.get("zero_optimization", {}).get("stage", 0)
    if type(stage) is not int or stage not in range(1, 4):
        raise RecipeError(
            f"{path}: zero_optimization.stage: {stage!r} must be 1, 2 or 3, without quotes; "
            "without DeepSpeed (no `deepspeed` in the recipe) nothing is sharded"
        )
