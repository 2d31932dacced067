"""Break the code in one place at a time, and see whether the tests notice.

The mutations stand in scripts/mutations/*.yaml: under each file its mutations, each with a name,
the text that is there exactly once (`old`), what takes its place (`new`), and the tests that should
fail then (`tests`). `interpret: true` runs them with Triton's interpreter. `explained` says why a
mutation changes nothing that a user could see, or what else notices it; its tests must then pass.

    python scripts/mutate.py                      # all of them, some minutes
    python scripts/mutate.py --only 'rope*' --jobs 2
    python scripts/mutate.py --list
    python scripts/mutate.py --json docs/benchmarks/mutations.jsonl

Every job works in a copy of the checkout. All tests first have to pass there unchanged. The exit
status is 0 when each mutation is killed or explained.
"""

import argparse
import contextlib
import datetime
import fnmatch
import importlib
import json
import os
import queue
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]
TABLES = ROOT / "scripts" / "mutations"
PYTEST = ("-q", "-x", "-p", "no:cacheprovider")
LIBRARIES = ("pytest", "transformers.trainer", "transformers.models.qwen2.modeling_qwen2", "peft")
FAILED, NO_TESTS = 1, 5  # pytest's exit codes
GOOD = ("killed", "explained")


@dataclass(frozen=True)
class Mutation:
    """One way to break one file.

    Attributes:
        name: unique.
        area: the table that it stands in.
        file: relative to the repository.
        old: text that the file holds exactly once.
        new: what takes its place.
        tests: pytest's names of tests: ``file``, ``file::test`` or ``file::test[case]``.
        interpret: whether the tests run Triton's kernels through its interpreter.
        explained: why no test fails; None where one must.
    """

    name: str
    area: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    interpret: bool = False
    explained: str | None = None

    def fault(self, root: Path = ROOT) -> str | None:
        """What is not true of this row any more, or None."""
        path = root / self.file
        count = path.read_text(encoding="utf-8").count(self.old) if path.is_file() else 0
        if count != 1:
            return f"{self.file} has its text {count} times"
        if self.old == self.new:
            return "it changes nothing"
        for test in self.tests:
            file, _, name = test.partition("::")
            name = name.partition("[")[0]
            text = (root / file).read_text(encoding="utf-8") if (root / file).is_file() else ""
            if not re.search(rf"^def {re.escape(name)}" if name else ".", text, re.MULTILINE):
                return f"there is no {test}"
        return None if self.tests else "it names no test"


@dataclass(frozen=True)
class Result:
    """What became of a mutation: killed, explained, survived, or error with the reason."""

    name: str
    area: str
    file: str
    status: str
    by: str


def load(tables: Path = TABLES) -> list[Mutation]:
    """All mutations, in the order of the tables."""
    found = []
    for table in sorted(tables.glob("*.yaml")):
        for file, rows in yaml.safe_load(table.read_text(encoding="utf-8")).items():
            for row in rows:
                tests = tuple(shlex.split(row.pop("tests")))
                found.append(Mutation(area=table.stem, file=file, tests=tests, **row))
    return found


def copy_checkout(target: Path) -> Path:
    """The tracked and the new files of the checkout, without what git ignores."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)
    return target


class Worker:
    """A process that has the libraries loaded and runs pytest in a fork of itself for each call.

    Loading them takes longer than most of the tests. Nothing of trainkit is loaded before the fork.

    Args:
        interpret: run Triton's kernels through its interpreter, which must be said at the start.
    """

    def __init__(self, *, interpret: bool) -> None:
        environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
        if interpret:
            environment["TRITON_INTERPRET"] = "1"
        # Compiled files are told apart by whole seconds and sizes, which a mutation may keep.
        environment["PYTHONDONTWRITEBYTECODE"] = "1"
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--serve", *LIBRARIES],
            env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def run(self, copy: Path, tests: Iterable[str], *, timeout: float) -> tuple[int | None, str]:
        """Pytest's exit code in a copy, None after the timeout, and what it said."""
        log = copy.with_suffix(".log")
        job = {"copy": str(copy), "tests": list(tests), "timeout": timeout, "log": str(log)}
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        code = json.loads(self.process.stdout.readline())
        return code, log.read_text(encoding="utf-8", errors="replace")


def serve(libraries: Iterable[str]) -> None:
    """The worker's side: a job a line in, pytest's exit code a line out."""
    for name in libraries:
        importlib.import_module(name)
    for line in sys.stdin:
        job = json.loads(line)
        child = os.fork()
        if child == 0:
            os.setsid()
            log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(log, 1)
            os.dup2(log, 2)
            os.chdir(job["copy"])
            os.environ["PYTHONPATH"] = job["copy"]
            sys.path[0] = job["copy"]
            code = int(importlib.import_module("pytest").main([*PYTEST, *job["tests"]]))
            sys.stdout.flush()
            os._exit(code)
        end, done, status = time.monotonic() + job["timeout"], 0, 0
        while not done and time.monotonic() < end:
            time.sleep(0.05)
            done, status = os.waitpid(child, os.WNOHANG)
        if not done:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
        print(json.dumps(os.waitstatus_to_exitcode(status) if done else None), flush=True)


@dataclass(frozen=True)
class Place:
    """Where one mutation at a time is tried: a copy and its two workers, by ``interpret``."""

    copy: Path
    workers: Mapping[bool, Worker]


def try_one(mutation: Mutation, place: Place, timeout: float) -> Result:
    """Apply a mutation to a copy, run its tests, and take it back."""
    copy = place.copy
    status, by = "error", mutation.fault(copy) or ""
    if not by:
        path = copy / mutation.file
        before = path.read_text(encoding="utf-8")
        path.write_text(before.replace(mutation.old, mutation.new), encoding="utf-8")
        try:
            worker = place.workers[mutation.interpret]
            code, text = worker.run(copy, mutation.tests, timeout=timeout)
        finally:
            path.write_text(before, encoding="utf-8")
        status, by = judged(mutation, code, text)
    return Result(mutation.name, mutation.area, mutation.file, status, by)


def judged(mutation: Mutation, code: int | None, text: str) -> tuple[str, str]:
    """The status, and the test that failed or why there is none."""
    if code in (None, FAILED):
        failed = re.search(r"^(?:FAILED|ERROR) (\S+)", text, re.MULTILINE)
        by = "a timeout" if code is None else failed[1] if failed else "a test"
        if mutation.explained:
            return "error", f"it is explained, and yet killed by {by}"
        return "killed", by
    if code == 0 and re.search(r"\d+ passed", text):
        return ("explained", mutation.explained) if mutation.explained else ("survived", "")
    lines = text.strip().splitlines()[-1:]
    return "error", "no test ran" if code in (0, NO_TESTS) else " ".join(lines)


def failing_unchanged(mutations: Sequence[Mutation], place: Place, timeout: float) -> str | None:
    """Why the tests do not pass on the code as it is; None where they do."""
    # A folder at a time: each has its fixtures once, and a hang is seen early.
    groups: dict[tuple[bool, Path], dict[str, None]] = {}
    for mutation in mutations:
        for test in mutation.tests:
            folder = Path(test.partition("::")[0]).parent
            groups.setdefault((mutation.interpret, folder), {})[test] = None
    for (interpret, _), tests in groups.items():
        code, text = place.workers[interpret].run(place.copy, tests, timeout=timeout * 10)
        if code != 0:
            return text[-3000:] or "a timeout"
    return None


@contextlib.contextmanager
def places(mutations: Sequence[Mutation], number: int) -> Iterator[list[Place]]:
    """Copies of the checkout, each with the workers that the mutations need."""
    kinds = sorted({mutation.interpret for mutation in mutations})
    with tempfile.TemporaryDirectory(prefix="trainkit-mutate-") as folder:
        found = [
            Place(copy_checkout(Path(folder) / str(each)), {k: Worker(interpret=k) for k in kinds})
            for each in range(number)
        ]
        try:
            yield found
        finally:
            for place in found:
                for worker in place.workers.values():
                    worker.process.communicate()  # its input ends, and so does it


def try_all(mutations: Sequence[Mutation], *, jobs: int, timeout: float) -> list[Result]:
    """The results in the order of the mutations; each is printed as it comes.

    Raises:
        SystemExit: the tests fail without a mutation.
    """
    with places(mutations, jobs) as found:
        text = failing_unchanged(mutations, found[0], timeout)
        if text is not None:
            raise SystemExit(f"{text}\nthe tests must pass before anything is broken")
        free: queue.SimpleQueue[Place] = queue.SimpleQueue()
        for place in found:
            free.put(place)

        def one(mutation: Mutation) -> Result:
            place = free.get()
            try:
                result = try_one(mutation, place, timeout)
            finally:
                free.put(place)
            print(f"{result.status:10} {result.name:44} {result.by}", flush=True)
            return result

        with ThreadPoolExecutor(jobs) as pool:
            return list(pool.map(one, mutations))


def summary(results: Sequence[Result]) -> dict[str, object]:
    """The first row of the record: when, of which commit, and how many."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    ).stdout.strip()
    counts = Counter(result.status for result in results)
    today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    return {"date": today, "commit": commit, "mutations": len(results), **counts}


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line, try the mutations, print and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", default=["*"], metavar="NAME", help="may hold * and ?")
    parser.add_argument("--list", action="store_true", help="only print the table")
    parser.add_argument("--jobs", type=int, default=1, help="copies that are tried side by side")
    parser.add_argument("--timeout", type=float, default=300, help="seconds for one mutation")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows here")
    parser.add_argument("--serve", nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--tables", type=Path, default=TABLES, help="a directory of tables")
    options = parser.parse_args(arguments)
    if options.serve:
        serve(options.serve)
        return 0
    mutations = [
        mutation
        for mutation in load(options.tables)
        if any(fnmatch.fnmatch(mutation.name, pattern) for pattern in options.only)
    ]
    if options.list or not mutations:
        for mutation in mutations:
            print(f"{mutation.area:12} {mutation.name:40} {mutation.file}")
        return 0 if mutations else 2
    stale = [f"{m.name}: {fault}" for m in mutations if (fault := m.fault())]
    if stale:
        print("the table is not true any more:", *stale, sep="\n  ", file=sys.stderr)
        return 2
    results = try_all(mutations, jobs=options.jobs, timeout=options.timeout)
    first = summary(results)
    print(", ".join(f"{key} {value}" for key, value in first.items()))
    if options.json is not None:
        rows = [first, *(asdict(result) for result in results)]
        options.json.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return 0 if all(result.status in GOOD for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
