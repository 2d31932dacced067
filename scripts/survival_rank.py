"""``trainkit sft`` with a clock in it: one rank of a run of ``survival_gpu.py``."""

import cProfile
import io
import json
import os
import pstats
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def train() -> None:
    """``trainkit sft``, with a clock in it."""
    import torch

    import trainkit.train.build  # all that a run imports, before its turn
    from trainkit.cli.app import main as trainkit
    from trainkit.train import saves
    from trainkit.train.checkpoints import CheckpointWriter
    from trainkit.train.trainer import ObjectiveTrainer

    settings = json.loads(os.environ["TRAINKIT_SURVIVAL"])
    found: dict[str, dict[int, float]] = {"begun": {}, "saved": {}, "written": {}, "pinned": {}}
    synchronize = torch.cuda.synchronize if torch.cuda.is_available() else (lambda: None)
    plain_begin, plain_save = ObjectiveTrainer.get_batch_samples, ObjectiveTrainer._save_checkpoint
    plain_finish, plain_pin = CheckpointWriter._finish, saves.pin_ahead
    block, gate, clock = settings["block"], Path(settings["gate"]), Path(settings["clock"])
    is_saved = [False]
    is_first = int(os.environ.get("RANK") or 0) == 0
    while not gate.exists():
        time.sleep(0.05)

    def write_clock() -> None:
        if is_first:
            partial = clock.with_suffix(".partial")
            partial.write_text(json.dumps(found))
            partial.replace(clock)

    switch = turn_off_watching() if block else None

    def begin(self: Any, *arguments: Any) -> Any:
        step = self.state.global_step
        if switch is None or step % block == 0:
            synchronize()
            found["begun"][step] = time.perf_counter()
            # The step after a save too: what a cut leaves has each save's whole stall.
            if step % 20 == 0 or is_saved[0]:
                is_saved[0] = False
                write_clock()
        if switch is not None:
            switch(step // block % 2 == 1)
        return plain_begin(self, *arguments)

    def save(self: Any, *arguments: Any) -> None:
        began = time.perf_counter()
        if len(found["saved"]) + 1 == settings["looked_into"]:
            look_into(lambda: plain_save(self, *arguments), Path(settings["profile"]))
        else:
            plain_save(self, *arguments)
        if settings["waits"] and len(found["saved"]) % 2:
            self.checkpoints.wait()
        found["saved"][self.state.global_step] = time.perf_counter() - began
        is_saved[0] = True

    def finish(self: Any, save: Any, target: Path, *arguments: Any) -> None:
        began = time.perf_counter()
        plain_finish(self, save, target, *arguments)
        found["written"][int(target.name.partition("-")[2])] = time.perf_counter() - began

    def pin_ahead(*arguments: Any) -> Any:
        began, thread = time.perf_counter(), plain_pin(*arguments)

        def watch() -> None:
            thread.join()
            found["pinned"][0] = time.perf_counter() - began

        if thread is not None:
            threading.Thread(target=watch, daemon=True).start()
        return thread

    ObjectiveTrainer.get_batch_samples = begin
    saves.pin_ahead = pin_ahead
    ObjectiveTrainer._save_checkpoint = save
    CheckpointWriter._finish = finish
    code = trainkit(sys.argv[1:])
    write_clock()
    sys.exit(code)


def look_into(work: Callable[[], None], output: Path) -> None:
    """Write down in which functions it spends most, one a line."""
    profile = cProfile.Profile()
    profile.runcall(work)
    text = io.StringIO()
    pstats.Stats(profile, stream=text).sort_stats("cumulative").print_stats(40)
    lines = [line.split() for line in text.getvalue().splitlines() if "{" in line or "(" in line]
    output.write_text("\n".join(f"{line[3]} s {' '.join(line[5:])}" for line in lines[1:]))


def turn_off_watching() -> Callable[[bool], None]:
    """A switch for everything that a step does about faults: True turns it off."""
    import torch

    from trainkit.run.directory import RunDirectory
    from trainkit.train.callbacks import StopOnRequest
    from trainkit.train.faults.watch import Watch
    from trainkit.train.optimizer import watched
    from trainkit.train.optimizer.finite import NumberGuard

    is_off = [False]
    nothing: list[torch.Tensor] = []

    def close(self: Any, *_: Any, **__: Any) -> torch.Tensor:
        self.flush()
        if not nothing:
            nothing.append(torch.zeros((), device=self._accelerator.device))
        return nothing[0]

    def without(owner: Any, name: str, other: Callable[..., Any]) -> None:
        plain = getattr(owner, name)

        def either(*arguments: Any, **keywords: Any) -> Any:
            return (other if is_off[0] else plain)(*arguments, **keywords)

        setattr(owner, name, either)

    without(NumberGuard, "begin", lambda *_, **__: None)
    without(NumberGuard, "add_loss", lambda *_, **__: None)
    without(NumberGuard, "close", close)
    without(watched, "hold_back", lambda *_, **__: None)
    without(Watch, "mark", lambda *_, **__: None)
    without(Watch, "_write", lambda *_, **__: None)
    without(Watch, "_lost", lambda *_, **__: None)
    without(StopOnRequest, "on_step_end", lambda *_, **__: None)
    without(RunDirectory, "heartbeat", lambda *_, **__: None)

    def switch(off: bool) -> None:
        is_off[0] = off

    return switch


if __name__ == "__main__":
    train()
