"""`trainkit kernels check`: rows for programs, a table for people, exit code 1 for a failure."""

import json

from families.family_models import make

from trainkit import kernels
from trainkit.cli.app import main
from trainkit.options.model import OPS


def test_the_command_prints_json_rows_or_a_table(tmp_path, capsys):
    make("qwen2").save_pretrained(tmp_path)
    capsys.readouterr()  # saving imports libraries that print
    assert main(["kernels", "check", "--model", str(tmp_path), "--device", "cpu", "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["op"] for row in rows] == [*OPS, "replica", "model"]
    wanted = {"op", "family", "max_error", "reference_error", "speedup", "status"}
    assert all(wanted <= row.keys() for row in rows)
    assert main(["kernels", "check", "--model", str(tmp_path), "--device", "cpu"]) == 0
    assert "swiglu                reference" in capsys.readouterr().out


def test_the_command_fails_and_still_prints_the_rows(tmp_path, capsys, monkeypatch):
    make("qwen2").save_pretrained(tmp_path)
    command = ["kernels", "check", "--model", str(tmp_path), "--device", "cpu", "--json"]
    assert main(command) == 0  # what the model is, is found once in a process
    capsys.readouterr()
    healthy = kernels.swiglu

    def broken(gate, up):  # but not on the proof's four tokens
        return healthy(gate, up) * (1.01 if gate.numel() > 8 * gate.shape[-1] else 1)

    monkeypatch.setattr(kernels, "swiglu", broken)
    assert main(command) == 1
    shown = capsys.readouterr()
    assert json.loads(shown.out.splitlines()[0])["op"] == "rms_norm"
    assert "error: kernels, family qwen2: the self-check failed: swiglu is off by" in shown.err
