"""Distillation against the plain models in fp64, and stored words against a live teacher."""

import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import trainkit
from objectives.pair_cases import adapters, fp8_base, over_fp8, resumed_alike, same_when_cut
from objectives.preference_cases import make_data
from objectives.test_objectives_pairs import logged
from tiny import make_qwen2, make_tokenizer
from transformers import set_seed

from trainkit.data.formats import read_row
from trainkit.data.messages import RowError
from trainkit.models.loss import takes_loss_from_head
from trainkit.objectives.distill import DistillLoss
from trainkit.objectives.objective import LossSetup
from trainkit.objectives.table import objective_of
from trainkit.options import DistillOptions
from trainkit.recipe import Recipe

NUM_ROWS = 12
CASES = {
    "forward": {},
    "reverse": {"divergence": "reverse_kl", "temperature": 2.0},
    "jsd": {"divergence": "jsd", "jsd_share": 0.3, "sft_weight": 0.25},
}


def conversation(number):
    said = " ".join(map(str, range(number))) or "none"
    turns = (("user", f"Count to {number}."), ("assistant", said))
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


def teacher_of(size):
    set_seed(7)
    return make_qwen2(size, num_hidden_layers=1).eval()


def trainer_of_rows(root, objective, *, packing=False, patched=False, given=None, **options):
    """A trainer on short conversations; ``patched`` may name a base in fp8 with adapters."""
    from lab import Lab

    from trainkit.patching import patch

    mine = Path(root) / f"data-{os.environ.get('RANK', 0)}"  # ranks would overwrite each other's
    mine.mkdir(parents=True)
    read = {name: options.pop(name) for name in ("mask", "max_length") if name in options}
    rows = [conversation(number) for number in range(NUM_ROWS)]
    data = make_data(mine, rows, objective=objective, packing=packing, **read)
    own = {"train_data": data.train, "eval_data": data.eval, "objective": objective}
    trainer = Lab(make_tokenizer(), Path(root)).trainer(
        "run",
        prepare=fp8_base if patched == "fp8" else patch if patched else None,
        wrap=adapters if patched == "fp8" else None,
        given=own | (given or {}),
        **{"save_strategy": "no", "max_grad_norm": 1e9, **options},
    )
    return trainer, data


def make_trainer(root, *, distill, packing=False, patched=False, hooks=(), **options):
    from trainkit.patching import patch

    def change(run):
        recipe = {"model": {"name_or_path": "none"}}
        recipe["data"] = {"train": ["none.jsonl"], "packing": packing}
        recipe |= {"objective": "distill", "distill": {"teacher": "live", **distill}}
        run.loaded = replace(run.loaded, recipe=Recipe(**recipe))
        run.teacher = teacher_of(len(make_tokenizer()))
        run.teacher.to(next(run.built.model.parameters()).dtype)
        if patched == "both":
            patch(run.teacher)

    row = objective_of("distill", DistillOptions(teacher="live"))
    given = {"change": change, "hooks": hooks}
    how = {"packing": packing, "patched": patched, "given": given, "mask": "assistant"}
    return trainer_of_rows(root, row, **how, **options)


def plain_divergence(student, teacher, options):
    """Sums over probabilities, written out."""
    p, q = teacher.softmax(-1), student.softmax(-1)
    kind = options.get("divergence", "forward_kl")
    if kind == "forward_kl":
        return (p * (p / q).log()).sum(-1)
    if kind == "reverse_kl":
        return (q * (q / p).log()).sum(-1)
    share = options["jsd_share"]
    m = share * p + (1 - share) * q
    return share * (p * (p / m).log()).sum(-1) + (1 - share) * (q * (q / m).log()).sum(-1)


@pytest.mark.parametrize(
    "patched", [False, True, "both", "fp8"], ids=["plain", "student", "both", "fp8"]
)
@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("name", CASES)
def test_the_loss_is_its_formula_on_the_plain_models(name, packing, patched, tmp_path):
    options = CASES[name]
    size = {"batch": 1 if packing else 4}
    trainer, data = make_trainer(
        tmp_path, distill=options, packing=packing, patched=patched, max_steps=1, optim="sgd",
        learning_rate=0.0, **size,
    )  # fmt: skip
    trainer.model.double()
    trainer.loss.teacher.double()
    found = {}

    def keep(*given, **named):
        named = trainer.model.named_parameters()
        found.update({key: each.grad.clone() for key, each in named if each.requires_grad})

    from transformers import TrainerCallback

    trainer.add_callback(type("K", (TrainerCallback,), {"on_pre_optimizer_step": keep})())
    trainer.train()
    (row,) = [row for row in trainer.state.log_history if "loss" in row]
    data.train.samples.set_epoch(0)
    taken = [data.train.samples[place] for place in range(size["batch"])]
    samples = [one for item in taken for one in (item if isinstance(item, list) else [item])]
    set_seed(1)
    student = make_qwen2(len(trainer.tokenizer))
    student = (over_fp8(student) if patched == "fp8" else student).double()
    teacher, heat = teacher_of(len(trainer.tokenizer)).double(), options.get("temperature", 1.0)
    divergence, entropy = [], []
    for sample in samples:
        ids = torch.tensor(sample["input_ids"], dtype=torch.long)[None]
        scored = torch.tensor(sample["loss_mask"])[1:] > 0
        mine = student(input_ids=ids).logits[0, :-1][scored]
        with torch.no_grad():
            theirs = teacher(input_ids=ids).logits[0, :-1][scored]
        divergence.append(plain_divergence(mine / heat, theirs / heat, options))
        entropy.append(-mine.log_softmax(-1).gather(1, ids[0, 1:][scored][:, None])[:, 0])
    means = torch.cat(divergence).mean(), torch.cat(entropy).mean()
    share = options.get("sft_weight", 0.0)
    wanted = (1 - share) * means[0] + share * means[1]
    wanted.backward()
    assert row["loss"] == pytest.approx(wanted.item(), rel=1e-6)
    assert row["distill/divergence"] == pytest.approx(means[0].item(), rel=1e-6)
    assert row["distill/cross_entropy"] == pytest.approx(means[1].item(), rel=1e-6)
    trained = {name: each for name, each in student.named_parameters() if each.requires_grad}
    assert trained.keys() == found.keys()
    for key, parameter in trained.items():
        gap = (found[key] - parameter.grad).norm()
        assert gap <= 1e-5 * parameter.grad.norm(), key


def train(root, **options):
    trainer, _ = make_trainer(root, distill=CASES["jsd"], **options)
    trainer.train()
    rows = [row for row in trainer.state.log_history if "loss" in row]
    return [[row["loss"], row["grad_norm"]] for row in rows] + [[trainer.evaluate()["eval_loss"]]]


def test_the_cut_into_micro_batches_and_ranks_changes_nothing(tmp_path):
    given = {"max_steps": 3, "optim": "sgd", "learning_rate": 0.1}
    same_when_cut(train, tmp_path, **given)


RECIPE = """\
objective: distill
distill: {sft_weight: 0.1}
model: {name_or_path: MODEL, dtype: float32}
data: {train: [rows.jsonl], eval: [rows.jsonl], packing: true, max_length: 128, cache_dir: cache}
training: {per_device_train_batch_size: 1, max_steps: 4, save_steps: 2, eval_steps: 2,
  eval_strategy: steps, learning_rate: 1e-3}
"""


def write_teacher(root, student, file):
    """A teacher with the student's vocabulary, whose size it returns; and questions for it."""
    size = json.loads((Path(student) / "config.json").read_text())["vocab_size"]
    teacher_of(size).save_pretrained(root / "teacher")
    make_tokenizer().save_pretrained(root / "teacher")
    rows = [conversation(number) for number in range(8)]
    (root / file).write_text("\n".join(map(json.dumps, rows)))
    return size


@pytest.fixture
def places(tmp_path, tiny_qwen2):
    """A teacher, and what it says to some questions: all of its vocabulary at each place."""
    size = write_teacher(tmp_path, tiny_qwen2, "asked.jsonl")
    said = trainkit(
        tmp_path, "generate", "teacher", "--prompts", "asked.jsonl", "--logprobs", size,
        "--max-new-tokens", 6, "--dtype", "float32", "-o", "rows.jsonl",
    )  # fmt: skip
    assert said.code == 0, said.err
    (tmp_path / "r.yaml").write_text(RECIPE.replace("MODEL", str(tiny_qwen2)))
    return tmp_path


def test_what_a_teacher_has_written_is_as_good_as_the_teacher(places):
    rows = [json.loads(line) for line in (places / "rows.jsonl").read_text().splitlines()]
    for row in rows:
        mass = np.exp(np.array(row["teacher_logprobs"])).sum(1)
        assert mass == pytest.approx(1, abs=1e-3)
    answers = [row["num_answer_tokens"] for row in rows]
    assert answers == [len(row["teacher_ids"]) for row in rows]
    plain = [{key: row[key] for key in ("input_ids", "labels")} for row in rows]
    (places / "plain").mkdir()  # the name of the file decides the order
    (places / "plain/rows.jsonl").write_text("\n".join(map(json.dumps, plain)))
    overrides = ["distill={teacher: teacher, sft_weight: 0.1}"]
    overrides += ["data.train=[plain/rows.jsonl]", "data.eval=[plain/rows.jsonl]"]
    losses = {}
    for run, given in {"stored": [], "live": overrides}.items():
        said = trainkit(places, "sft", "r.yaml", "--output-dir", run, *given, pictures=False)
        assert said.code == 0, said.err
        losses[run] = [
            (row.get("loss"), row.get("eval_loss"), row.get("distill/agreement"))
            for row in logged(places / run)
        ]
    assert len(losses["live"]) >= 4
    for mine, theirs in zip(losses["stored"], losses["live"], strict=True):
        for one, other in zip(mine, theirs, strict=True):
            assert one is other is None or one == pytest.approx(other, rel=1e-5)


@pytest.mark.sample("zero3")
@pytest.mark.parametrize("shard", ["zero3", "fsdp2"])
def test_a_teacher_is_whole_next_to_weights_that_are_sharded(shard, places):
    asks = ["distill={teacher: teacher, sft_weight: 0.1}", "data.train=[asked.jsonl]"]
    asks += ["data.eval=[asked.jsonl]", "data.cache_dir=other"]
    batch = "training.per_device_train_batch_size"
    found = []
    for run, given, ranks in (
        ("alone", [f"{batch}=2"], {}),
        ("spread", [f"{batch}=1", f"parallel.shard={shard}"], {"num_ranks": 2}),
    ):
        said = trainkit(places, "sft", "r.yaml", "--output-dir", run, *asks, *given, **ranks)
        assert said.code == 0, said.err
        keys = ("loss", "eval_loss", "distill/agreement")
        found.append([tuple(map(row.get, keys)) for row in logged(places / run)])
    assert len(found[0]) >= 4
    for mine, theirs in zip(*found, strict=True):
        for one, other in zip(mine, theirs, strict=True):
            assert one is other is None or one == pytest.approx(other, rel=1e-5)


@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl"])
def test_all_tokens_that_are_not_stored_are_one_outcome(kind):
    torch.manual_seed(0)
    student, teacher = (torch.randn(5, 40, dtype=torch.double) for _ in range(2))
    chosen = torch.randint(40, (5,))
    logs, ids = teacher.log_softmax(-1).topk(3)
    loss = DistillLoss(LossSetup(torch.nn.Module(), False, distill=DistillOptions(divergence=kind)))
    found = loss._chunk(student, chosen, ids, logs)

    def buckets(logits):
        p = logits.softmax(-1)
        kept = p.gather(1, ids)
        return torch.cat((kept, (p.sum(1) - kept.sum(1))[:, None]), 1).log()

    wanted = plain_divergence(buckets(student), buckets(teacher), {"divergence": kind}).sum()
    assert found[0].item() == pytest.approx(wanted.item(), rel=1e-9)


def test_a_resumed_run_has_the_same_bytes(places):
    assert resumed_alike(places)


def test_a_sample_that_was_cut_is_refused(places):
    rows = [json.loads(line) for line in (places / "rows.jsonl").read_text().splitlines()]
    longest = max(len(row["input_ids"]) for row in rows)
    change = [f"data.max_length={longest - 1}", "data.truncation=right", "data.max_dropped=90%"]
    said = trainkit(places, "sft", "r.yaml", *change, pictures=False)
    assert said.code == 2
    assert "the teacher has spoken of" in said.err


ROW = {
    "input_ids": [1, 2, 3],
    "labels": [-100, 2, 3],
    "teacher_ids": [[2, 1], [3, 1]],
    "teacher_logprobs": [[-0.1, -3.0], [-0.1, -3.0]],
}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"teacher_logprobs": [[-0.1], [-0.1]]}, "no_teacher"),
        ({"teacher_logprobs": [[0.9, 0.1], [0.9, 0.1]]}, "no_teacher"),
        ({"teacher_ids": [[2, 1]], "teacher_logprobs": [[-0.1, -3.0]]}, "no_teacher"),
        ({"input_ids": None}, "no_tokens"),
    ],
    ids=["sound", "other shape", "probabilities", "a place is missing", "no answer"],
)
def test_rows_are_held_to_what_they_must_be(change, reason):
    row = {**ROW, **change}
    if reason is None:
        assert read_row(row, "distilled").trained == (False, True, True)
        return
    with pytest.raises(RowError) as caught:
        read_row(row, "distilled")
    assert caught.value.reason == reason


def test_a_teacher_with_other_tokens_is_refused(places):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(places / "teacher")
    tokenizer.add_tokens(["<extra>"])
    tokenizer.save_pretrained(places / "teacher")
    change = ["distill={teacher: teacher}", "data.train=[asked.jsonl]", "data.eval=[]"]
    change.append("training.eval_strategy=no")
    said = trainkit(places, "sft", "r.yaml", *change, pictures=False)
    assert said.code != 0
    assert "'<extra>' is not the same" in said.err
    assert "data:" not in said.err  # nothing was read yet
    (places / "teacher" / "tokenizer.json").write_text("{")
    said = trainkit(places, "sft", "r.yaml", *change, pictures=False)
    assert "error: distill.teacher: teacher: the tokenizer cannot be loaded" in said.err


@pytest.mark.parametrize("family", ["Gemma2", "Cohere"])
def test_caps_and_scales_of_both_heads_are_in_the_divergence(family):
    import transformers
    from families.family_models import SIZES

    from trainkit.patching import patch

    config = getattr(transformers, f"{family}Config")
    change = {"Gemma2": {"final_logit_softcapping": 3.0}, "Cohere": {"logit_scale": 4.0}}[family]
    ids = torch.arange(3, 29).view(2, 13)
    found = []
    for is_patched in (False, True):
        models = []
        for seed, own in enumerate((change, {})):  # the teacher has its family's
            set_seed(seed)
            made = getattr(transformers, f"{family}ForCausalLM")(config(**SIZES, **own))
            models.append(made.double())
            if is_patched:
                patch(made)
            assert takes_loss_from_head(made) == is_patched
        options = DistillOptions(teacher="live", **CASES["jsd"])
        teacher = models[1].requires_grad_(False)
        setup = LossSetup(models[0], takes_num_items=True, distill=options, teacher=teacher)
        batch = {"input_ids": ids, "labels": ids.masked_fill(ids % 5 == 0, -100)}
        loss = DistillLoss(setup).evaluate(models[0], batch, 1).loss_sum
        loss.backward()
        found.append([loss.detach(), *(each.grad for each in models[0].parameters())])
        assert loss > 0.01
    for plain, ours in zip(*found, strict=True):
        assert (ours - plain).norm() <= 1e-6 * plain.norm()
