"""Try ``attn_implementation: auto`` on every causal-LM class of the installed transformers.

Builds each class tiny and random, in fp32 on the CPU, runs the proof that `trainkit sft` runs at
start on padded and on packed rows, and writes one line for each class.

    python scripts/attention_survey.py [--only TYPE ...] [--json FILE] [--markdown FILE]
"""

import argparse
import contextlib
import io
import json
import logging
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers

from trainkit.errors import TrainkitError
from trainkit.models.attention import resolve_attention
from trainkit.models.attention.proof import settle

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from tiny_classes import classes, make_tiny


def try_class(config_class: Any, model_class: Any) -> dict[str, Any]:
    """What ``auto`` does with one class, on padded and on packed rows."""
    row: dict[str, Any] = {"model_type": config_class.model_type, "class": model_class.__name__}
    try:
        model = make_tiny(config_class, model_class)
    except Exception as error:
        return {**row, "built": False, "reason": f"{type(error).__name__}: {_first_line(error)}"}
    row["built"] = True
    for packed in (False, True):
        row["packed" if packed else "padded"] = try_rows(model, packed=packed)
    return row


def try_rows(model: Any, *, packed: bool) -> dict[str, Any]:
    """The outcome on one kind of rows: what was chosen, how far from eager, or why not."""
    wanted = resolve_attention(packed=packed, device="cpu", dtype=torch.float32)
    started = time.perf_counter()
    try:
        chosen = settle(model, wanted, packed=packed, is_auto=True)
    except TrainkitError as error:
        return {"outcome": "refused", "reason": _first_line(error)}
    except Exception as error:
        return {"outcome": "crashed", "reason": f"{type(error).__name__}: {_first_line(error)}"}
    accepted = [check for check in chosen.checks if check["status"] == "ok"]
    return {
        "outcome": chosen.name,
        "reason": "" if chosen.name == wanted.name else chosen.reason,
        "error": max((check["error"] for check in accepted), default=None),
        "allowed": max((check["allowed"] for check in accepted), default=None),
        "seconds": round(time.perf_counter() - started, 2),
    }


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else repr(error)


def main() -> None:
    """Survey, print a line each, and write what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", help="model types; all by default")
    parser.add_argument("--json", type=Path, help="write one JSON object a line")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.CRITICAL)
    rows = []
    for model_type, (config_class, model_class) in sorted(classes().items()):
        if options.only and model_type not in options.only:
            continue
        with contextlib.redirect_stderr(io.StringIO()):
            row = try_class(config_class, model_class)
        row["transformers"] = transformers.__version__
        rows.append(row)
        sys.stdout.write(json.dumps(row) + "\n")
        sys.stdout.flush()
    if options.json is not None:
        options.json.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    main()
