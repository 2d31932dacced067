"""A second model next to the one that trains, against what torch has at most on a CPU in a step."""

from dataclasses import replace

import pytest
import torch
from estimate.test_estimate_images import allocated
from transformers import AutoModelForCausalLM, Qwen2Config

from trainkit.estimate.peak import GIB, peak
from trainkit.estimate.recipe import notes_of, plan_of
from trainkit.objectives.objective import LossSetup
from trainkit.objectives.table import objective_of
from trainkit.options.training import DistillOptions
from trainkit.recipe import Recipe

SIZES = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 4096}
SMALL = {"hidden_size": 128, "intermediate_size": 320, "num_hidden_layers": 2, **SIZES}
LARGE = {"hidden_size": 256, "intermediate_size": 640, "num_hidden_layers": 4, **SIZES}
LENGTH = 384


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    root = tmp_path_factory.mktemp("second")
    for name, sizes in {"student": SMALL, "teacher": LARGE}.items():
        (root / name).mkdir()
        Qwen2Config(tie_word_embeddings=False, **sizes).save_pretrained(root / name)
    return root


def recipe_of(places, objective, rows, **sections):
    batch = {"per_device_train_batch_size": rows}
    return Recipe(
        model={"name_or_path": str(places / "student"), "dtype": "float32"},
        data={"train": ["none.jsonl"], "max_length": LENGTH, "packing": False},
        objective=objective,
        training=batch,
        **sections,
    )


def loaded(place):
    config = Qwen2Config.from_pretrained(place)
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").float()


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("divergence", ["forward_kl", "jsd"])
def test_a_teacher_and_the_logits_of_both(divergence, rows, places):
    distill = {"teacher": str(places / "teacher"), "divergence": divergence}
    recipe = recipe_of(places, "distill", rows, distill=distill)
    student, teacher = loaded(places / "student").train(), loaded(places / "teacher").eval()
    options = DistillOptions(**distill)
    loss = objective_of("distill", options).loss(
        LossSetup(student, takes_num_items=True, distill=options, teacher=teacher)
    )
    ids = torch.arange(rows * LENGTH).view(rows, LENGTH) % 4000
    batch = {"input_ids": ids, "labels": ids}

    def step():
        loss.evaluate(student, dict(batch), rows * LENGTH).loss_sum.backward()

    there = sum(p.numel() * 4 for model in (student, teacher) for p in model.parameters())
    measured = there + allocated(step)
    # Without optimizer and loop, and without what a GPU's libraries and allocator take.
    plan = replace(plan_of(recipe, 1), optimizer=None, trainer=False, ops=frozenset())
    owners = peak(plan).by_owner
    assert owners["logits"] > owners["activations"] > 0
    found = sum(owners[each] for each in ("weights", "activations", "logits", "gradients")) * GIB
    assert found == pytest.approx(measured, rel=0.05)


def test_heads_that_are_compared_by_chunks_keep_no_logits(places):
    """A chunk of both, which the gradient takes over, where whole ones are widened, too."""
    recipe = recipe_of(places, "distill", 3, distill={"teacher": str(places / "teacher")})
    plain, ours = (
        peak(plan_of(recipe.replace(kernels=asks), 1)).by_owner["logits"] for asks in (False, True)
    )
    assert ours < plain / 3


def test_a_reference_is_the_model_once_more(places):
    live, ahead = (
        plan_of(recipe_of(places, "dpo", 1, preference={"precompute_reference": asks}), 1)
        for asks in (False, True)
    )
    weights = sum(p.numel() * 4 for p in loaded(places / "student").parameters())
    more = (peak(live).by_owner["weights"] - peak(ahead).by_owner["weights"]) * GIB
    assert more == pytest.approx(weights, rel=1e-6)
    assert "not counted" not in " ".join(notes_of(recipe_of(places, "dpo", 1), live))
