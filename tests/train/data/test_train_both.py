"""Evaluation data that is also trained on: said by content, or by path where rows are streamed."""

import json
from itertools import count

import pytest
from tiny import chat_lines

from trainkit.data import DataOptions, Source
from trainkit.objectives.sft import SFT
from trainkit.train.data import prepare_run_data


@pytest.mark.parametrize("buffer", [0, 30], ids=["prepared", "streamed"])
def test_files_that_are_trained_and_evaluated_are_named(tmp_path, tiny_tokenizer, buffer):
    lines = [chat_lines([("q", "a")]) + "\n"] * 40
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
            objective=SFT,
        )
        return [text for text in data.warnings if "also trained on" in text]

    assert not warnings("other")
    [said] = warnings("other", "a")
    assert "a.jsonl" in said
    assert "other.jsonl" not in said
    assert len(warnings("copy")) == (0 if buffer else 1)


def test_training_and_evaluation_files_of_one_name_draw_by_themselves(tmp_path, tiny_tokenizer):
    """The rows that ``max_samples`` takes of each are others."""
    sources = []
    for at in ("train", "held"):
        (tmp_path / at).mkdir()
        rows = [
            [{"role": "user", "content": f"{at} {n}"}, {"role": "assistant", "content": f"{n}"}]
            for n in range(40)
        ]
        text = "".join(json.dumps({"messages": row}) + "\n" for row in rows)
        (tmp_path / at / "d.jsonl").write_text(text)
        sources.append([Source(str(tmp_path / at / "d.jsonl"), max_samples=10)])
    data = prepare_run_data(
        *sources,
        tiny_tokenizer,
        DataOptions(max_length=128, cache_dir=str(tmp_path / "cache")),
        packing=False,
        shuffle=False,
        ledger=tmp_path / "dropped.jsonl",
        progress=None,
        objective=SFT,
    )
    drawn = [
        [each.sample_name(number).rpartition(":")[2] for number in range(10)]
        for each in (data.train, data.eval)
    ]
    assert drawn[0] != drawn[1]
