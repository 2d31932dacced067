"""A culprit is planted, and named: with the batch a run kept and one thing changed at a time."""

import json
import math
import shlex
import shutil

import pytest
import torch
from commands import trainkit
from safetensors.torch import load_file, save_file

from trainkit import kernels
from trainkit.checkpoint.whole.atomic import commit, stage
from trainkit.errors import RunDirectoryError
from trainkit.models.fp8 import trained
from trainkit.run import RunDirectory
from trainkit.train.diagnose import Bench, Diagnosis, MicroBatch, diagnose, single_rows
from trainkit.train.faults.numbers import BadBatch, folder_of, read_batches, write_batch
from trainkit.train.teacher import second_model

ROWS = ["d.jsonl:1", "d.jsonl:2", "d.jsonl:3"]
RARE = 200
"""A token of the second row only."""

NUMBERS = {
    "ops": [{"op": "rms_norm", "status": "on"}, {"op": "rope", "status": "on"}],
    "attention": {"name": "trainkit"},
}


@pytest.fixture
def run(tmp_path, tiny_qwen2):
    """A run that has stopped at its first step, with a model of its own to spoil."""
    shutil.copytree(tiny_qwen2, tmp_path / "m")
    made = RunDirectory.create_at(tmp_path / "run")
    recipe(made, "kernels: true")
    made.write_json(made.kernels, NUMBERS)
    keep_batch(made, ROWS)
    return made


def keep_batch(run, rows, *, with_answers=False, extras=None):
    ids = torch.randint(0, 199, (len(rows), 12), generator=torch.Generator().manual_seed(0))
    ids[1, 4] = RARE
    batch = {"input_ids": ids, "labels": ids.clone(), "attention_mask": torch.ones_like(ids)}
    if with_answers:
        batch["answer_ids"] = torch.arange(len(rows))[:, None].expand(-1, 12).clone()
    nan = float("nan")
    extras = {"num_trained_tokens": 11 * len(rows)} if extras is None else extras
    write_batch(
        run.root,
        BadBatch(1, 0, "loss", "loss is nan", [nan], nan, math.inf, [rows], [batch], [extras]),
    )


def recipe(run, *lines, dtype="float32", more=""):
    model = f"model: {{name_or_path: {run.root.parent / 'm'}, dtype: {dtype}{more}}}"
    data = "data: {train: [d.jsonl], packing: false}"
    run.recipe.write_text("\n".join((model, data, *lines)) + "\n")


def spoil(run, change):
    path = run.root.parent / "m/model.safetensors"
    weights = load_file(path)
    change(weights)
    save_file(weights, path, metadata={"format": "pt"})


def test_a_sound_batch_has_no_culprit(run):
    found = diagnose(run, None)
    assert found.culprit is None
    assert "the batch is not bad here: loss" in found.because
    assert len(found.trials) == 1


def test_a_kernel(run, monkeypatch):
    plain = kernels.rms_norm

    def broken(x, *given, **named):  # in no proof: neither in fp64 nor on its four tokens
        is_batch = x.dtype == torch.float32 and x.numel() > 8 * x.shape[-1]
        return plain(x, *given, **named) * (math.inf if is_batch else 1)

    monkeypatch.setattr(kernels, "rms_norm", broken)
    told = []
    found = diagnose(run, 1, told.append)
    assert (found.culprit, found.name) == ("kernel", "rms_norm")
    assert "layers.0.input_layernorm" in found.because
    assert shlex.split(found.fix)[-1] == "kernels={rms_norm: false}"
    assert [line.partition(":")[0] for line in told] == [
        "as it ran",
        "without kernels",
        "without rms_norm",
    ]


def test_an_attention(run, monkeypatch):
    """The one that ran is recorded: ``auto`` might choose another here."""
    plain = torch.nn.functional.scaled_dot_product_attention

    def attend(*given, **options):
        return plain(*given, **options) * math.inf

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attend)
    recipe(run, "kernels: false")
    run.write_json(run.kernels, {"attention": {"name": "sdpa"}})
    found = diagnose(run, 1)
    assert (found.culprit, found.name) == ("attention", "sdpa")
    assert "layers.0.self_attn" in found.because
    assert found.fix.endswith("model.attn_implementation=eager")
    assert [trial.what for trial in found.trials] == ["", "eager attention"]


def test_fp8_products(run, monkeypatch):
    plain = trained.fp8_linears

    def multiply(x, *more):
        found = plain(x, *more)  # what is checked when the model is built has no batch
        return tuple(each * math.inf for each in found) if x.dim() == 3 else found

    monkeypatch.setattr(trained, "fp8_linears", multiply)
    recipe(run, "kernels: false", dtype="bfloat16", more=", fp8: all")
    found = diagnose(run, 1)
    assert (found.culprit, found.name) == ("fp8", "products")
    assert found.fix.endswith("model.fp8=false")
    assert [trial.what for trial in found.trials] == ["", "eager attention", "without fp8"]


def test_a_quantised_base(run, monkeypatch):
    import bitsandbytes

    plain = bitsandbytes.nn.Linear4bit.forward
    monkeypatch.setattr(
        bitsandbytes.nn.Linear4bit, "forward", lambda *given: plain(*given) * math.inf
    )
    recipe(run, "kernels: false", "lora: {r: 2, quantize: nf4}", dtype="bfloat16")
    found = diagnose(run, 1)
    assert (found.culprit, found.name) == ("quantize", "nf4 base")
    assert found.fix.endswith("lora.quantize=null")


def test_a_model_that_is_bad_whatever_it_reads(run, monkeypatch):
    plain = torch.nn.Embedding.forward
    monkeypatch.setattr(torch.nn.Embedding, "forward", lambda *given: plain(*given) * math.nan)
    recipe(run, "kernels: false")
    found = diagnose(run, 1)
    assert (found.culprit, found.name) == ("model", "model.embed_tokens")


def test_a_weight(run):
    name = "model.layers.1.mlp.up_proj.weight"
    spoil(run, lambda weights: weights[name].view(-1)[7].fill_(math.inf))
    found = diagnose(run, 1)
    assert (found.culprit, found.name) == ("weights", name)


def test_an_overflow_that_a_wider_dtype_does_not_have(run):
    def grow(weights):
        weights["model.layers.1.mlp.up_proj.weight"] *= 2e4
        weights["model.layers.1.mlp.down_proj.weight"] *= 1e3

    spoil(run, grow)
    recipe(run, "kernels: false", dtype="float16")
    found = diagnose(run, 1)
    assert (found.culprit, found.name) == ("dtype", "float16")
    assert "layers.1.mlp" in found.because
    assert [trial.what for trial in found.trials] == ["", "eager attention", "in float32"]


def test_a_row(run, monkeypatch):
    plain = torch.nn.Embedding.forward

    def forward(self, ids):
        return plain(self, ids).masked_fill((ids == RARE).unsqueeze(-1), math.nan)

    monkeypatch.setattr(torch.nn.Embedding, "forward", forward)
    found = diagnose(run, 1)
    assert (found.culprit, found.name) == ("rows", ROWS[1])
    assert "1 of 3 rows" in found.because
    assert "model.embed_tokens" in found.because
    keep_batch(run, [f"p.jsonl:{row}" for row in (1, 1, 2, 2)], with_answers=True)
    recipe(run, "kernels: true", "objective: orpo")
    found = diagnose(run, 1)  # an answer without the other one has no loss
    assert (found.culprit, found.name) == ("rows", "p.jsonl:1")
    assert "1 of 2 rows" in found.because


@pytest.mark.parametrize(
    ("place", "culprit", "name", "objective"),
    [
        ("checkpoint-0", "adapters", "lora", "sft"),
        ("checkpoint-0", "adapters", "lora", "dpo"),  # which switches them off and on by itself
        ("bad_batches/step-1/weights", "learning_rate", "1e+12", "sft"),
    ],
)
def test_adapters_that_have_grown(place, culprit, name, objective, run, tiny_qwen2):
    """In a checkpoint, nobody knows since when; where an update has done it, its rate."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(tiny_qwen2, dtype=torch.float32)
    model = get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj", "down_proj"]))
    with torch.no_grad():
        for key, weight in model.named_parameters():
            if "lora_" in key and "down_proj" in key:
                weight.fill_(1e25)
    weights = run.root / place
    staging = stage(weights)
    model.save_pretrained(staging)
    commit(staging, weights, metadata={})
    lora = "lora: {r: 2, target_modules: [q_proj, down_proj]}"
    keep_batch(run, [*ROWS, "d.jsonl:4"], with_answers=objective == "dpo")
    training = "training: {learning_rate: 1e12, optim: sgd}"
    recipe(run, "kernels: true", lora, f"objective: {objective}", training)
    found = diagnose(run, 1)
    assert (found.culprit, found.name) == (culprit, name)
    assert found.are_the_steps


@pytest.mark.parametrize("objective", ["dpo", "distill"])
def test_the_model_that_a_loss_asks_besides_is_asked_again(objective, run):
    """With the base's own weights it finds nothing to learn, and with others something."""
    asks = {
        "dpo": "preference: {precompute_reference: false}",
        "distill": f"distill: {{teacher: {run.root.parent / 'm'}, sft_weight: 0.0}}",
    }
    if objective == "dpo":
        keep_batch(run, [*ROWS, "d.jsonl:4"], with_answers=True)
    else:
        keep_batch(run, ROWS, extras={})
    recipe(run, f"objective: {objective}", asks[objective])
    nothing = {"dpo": math.log(2), "distill": 0.0}[objective]
    assert diagnose(run, 1).trials[0].outcome.loss == pytest.approx(nothing, abs=1e-6)
    weights = run.root / "bad_batches/step-1/weights"
    staging = stage(weights)
    spoil(run, lambda weights: weights.update({name: 2 * w for name, w in weights.items()}))
    shutil.copytree(run.root.parent / "m", staging, dirs_exist_ok=True)
    spoil(run, lambda weights: weights.update({name: w / 2 for name, w in weights.items()}))
    commit(staging, weights, metadata={})
    assert abs(diagnose(run, 1).trials[0].outcome.loss - nothing) > 1e-3


def test_a_second_model_is_loaded_again_only_where_it_would_be_another(run, monkeypatch):
    keep_batch(run, ROWS, extras={})
    recipe(run, "objective: distill", f"distill: {{teacher: {run.root.parent / 'm'}}}")
    loads = []
    monkeypatch.setattr(
        "trainkit.train.diagnose.second_model",
        lambda *given: loads.append(given) or second_model(*given),
    )
    kept = read_batches(folder_of(run.root, 1))
    bench = Bench(run, kept, None, Diagnosis(1, "", "", False), lambda _: None)
    for overrides in ([], [], ["model.dtype=bfloat16"]):
        assert not bench.trial("", overrides).problem
    assert len(loads) == 2


def test_from_the_command_line(run):
    spoil(run, lambda weights: weights["model.norm.weight"].fill_(math.nan))
    said = trainkit(run.root.parent, "diagnose", "run", "--json").well()
    found = json.loads(said.out)
    assert (found["culprit"], found["name"]) == ("weights", "model.norm.weight")
    assert found["trials"][0]["outcome"]["first_module"] == "model.norm"
    said = trainkit(run.root.parent, "diagnose", "run", "--step", "4")
    assert "no batch of step 4 was kept (kept: 1)" in said.err


def test_a_run_without_a_kept_batch_says_so(tmp_path):
    with pytest.raises(RunDirectoryError, match="no batch of a step was kept"):
        diagnose(RunDirectory.create_at(tmp_path / "run"), None)


def test_a_packed_row_is_taken_apart_into_its_documents():
    ids = torch.arange(8)[None]
    positions = torch.tensor([[0, 1, 2, 0, 1, 0, 1, 0]])  # the last is padding
    values = {"input_ids": ids, "labels": ids, "position_ids": positions, "num": 8}
    rows = single_rows(MicroBatch(("a", "b", "c"), values))
    assert [row.values["input_ids"].tolist() for row in rows] == [[[0, 1, 2]], [[3, 4]], [[5, 6]]]
    assert [row.rows for row in rows] == [("a",), ("b",), ("c",)]
