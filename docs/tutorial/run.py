"""Runs pages of the tutorial: the python blocks of a page, in order, as one script.

    TRITON_INTERPRET=1 python docs/tutorial/run.py 1          # on a CPU
    python docs/tutorial/run.py 1 2 3                         # on a GPU: it prints times, too

Lines keep their numbers, so a traceback points into the page.
"""

import argparse
import linecache
import time
from pathlib import Path

import torch

PAGES = Path(__file__).parent


def script_of(page: Path) -> str:
    """The page with every line outside its python blocks left empty."""
    lines, inside = [], False
    for line in page.read_text(encoding="utf-8").splitlines(keepends=True):
        is_fence = line.startswith("```")
        if is_fence:
            inside = line.strip() == "```python"
        lines.append(line if inside and not is_fence else "\n")
    return "".join(lines)


def run(page: Path) -> None:
    """Run a page in a namespace of its own."""
    script = script_of(page)
    # Triton reads the source of a kernel back through linecache; no time stamp: never reloaded.
    lines = script.splitlines(keepends=True)
    linecache.cache[str(page)] = (len(script), None, lines, str(page))
    torch.manual_seed(0)  # the same numbers whichever pages ran before
    exec(compile(script, str(page), "exec"), {"__name__": "__main__", "__file__": str(page)})


def main() -> None:
    """Run the pages whose numbers are given."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pages", nargs="+", type=int, help="numbers of pages")
    for number in parser.parse_args().pages:
        page = next(PAGES.glob(f"{number}-*.md"), None)
        if page is None:
            parser.error(f"there is no page {number}")
        print(f"== {page.name}")
        started = time.perf_counter()
        run(page)
        print(f"== {page.name} ran in {time.perf_counter() - started:.1f} s")


if __name__ == "__main__":
    main()
