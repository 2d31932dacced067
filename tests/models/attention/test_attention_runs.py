"""The proof of attention in runs: under ZeRO-3, and with an attention that the recipe names."""

import json

import pytest
from ranks import run_ranks
from tiny import SINCE_5_18
from tiny_classes import classes, make_tiny

from trainkit.cli.app import main

OURS = "trainkit"


@pytest.fixture(scope="module")
def directory_of(tmp_path_factory, tiny_tokenizer):
    """A tiny model of a kind, as save_pretrained leaves it."""

    def make(model_type):
        directory = tmp_path_factory.mktemp(model_type)
        model = make_tiny(*classes()[model_type], vocab_size=len(tiny_tokenizer))
        model.save_pretrained(directory)
        tiny_tokenizer.save_pretrained(directory)
        return directory

    return make


@pytest.mark.sample("bfloat16")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_proof_under_zero3_runs_on_layers_of_the_models_kind(dtype, directory_of):
    """Windows in one layer, sinks in all; the two ranks say the same."""
    directory = str(directory_of("gpt_oss"))
    case = "models.attention.attention_rank_cases:prove"
    right, other = run_ranks(case, directory=directory, dtype=dtype, packed=True)
    assert right == other
    assert not right["is_whole"]
    assert right["same_randomness"]
    assert right["attention"] == right["name"] == OURS
    assert {(row["batch"], row["status"]) for row in right["checks"]} == {
        ("padded", "ok"),
        ("packed", "ok"),
    }
    assert {row["compared"] for row in right["checks"]} == {"logits", "layers: 2"}
    for wrong in run_ranks(case, directory=directory, dtype=dtype, without="sinks"):
        assert wrong["name"] != OURS
        assert "rounding explains" in wrong["reason"]


RECIPE = """\
model: {{name_or_path: "{model}", attn_implementation: {attention}, dtype: bfloat16}}
data: {{train: [rows.jsonl], max_length: 64, packing: {packing}, cache_dir: cache}}
training: {{per_device_train_batch_size: 2, max_steps: 1}}
"""


def run(tmp_path, monkeypatch, capsys, **recipe):
    rows = [
        [{"role": role, "content": f"{role} {n}"} for role in ("user", "assistant")]
        for n in range(8)
    ]
    text = "\n".join(json.dumps({"messages": each}) for each in rows)
    (tmp_path / "rows.jsonl").write_text(text)
    (tmp_path / "small.yaml").write_text(RECIPE.format(**recipe))
    monkeypatch.chdir(tmp_path)
    status = main(["sft", "--config", "small.yaml", "--output-dir", "run"])
    kernels = tmp_path / "run" / "kernels.json"
    record = json.loads(kernels.read_text()) if kernels.exists() else {}
    return status, capsys.readouterr().err, record


@pytest.mark.parametrize(
    ("model_type", "attention", "packing"),
    [("mistral", "sdpa", "false"), ("gemma2", "eager", "true"), ("gpt_oss", "trainkit", "true")],
)
def test_a_named_attention_that_is_the_models_own_trains(
    model_type, attention, packing, directory_of, tmp_path, monkeypatch, capsys
):
    model = directory_of(model_type)
    status, said, record = run(
        tmp_path, monkeypatch, capsys, model=model, attention=attention, packing=packing
    )
    assert status == 0, said
    assert record["attention"]["name"] == attention
    assert {row["status"] for row in record["attention"]["checks"]} == {"ok"}


# Up to 5.17 Gemma 2 let SDPA drop its soft caps, which the proof sees in the numbers.
NO_SOFT_CAP = (
    "it cannot run: Gemma2ForCausalLM does not support" if SINCE_5_18 else "from eager attention"
)


@pytest.mark.parametrize(
    ("model_type", "attention", "packing", "reason"),
    [
        ("gemma2", "sdpa", "false", NO_SOFT_CAP),
        ("gpt_oss", "eager", "true", "those of each document alone"),
        ("mistral", "flex", "false", "is not supported"),
        ("mistral", "flash_attention_2", "true", "it cannot run"),
    ],
)
def test_a_named_attention_that_is_not_the_models_stops_the_run(
    model_type, attention, packing, reason, directory_of, tmp_path, monkeypatch, capsys
):
    model = directory_of(model_type)
    status, said, record = run(
        tmp_path, monkeypatch, capsys, model=model, attention=attention, packing=packing
    )
    assert status in (1, 2)
    assert f"model.attn_implementation: attention {attention} does not compute" in said
    assert reason in said
    assert "set it to auto" in said
    rows = record["attention_checks"]
    assert {row["attention"] for row in rows} == {attention}
    assert "failed" in {row["status"] for row in rows}
    assert not (tmp_path / "run" / "final").exists()
    assert not list((tmp_path / "run").glob("checkpoint-*"))


def test_a_named_attention_that_drops_a_soft_cap_is_stopped_by_its_layers(
    directory_of, tmp_path, monkeypatch, capsys
):
    """A cap of 50 does nothing to a random model's logits; its layers show that it is gone."""
    from trainkit.models.attention import forward

    original = forward.spelled_out
    monkeypatch.setattr(
        forward, "spelled_out", lambda *a, **k: original(*a, **{**k, "softcap": None})
    )
    model = directory_of("gemma2")
    status, said, record = run(
        tmp_path, monkeypatch, capsys, model=model, attention=OURS, packing="true"
    )
    assert status in (1, 2)
    assert "differs by" in said
    assert "from eager attention on the same padded states" in said
    by_logits = [row for row in record["attention_checks"] if row["compared"] == "logits"]
    assert {row["status"] for row in by_logits} == {"ok"}
