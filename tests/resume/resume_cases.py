"""Commands as a user types them, run in a forked process that may be killed at a step."""

import contextlib
import io
import os
import signal


def sft(cwd, argv, kill_at=None, stop_at=None, environment=None):
    """``trainkit sft ARGV`` in ``cwd``; exit code and what it said.

    Args:
        cwd: where the command is typed.
        argv: after ``sft``.
        kill_at: SIGKILL in this step, before it is logged or saved.
        stop_at: SIGINT in this step.
        environment: variables on top.
    """
    os.chdir(cwd)
    if os.environ["WORLD_SIZE"] == "1":
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
            del os.environ[name]
    os.environ.update(environment or {})
    from trainkit.cli.app import main
    from trainkit.train.callbacks import StopWhenAsked

    plain = StopWhenAsked.on_step_end

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        if state.global_step == stop_at:
            os.kill(os.getpid(), signal.SIGINT)
        return plain(self, args, state, control, **kwargs)

    StopWhenAsked.on_step_end = on_step_end
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(["sft", *argv])
    return {"code": code, "out": out.getvalue(), "err": err.getvalue()}
