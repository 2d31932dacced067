"""What an objective does not go with is refused by its key."""

import pytest

from trainkit.errors import RecipeError
from trainkit.recipe import Recipe

MODEL, DATA, UNPACKED = {"name_or_path": "m"}, {"train": ["d.jsonl"]}, {"packing": False}
DRAWN = {"teacher": "t", "on_policy": {}}
SHARED = {"preference": {"share_prompts": True}}
SMOOTH = {"training": {"label_smoothing_factor": 0.1}}
IN_FP8 = {"model": {**MODEL, "fp8": True}}


def on_policy(change=None, data=None, **other):
    distill = {**DRAWN, **(change or {})}
    return "distill", {"data": {**DATA, **UNPACKED, **(data or {})}, "distill": distill, **other}


REFUSED = [
    ("dft", SMOOTH, "training.label_smoothing_factor"),
    ("dft", {"data": {**DATA, "per_source_loss": True}}, "data.per_source_loss"),
    ("dft", IN_FP8, "objective"),
    ("dft", {"model": {**MODEL, "router_aux_loss": 0.1}}, "model.router_aux_loss"),
    ("dft", {"optim_in_backward": True, "training": {"max_grad_norm": 0}}, "objective"),
    ("dft", {"preference": {}}, "preference"),
    ("dft", {"eaft": {}}, "eaft"),
    ("distill", {"distill": {"temperature": 2.0}}, "distill.temperature"),
    ("distill", {"distill": {"teacher": "t", "jsd_share": 0.3}}, "distill.jsd_share"),
    ("sft", {"distill": {"teacher": "t"}}, "distill"),
    ("distill", {"parallel": {"tensor": 2, "shard": "zero1"}}, "objective"),
    ("distill", SMOOTH, "training.label_smoothing_factor"),
    ("distill", {"preference": {"beta": 0.2}}, "preference"),
    (*on_policy({"teacher": None}), "distill.on_policy"),
    (*on_policy({"sft_weight": 0.1}), "distill.sft_weight"),
    (*on_policy(data={"packing": True}), "data.packing"),
    (*on_policy(data={"streaming": True}, training={"max_steps": 1}), "data.streaming"),
    (*on_policy(parallel={"shard": "zero3"}), "distill.on_policy"),
    (*on_policy(parallel={"shard": "fsdp2"}), "distill.on_policy"),
    (*on_policy({"on_policy": {"share": 1.5}}), "distill.on_policy.share"),
    ("dpo", {"lora": {"init_lora_weights": "pissa"}}, "lora.init_lora_weights"),
    ("dpo", IN_FP8, "objective"),
    ("dpo", {"lora": {}, "parallel": {"pipeline": 2}}, "objective"),
    ("dpo", {"lora": {}, "data": {**DATA, "mask": "none"}}, "data.mask"),
    ("dpo", SMOOTH, "training.label_smoothing_factor"),
    ("dpo", {"preference": {"loss": "ipo", "label_smoothing": 0.1}}, "preference.label_smoothing"),
    ("orpo", {"preference": {"loss": "ipo"}}, "preference.loss"),
    ("orpo", {"preference": {"sft_weight": 0.1}}, "preference.sft_weight"),
    ("dpo", {"preference": {"sft_prompt": True}}, "preference.sft_prompt"),
    ("sft", {"preference": {}}, "preference"),
    ("dpo", {**SHARED, "data": {**DATA, **UNPACKED}}, "data.packing"),
    ("kto", SHARED, "preference.share_prompts"),
    ("dpo", {**SHARED, "model": {**MODEL, "attn_implementation": "sdpa"}},
     "model.attn_implementation"),
    ("reward", {"parallel": {"shard": "zero3"}}, "objective"),
    ("reward", {"preference": {"beta": 0.2}}, "preference.beta"),
    ("reward", {"eval_tasks": {"tasks": ["boolq"], "every": 2}}, "eval_tasks"),
]  # fmt: skip


@pytest.mark.parametrize(("objective", "change", "where"), REFUSED)
def test_what_an_objective_does_not_go_with_is_refused_by_its_key(objective, change, where):
    with pytest.raises(RecipeError) as caught:
        Recipe(**{"model": MODEL, "data": DATA, "objective": objective, **change})
    assert str(caught.value.where) == where
