"""A reward model against transformers' own class for it."""

import pytest
import torch
from commands import trainkit, trainkit_each
from objectives.pair_cases import pair, resumed_alike, same_when_cut
from objectives.test_objectives_pairs import RECIPE, logged, start
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer

PLAIN = RECIPE.replace("objective: dpo\npreference: {beta: 0.2}", "objective: reward")
FULL = PLAIN.replace("lora: {r: 4}\n", "").replace("1e-2", "1e-3")


def scores(model, tokenizer, rows):
    """Of the better and the worse answers, one text at a time, as a user would."""
    found = []
    for row in rows:
        for side in ("chosen", "rejected"):
            text = [*row["prompt"], *row[side]]
            ids = tokenizer.apply_chat_template(text, return_tensors="pt", return_dict=True)
            with torch.no_grad():
                found.append(model(**ids).logits[0, 0])
    return torch.stack(found).view(-1, 2)


@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
def test_what_a_run_leaves_is_transformers_own_reward_model(lora, tmp_path, tiny_qwen2):
    start(tmp_path, tiny_qwen2, (PLAIN if lora else FULL) + "kernels: true\n")
    options = ["preference.center_rewards=0.01", "training.max_steps=12"]
    said = trainkit(tmp_path, "sft", "r.yaml", "--output-dir", "run", *options, pictures=False)
    assert said.code == 0, said.err
    final, base = tmp_path / "run/final", str(tiny_qwen2)
    tokenizer = AutoTokenizer.from_pretrained(final)
    if lora:
        from peft import AutoPeftModelForSequenceClassification

        model = AutoPeftModelForSequenceClassification.from_pretrained(final, num_labels=1)
        names = set(load_file(final / "adapter_model.safetensors"))
        assert "base_model.model.score.weight" in names
        assert not any("lm_head" in name for name in names)
    else:
        model = AutoModelForSequenceClassification.from_pretrained(final)
        plain = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1)
        assert not torch.equal(plain.score.weight, model.score.weight)
    model.eval()
    found = scores(model, tokenizer, [pair(number) for number in range(12)])
    rows = logged(tmp_path / "run")
    last = [row for row in rows if "eval_rewards/margins" in row][-1]
    losses = -torch.nn.functional.logsigmoid(found[:, 0] - found[:, 1])
    losses = losses + 0.01 * found.sum(1) ** 2
    assert last["eval_loss"] == pytest.approx(losses.mean().item(), rel=1e-4)
    assert last["eval_rewards/chosen"] == pytest.approx(found[:, 0].mean().item(), rel=1e-3)
    assert last["eval_rewards/margins"] > rows[0].get("rewards/margins", 0)
    commands = [["generate", "run", "--prompts", "pairs.jsonl", "-o", "o"]]
    commands += [["merge", "run", "merged"], ["export", "vllm", "run", "served"]] if lora else []
    for asked in trainkit_each(tmp_path, commands):
        assert asked.code != 0
        assert "reward model" in asked.err


@pytest.mark.sample("full")
@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
def test_a_resumed_run_has_the_same_bytes(lora, tmp_path, tiny_qwen2):
    start(tmp_path, tiny_qwen2, PLAIN if lora else FULL)
    assert resumed_alike(tmp_path, lora)


def train(root, *, packing=False, patched=False, **options):
    """The losses and norms of a rank, with a head that every rank has alike."""
    from objectives.pair_cases import make_trainer

    from trainkit.models.scalar_head import add_scalar_head
    from trainkit.patching import patch

    def prepare(model):
        add_scalar_head(model)
        if patched:
            patch(model)

    trainer, _ = make_trainer(
        root, objective="reward", lora=False, packing=packing, prepare=prepare, **options
    )
    trainer.train()
    rows = [row for row in trainer.state.log_history if "loss" in row]
    return [[row["loss"], row["grad_norm"]] for row in rows]


def test_the_cut_and_the_packing_change_nothing(tmp_path):
    given = {"max_steps": 3, "optim": "sgd", "learning_rate": 0.1}
    same_when_cut(train, tmp_path, **given)
    whole, packed = (
        train(tmp_path / str(packing), batch=12, packing=packing, max_steps=1)
        for packing in (False, True)
    )
    assert packed[0] == pytest.approx(whole[0], rel=1e-4)  # all pairs, in fewer rows
