"""Distillation on answers that the student draws: how they are drawn, trained on and repeated."""

import json

import pytest
import torch
from commands import trainkit
from objectives.pair_cases import resumed_alike, same_when_cut
from objectives.test_objectives_distill import (
    make_trainer,
    plain_divergence,
    teacher_of,
    write_teacher,
)
from objectives.test_objectives_pairs import logged
from tiny import TABLES, make_qwen2, make_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM

from trainkit.models.generation import draw_rows
from trainkit.options.training import OnPolicyOptions
from trainkit.train.hooks import Hook
from trainkit.train.teacher import DrawnAnswers

DRAWS = {"max_new_tokens": 6, "batch_size": 3}


class Seen(Hook):
    """The samples of each step's micro-batches, as (token ids, which are trained)."""

    def __init__(self):
        self.rows = []

    def before_step(self, loop, micro, counts, seconds):
        for batch in micro:
            rows = zip(
                *(batch[key] for key in ("input_ids", "labels", "attention_mask")), strict=True
            )
            self.rows += [(ids[mask > 0], labels[mask > 0] != -100) for ids, labels, mask in rows]


def trainer_of(root, *, draws=DRAWS, distill=None, hooks=(), **options):
    own = DrawnAnswers(OnPolicyOptions(**draws))
    distill = {"divergence": "reverse_kl", **(distill or {}), "on_policy": draws}
    return make_trainer(root, distill=distill, hooks=[own, *hooks], **options)


@pytest.mark.parametrize("heat", [1.0, 0.7])
def test_tokens_are_drawn_from_the_models_own_distribution(heat):
    """Three of the expected shares' deviations (chi-square, a bin for the rare ones)."""
    model, count = make_qwen2(40, initializer_range=0.3).eval(), 8_000
    model.generation_config.repetition_penalty = 9.0  # of the published settings none acts
    prompt = [3, 4, 5]
    drawn = []
    for start in range(0, count, 1000):
        seeds = range(start, start + 1000)
        rows = draw_rows(model, [prompt] * 1000, seeds, [0], 0, max_new_tokens=2, temperature=heat)
        drawn += [row for row in rows if len(row) == 2]
    first = torch.tensor([row[0] for row in drawn])
    likeliest = int(first.mode().values)
    for given, found in (
        (prompt, first),
        ([*prompt, likeliest], torch.tensor([row[1] for row in drawn if row[0] == likeliest])),
    ):
        with torch.no_grad():
            wanted = (model(torch.tensor([given])).logits[0, -1].double() / heat).softmax(-1)
        if given is prompt:  # those that end at once are not among them
            wanted[0] = 0
            wanted /= wanted.sum()
        seen, expected = torch.bincount(found, minlength=40).double(), wanted * len(found)
        rare = expected < 10
        seen, expected = (
            torch.cat((each[~rare], each[rare].sum()[None])) for each in (seen, expected)
        )
        bins = len(expected) - 1
        assert bins > 5
        square = ((seen - expected) ** 2 / expected.clamp(min=1)).sum().item()
        assert square < bins + 3 * (2 * bins) ** 0.5
    assert model.generation_config.repetition_penalty == 9.0


def test_an_answer_at_the_end_of_a_table_of_positions_is_drawn_to_the_end():
    config = AutoConfig.for_model("gpt2", vocab_size=40, **TABLES["gpt2"])
    model = AutoModelForCausalLM.from_config(config).eval()
    prompts, how = [[3], [4] * 12], {"max_new_tokens": 12, "temperature": 1.0}
    together = draw_rows(model, prompts, [11, 12], [], 0, **how)
    assert [len(row) for row in together] == [12, 4]
    assert together == [
        draw_rows(model, [p], [s], [], 0, **how)[0] for p, s in zip(prompts, [11, 12], strict=True)
    ]


def test_an_answer_does_not_depend_on_what_it_is_batched_with():
    model = make_qwen2(40, initializer_range=0.3).eval()
    prompts, seeds = [[3], [4, 5, 6, 7], [8, 9]], [11, 12, 13]
    how = {"max_new_tokens": 12, "temperature": 1.0}
    together = draw_rows(model, prompts, seeds, [0], 0, **how)
    alone = [
        draw_rows(model, [p], [s], [0], 0, **how)[0] for p, s in zip(prompts, seeds, strict=True)
    ]
    assert together == alone
    stop = together[1][3]
    (cut,) = draw_rows(model, prompts[1:2], seeds[1:2], [stop], 0, **how)
    assert cut == together[1][: together[1].index(stop) + 1]


def test_drawn_answers_are_trained_on_behind_their_prompts(tmp_path):
    """The loss of a step is the divergence, from plain models in fp64, on the rows it has seen."""
    seen = Seen()
    draws = {**DRAWS, "share": 0.5}
    trainer, data = trainer_of(
        tmp_path, draws=draws, hooks=[seen], batch=12, max_steps=1, optim="sgd", learning_rate=0.0
    )
    trainer.train()
    (row,) = [row for row in trainer.state.log_history if "loss" in row]
    data.train.samples.set_epoch(0)
    num_drawn = 0
    for (ids, trained), given in zip(seen.rows, data.train.samples, strict=True):
        start = int(given["loss_mask"].argmax())
        assert ids[:start].tolist() == given["input_ids"][:start].tolist()
        assert not trained[:start].any()
        assert trained[start : start + 1].all()
        if ids.tolist() != given["input_ids"].tolist():
            num_drawn += 1
            assert trained[start:].all()
            assert len(ids) - start <= DRAWS["max_new_tokens"]
    assert 2 <= num_drawn <= 10  # of 12, by a half
    torch.manual_seed(1)
    student = make_qwen2(len(trainer.tokenizer)).double()
    teacher = teacher_of(len(trainer.tokenizer)).double()
    found = []
    with torch.no_grad():
        for ids, trained in seen.rows:
            mine, theirs = (
                each(ids[None]).logits[0, :-1][trained[1:]] for each in (student, teacher)
            )
            found.append(plain_divergence(mine, theirs, {"divergence": "reverse_kl"}))
    assert row["loss"] == pytest.approx(torch.cat(found).mean().item(), rel=1e-6)
    assert 1 <= row["on_policy/tokens"] <= DRAWS["max_new_tokens"]


def train(root, **options):
    trainer, _ = trainer_of(root, draws={**DRAWS, "share": 0.7, "rest": "teacher"}, **options)
    trainer.train()
    rows = [row for row in trainer.state.log_history if "loss" in row]
    return [[row["loss"], row["grad_norm"], row["num_trained_tokens"]] for row in rows]


def test_the_cut_into_micro_batches_and_ranks_changes_nothing(tmp_path):
    given = {"max_steps": 3, "optim": "sgd", "learning_rate": 0.1}
    same_when_cut(train, tmp_path, **given)


RECIPE = """\
objective: distill
distill: {teacher: teacher, divergence: reverse_kl, on_policy: {every: EVERY, max_new_tokens: 6}}
model: {name_or_path: MODEL, dtype: float32}
data: {train: [rows.jsonl], eval: [rows.jsonl], packing: false, max_length: 128, cache_dir: cache}
training: {per_device_train_batch_size: 1, max_steps: 4, save_steps: 2, eval_steps: 2,
  eval_strategy: steps, learning_rate: 1e-3}
"""


@pytest.fixture
def places(tmp_path, tiny_qwen2):
    write_teacher(tmp_path, tiny_qwen2, "rows.jsonl")
    (tmp_path / "r.yaml").write_text(RECIPE.replace("MODEL", str(tiny_qwen2)))
    return tmp_path


@pytest.mark.sample("3")
@pytest.mark.parametrize("every", [1, 3])
def test_a_resumed_run_has_the_same_bytes(every, places):
    """Stopped behind step 2: with 3 amid the steps that were drawn for at once."""
    recipe = places / "r.yaml"
    recipe.write_text(recipe.read_text().replace("EVERY", str(every)))
    rows = resumed_alike(places)
    assert [row["on_policy/tokens"] for row in rows if "on_policy/tokens" in row]
    stopped = logged(places / "stopped")
    assert [row["num_trained_tokens"] for row in stopped if "loss" in row] == [
        row["num_trained_tokens"] for row in rows if "loss" in row
    ]


@pytest.mark.parametrize("shard", ["none", "zero2"])
def test_two_ranks_train_on_what_one_does(shard, places):
    recipe = places / "r.yaml"
    recipe.write_text(recipe.read_text().replace("EVERY", "2"))
    found = []
    for run, batch, given, ranks in (
        ("alone", 2, [], {}),
        ("spread", 1, [f"parallel.shard={shard}"], {"num_ranks": 2}),
    ):
        given = [*given, f"training.per_device_train_batch_size={batch}"]
        said = trainkit(places, "sft", "r.yaml", "--output-dir", run, *given, **ranks)
        assert said.code == 0, said.err
        keys = ("loss", "num_trained_tokens", "on_policy/tokens", "eval_loss")
        found.append([[row.get(key) for key in keys] for row in logged(places / run)])
    assert len(found[0]) >= 4
    for mine, theirs in zip(*found, strict=True):
        for one, other in zip(mine, theirs, strict=True):
            assert one is other is None or one == pytest.approx(other, rel=1e-4)


def test_the_student_comes_closer_on_prompts_that_it_has_not_seen(tmp_path):
    """KL on its own answers there, from plain logits: it falls by more than half."""
    held_out = [make_tokenizer().encode(f"Who is {number}?") for number in range(16)]

    def distance(student, teacher):
        rows = draw_rows(student, held_out, range(16), [0], 0, max_new_tokens=8, temperature=1.0)
        found = []
        for prompt, row in zip(held_out, rows, strict=True):
            ids = torch.tensor([[*prompt, *row]])
            with torch.no_grad():
                mine, theirs = (
                    each(ids).logits[0, len(prompt) - 1 : -1] for each in (student, teacher)
                )
            found.append(plain_divergence(mine, theirs, {"divergence": "reverse_kl"}))
        return torch.cat(found).mean().item()

    trainer, _ = trainer_of(tmp_path, batch=6, max_steps=60, learning_rate=3e-3)
    trainer.model.eval()
    before = distance(trainer.model, trainer.run.teacher)
    trainer.train()
    trainer.model.eval()
    assert distance(trainer.model, trainer.run.teacher) < before / 2


def test_a_row_without_a_prompt_is_refused(places):
    (places / "rows.jsonl").write_text(json.dumps({"input_ids": [5, 6, 7], "labels": [5, 6, 7]}))
    recipe = places / "r.yaml"
    recipe.write_text(recipe.read_text().replace("EVERY", "1"))
    said = trainkit(places, "sft", "r.yaml", pictures=False)
    assert said.code == 2
    assert "rows.jsonl:1 is trained from its first token" in said.err
