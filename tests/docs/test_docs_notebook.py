"""The notebook's cells run from top to bottom, with three steps of training."""

import json
import shlex
from pathlib import Path

import matplotlib as mpl
from commands import trainkit

NOTEBOOK = Path(__file__).parents[2] / "docs" / "notebooks" / "quickstart.ipynb"


def test_the_cells_run_in_order(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    mpl.use("Agg")
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    names: dict[str, object] = {}
    for cell in cells:
        text = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            continue
        assert not cell["outputs"], "outputs are the reader's own"
        if text.startswith("!"):
            program, *words = shlex.split(text[1:])
            assert program == "trainkit"
            if "sft" in words:
                words += ["training.max_steps=3", "generation_eval=null"]
                words += ["training.eval_strategy=no", "data.train=[quickstart/held_out.jsonl]"]
            said = trainkit(tmp_path, *words)
            assert said.code == 0, said.err
            continue
        exec(compile(text, cell["id"], "exec"), names)
    assert "the model:" in capsys.readouterr().out
    assert len(names["trained"]) == 3
