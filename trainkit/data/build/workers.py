"""Worker processes that build samples, in order and with bounded memory."""

import ctypes
import gc
import itertools
import multiprocessing
import os
import signal
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager

from trainkit.data.build.builder import BuiltRows, SampleBuilder
from trainkit.data.read.reading import RawRow
from trainkit.errors import DataError
from trainkit.options import Source

Work = tuple[int, list[RawRow]]
"""The number of a file, and a run of its rows."""

Result = tuple[int, list[RawRow], BuiltRows]
"""The same, and what became of them."""

_PR_SET_PDEATHSIG = 1

_builder: SampleBuilder | None = None


def build_all(
    builder: SampleBuilder, work: Iterable[Work], source: Source, *, num_workers: int
) -> Iterator[Result]:
    """Build samples for all rows; results come in the order of the rows.

    Workers are forked, so the tokenizer is loaded once. They must be made before a process group
    or a CUDA context exists. At most three runs of rows per worker are under way at any time.

    Args:
        builder: used by every worker.
        work: runs of rows, read as they are needed.
        source: where the rows come from.
        num_workers: processes; 0 and 1 build in this one.

    Raises:
        DataError: a worker died, or found what concerns the whole run.
    """
    work = iter(work)
    if num_workers <= 1 or "fork" not in multiprocessing.get_all_start_methods():
        for file, rows in work:
            yield file, rows, builder.build(rows, source)
        return
    with _single_threaded_tokenizers():
        # The first run is built here: the template's probes are then done for all workers, and a
        # small file needs none.
        for file, rows in itertools.islice(work, 1):
            yield file, rows, builder.build(rows, source)
        yield from _build_in_pool(builder, work, source, num_workers)


def _build_in_pool(
    builder: SampleBuilder, work: Iterator[Work], source: Source, num_workers: int
) -> Iterator[Result]:
    first = next(work, None)
    if first is None:
        return
    pending: deque[tuple[int, list[RawRow], Future[BuiltRows]]] = deque()
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(num_workers, context, _start, (builder, os.getpid())) as pool:
        try:
            for file, rows in itertools.chain([first], work):
                with _alive():
                    pending.append((file, rows, pool.submit(_build, rows, source)))
                if len(pending) > 3 * num_workers:
                    yield _take(pending)
            while pending:
                yield _take(pending)
        finally:
            for _, _, future in pending:
                future.cancel()


@contextmanager
def _single_threaded_tokenizers() -> Iterator[None]:
    """The workers are the parallelism; the threads of a forked tokenizer may hang."""
    before = os.environ.get("TOKENIZERS_PARALLELISM")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ["TOKENIZERS_PARALLELISM"]
        else:
            os.environ["TOKENIZERS_PARALLELISM"] = before


def _take(
    pending: deque[tuple[int, list[RawRow], Future[BuiltRows]]],
) -> Result:
    file, rows, future = pending.popleft()
    with _alive():
        return file, rows, future.result()


@contextmanager
def _alive() -> Iterator[None]:
    """Name the end of a worker, which submitting work may be the first to meet."""
    try:
        yield
    except BrokenProcessPool as error:
        raise DataError(
            "a tokenising process died, most likely because memory ran out",
            fix="lower data.num_workers or data.max_row_bytes",
        ) from error


def _start(builder: SampleBuilder, parent: int) -> None:
    global _builder
    _builder = builder
    _die_with(parent)
    # Rows make many short-lived objects and no cycles: what the parent has loaded need not be
    # walked again and again (nor its pages be copied).
    gc.freeze()
    gc.set_threshold(100_000, 50, 100)


def _die_with(parent: int) -> None:
    """Ask Linux to end this process when its parent is killed; end it if that was a moment ago.

    It would wait for work for ever, and hold the files that it has inherited.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _build(rows: list[RawRow], source: Source) -> BuiltRows:
    assert _builder is not None
    return _builder.build(rows, source)
