"""A save that is killed leaves the old directory whole, or the new one, or none."""

import json
import signal
import subprocess
import sys
import textwrap

import pytest
from checkpoint.test_checkpoint_atomic import make, names

from trainkit.checkpoint.whole import atomic

# A save that kills itself just before (odd) or just after (even) the n-th system call that it
# makes: every boundary of the protocol is a crash point. Each save is a process of its own, forked
# behind the import.
SAVES_THAT_DIE = textwrap.dedent(
    """
    import json, os, sys
    from pathlib import Path
    from trainkit.checkpoint.whole import atomic
    replace, folders = sys.argv[1] == "replace", [Path(folder) for folder in sys.argv[2:]]
    count = 0
    def step():
        global count
        count += 1
        if count == fuse:
            os.kill(os.getpid(), 9)
    def watched(function):
        def call(*args, **kwargs):
            step()
            result = function(*args, **kwargs)
            step()
            return result
        return call
    ends = []
    for fuse, folder in enumerate(folders):
        child = os.fork()
        if child:
            ends.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
            continue
        for name in ("mkdir", "rename", "fsync", "open", "unlink", "rmdir"):
            setattr(os, name, watched(getattr(os, name)))
        atomic._exchange = watched(atomic._exchange)
        target = folder / "t"
        with atomic.staged_directory(target, metadata={"new": True}, replace=replace) as staging:
            for name in ("a", "b"):
                (staging / name).write_text(name * 100)
        os._exit(min(count, 255))
    print(json.dumps(ends))
    """
)


@pytest.mark.parametrize("mode", ["fresh", "replace"])
def test_kill_at_every_system_call(tmp_path, mode):
    """At any crash point the target is absent, or the old one whole, or the new one whole."""

    def folders(*numbers):
        for number in numbers:
            folder = tmp_path / str(number)
            folder.mkdir()
            if mode == "replace":
                make(folder / "t", metadata={"new": False})
            yield folder

    def run(*saves):
        command = [sys.executable, "-c", SAVES_THAT_DIE, mode, *map(str, saves)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return json.loads(done.stdout)

    (total,) = run(
        *folders(0)
    )  # no system call has this number: it ends, and says how many it made
    assert 12 <= total < 255
    unbroken, *killed = list(folders(*range(1, total + 2)))
    ends = run(unbroken, *killed)
    assert ends == [total] + [-signal.SIGKILL] * total
    outcomes = set()
    for folder in killed:
        if (folder / "t").exists():
            outcomes.add(atomic.verify_directory(folder / "t").metadata["new"])
        else:
            outcomes.add(None)
        # The next save of a living process sweeps and succeeds.
        make(folder / "t", replace=True)
        stale = [name for name in names(folder) if name != "t"]
        assert all(not (folder / name / "x").exists() for name in stale)
        assert len(stale) <= 1, stale
    assert outcomes == ({True, False} if mode == "replace" else {True, None})
