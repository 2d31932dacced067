"""What another tool's file says."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Theirs:
    """What a file says.

    Attributes:
        path: the file.
        values: its keys.
        program: the program and subcommand of a command line, such as ``swift sft``.
        launcher: options of the launcher before it, such as ``config_file``.
        unclear: keys whose value only running it could tell, with the expression.
        lost: what a script does to the model or the rows that has no counterpart: (what, why).
        noted: what it does that changes nothing here: (what, why).
        tool: whose a script is.
    """

    path: Path
    values: dict[str, Any]
    program: str = ""
    launcher: dict[str, Any] = field(default_factory=dict)
    unclear: dict[str, str] = field(default_factory=dict)
    lost: list[tuple[str, str]] = field(default_factory=list)
    noted: list[tuple[str, str]] = field(default_factory=list)
    tool: str | None = None
