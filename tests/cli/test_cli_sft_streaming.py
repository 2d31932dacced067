"""``trainkit sft`` on streamed data: it learns, goes on exactly, and its ranks share the rows."""

import json
from pathlib import Path

import pytest
from commands import trainkit

RECIPE = """\
model: {{name_or_path: "{model}", dtype: float32}}
data:
  train: [chat.jsonl, math.jsonl]
  eval: [held.jsonl]
  max_length: 256
  cache_dir: cache
  streaming: 50
training:
  {{learning_rate: 1e-2, per_device_train_batch_size: 2, gradient_accumulation_steps: 2,
   max_steps: 12, save_steps: 4}}
"""


def conversation(question, answer):
    turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return json.dumps({"messages": turns})


@pytest.fixture
def project(tmp_path, tiny_qwen2):
    """Two sources with dirt; a pass over both takes a few of the steps."""
    for name, count in (("chat", 55), ("math", 105)):
        lines = [conversation(f"Say {n}.", f"{name} {n}" * (n % 3 + 1)) for n in range(count)]
        lines[5::25] = ["{broken"] * len(lines[5::25])
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    (tmp_path / "held.jsonl").write_text(conversation("Say 1.", "chat 1"))
    (tmp_path / "r.yaml").write_text(RECIPE.format(model=tiny_qwen2))
    return tmp_path


def sft(project, *arguments, **options):
    return trainkit(project, "sft", *arguments, **options)


def rows_of(run, key="loss"):
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if key in row]


def dropped(run, name="dropped.jsonl"):
    rows = [json.loads(line) for line in (run / name).read_text().splitlines()]
    return [(Path(row["file"]).name, row["line"]) for row in rows]


ALL_DROPPED = [("chat.jsonl", n) for n in range(6, 56, 25)] + [
    ("math.jsonl", n) for n in range(6, 106, 25)
]


def test_a_killed_run_goes_on_as_if_it_had_not_been(project):
    """SIGKILL behind a checkpoint; the steps after it are done again, the ledger keeps one line.

    Three loading processes and an even number of batches a step: whose turn it is differs.
    """
    import torch
    from safetensors.torch import load_file

    options = ("--config", "r.yaml", "training.dataloader_num_workers=3")
    code, _, err = sft(project, *options, "--output-dir", "whole")
    assert code == 0, err
    assert "the stream has begun pass 2 over its files" in err
    whole = project / "whole"
    losses = [row["loss"] for row in rows_of(whole)]
    assert len(losses) == 12
    assert losses[-1] < 0.8 * losses[0]
    assert {"loss/chat", "loss/math"} <= set(rows_of(whole)[3])
    assert rows_of(whole, "eval_loss")
    assert rows_of(whole)[-1]["num_dropped"] == len(ALL_DROPPED)
    assert sorted(dropped(whole)) == sorted(ALL_DROPPED)

    parts = project / "parts"
    assert sft(project, *options, "--output-dir", "parts", kill_at=7) is None
    assert (parts / "checkpoint-4").exists()
    assert len(rows_of(parts)) == 6
    math = (project / "math.jsonl").read_text()
    (project / "math.jsonl").write_text(math.replace("Say 75.", "Ask 75.", 1))
    code, _, err = sft(project, *options, "--output-dir", "parts", "--resume")
    assert code == 1
    assert "math.jsonl was changed" in " ".join(err.split())
    (project / "math.jsonl").write_text(math)
    code, _, err = sft(project, *options, "--output-dir", "parts", "--resume")
    assert code == 0, err
    assert "continuing from" in err
    same = (
        "step", "epoch", "loss", "loss/chat", "num_tokens", "num_rows", "num_dropped", "num_passes",
    )  # fmt: skip
    assert [[row.get(key) for key in same] for row in rows_of(parts)] == [
        [row.get(key) for key in same] for row in rows_of(whole)
    ]
    first, second = (load_file(run / "final" / "model.safetensors") for run in (whole, parts))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert dropped(parts) == dropped(whole)


def test_ranks_share_the_rows_and_their_dirt(project):
    code, _, err = sft(project, "--config", "r.yaml", "--output-dir", "two", num_ranks=2)
    assert code == 0, err
    run = project / "two"
    mine, other = dropped(run), dropped(run, "dropped.rank1.jsonl")
    assert mine
    assert other
    assert sorted(mine + other) == sorted(ALL_DROPPED)
    assert rows_of(run)[-1]["num_dropped"] == len(ALL_DROPPED)
    assert {p.name for p in (run / "checkpoint-12").glob("stream*")} == {
        "stream_rank0.json",
        "stream_rank1.json",
    }


def test_what_cannot_work_is_said_before_the_model_is_loaded(project):
    code, _, err = sft(project, "--config", "r.yaml", "data.max_dropped=1")
    assert code == 2
    assert "max_dropped 1" in err
    assert "Traceback" not in err
    assert not (project / "train_model").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("training.max_steps=-1", "training.max_steps must say where to stop"),
        ("training.train_sampling_strategy=group_by_length", "group_by_length needs the lengths"),
        ("data.streaming=0", "data.streaming: 0 must be true or false"),
    ],
)
def test_a_recipe_that_cannot_stream_is_refused(project, change, message):
    from trainkit.errors import RecipeError
    from trainkit.recipe import load_recipe

    with pytest.raises(RecipeError, match=message):
        load_recipe(project / "r.yaml", [change])
