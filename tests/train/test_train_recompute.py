"""``recompute`` in a run: the same bytes whatever is recomputed, and a budget that is kept to."""

import gc
import hashlib
import json

import pytest
from ranks import run_ranks
from tiny import chat_lines, make_qwen2

from trainkit.cli.app import main
from trainkit.train.recompute import AIM, GIB, Choice, CountedMemory, Measured, next_choice

LAYERS = 8
RECIPE = """\
model: {name_or_path: model, dtype: float32}
data: {train: [train.jsonl], max_length: 128, cache_dir: cache}
training: {per_device_train_batch_size: 4, max_steps: 5, save_steps: 4, learning_rate: 1.0e-3}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tiny_tokenizer):
    folder = tmp_path_factory.mktemp("recompute")
    model = make_qwen2(len(tiny_tokenizer), num_hidden_layers=LAYERS)
    model.save_pretrained(folder / "model")
    tiny_tokenizer.save_pretrained(folder / "model")
    (folder / "r.yaml").write_text(RECIPE)
    text = chat_lines(("Say it.", f"It is {n:02d}. " * 4) for n in range(24))
    (folder / "train.jsonl").write_text(text)
    return folder


@pytest.fixture(autouse=True)
def inside(folder, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.setattr("trainkit.run.report.draw_plots", lambda *_: [])
    monkeypatch.setattr("trainkit.run.report.svg_plots", lambda *_: [])


def train(folder, name, *words):
    assert main(["sft", "r.yaml", "--output-dir", name, *words]) == 0
    return outcome(folder, name)


def outcome(folder, name):
    """The bytes of the model, and every loss and norm."""
    rows = [json.loads(row) for row in (folder / name / "metrics.jsonl").read_text().splitlines()]
    weights = (folder / name / "final" / "model.safetensors").read_bytes()
    curve = [(row["loss"], row["grad_norm"]) for row in rows if "loss" in row]
    return hashlib.sha256(weights).hexdigest(), curve


@pytest.fixture(scope="module")
def plain(folder):
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        return train(folder, "plain")


@pytest.mark.parametrize("said", ["selective", "{every: 3}"])
def test_what_is_recomputed_changes_no_byte(folder, plain, said):
    name = "".join(filter(str.isalnum, said))
    assert train(folder, name, f"recompute={said}") == plain
    assert "# gradient_checkpointing: true  # from recompute" in (
        (folder / name / "resolved.yaml").read_text()
    )


def test_a_budget_is_measured_chosen_recorded_and_taken_up(folder, plain, capsys):
    """Counted on a CPU: the tensors that there are; a layer is the step between two choices."""
    gc.collect()
    budget = 0.012 + CountedMemory().now() / GIB  # with what other tests of this process keep
    assert train(folder, "budget", f"recompute={{budget_gib: {budget}}}") == plain
    kept = json.loads((folder / "budget" / "recompute.json").read_text())
    assert kept["layers"] == LAYERS
    assert 0 < kept["recomputed"] < LAYERS
    assert len(kept["measured"]) >= 3
    last = kept["measured"][-1]
    a_layer = last["layer_keeps_mib"] / 1024
    assert budget - a_layer < last["peak_gib"] <= budget
    said = capsys.readouterr().err
    assert f"{kept['recomputed']} of {LAYERS} layers are recomputed" in said
    assert main(["sft", "--resume", "budget/checkpoint-4"]) == 0
    assert outcome(folder, "budget") == plain
    assert "as chosen before" in capsys.readouterr().err
    assert json.loads((folder / "budget" / "recompute.json").read_text()) == kept


@pytest.mark.parametrize(
    ("words", "ways"),
    [
        (["parallel.shard=zero3"], {"budget": "{budget_gib: 0.02}"}),
        (
            ["parallel.shard=fsdp2", "lora.r=4", "lora.quantize=nf4"],
            {"selective": "selective", "budget": "{budget_gib: 0.0175}"},
        ),
    ],
    ids=["zero3", "fsdp2 over four bits"],
)
def test_on_ranks_that_share_weights_nothing_changes_either(folder, words, ways):
    """Packed rows, whole weights and adapters; the budget is agreed on and binds."""
    words = [*words, "data.packing=true", "training.max_steps=2", "training.save_strategy=no"]
    ways = {"none": "none", **ways}
    found, _ = run_ranks(
        "train.recompute_cases:outcomes", world_size=2, cwd=str(folder), words=words, ways=ways
    )
    assert len(found["none"]["curve"]) == 2
    assert [found[name]["curve"] for name in ways] == [found["none"]["curve"]] * len(ways)
    assert [found[name]["weights"] for name in ways] == [found["none"]["weights"]] * len(ways)
    assert 0 < found["budget"]["recomputed"] < LAYERS


def test_a_budget_that_cannot_be_kept_is_said(folder, plain, capsys):
    assert train(folder, "small", "recompute={budget_gib: 0.0001}", "training.save_steps=9") == (
        plain
    )
    assert "that is what the rest of the step needs" in capsys.readouterr().err
    assert json.loads((folder / "small" / "recompute.json").read_text())["recomputed"] == LAYERS


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["recompute=half"], "must be one of 'none', 'full' or 'selective'"),
        (["recompute={every: 0}"], "must be at least 1"),
        (["recompute={budget_gib: 0}"], "must be above 0"),
        (["recompute={}"], "takes every or budget_gib, one of them"),
        (["recompute={every: 2, budget_gib: 3}"], "takes every or budget_gib, one of them"),
        (["recompute={budget_gib: 3, selective: true}"], "recomputes whole layers"),
        (["recompute={every: 1, selective: true, offload: true}"], "stays on the GPU"),
        (["recompute={each: 2}"], "every"),
        (["recompute=full", "training.gradient_checkpointing=true"], "both say what is recomputed"),
        (["recompute=none", "training.gradient_checkpointing=true"], "both say what is recomputed"),
        (
            ["recompute=full", "training.gradient_checkpointing_kwargs={use_reentrant: true}"],
            "both say what is recomputed",
        ),
        (["recompute=selective", "training.torch_compile=true"], "decides itself"),
        (["recompute={budget_gib: 3}", "training.torch_compile=true"], "decides itself"),
        (
            ["recompute={every: 1, offload: true}", "lora.offload_activations=false"],
            "both say what is offloaded",
        ),
    ],
)
def test_what_cannot_be_meant_is_refused(capsys, words, what):
    assert main(["sft", "r.yaml", "--output-dir", "refused", *words]) == 2
    assert what in capsys.readouterr().err


def step(choice, fixed, keeps, slim, *, least=0, largest=1.0):
    """What a step would show: activations on top of what is fixed, unless gradients are more."""
    kept = (choice.layers - choice.recomputed) * keeps
    kept += (choice.recomputed - choice.offloaded) * slim
    peak = fixed + max(kept + keeps, least)
    whole = keeps if choice.recomputed < choice.layers else 0
    return Measured(choice, peak, fixed + kept, peak, fixed, fixed, whole, slim, largest)


@pytest.mark.parametrize("budget", range(30, 90, 7))
@pytest.mark.parametrize("least", [0, 19])
def test_the_choice_never_exceeds_the_budget_and_uses_it(budget, least):
    """Units of a GiB, 32 layers that keep 2 each: all kept are 30 + 66."""
    choice, measured = Choice(32, 31), []
    for _ in range(5):
        measured.append(step(choice, 10 * GIB, 2 * GIB, GIB // 8, least=least * GIB))
        before, choice = choice, next_choice(budget * GIB, measured)
        assert measured[-1].peak <= budget * GIB
        if before == choice:
            break
    assert before == choice
    assert 0.92 * budget * GIB <= measured[-1].peak or not choice.recomputed


def test_a_small_budget_offloads_and_a_larger_batch_counts():
    choice, measured = Choice(32, 32), []
    for _ in range(3):
        measured.append(step(choice, 10 * GIB, 2 * GIB, GIB))
        choice = next_choice(30 * GIB, measured)
    assert choice == Choice(32, 32, 15)
    assert choice.ways.count("offload") == 15
    assert 30 * AIM >= measured[-1].peak / GIB > 28
    assert next_choice(30 * GIB, measured[:1], offload=False) == Choice(32, 32)
    one = [step(Choice(32, 31), 10 * GIB, 2 * GIB, GIB // 8, largest=2.0)]
    assert 10 + 2 * (one[0].peak / GIB - 10) < 50
    assert (
        next_choice(50 * GIB, one).recomputed
        > next_choice(50 * GIB, [step(Choice(32, 31), 10 * GIB, 2 * GIB, GIB // 8)]).recomputed
    )
