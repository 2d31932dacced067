"""``trainkit`` as a user types it, without paying the imports for every command.

The command runs in a process of its own that ``ranks.py`` forks behind the imports: it has its own
directory, variables, standard output and error, exit code and, where asked for, a sudden end.
``tests/cli`` also starts interpreters of its own, and so do ``train.sh`` and its launcher in
``tests/resume/test_resume_restart.py``.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import moments
from ranks import RankFailure, run_ranks


def python(*words, **options) -> str:
    """What Python prints, with these words behind it, in a process of its own."""
    command = [sys.executable, *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


class Said(NamedTuple):
    """What came back."""

    code: int
    out: str
    err: str

    def well(self) -> "Said":
        """This, which must have ended well."""
        assert self.code == 0, self.err
        return self


def trainkit(cwd, *argv, num_ranks=1, **options) -> Said | None:
    """``trainkit ARGV``, typed in ``cwd``: what the first rank said, or None where it was killed.

    Args:
        cwd: where the command is typed.
        argv: its words.
        num_ranks: as ``torchrun --nproc-per-node`` starts them.
        options: ``kill_at``, ``stop_at``, ``launch``, ``is_plain``, ``environment``, ``typed`` and
            ``pictures`` of ``run_command``, and ``timeout`` in seconds.
    """
    timeout = options.pop("timeout", 240)
    if options.get("launch"):
        options["launch"], num_ranks = num_ranks, 1
    arguments = {"cwd": str(cwd), "argv": [str(word) for word in argv], **options}
    try:
        ranks = run_ranks(
            "commands:run_command", world_size=num_ranks, timeout=timeout, **arguments
        )
    except RankFailure:
        if options.get("kill_at") is None and options.get("plan") is None:
            raise
        return None
    return Said(*ranks[0])


def trainkit_each(cwd, commands) -> list[Said]:
    """``trainkit ARGV`` for each of the commands, one after another in one process.

    Args:
        cwd: where they are typed, or a folder for each of them.
        commands: their words.
    """
    cwds = list(map(str, cwd)) if isinstance(cwd, list) else [str(cwd)] * len(commands)
    (said,) = run_ranks("commands:run_each", world_size=1, timeout=280, cwds=cwds, argvs=commands)
    return [Said(*each) for each in said]


def run_each(cwds, argvs):
    """Runs in the forked process."""
    from trainkit.cli.app import main

    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        del os.environ[name]
    del os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    os.environ["COLUMNS"] = "100"
    _draw_nothing()
    said = []
    for number, (cwd, argv) in enumerate(zip(cwds, argvs, strict=True)):
        os.chdir(cwd)
        files = [Path(os.environ["RANK_FOLDER"], f"{number}.{each}") for each in (1, 2)]
        for descriptor, file in enumerate(files, 1):
            os.dup2(os.open(file, os.O_CREAT | os.O_WRONLY), descriptor)
        code = main(argv)
        sys.stdout.flush(), sys.stderr.flush()
        said.append((code, *(file.read_text(encoding="utf-8") for file in files)))
    return said


def run_command(
    cwd,
    argv,
    kill_at=None,
    stop_at=None,
    number=signal.SIGINT,
    presses=1,
    on_rank=None,
    to_launcher=False,
    launch=0,
    max_restarts=0,
    is_plain=False,
    plan=None,
    environment=None,
    pictures=False,
    spoil=None,
    typed=None,
):
    """Runs in the forked process.

    Args:
        cwd: where the command is typed.
        argv: after ``trainkit``.
        kill_at: SIGKILL in this step, before it is logged or saved; 0 is while the model loads.
        stop_at: the same for ``number``.
        number: the signal of ``stop_at``.
        presses: how often it comes.
        on_rank: where; everywhere when it is None.
        to_launcher: the rank sends it to what has started it, not to itself.
        launch: so many ranks are started by ``trainkit launch``, which the command then is for;
            0 for a command of its own.
        max_restarts: of that launch; the end comes before the first of them only.
        is_plain: the launch is torch's own, ``torchrun``.
        plan: of a kill, see ``moments``.
        environment: variables on top.
        spoil: step: what its loss is multiplied by.
        typed: what stands on its standard input.
        pictures: draw the curves, which take most of a short run's time.
    """
    os.chdir(cwd)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests themselves may run under nohup

    def end_at():
        if plan is not None:
            os.environ[moments.PLAN] = plan
            moments.arm()
        is_again = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
        if on_rank in (None, int(os.environ["RANK"])) and not is_again:
            _end_at({kill_at: signal.SIGKILL, stop_at: number}, to_launcher, presses)

    if not launch:
        end_at()
    if os.environ["WORLD_SIZE"] == "1":
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
            del os.environ[name]
        del os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    os.environ.update({"COLUMNS": "100"} | (environment or {}))
    folder = Path(os.environ["RANK_FOLDER"])
    for descriptor in (1, 2):
        file = os.open(folder / f"{os.getpid()}.{descriptor}", os.O_CREAT | os.O_WRONLY)
        os.dup2(file, descriptor)
    if typed is not None:
        (folder / "typed").write_text(typed, encoding="utf-8")
        os.dup2(os.open(folder / "typed", os.O_RDONLY), 0)
    if spoil:
        _spoil({int(step): float(factor) for step, factor in spoil.items()})
    if not pictures:
        _draw_nothing()
    if launch:
        import launches

        if is_plain:
            code = launches.plain_torchrun(argv, launch, in_rank=end_at)
        else:
            code = launches.launch(argv, launch, max_restarts=max_restarts, in_rank=end_at)
    else:
        from trainkit.cli.app import main

        code = main(argv)
    sys.stdout.flush(), sys.stderr.flush()
    return code, *(
        (folder / f"{os.getpid()}.{descriptor}").read_text(encoding="utf-8")
        for descriptor in (1, 2)
    )


def _end_at(signals, to_launcher, presses):
    """Send this process, or its launcher, a signal at the end of a step: ``{step: signal}``.

    A checkpoint that is being written is complete by then, so that a test knows where a run goes
    on; a kill inside a save is another test's.
    """
    from trainkit.train import build
    from trainkit.train.callbacks import StopOnRequest
    from trainkit.train.checkpoints import CheckpointWriter

    victim = os.getppid() if to_launcher else os.getpid()
    plain, plain_build = StopOnRequest.on_step_end, build._built
    plain_saving, writers = CheckpointWriter.saving, []

    def on_step_end(self, loop):
        step = loop.state.global_step
        if step in signals:
            for writer in writers:
                writer.wait()
            for _ in range(presses):
                os.kill(victim, signals[step])
        return plain(self, loop)

    def saving(self, *arguments, **keywords):
        writers[:] = [self]
        return plain_saving(self, *arguments, **keywords)

    def build_model(*arguments):
        if 0 in signals:
            os.kill(victim, signals[0])
        return plain_build(*arguments)

    StopOnRequest.on_step_end = on_step_end
    CheckpointWriter.saving = saving
    build._built = build_model


def _spoil(factors):
    from trainkit.train.loop import Loop

    plain = Loop.micro_loss

    def micro_loss(self, *given, **named):
        return plain(self, *given, **named) * factors.get(self.state.global_step + 1, 1.0)

    Loop.micro_loss = micro_loss


def _draw_nothing():
    import trainkit.run.report
    import trainkit.train.build

    trainkit.run.report.draw_plots = trainkit.run.report.svg_plots = lambda *_: []
    trainkit.run.report.CurveRefresher.refresh = lambda *_, **__: False
