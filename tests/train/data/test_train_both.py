"""Evaluation data that is also trained on: said by content, or by path where rows are streamed."""

import json
from itertools import count

import pytest

from trainkit.data import DataOptions, Source
from trainkit.objectives.table import OBJECTIVES
from trainkit.train.data import prepare_run_data


@pytest.mark.parametrize("buffer", [0, 30], ids=["prepared", "streamed"])
def test_files_that_are_trained_and_evaluated_are_named(tmp_path, tiny_tokenizer, buffer):
    turn = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
    lines = [json.dumps({"messages": turn}) + "\n"] * 40
    for name, num in (("a", 40), ("copy", 40), ("other", 39)):
        (tmp_path / f"{name}.jsonl").write_text("".join(lines[:num]))
    numbers = count()

    def warnings(*evaluated):
        data = prepare_run_data(
            [Source(str(tmp_path / "a.jsonl"))],
            [Source(str(tmp_path / f"{name}.jsonl")) for name in evaluated],
            tiny_tokenizer,
            DataOptions(max_length=128, cache_dir=str(tmp_path / "cache")),
            packing=False,
            stream_buffer=buffer,
            ledger=tmp_path / f"dropped-{next(numbers)}.jsonl",
            progress=None,
            objective=OBJECTIVES["sft"],
        )
        return [text for text in data.warnings if "also trained on" in text]

    assert not warnings("other")
    [said] = warnings("other", "a")
    assert "a.jsonl" in said
    assert "other.jsonl" not in said
    assert len(warnings("copy")) == (0 if buffer else 1)
