"""The batch of a step whose numbers are bad, kept for `trainkit diagnose`: no pickle.

Each rank writes one safetensors file: the tensors of its micro-batches, and, as JSON in the header,
their rows, their losses and why the step is bad.
"""

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from trainkit.errors import RunDirectoryError
from trainkit.run.files import jsonable, write_bytes_atomic

FOLDER = "bad_batches"
WEIGHTS = "weights"
"""Inside the folder of a step that ended the run: the weights it met."""

_KEPT = 20
"""Steps whose batches stay: a run that skips now and then must not fill the disk."""


@dataclass(frozen=True)
class BadBatch:
    """What one rank knows of a bad step.

    Attributes:
        step: its number, from 1.
        dist_rank: whose part it is.
        kind: loss, gradient, spike or weights: what was bad.
        says: the sentence that the user read.
        losses: of the micro-batches, each its part of the step's loss.
        grad_norm: before clipping.
        limit: of a spike.
        rows: the samples of each micro-batch, ``file:line`` where that is known.
        batches: the micro-batches' tensors by name.
        extras: what else they hold, by name: plain values.
    """

    step: int
    dist_rank: int
    kind: str
    says: str
    losses: Sequence[float]
    grad_norm: float
    limit: float
    rows: Sequence[Sequence[str]]
    batches: Sequence[Mapping[str, torch.Tensor]] = field(repr=False)
    extras: Sequence[Mapping[str, Any]] = ()


def split(batch: Mapping[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """A batch's tensors and its plain values."""
    tensors = {key: value for key, value in batch.items() if isinstance(value, torch.Tensor)}
    plain = (str, int, float, bool, list, type(None))
    return tensors, {k: v for k, v in batch.items() if k not in tensors and isinstance(v, plain)}


def folder_of(run: Path, step: int) -> Path:
    """Where the batch of a step is."""
    return run / FOLDER / f"step-{step}"


def write_batch(run: Path, bad: BadBatch) -> Path:
    """Keep this rank's part; returns the step's folder.

    Raises:
        RunDirectoryError: it cannot be written.
    """
    folder = folder_of(run, bad.step)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        f"{number}.{name}": value.detach().cpu().contiguous().clone()
        for number, batch in enumerate(bad.batches)
        for name, value in batch.items()
    }
    about = {key: value for key, value in vars(bad).items() if key != "batches"}
    text = json.dumps(jsonable(about), ensure_ascii=False)
    data = save(tensors, metadata={"bad_batch": text})
    path = folder / f"rank{bad.dist_rank}.safetensors"
    write_bytes_atomic(path, data)
    if bad.dist_rank == 0:
        for old in steps_kept(run)[:-_KEPT]:
            shutil.rmtree(folder_of(run, old), ignore_errors=True)
    return folder


def steps_kept(run: Path) -> list[int]:
    """The steps whose batches were kept, in order."""
    names = (path.name.removeprefix("step-") for path in (run / FOLDER).glob("step-*"))
    return sorted(int(name) for name in names if name.isdigit())


def read_batches(folder: Path) -> list[BadBatch]:
    """What the ranks kept of a step, in order.

    Raises:
        RunDirectoryError: a file is damaged, or there is none.
    """
    found = []
    for path in sorted(folder.glob("rank*.safetensors"), key=lambda p: (len(p.name), p.name)):
        try:
            with safe_open(path, framework="pt") as file:
                about = json.loads((file.metadata() or {})["bad_batch"])
                batches: list[dict[str, torch.Tensor]] = [{} for _ in about["rows"]]
                for key in file.keys():  # noqa: SIM118 - no mapping
                    number, _, name = key.partition(".")
                    batches[int(number)][name] = file.get_tensor(key)
            about["losses"] = [float(loss) for loss in about["losses"]]
            about |= {key: float(about[key]) for key in ("grad_norm", "limit")}
            found.append(BadBatch(**about, batches=batches))
        except (SafetensorError, OSError, ValueError, LookupError, TypeError) as error:
            raise RunDirectoryError(
                f"this is not a batch that a run has kept: {error}",
                where=str(path),
                fix="delete its folder, and go on with the run: what is bad again is kept again",
            ) from error
    if not found:
        raise RunDirectoryError("no batch is kept here", where=str(folder))
    return found
