"""What lies in a checkpoint, looked at before anything of transformers or DeepSpeed reads it.

A manifest proves that nothing changed since it was written. Whoever can write the files can write
the manifest too, so what may do harm is looked at as well: pickles are opened with torch's
weights-only unpickler, which runs no code, headers and JSON with readers that check them.
"""

import json
import math
import pickle
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerState
from transformers.trainer_pt_utils import safe_globals

from trainkit.checkpoint.weights.plain_files import read_json
from trainkit.checkpoint.weights.reader import tensors_in
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
ANOTHER = "continue from another checkpoint of the run: --resume RUN/checkpoint-N"


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


def _is_row(row: Any) -> bool:
    """Of the log; texts are not judged by, and nothing is a list."""
    return (
        isinstance(row, dict)
        and _is_count(row.get("step", 0))
        and all(value is None or isinstance(value, int | float | str) for value in row.values())
        and all(_is_number(row[key]) for key in row if key.startswith("eval_"))
    )


def _is_callbacks(value: Any) -> bool:
    if not isinstance(value, dict):
        return False
    early = value.get("early_stopping", {"best": None, "num_worse": 0})
    return (
        all(isinstance(each, dict | list) for each in value.values())
        and isinstance(early, dict)
        and (early.get("best") is None or _is_number(early["best"]))
        and _is_count(early.get("num_worse"))
    )


_STATE: Mapping[str, Callable[[Any], bool]] = {
    "global_step": _is_count,
    "max_steps": _is_count,
    "epoch": lambda epoch: epoch is None or (_is_number(epoch) and 0 <= epoch < math.inf),
    "log_history": lambda rows: isinstance(rows, list) and all(map(_is_row, rows)),
    "best_metric": lambda metric: metric is None or _is_number(metric),
    "best_global_step": lambda step: step is None or _is_count(step),
    "best_model_checkpoint": lambda place: place is None or isinstance(place, str),
    "num_input_tokens_seen": _is_count,
    "total_flos": lambda flos: _is_number(flos) and 0 <= flos < math.inf,
    "stateful_callbacks": _is_callbacks,
}
"""What a continued run reads of the Trainer's own record; it works out the rest again."""


class StandIn:
    """Replaces a DeepSpeed class whose content is not needed, or is plain attributes."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments


def _member(kind: Any, name: Any) -> Any:
    return StandIn(name) if kind is StandIn else member(kind, name)


def check_contents(directory: Path, *, state_file: str, step: int) -> None:
    """Refuse a checkpoint that holds something else than numbers and plain values."""
    for name in list_files(directory):
        path = directory / name
        if path.suffix in _PICKLES:
            open_pickle(path)
        elif path.suffix == ".safetensors":
            tensors_in(path)
        elif path.suffix == ".json" and name != state_file:
            read_json(path)
        elif name == "latest":
            _check_latest(path)
    _check_state(directory / state_file, step)


def open_pickle(path: Path) -> Any:
    """The content of a file that ``torch.save`` wrote: numbers and plain values, mapped."""
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
            fix=ANOTHER,
        ) from None


def saved_by_torch(path: Path, place: Any = "cpu") -> Any:
    """A file that every checkpoint of such a run has: numbers and plain values."""
    if not path.is_file():
        raise CheckpointError(
            f"{path.name} is missing: what follows would not be the run that was begun",
            where=str(path.parent),
            fix=ANOTHER,
        )
    return torch.load(path, map_location=place, weights_only=True)


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
            f"{name!r} is not a folder of this checkpoint", where=str(path), fix=ANOTHER
        )


@contextmanager
def taking_up(path: Path) -> Iterator[None]:
    """What takes up a file of a checkpoint may meet anything: its digest was of that, too."""
    try:
        yield
    except (torch.OutOfMemoryError, NotImplementedError):
        raise
    except (
        *(ValueError, TypeError, LookupError, AttributeError),
        *(RuntimeError, AssertionError, OverflowError),
    ) as error:
        raise CheckpointError(
            f"it does not hold what this run saves there: {type(error).__name__}: {error}",
            where=str(path),
            fix=ANOTHER,
        ) from error


def refuse_unfit(path: Path, found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Hold saved tensors against those whose place they take: torch would cast and broadcast."""
    for name in found.keys() & wanted.keys():
        ours, theirs = (
            f"{str(each.dtype).removeprefix('torch.')} of shape {[*each.shape]}"
            for each in (wanted[name], found[name])
        )
        if ours != theirs:
            raise CheckpointError(
                f"{name} is {theirs} in it, and {ours} in the run", where=str(path), fix=ANOTHER
            )


def _check_state(path: Path, step: int) -> None:
    # Written by transformers, which writes NaN as Python does, so not ``read_json``.
    try:
        state = json.loads(path.read_bytes())
    except FileNotFoundError:
        return
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"it is not JSON: {error}", where=str(path), fix=ANOTHER) from None
    if not isinstance(state, dict):
        raise CheckpointError("it is not a JSON object", where=str(path), fix=ANOTHER)
    known = {field.name: field.default for field in fields(TrainerState)}
    wrong = [key for key, fits in _STATE.items() if not fits(state.get(key, known.get(key)))]
    wrong += [] if wrong or state["global_step"] == step else ["global_step"]
    wrong += sorted(state.keys() - known.keys())
    if wrong:
        value = state.get(wrong[0])
        raise CheckpointError(
            f"{wrong[0]}: {value!r:.80} is not what a run writes at step {step}",
            where=str(path),
            fix=ANOTHER,
        )


# Members of enumerations as early versions of Python 3.11 pickle them: ``getattr(class, name)``.
#
# An unpickler that runs no code refuses ``getattr``, with which a pickle reaches any attribute.
# Here a function replaces it that looks up a member by its name and nothing else.

GETATTR = "builtins.getattr"


def member(kind: Any, name: Any) -> Enum:
    is_enumeration = isinstance(kind, type) and issubclass(kind, Enum)
    if is_enumeration and isinstance(name, str) and name in kind.__members__:
        return kind.__members__[name]
    raise pickle.UnpicklingError(f"it asks for {str(name)[:40]} of {str(kind)[:60]}")
