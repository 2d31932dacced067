"""Names that other tools, older transformers and trainkit's own command line use for our keys.

Somebody who brings a recipe from elsewhere sees what each of its keys is called here: the rows are
in ``foreign.json``. Every target is a key of the schema, or null where there is nothing to set; a
test holds the table to it.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class ForeignName:
    """What a key of another tool is here.

    Attributes:
        owner: the tools that use the name.
        target: our dotted key, or None.
        note: how to say it here, where copying the value is not enough.
    """

    owner: str
    target: str | None
    note: str | None = None


_ROWS = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))

FOREIGN: Mapping[str, ForeignName] = {
    name: ForeignName(*row) for name, row in _ROWS["foreign"].items()
}

REMOVED: Mapping[str, str] = _ROWS["removed"]
"""Fields that TrainingArguments once had; ``{value}`` stands for what was given."""

REFUSED: Mapping[str, str] = _ROWS["refused"]
"""Fields of TrainingArguments that are set another way here."""
