"""What a check of a machine says."""

import dataclasses
from typing import Any, Literal

State = Literal["ok", "warning", "error"]


@dataclasses.dataclass(frozen=True)
class Finding:
    """What a check found.

    Attributes:
        check: its name.
        state: ``error`` where training cannot work, ``warning`` where something will be slow,
            missing or fail later.
        found: what is there.
        fix: the command that fixes it; what is more to say follows a ``#``. Everything that
            is not ok has one.
    """

    check: str
    state: State
    found: str
    fix: str | None = None

    def __post_init__(self) -> None:
        if (self.state == "ok") != (self.fix is None):
            raise ValueError(f"{self.check}: a fault has a fix, and nothing else has")

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as programs read them."""
        return dataclasses.asdict(self)


def judged(check: str, found: str, *, fault: State, fix: str | None) -> Finding:
    """A finding that is ok without a fix, and a fault with one."""
    return Finding(check, "ok" if fix is None else fault, found, fix)
