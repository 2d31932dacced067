"""What lies in a checkpoint, looked at before anything of transformers or DeepSpeed reads it.

A manifest proves that nothing changed since it was written. Whoever can write the files can write
the manifest too, so what may do harm is looked at as well: pickles are opened with torch's
weights-only unpickler, which runs no code, headers and JSON with readers that check them.
"""

import json
import pickle
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers.trainer_pt_utils import safe_globals

from trainkit.checkpoint.weights.enum_pickles import GETATTR, member
from trainkit.checkpoint.weights.plain_files import read_json
from trainkit.checkpoint.weights.reader import SafetensorsFile
from trainkit.checkpoint.whole.manifest import list_files
from trainkit.errors import CheckpointError

SHARD_CLASSES = (
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.utils.tensor_fragment.fragment_address",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
)
"""The classes that DeepSpeed's shards name: plain attributes, or nothing that is needed."""

_PICKLES = (".pt", ".pth", ".bin")
_FIX = "continue from another checkpoint of the run: --resume RUN/checkpoint-N"
_STATE_TYPES: Mapping[str, type | tuple[type, ...]] = {
    "global_step": int,
    "max_steps": int,
    "epoch": (int, float, type(None)),
    "log_history": list,
    "stateful_callbacks": dict,
}


class StandIn:
    """Replaces a DeepSpeed class whose content is not needed, or is plain attributes."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments


def _member(kind: Any, name: Any) -> Any:
    return StandIn(name) if kind is StandIn else member(kind, name)


def check_contents(directory: Path, *, state_file: str = "trainer_state.json") -> None:
    """Refuse a checkpoint that holds something else than numbers and plain values.

    Args:
        directory: of the checkpoint.
        state_file: the Trainer's own record in it.

    Raises:
        CheckpointError: naming the file and what is wrong with it.
    """
    for name in list_files(directory):
        path = directory / name
        if path.suffix in _PICKLES:
            open_pickle(path)
        elif path.suffix == ".safetensors":
            SafetensorsFile(path).close()
        elif path.suffix == ".json" and name != state_file:
            read_json(path)
        elif name == "latest":
            _check_latest(path)
    _check_state(directory / state_file)


def open_pickle(path: Path) -> Any:
    """The content of a file that ``torch.save`` wrote: numbers and plain values, mapped, not read.

    Raises:
        CheckpointError: it is damaged, or would run code.
    """
    is_zip = zipfile.is_zipfile(path)
    try:
        if is_zip:
            _check_archive(path)
        stand_ins: list[Any] = [(StandIn, name) for name in SHARD_CLASSES]
        stand_ins.append((_member, GETATTR))
        with safe_globals(), torch.serialization.safe_globals(stand_ins):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
    except (OSError, MemoryError):
        raise
    except Exception as error:  # the weights-only unpickler raises nearly anything on damage
        raise CheckpointError(
            f"this file is damaged or hostile, and was not loaded: {_reason(error)}",
            where=str(path),
            fix=_FIX,
        ) from None


def _check_archive(path: Path) -> None:
    """Torch stores without compression; a small file that unfolds to a huge one is none of its."""
    with zipfile.ZipFile(path) as archive:
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
            raise pickle.UnpicklingError("it is compressed, which torch.save never does")


def _reason(error: Exception) -> str:
    """The sentence that says what was asked for, without torch's advice on how to run it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    named = [line for line in lines if "GLOBAL" in line or "Unsupported" in line]
    text = (named or lines or [type(error).__name__])[0]
    return text.partition(" was not an allowed")[0].removeprefix("WeightsUnpickler error: ")


def _check_latest(path: Path) -> None:
    """DeepSpeed opens the folder that this file names."""
    name = path.read_text(encoding="utf-8", errors="replace").strip()
    if (
        not name
        or Path(name).name != name
        or name in (".", "..")
        or not (path.parent / name).is_dir()
    ):
        raise CheckpointError(
            f"{name!r} is not a folder of this checkpoint", where=str(path), fix=_FIX
        )


def _check_state(path: Path) -> None:
    # Written by transformers, which writes NaN as Python does, so not ``read_json``.
    try:
        state = json.loads(path.read_bytes())
    except FileNotFoundError:
        return
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"it is not JSON: {error}", where=str(path), fix=_FIX) from None
    if not isinstance(state, dict):
        raise CheckpointError("it is not a JSON object", where=str(path), fix=_FIX)
    for key, kind in _STATE_TYPES.items():
        if not isinstance(state.get(key), kind):
            raise CheckpointError(
                f"{key}: {state.get(key)!r:.80} is no such value", where=str(path), fix=_FIX
            )
    if not all(isinstance(row, dict) for row in state["log_history"]):
        raise CheckpointError("log_history: a row is not an object", where=str(path), fix=_FIX)
