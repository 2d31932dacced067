"""Loads of experts, the routers' loss, and the proof that adapters of experts train."""

import json
from types import SimpleNamespace

import pytest
import torch
from families.survey import build
from project import make_project
from safetensors.torch import load_file
from train.router_cases import make_moe

from trainkit.errors import ModelError, TrainkitError
from trainkit.lora import LoraOptions, attach
from trainkit.objectives.routing import RouterLosses, Routing, Together, real_tokens
from trainkit.options import DataSection
from trainkit.parallel.rows import next_tokens
from trainkit.patching import patch
from trainkit.train.checkpoints import Save
from trainkit.train.experts import ExpertsTrain
from trainkit.train.saves import _write_weights

E, PAD = 8, 90
AUXILIARY = (
    "qwen3_moe", "mixtral", "olmoe", "qwen2_moe", "gpt_oss", "granitemoe", "ernie4_5_moe",
    "minimax", "qwen3_next",
)  # fmt: skip


def batch(packed):
    """Two rows: of documents and a tail, or of one document each and padding."""
    ids = torch.randint(0, 80, (2, 12), generator=torch.Generator().manual_seed(1))
    ids[:, 9:] = PAD
    labels = ids.clone()
    labels[:, :5] = labels[:, 9:] = -100
    if not packed:
        return {"input_ids": ids, "labels": labels, "attention_mask": (ids != PAD).long()}
    positions = torch.tensor([0, 1, 2, 3, 0, 1, 2, 3, 4, 0, 1, 2]).repeat(2, 1)
    positions[1] = torch.arange(12)  # full to the end with one token: no tail, since it is trained
    labels[1, 9:] = PAD
    return {"input_ids": ids, "labels": labels, "position_ids": positions}


@pytest.mark.parametrize("kernels", [False, True])
@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_loads_are_those_of_real_tokens(packed, adapted, kernels):
    model = make_moe(96)
    if adapted:
        model = attach(model, LoraOptions(r=4))
    if kernels:
        patch(model)
    model.train()
    routing = Routing(model)
    routing.asks_reached = True
    chosen = []
    for name, module in model.named_modules():
        if name.endswith("mlp.gate"):
            module.register_forward_hook(lambda m, a, out: chosen.append(out[2]))
    inputs = batch(packed)
    other = {key: each.flip(0) for key, each in inputs.items()}
    for each in (inputs, other):  # two micro-batches
        routing.begin(each)
        model(**each).loss.backward()
    real = inputs["input_ids"] != PAD
    real[1] |= packed
    real = torch.cat((real, real.flip(0))).flatten()
    aimed = next_tokens(torch.cat((inputs["labels"], other["labels"])), -100).flatten() != -100
    rows, all_reached = routing.rows(routing.sums.tolist()), routing.take_reached()
    assert (len(chosen), len(all_reached), routing.take_reached()) == (4, 2, {})
    for layer, reached in enumerate(all_reached.values()):
        index = torch.cat(chosen[layer::2])
        loads = torch.bincount(index[real].flatten(), minlength=E).double()
        shares = loads / loads.sum()
        assert rows[f"experts_largest_share/{layer}"] == pytest.approx(
            shares.max().item(), abs=1e-4
        )
        assert rows[f"experts_dead/{layer}"] == (loads == 0).sum()
        assert rows[f"experts_load_cv/{layer}"] == pytest.approx(
            (loads.std(correction=0) / loads.mean()).item(), abs=1e-4
        )
        entropy = -sum(s * s.log() for s in shares if s) / torch.tensor(8.0).log()
        assert rows[f"experts_entropy/{layer}"] == pytest.approx(entropy.item(), abs=1e-4)
        wanted = torch.bincount(index[aimed].flatten(), minlength=E)
        assert torch.equal(reached, wanted.double())


@pytest.mark.parametrize("model_type", AUXILIARY)
def test_the_routers_losses_are_transformers_own_and_a_sum_over_any_cut(model_type):
    """Of 4 rows at once as the model returns it; in parts, once the whole has been counted."""
    model = build(model_type).double().train()
    losses = RouterLosses(model, 0.3, None, 0.25)
    ids = torch.randint(0, 80, (4, 9), generator=torch.Generator().manual_seed(0))
    mask = (torch.arange(9) < torch.tensor([9, 4, 7, 5])[:, None]).long()
    with torch.no_grad():
        outputs = model(input_ids=ids, attention_mask=mask, **losses.forward_options)
        if not outputs.get("router_logits"):  # transformers 5.17 keeps those of granitemoe
            with pytest.raises(ModelError, match="granitemoe have no auxiliary loss"):
                losses.count(outputs, mask.flatten() != 0)
            return
        whole = losses.count(outputs, real_tokens({"input_ids": ids, "attention_mask": mask}))
    balance, z = losses.losses(whole, whole).tolist()
    assert balance == pytest.approx(0.3 * float(outputs.aux_loss), rel=1e-5)
    real = torch.cat([each[mask.flatten() == 1] for each in outputs.router_logits])
    assert z == pytest.approx(0.25 * real.logsumexp(-1).square().mean().item(), rel=1e-5)
    wanted = {}
    for cut in ((4,), (2, 2), (3, 1), (1, 1, 1, 1)):
        model.zero_grad()
        total = 0.0
        for part, some in zip(ids.split(cut), mask.split(cut), strict=True):
            given = {"input_ids": part, "attention_mask": some}
            mine = losses.count(model(**given, **losses.forward_options), real_tokens(given))
            (added := losses.losses(mine, whole)).sum().backward()
            total = total + added.detach()
        assert total.tolist() == pytest.approx([balance, z], rel=1e-6)
        gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        wanted = wanted or gradients
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, wanted[name], rtol=1e-4, atol=1e-8, msg=name)


def test_another_form_of_the_auxiliary_loss_is_refused():
    with pytest.raises(ModelError, match="qwen2 have no auxiliary loss") as error:
        RouterLosses(build("qwen2"), 0.0, 0.1, 0.0)
    assert error.value.where == "model.router_aux_loss"
    assert not RouterLosses(build("qwen2"), 0.0, None, 0.0).is_on


def test_figures_come_apart_and_together_again():
    first, second = (SimpleNamespace(shape=shape, sums=None) for shape in ((2, 2), (3,)))
    both = Together([first, second])
    assert both.sums is None
    second.sums = torch.arange(3.0)
    assert both.sums.tolist() == [0, 0, 0, 0, 0, 1, 2]
    both.sums = torch.arange(7.0)
    assert first.sums.tolist() == [[0, 1], [2, 3]]
    assert both.take(torch.device("cpu")).tolist() == [*range(7)]
    assert both.sums is None


def loop_of(model, rate=0.1):
    routing = Routing(model)
    return SimpleNamespace(
        model=model, rate=rate, args=SimpleNamespace(fp16=False),
        guard=SimpleNamespace(is_held=False),
        loss=SimpleNamespace(train_metrics=Together([routing])),
    ), routing  # fmt: skip


@pytest.mark.parametrize("fault", [None, "gradient", "optimizer", "one"])
@pytest.mark.parametrize("kernels", [False, True])
def test_an_adapter_of_an_expert_that_does_not_train_is_named(kernels, fault):
    model = attach(make_moe(96), LoraOptions(r=4)).train()
    if kernels:
        patch(model)
    inert = next(p for n, p in model.named_parameters() if "experts" in n and "_B" in n)
    if fault == "one":  # the gradient of expert 3 alone
        inert.register_hook(lambda g: g * (torch.arange(g.shape[1]) % E != 3))
    if fault == "gradient":
        inert.register_hook(torch.zeros_like)
    loop, routing = loop_of(model)
    hook = ExpertsTrain()
    hook.begin(loop, None)
    trained = [p for p in model.parameters() if p.requires_grad]
    if fault == "optimizer":
        trained = [p for p in trained if p is not inert]
    optimizer = torch.optim.AdamW(trained, lr=0.1)

    def step():
        inputs = batch(packed=False)
        routing.begin(inputs)
        model(**inputs).loss.backward()
        hook.on_pre_optimizer_step(loop)
        optimizer.step()
        loop.rate, rate = 0.0, loop.rate
        hook.stepped(loop, ())  # as in the first step of a warm-up: nothing is said yet
        loop.rate = rate
        hook.stepped(loop, ())

    if fault is None:
        step()
        assert not routing.asks_reached
        return
    with pytest.raises(TrainkitError, match=r"layers\.0\.mlp\.experts.*though tokens") as error:
        step()
    assert ("the optimizer" in str(error.value)) == (fault == "optimizer")
    assert fault != "one" or "experts 3," in str(error.value)


def test_a_run_logs_and_draws_them(tmp_path, tiny_tokenizer):
    make_moe(len(tiny_tokenizer)).save_pretrained(tmp_path / "moe")
    tiny_tokenizer.save_pretrained(tmp_path / "moe")
    (tmp_path / "project").mkdir()
    project = make_project(tmp_path / "project", tmp_path / "moe")
    words = ["data.packing=true", "training.max_steps=2", "training.eval_strategy=epoch"]
    assert project.sft("--config", "r.yaml", *words, "--output-dir", "run").code == 0
    lines = (project.root / "run" / "metrics.jsonl").read_text().splitlines()
    first, *_, last = map(json.loads, lines)
    assert {"router_loss", "experts_largest_share/0", "experts_entropy/1"} <= first.keys()
    assert {"eval_router_loss", "eval_loss"} <= last.keys()
    # cross entropy and the routers' loss are apart in evaluation, and a sum in training
    assert first["loss"] - first["router_loss"] == pytest.approx(last["eval_loss"], rel=0.1)


@pytest.mark.parametrize("status", ["on", "off", None])
@pytest.mark.parametrize("adapted", [False, True, "router"])
def test_nobody_walks_over_a_model_whose_forward_pass_changes_its_modules(
    adapted, status, tmp_path
):
    """peft's experts take other modules in while they run: nothing may be saved meanwhile."""
    model = make_moe(96)
    if adapted:
        more = {"target_parameters": ["gate.weight"]} if adapted == "router" else {}
        model = attach(model, LoraOptions(r=4, **more))
    written = []
    model.save_pretrained = lambda *_, **__: written.append(1)
    engine = SimpleNamespace(save_weights=lambda save, write: save.defer(None, lambda: write({})))
    loop = SimpleNamespace(
        model=model, engine=engine, tokenizer=SimpleNamespace(save_pretrained=lambda _: None),
        checkpoints=SimpleNamespace(fingerprint={}),
        run=SimpleNamespace(
            built=SimpleNamespace(runs={"lora_experts": status} if status else {}),
            recipe=SimpleNamespace(data=DataSection(train=["rows.jsonl"])),
        ),
    )  # fmt: skip
    save = Save(tmp_path / "m")
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "adapter_config.json").write_text("{}")
    _write_weights(loop, save)
    at_once = adapted == "router" or (adapted and status != "on")
    assert bool(written) == at_once, save.problem
    save.finish(records=False)
    assert len(written) == 1


@pytest.fixture(scope="module")
def on_one(tmp_path_factory, tiny_tokenizer):
    """A project, and the figures of a run of it in one process: steps of two micro-batches."""
    root = tmp_path_factory.mktemp("spread")
    model = make_moe(len(tiny_tokenizer))
    model.config.output_router_logits = False
    model.save_pretrained(root / "moe")
    tiny_tokenizer.save_pretrained(root / "moe")
    (root / "project").mkdir()
    project = make_project(root / "project", root / "moe")

    def figures(name, *words, num_ranks=1):
        words += ("model.dtype=float32", "model.router_aux_loss=1.0", "model.router_z_loss=0.1")
        words += ("training.max_steps=3", "global_batch_size=8", "training.save_strategy=no")
        words += ("training.per_device_train_batch_size=2", "training.weight_decay=0.1")
        words += ("--output-dir", name)
        project.sft("--config", "r.yaml", *words, num_ranks=num_ranks).well()
        lines = (project.root / name / "metrics.jsonl").read_text().splitlines()
        keys = ("loss", "grad_norm", "router_loss", "router_z_loss")
        return [[row[key] for key in keys] for row in map(json.loads, lines) if "loss" in row]

    wanted = {each: figures(each, *MORE[each]) for each in MORE}
    return project.root, figures, wanted


MORE = {
    "auto": ("lora.experts=auto",),
    "split": ("lora.experts=split", "lora.target_parameters=[gate.weight]"),  # the router's, too
}


@pytest.mark.sample("zero3-auto", "fsdp2-split")
@pytest.mark.parametrize(
    ("spread", "experts"),
    [
        *((each, "auto") for each in ("none", "zero2", "zero3", "fsdp2")),
        *((each, "split") for each in ("zero2", "zero3", "fsdp2")),
    ],
)
def test_two_ranks_train_adapters_of_experts_as_one_does(spread, experts, on_one):
    root, figures, wanted = on_one
    name = f"{spread}-{experts}"
    words = (f"parallel.shard={spread}", *MORE[experts])
    found, wanted = figures(name, *words, num_ranks=2), wanted[experts]
    assert len(found) == 3
    saved = load_file(root / name / "final" / "adapter_model.safetensors")
    inner = [b for at, b in saved.items() if ".experts.base_layer.lora_B" in at]
    blocks = [b.chunk(2)[0].chunk(2, 1)[1] for b in inner]
    assert any(bool(each.any()) for each in blocks) == (experts == "auto")
    assert all(bool(each.any()) for each in inner)
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours == pytest.approx(theirs, rel=2e-4)
