"""Going back to the last checkpoint within a run: a step's numbers are bad, or it did not fit."""

import dataclasses
import gc

import torch

from trainkit.parallel.agreement import decided_by_main
from trainkit.run import RunDirectory
from trainkit.run.starts import Start, append_start, begin_again
from trainkit.train.faults.shortage import MemoryShortageError
from trainkit.train.optimizer.finite import NumberError
from trainkit.train.prepare import Invocation, Prepared
from trainkit.train.resume.begin import find_resumption
from trainkit.train.resume.record import Resumption
from trainkit.train.sections import trainer_arguments


def go_back(
    start: Invocation,
    prepared: Prepared,
    run: RunDirectory,
    bad: NumberError | MemoryShortageError,
    overrides: tuple[str, ...] = (),
) -> tuple[Invocation, Prepared, Resumption]:
    """Give the memory of the old model back, find the last checkpoint, and record the step.

    As for a process that starts: nothing of the attempt that met the bad step is used again.

    Args:
        start: what was typed.
        prepared: data and arguments, which stay.
        run: the run.
        bad: names the step. A step with bad numbers is left out from here on.
        overrides: what is otherwise from here on, as a user would give it.

    Returns:
        The start of a continued run, its arguments, and where it begins.
    """
    prepared.layout.engine.forget()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    start = dataclasses.replace(
        start, options=dataclasses.replace(start.options, resume=run.root, overrides=())
    )
    if overrides:
        start = dataclasses.replace(start, loaded=start.loaded.overridden(overrides))
        args = trainer_arguments(start.recipe, prepared.layout)
        args.output_dir = str(run.root)
        prepared = dataclasses.replace(prepared, args=args)
    resumption = find_resumption(start, prepared)
    point = resumption.point
    left_out = (bad.step,) if isinstance(bad, NumberError) else ()

    def record() -> None:
        if point is None:
            begin_again(run.root)
        step = point.step if point else 0
        append_start(run, Start(step=step, overrides=overrides, passed_over=left_out))

    decided_by_main(start.process, record)
    what = f", and leaves step {left_out[0]} out" if left_out else f" with {' '.join(overrides)}"
    start.console.warn(f"{bad.what}; the run goes back to step {point.step if point else 0}{what}")
    return start, prepared, resumption
