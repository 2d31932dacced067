"""DeepSpeed's shards written and read without running what is in them.

DeepSpeed reads its checkpoints with the full unpickler, which runs whatever code a file holds. Here
torch's weights-only unpickler reads them: tensors, plain values, and the four small classes of
DeepSpeed's own that its shards name.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from deepspeed.runtime import engine as deepspeed_engine
from deepspeed.runtime.checkpoint_engine import TorchCheckpointEngine
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address

from trainkit.checkpoint.weights.contents import GETATTR, member
from trainkit.errors import CheckpointError
from trainkit.evaluation_mode import changed
from trainkit.parallel.engine import snapshot

Take = Callable[[Path, Callable[[], None]], None]

NEEDED: tuple[type, ...] = (LossScaler, DynamicLossScaler, fragment_address, ZeroStageEnum)
"""What a shard may hold besides tensors and plain values; none of them does anything when made."""

_FACTORY = "create_checkpoint_engine"


class ShardFiles(TorchCheckpointEngine):
    """What DeepSpeed saves and loads its files with.

    A save raises nothing: DeepSpeed's ranks wait for one another while they save, and one that left
    would be waited for. What fails is told by what ``deferring`` was given.
    """

    _take: ClassVar[Take | None] = None
    _refuse: ClassVar[Callable[[Path, Any], None] | None] = None

    @classmethod
    def deferring(cls, take: Take) -> AbstractContextManager[None]:
        """Within, give each file to ``take`` with the function that writes it."""
        return changed([(cls, "_take", take)])

    @classmethod
    def judging(cls, refuse: Callable[[Path, Any], None]) -> AbstractContextManager[None]:
        """Within, give each file that was read to ``refuse``, before anything is made of it."""
        return changed([(cls, "_refuse", refuse)])

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Make a folder; where that fails, so does the first file in it."""
        with suppress(OSError):
            super().makedirs(path, exist_ok=exist_ok)

    def save(self, state_dict: Any, path: str) -> None:
        take = type(self)._take
        if take is None:
            torch.save(state_dict, path)
        else:
            take(Path(path), partial(torch.save, snapshot(state_dict), path))

    def load(self, path: str, map_location: Any = None) -> Any:
        try:
            with torch.serialization.safe_globals([*NEEDED, (member, GETATTR)]):
                saved = torch.load(path, map_location=map_location, weights_only=True)
        except (OSError, MemoryError):
            raise
        except Exception as error:  # the unpickler raises nearly anything on damage
            reason = str(error).strip().partition("\n")[0]
            raise CheckpointError(
                f"this shard is damaged or hostile, and was not loaded: {reason}",
                where=path,
                fix="continue from another checkpoint of the run",
            ) from None
        refuse = type(self)._refuse
        if refuse is not None:
            refuse(Path(path), saved)
        return saved


def use_shard_files() -> None:
    """Let every engine that DeepSpeed makes in this process use `ShardFiles`.

    DeepSpeed chooses the class by its configuration among its own only, so its choice is replaced.
    """
    if not hasattr(deepspeed_engine, _FACTORY):
        raise CheckpointError(
            "this version of DeepSpeed opens its checkpoints in a way that trainkit does not know",
            where="deepspeed.runtime.engine",
            fix="install a version that constraints.txt names",
        )
    setattr(deepspeed_engine, _FACTORY, lambda config_params, **_: ShardFiles(config_params))
