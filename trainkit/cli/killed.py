"""``trainkit`` that kills itself with SIGKILL: in a step, or while it writes a checkpoint.

    TRAINKIT_KILL='{"step": 3}' python -m trainkit.cli.killed sft ...

Nothing of it is imported in a run that nobody rehearses.
"""

import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

from trainkit.cli.app import main as trainkit
from trainkit.train.rehearse import VARIABLE


def main() -> int:
    plan = json.loads(os.environ.get(VARIABLE, "{}"))
    if plan and plan["rank"] == int(os.environ.get("RANK", "0")):
        mark = Path(plan["mark"])
        if "write" in plan:
            _kill_at_write(int(plan["write"]), mark)
        else:
            _kill_in_step(int(plan["step"]), float(plan["after"]), mark)
    return trainkit(sys.argv[1:])


def _kill(mark: Path) -> None:
    mark.touch()
    os.kill(os.getpid(), signal.SIGKILL)


def _kill_in_step(step: int, after: float, mark: Path) -> None:
    from trainkit.train.loop import Loop

    plain = Loop.step

    def killed_step(self: Any, batches: Any, epoch: int, number: int) -> None:
        if self.state.global_step + 1 == step:
            self.checkpoints.settle()  # or nothing might be left to go on from
            threading.Timer(after, _kill, [mark]).start()
        plain(self, batches, epoch, number)

    Loop.step = killed_step  # type: ignore[method-assign]


def _kill_at_write(number: int, mark: Path) -> None:
    """Every file of a checkpoint is put on the disk before the checkpoint counts."""
    plain, written = os.fsync, [0]

    def fsync(descriptor: Any) -> None:
        place = Path(f"/proc/self/fd/{descriptor}")
        if "staging" in str(place.readlink() if place.is_symlink() else ""):
            written[0] += 1
            if written[0] == number:
                _kill(mark)
        plain(descriptor)

    os.fsync = fsync  # type: ignore[assignment]


if __name__ == "__main__":
    sys.exit(main())
