"""Runs of the objectives that compare answers, through the real data path and loop."""

import contextlib
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from lora.plain_fp8 import plain_fp8
from objectives import preference_cases
from objectives.preference_cases import make_data

from trainkit.models.fp8.base import quantize_to_fp8
from trainkit.objectives import objective_of
from trainkit.recipe import Recipe

NUM_PAIRS = 12
LORA = {"r": 4, "lora_alpha": 32, "target_modules": "all-linear", "init_lora_weights": False}


def pair(number):
    """A prompt of two turns and an answer, so that all three have their own length."""
    whole = preference_cases.pair(number)
    return {"prompt": whole["chosen"][:-1], **{key: turns[-1:] for key, turns in whole.items()}}


def adapters(model):
    """LoRA whose second matrices are random, too: the reference is another model from step 0."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(3)
    return get_peft_model(model, LoraConfig(**LORA))


def fp8_base(model):
    """A base in fp8, in place."""
    quantize_to_fp8(model, torch.device("cpu"))


def over_fp8(model):
    """The same adapters over a plain model that rounds what such a base does."""
    plain_fp8(model)
    return adapters(model)


def rated(number):
    """An answer with its mark; two rows with the same prompt follow one another."""
    row = pair(number // 2)
    good = number % 3 != 1
    return {
        "prompt": row["prompt"],
        "completion": row["chosen" if number % 2 else "rejected"],
        "label": good,
    }


def make_trainer(
    root,
    *,
    objective="dpo",
    patched=False,
    packing=False,
    lora=True,
    stored=False,
    prepare=None,
    **options,
):
    """``stored``: the reference is asked before the first step, as a command has it."""
    from lab import Lab
    from tiny import make_tokenizer

    from trainkit.data.options import DataOptions
    from trainkit.patching import patch
    from trainkit.train.reference import References

    mine = Path(root) / f"data-{os.environ.get('RANK', 0)}"  # ranks would overwrite each other's
    mine.mkdir(parents=True)
    row = objective_of(objective)
    make = rated if objective == "kto" else pair
    hooks = [References()] if stored else []
    rows = [make(number) for number in range(NUM_PAIRS)]
    shares = bool((options.get("preference") or {}).get("share_prompts"))
    data = make_data(mine, rows, objective=row, packing=packing, shares_prompts=shares)
    given = {"train_data": data.train, "eval_data": data.eval, "objective": row}
    sections = {"objective": objective, "preference": options.pop("preference", None)}

    def change(run):
        chosen = {"lora": {} if lora else None, **sections}
        recipe = {"model": {"name_or_path": "none"}, "data": {"train": ["none.jsonl"]}, **chosen}
        run.loaded = replace(run.loaded, recipe=Recipe(**recipe))
        run.data_options = DataOptions(cache_dir=str(mine / "cache"))
        Path(run.root).mkdir(parents=True, exist_ok=True)

    trainer = Lab(make_tokenizer(), Path(root)).trainer(
        "run",
        prepare=prepare or (patch if patched else None),
        wrap=adapters if lora else None,
        given={**given, "change": change, "hooks": hooks},
        **{"save_strategy": "no", "max_grad_norm": 1e9, **options},
    )
    return trainer, data


def answers_of(model, pairs, every=False):
    """(pairs, 2) log-probabilities from full logits and softmax, written out, and tokens.

    With ``every`` they are of prompt and answer.
    """
    sums, lengths = [], []
    for sample in (sample for items in pairs for sample in items):
        ids = torch.tensor(sample["input_ids"], dtype=torch.long)[None]
        log_p = model(input_ids=ids).logits[0, :-1].log_softmax(-1)
        taken = log_p.gather(1, ids[0, 1:, None])[:, 0]
        scored = (torch.tensor(sample["loss_mask"])[1:] > 0) | every
        sums.append(taken[scored].sum())
        lengths.append(int(scored.sum()))
    return torch.stack(sums).view(-1, 2), torch.tensor(lengths).view(-1, 2)


def wanted_loss(objective, preference, sums, reference, lengths, learnt=None):
    """Each pair's loss as the papers and TRL write it, with exp and log only.

    ``learnt`` is the mean log-probability that orpo's cross entropy is of, if not the better
    answer's.
    """
    besides = -preference.get("sft_weight", 0.0) * (sums / lengths)[:, 0]
    return besides + _compared(objective, preference, sums, reference, lengths, learnt)


def _compared(objective, preference, sums, reference, lengths, learnt):

    def log_sigmoid(x):
        return -(1 + (-x).exp()).log()

    beta = preference.get("beta", 2.0 if objective == "simpo" else 0.1)
    eps, kind = preference.get("label_smoothing", 0.0), preference.get("loss", "sigmoid")
    means = sums / lengths
    if objective == "simpo":
        gamma = preference.get("gamma", 0.5)
        return -log_sigmoid(beta * (means[:, 0] - means[:, 1]) - gamma)
    if objective == "orpo":
        odds = means - (1 - means.exp()).log()
        learnt = means[:, 0] if learnt is None else learnt
        return -learnt - beta * log_sigmoid(odds[:, 0] - odds[:, 1])
    ratios = sums - reference
    if kind == "ipo" or preference.get("length_normalized"):
        ratios = ratios / lengths
    a, b = ratios.unbind(1)
    m = beta * (a - b)
    return {
        "sigmoid": lambda: -(1 - eps) * log_sigmoid(m) - eps * log_sigmoid(-m),
        "robust": lambda: (-(1 - eps) * log_sigmoid(m) + eps * log_sigmoid(-m)) / (1 - 2 * eps),
        "hinge": lambda: (1 - m).clamp(min=0),
        "ipo": lambda: (a - b - 1 / (2 * beta)) ** 2,
        "nca_pair": lambda: (
            -log_sigmoid(beta * a) - 0.5 * log_sigmoid(-beta * a) - 0.5 * log_sigmoid(-beta * b)
        ),
        "sppo_hard": lambda: (a - 0.5 / beta) ** 2 + (b + 0.5 / beta) ** 2,
        "apo_zero": lambda: 1 - (beta * a).sigmoid() + (beta * b).sigmoid(),
        "apo_down": lambda: (beta * a).sigmoid() + 1 - m.sigmoid(),
    }[kind]()


def fp64_step(trainer, pairs, objective, preference, wrapped):
    """Loss and gradients of the plain Hugging Face model in fp64 on these pairs."""
    from tiny import make_qwen2
    from transformers import set_seed

    set_seed(1)
    model = make_qwen2(len(trainer.tokenizer))
    model = (wrapped(model) if wrapped else model).double()
    reference = None
    if wrapped:
        with torch.no_grad(), model.disable_adapter():
            reference, _ = answers_of(model, pairs)
    sums, lengths = answers_of(model, pairs)
    learnt = None
    if preference.get("sft_prompt"):
        whole, tokens = answers_of(model, pairs, every=True)
        learnt = whole[:, 0] / tokens[:, 0]
    loss = wanted_loss(objective, preference, sums, reference, lengths, learnt).mean()
    loss.backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return loss.item(), gradients, (sums.detach(), reference, lengths)


def fp64_run(trainer, data, objective, preference, num_steps, rate):
    """The losses of plain steps of gradient descent in fp64, all weights trained."""
    from tiny import make_qwen2
    from transformers import set_seed

    set_seed(1)
    model = make_qwen2(len(trainer.tokenizer)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    size, losses, before = trainer.args.train_batch_size, [], {}
    data.train.samples.set_epoch(0)
    order = [item for place in range(len(data.train.samples)) for item in data.train.samples[place]]
    pairs = [order[place : place + 2] for place in range(0, len(order), 2)]
    with torch.no_grad():
        for pair in pairs:
            before[pair[0]["id"]] = answers_of(model, [pair])[0]
    for step in range(num_steps):
        batch = pairs[step * size : (step + 1) * size]
        sums, lengths = answers_of(model, batch)
        reference = torch.cat([before[pair[0]["id"]] for pair in batch])
        loss = wanted_loss(objective, preference, sums, reference, lengths).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def step_of(root, **options):
    """A step in fp64, where only formulas and orders of sums can differ: rows, gradients."""
    from transformers import TrainerCallback

    trainer, data = make_trainer(root, **{"optim": "sgd", "learning_rate": 0.0, **options})
    trainer.model.double()
    kept = {}

    class Gradients(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, model=None, **_):
            named = model.named_parameters()
            kept.update({name: p.grad.clone() for name, p in named if p.grad is not None})

    trainer.add_callback(Gradients())
    trainer.train()
    rows = [row for row in trainer.state.log_history if "loss" in row]
    return trainer, data, rows, kept


def train(root, **options):
    """What a rank logs, and its evaluation."""
    with contextlib.suppress(FileExistsError):
        Path(root).mkdir()
    trainer, _ = make_trainer(root, **options)
    trainer.train()
    keys = ("loss", "grad_norm", "rewards/margins", "logps/chosen")
    rows = [row for row in trainer.state.log_history if "loss" in row]
    figures = trainer.evaluate()
    return [[row[key] for key in keys] for row in rows] + [
        [figures["eval_loss"], figures["eval_rewards/margins"]]
    ]


def resumed_alike(root, lora=False):
    """The rows that a run logs; stopped in the middle and resumed it ends with the same bytes."""
    from commands import trainkit

    for run, options in {"whole": {}, "stopped": {"stop_at": 2}}.items():
        trainkit(root, "sft", "r.yaml", "--output-dir", run, **options)
    shutil.rmtree(root / "cache/reference", ignore_errors=True)  # a run has its own copy
    said = trainkit(root, "sft", "--resume", "stopped")
    assert said.code == 0, said.err
    name = "adapter_model.safetensors" if lora else "model.safetensors"
    final = [(root / run / "final" / name).read_bytes() for run in ("whole", "stopped")]
    assert final[0] == final[1]
    return [json.loads(line) for line in (root / "whole/metrics.jsonl").read_text().splitlines()]


def cut_otherwise(train, root, **given):
    """What ``train`` says of four rows at once, of one after another, and of two on two ranks."""
    from ranks import run_ranks

    case = f"objectives.{train.__module__.rpartition('.')[2]}:{train.__name__}"
    return (
        train(root / "wide", batch=4, **given),
        train(root / "deep", batch=1, accumulate=4, **given),
        *run_ranks(case, root=str(root / "ranks"), batch=2, patched=True, **given),
    )


def same_when_cut(train, root, *, rel=1e-4, abs=None, **given):
    """Whatever ``train`` says does not hang on how a step's rows are cut."""
    wide, *others = cut_otherwise(train, root, **given)
    for other in others:
        for mine, theirs in zip(wide, other, strict=True):
            assert theirs == pytest.approx(mine, rel=rel, abs=abs)
