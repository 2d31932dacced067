"""Runs on ranks that differ in what is recomputed only."""

import hashlib
import json
import os
from pathlib import Path


def outcomes(cwd, words, ways):
    """For each way to recompute: the bytes of what was saved, every loss and norm, and layers.

    The runs go one after another in the same processes.
    """
    import trainkit.run.report
    from trainkit.cli.app import main

    os.chdir(cwd)
    trainkit.run.report.draw_plots = trainkit.run.report.svg_plots = lambda *_: []
    found = {}
    for name, said in ways.items():
        run = f"{'-'.join(word.rpartition('=')[2] for word in words)}-{name}"
        assert main(["sft", "r.yaml", "--output-dir", run, *words, f"recompute={said}"]) == 0
        if os.environ["RANK"] == "0":
            found[name] = outcome(Path(run))
    return found


def outcome(run):
    """Of a finished run."""
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    saved = sorted((run / "final").glob("*.safetensors"))
    record = run / "recompute.json"
    return {
        "weights": [hashlib.sha256(file.read_bytes()).hexdigest() for file in saved],
        "curve": [(row["loss"], row["grad_norm"]) for row in rows if "loss" in row],
        "recomputed": json.loads(record.read_text())["recomputed"] if record.exists() else None,
    }
