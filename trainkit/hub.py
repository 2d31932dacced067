"""Whether the hub answers, asked once: its clients would retry for minutes. No torch."""

import functools
import threading
from pathlib import Path

from trainkit.errors import TrainkitError

SECONDS = 3
"""That the hub, or the proxy before it, has to answer in."""


def check_hub(
    name: str, kind: type[TrainkitError], where: str, fix: str, copies: Path | None = None
) -> None:
    """Refuse a name that nothing can be fetched for; what was fetched before serves instead."""
    from huggingface_hub import constants

    trouble = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else _trouble(constants.ENDPOINT)
    if trouble is None:
        return
    cache = Path(constants.HF_HUB_CACHE)
    folder = f"{'models' if copies is None else 'datasets'}--{name.replace('/', '--')}"
    if (cache / folder / "snapshots").is_dir() or (copies is not None and copies.is_dir()):
        constants.HF_HUB_OFFLINE = True
        return
    raise kind(
        f"there is nothing at {Path(name).absolute()}, nor a copy of an earlier download, and the "
        f"hub at {constants.ENDPOINT} cannot be reached ({trouble})",
        where=where,
        fix=fix,
    )


@functools.cache
def _trouble(endpoint: str) -> str | None:
    """Why nothing answers there, with the proxies and certificates of the hub's own client."""
    from huggingface_hub import get_session

    found = [f"no answer in {SECONDS} seconds"]

    def ask() -> None:
        try:
            status = get_session().head(endpoint, timeout=SECONDS).status_code
            found.append(f"it answers {status}" if status in (407, 502, 503, 504) else "")
        except Exception as error:  # of whichever library the client is made with
            found.append(f"{type(error).__name__}: {error}"[:200])

    # A thread, as looking a name up has no time limit of its own.
    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(SECONDS)
    return found[-1] or None
