"""The benchmarks run, at a size where they measure nothing."""

import itertools
import json
import subprocess

import pytest
import torch
from typer.testing import CliRunner

from benchmarks import curve, loss, ops, packing, runs, unlisted
from trainkit.bench import step
from trainkit.bench.cells import Cell, Records, environment, run
from trainkit.bench.lora import MODES, quantize
from trainkit.bench.lora import measure as measure_lora
from trainkit.bench.providers import MODELS, Shape, attention_of, build
from trainkit.cli.commands.machine import bench_app as app

TINY = Shape(
    "qwen2",
    {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 128,
        "tie_word_embeddings": True,
    },
    4,
    64,
)


CPU = torch.device("cpu")


def test_providers_compute_the_same_loss_in_processes_of_their_own():
    first, other = (
        Cell("trainkit.bench.step", "tiny", provider, warm_up_seconds=0.0, steps=1, shape=TINY)
        for provider in ("trainkit", "hf_sdpa")
    )
    failed, ours = run([Cell("json", "tiny", "nobody"), first])
    plain = step.measure(other, CPU)
    assert "no attribute 'measure'" in failed["error"]  # and the others run all the same
    assert ours["provider"] == "trainkit"
    # bf16 on both sides.
    assert ours["loss"] == pytest.approx(plain["loss"], abs=2e-2)
    assert plain["tokens_per_second"] == pytest.approx(4 * 64 / plain["ms"] * 1e3)


@pytest.mark.parametrize("mode", MODES)
def test_providers_train_the_same_adapters(mode):
    def loss_of(provider):
        cell = Cell("", "tiny", provider, mode, steps=1, shape=TINY)
        return measure_lora(cell, CPU)["loss"]

    ours, frozen = loss_of("trainkit"), loss_of("frozen")
    assert frozen == pytest.approx(ours, abs=5e-3)  # B starts at zero
    if mode.startswith("fp8"):
        with pytest.raises(ValueError, match="peft has no fp8 base"):
            loss_of("peft")
    else:  # bf16: a loss of log(128) = 4.9 with roundings of a few thousandths
        assert ours == pytest.approx(loss_of("peft"), abs=5e-3)


def test_quantising_in_place_packs_the_decoder_and_leaves_the_head():
    model = quantize(build(TINY, CPU, "sdpa"))
    kinds = {name: type(module).__name__ for name, module in model.named_modules()}
    assert kinds["model.layers.0.self_attn.q_proj"] == "Linear4bit"


@pytest.mark.parametrize("mode", ["full", "lora"])
def test_steps_of_two_depths_make_the_whole_models(mode, monkeypatch):
    """16 layers of 5 ms and 40 ms besides, told from 6 layers and from 3."""
    sizes = {**TINY.config, "num_hidden_layers": 16}
    cell = Cell("", "tiny", "trainkit", mode, 0.0, 1, {"pattern": 3}, Shape("olmo2", sizes, 2, 16))
    depths = []

    def milliseconds(self):
        self.step()
        depths.append(sum(type(each).__name__.endswith("Layer") for each in self.model.modules()))
        return 40.0 + 5.0 * depths[-1]

    monkeypatch.setattr("trainkit.bench.measure.Training.milliseconds", milliseconds)
    row = unlisted.measure(cell, CPU)
    assert depths == [6, 3]
    assert row["ms"] == 40.0 + 5.0 * 16
    assert row["layer_microseconds"] == 5000


@pytest.mark.parametrize("layout", packing.LAYOUTS)
def test_layouts_count_their_tokens(layout):
    cell = Cell("", "tiny", "trainkit", layout, steps=2, shape=TINY)
    for batch in packing.batches(cell, TINY):
        assert batch["input_ids"].shape[0] == TINY.batch_size
        assert batch["input_ids"].shape[1] <= TINY.length
        trained = int((batch["labels"] != -100).sum())
        assert 0 < trained < packing._num_tokens(batch) <= batch["input_ids"].numel()


def test_conversations_are_a_sixth_of_the_longest():
    samples = packing.conversations(4000, 2048, 1000)
    mean = sum(len(sample["input_ids"]) for sample in samples) / len(samples)
    assert mean == pytest.approx(2048 / 6, rel=0.1)


def test_flops_are_those_of_the_published_figures():
    """Qwen2-0.5B at 2048 tokens: 6 x 494 M + causal attention, 3.23 GFLOP a token."""
    shape = MODELS["qwen2-0.5b"]
    with torch.device("meta"):
        model = torch.nn.Linear(1, 494_032_768, bias=False)
    assert step._flops_per_token(model, shape) == pytest.approx(3.228e9, rel=1e-3)


def test_records_are_flat_and_name_their_units(tmp_path):
    records = Records("step", tmp_path / "step.jsonl", commit="abc")
    assert not records.of("tiny", {"provider": "x", "error": "no"})
    records.of("tiny", {"provider": "x", "ms": 1.5, "mfu": None, "b": 2})
    (row,) = map(json.loads, (tmp_path / "step.jsonl").read_text().splitlines())
    assert row["metric"] == "ms"
    assert row["unit"] == "ms"
    assert row["b"] == 2
    assert {"bench", "case", "provider", "value", "gpu", "versions", "commit"} <= row.keys()


@pytest.mark.parametrize("trained", [1.0, 0.5])
def test_the_loss_is_measured_beside_matrix_products(trained):
    case = loss.Case(64, 8, 40, trained=trained)
    providers = ("trainkit", "eager")
    rows = list(loss.run([case], providers, torch.device("cpu"), matrix_size=32))
    assert [row["provider"] for row in rows] == ["trainkit", "eager"][: 1 if trained < 1 else 2]
    for row in rows:
        assert row["share_of_matmul"] == pytest.approx(row["tflops"] / row["tflops_sustained"])
        assert row["tflops"] == pytest.approx(6 * 64 * 8 * 40 / row["ms"] / 1e9)


def test_providers_of_the_loss_compute_the_same():
    case = loss.Case(64, 8, 40)
    hidden, weight, labels = loss._inputs(case, torch.device("cpu"))
    call = (hidden, weight, labels, torch.tensor(64), 64)
    ours, plain = (loss._loss_of(name, case)(*call) for name in ("trainkit", "eager"))
    torch.testing.assert_close(ours, plain, rtol=1e-2, atol=0.0)  # bf16 logits on both sides


def test_identical_plain_curves_prove_nothing():
    """Two names for one attention kernel would make the noise between plain runs look like zero."""
    losses = {name: [2.0, 1.1] for name in curve.RUNS}
    losses |= {"hf_cudnn": [2.0, 1.0], "trainkit": [2.0, 1.05]}
    assert curve.distances(losses)["trainkit"]["max_difference"] == pytest.approx(0.05)
    with pytest.raises(ValueError, match="did not differ"):
        curve.distances({**losses, "hf_efficient": losses["hf_cudnn"]})


def test_unknown_names_are_refused_with_the_known_ones():
    result = CliRunner().invoke(app, ["step", "--models", "gpt-9"])
    assert result.exit_code == 2
    assert "qwen2-0.5b" in result.output


@pytest.mark.parametrize("provider", ["hf_cudnn", "liger_cudnn"])
def test_a_named_attention_is_the_only_one_allowed(provider):
    """Where it cannot run, as on a CPU, the cell fails instead of falling back unseen."""
    states = torch.randn(1, 2, 8, 8)
    torch.nn.functional.scaled_dot_product_attention(states, states, states)
    with attention_of(provider), pytest.raises(RuntimeError, match=r"No (available|viable)"):
        torch.nn.functional.scaled_dot_product_attention(states, states, states)


def test_the_commit_is_the_packages_own_wherever_one_stands(tmp_path, monkeypatch):
    at_home = environment()["commit"]
    monkeypatch.chdir(tmp_path)
    subprocess.run(["git", "init", "-q"], check=True)
    assert environment()["commit"] == at_home


def test_only_a_peer_may_fail(monkeypatch):
    def failing(provider, op):
        raise RuntimeError("out of order")

    monkeypatch.setattr(ops, "function_of", failing)
    monkeypatch.setattr(ops, "_copy_rows", lambda cell, copy: ())
    for row in ops.run(["rms_norm"], ["liger"], 4000.0):
        assert "out of order" in row["error"]
    with pytest.raises(RuntimeError, match="out of order"):
        list(ops.run(["rms_norm"], ["trainkit"], 4000.0))


@pytest.mark.gpu
def test_every_clock_of_an_op(monkeypatch):
    monkeypatch.setattr(ops, "HIDDEN", (256,))
    rows = list(ops.run(["rms_norm"], ["trainkit", "eager"], 4000.0))
    assert not [row for row in rows if "error" in row]
    clocks = {(row["provider"], row["clock"], row["pass"]) for row in rows}
    passes = itertools.product(("autograd", "kernel"), ("forward", "backward"))
    assert {("copy", *each) for each in passes} <= clocks
    assert ("trainkit", "host", "forward") in clocks


@pytest.mark.parametrize("each", runs.RUNS, ids=lambda each: each.name)
def test_the_runs_that_are_compared_are_recipes_that_can_be_estimated(each):
    assert len([other for other in runs.RUNS if other.name == each.name]) == 1
    if each.provider == "trainkit":
        assert runs.estimated(each, 8, "NVIDIA H200")["estimated_gib"] > 1
