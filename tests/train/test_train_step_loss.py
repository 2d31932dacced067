"""One step's loss whatever the cut and the model class; evaluation measures the same quantity."""

import pytest
from ranks import run_ranks
from tiny import make_qwen2
from train.router_cases import make_moe


def meaning(vocab_size):
    """A class that returns the mean of its micro-batch, as gemma3n and gemma4 do."""
    model = make_qwen2(vocab_size)
    plain = type(model)

    class Mean(plain):
        accepts_loss_kwargs = False

        def forward(self, *args, num_items_in_batch=None, **kwargs):
            return super().forward(*args, **kwargs)

    model.__class__ = Mean
    return model


def run(lab, monkeypatch, make, name, **options):
    """Rows of a run with this model, and its evaluation."""
    import tiny

    monkeypatch.setattr(tiny, "make_qwen2", lambda vocab_size, **_: make(vocab_size))
    trainer = lab.trainer(name, max_steps=3, save_strategy="no", **options)
    monkeypatch.undo()
    before = trainer.evaluate()
    trainer.train()
    return [row for row in trainer.state.log_history if "loss" in row], before


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_a_class_that_returns_means_weighs_tokens_too(lab, monkeypatch, smoothing):
    options = {"label_smoothing_factor": smoothing, "learning_rate": 1e-3}
    runs = {
        name: run(lab, monkeypatch, make, name, batch=batch, accumulate=8 // batch, **options)
        for name, make, batch in [
            ("plain", make_qwen2, 8),
            ("wide", meaning, 8),
            ("deep", meaning, 1),
        ]
    }
    for rows, evaluated in runs.values():
        for key in ("loss", "grad_norm"):
            wanted = [row[key] for row in runs["plain"][0]]
            assert [row[key] for row in rows] == pytest.approx(wanted, rel=1e-5)
        assert evaluated["eval_loss"] == pytest.approx(runs["plain"][1]["eval_loss"], rel=1e-6)


def test_a_micro_batch_without_a_trained_token_adds_nothing(lab, monkeypatch):
    order = lab.data(seed=1).samples.order
    lab.samples[order[1]]["loss_mask"][:] = 0
    wide, _ = run(lab, monkeypatch, meaning, "wide", batch=4)
    deep, _ = run(lab, monkeypatch, meaning, "deep", batch=1, accumulate=4)
    assert [row["loss"] for row in deep] == pytest.approx([row["loss"] for row in wide], rel=1e-5)


ROUTERS = ({}, {"router_aux_loss": 0.5, "router_z_loss": 0.1})


@pytest.mark.sample("0.0-own", "0.1-asked")
@pytest.mark.parametrize("options", ROUTERS, ids=("own", "asked"))
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_routers_losses_are_the_same_however_a_step_is_cut(
    lab, monkeypatch, smoothing, options
):
    given = {"label_smoothing_factor": smoothing, "learning_rate": 1e-3}
    given["given"] = {"of_model": options}
    (wide, evaluated), *others = (
        run(
            lab, monkeypatch, make_moe, f"{size}", batch=size, accumulate=8 // size,
            per_device_eval_batch_size=size, **given,
        )
        for size in (8, 2, 1)
    )  # fmt: skip
    keys = [k for k in ("loss", "grad_norm", "router_loss", "router_z_loss") if k in wide[0]]
    assert len(keys) == 3 + ("router_z_loss" in options)
    assert wide[0]["router_loss"] == pytest.approx(evaluated["eval_router_loss"], rel=0.1)
    for rows, again in others:
        for row, other in zip(wide, rows, strict=True):
            assert [other[k] for k in keys] == pytest.approx([row[k] for k in keys], rel=2e-5)
        for key in evaluated.keys() & {"eval_loss", "eval_router_loss", "eval_router_z_loss"}:
            assert again[key] == pytest.approx(evaluated[key], rel=1e-6)


@pytest.mark.sample("2-asked")
@pytest.mark.parametrize("options", ROUTERS, ids=("own", "asked"))
@pytest.mark.parametrize("stage", [0, 2])
def test_the_routers_losses_are_the_same_on_any_number_of_ranks(stage, options, tmp_path):
    """Eight rows: on one rank at once, and on two in one or two micro-batches each."""
    case = "train.router_cases:train"
    one, options = str(tmp_path / "one"), {"factors": options}
    (wanted,) = run_ranks(case, world_size=1, root=one, batch=8, accumulate=1, **options)
    for batch, accumulate in ((4, 1), (2, 2)):
        root = tmp_path / f"{batch}"
        root.mkdir()
        two = run_ranks(
            case, root=str(root), batch=batch, accumulate=accumulate, stage=stage, **options
        )
        assert two[0] == two[1]
        for ours, theirs in zip(two[0], wanted, strict=True):
            assert ours == pytest.approx(theirs, rel=3e-5)


def test_without_accumulation_it_is_the_models_own(lab, monkeypatch):
    rows, _ = run(lab, monkeypatch, make_moe, "run", batch=8, learning_rate=0.0)
    order = lab.data(seed=1).samples.order
    batch = lab.data().collator([lab.samples[index] for index in order[:8]])
    inputs = {key: batch[key] for key in ("input_ids", "labels", "attention_mask")}
    model = make_moe(len(lab.tokenizer)).train()
    assert rows[0]["loss"] == pytest.approx(model(**inputs).loss.item(), rel=1e-5)


def test_smoothing_keeps_the_loss_in_the_head(lab, monkeypatch):
    """No logits, and the plain model's numbers."""
    from trainkit.patching import patch

    def fused(vocab_size):
        model = make_qwen2(vocab_size)
        patch(model)
        return model

    options = {"label_smoothing_factor": 0.1, "batch": 4}
    plain, evaluated = run(lab, monkeypatch, make_qwen2, "plain", **options)
    ours, again = run(lab, monkeypatch, fused, "fused", **options)
    assert [row["loss"] for row in ours] == pytest.approx([r["loss"] for r in plain], rel=1e-5)
    assert again["eval_loss"] == pytest.approx(evaluated["eval_loss"], rel=1e-6)
    assert "token_accuracy" in ours[0]  # comes from the head: there were no logits


def test_flops_count_the_experts_that_a_token_goes_through():
    """2 of 8 experts: the rest of the model, and a quarter of the experts' weights, 6 each."""
    from trainkit.train.log import training_flops_per_token

    model = make_moe(300)
    experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    assert experts == 2 * 8 * 3 * 32 * 16  # layers, experts, three matrices
    rest = sum(p.numel() for p in model.parameters()) - experts - 300 * 32  # but the look-up
    assert training_flops_per_token(model, 0) == 6 * (rest + experts / 4)
