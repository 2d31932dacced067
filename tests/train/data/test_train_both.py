"""Evaluation data that is also trained on: said by its rows; streamed by how files begin."""

import json
from itertools import count

import pytest
from tiny import chat_lines

from trainkit.data import DataOptions, Source
from trainkit.objectives.sft import SFT
from trainkit.train.data import prepare_run_data


@pytest.mark.parametrize("buffer", [0, 30], ids=["prepared", "streamed"])
def test_files_that_are_trained_and_evaluated_are_named(tmp_path, tiny_tokenizer, buffer):
    for name, rows in (("a", range(40)), ("copy", range(40)), ("other", range(90, 99))):
        text = chat_lines((f"q{n}", "a") for n in rows) + "\n"
        (tmp_path / f"{name}.jsonl").write_text(text)
    (tmp_path / "part.jsonl").write_text(chat_lines((f"q{n}", "a") for n in range(37, 44)))
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
    assert ("a.jsonl" if buffer else "40 rows of a") in said
    assert "other" not in said
    assert len(warnings("copy")) == 1
    if not buffer:
        assert "3 rows of part;" in warnings("part")[0]


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
