"""Two ranks train a type that no list of families has named as one process does, on kernels."""

import json

import pytest
import torch
from project import logged, make_uneven, sft
from transformers import AutoConfig, AutoModelForCausalLM

RECIPE = """\
model: {name_or_path: m, dtype: float32}
data: {train: [a.jsonl], packing: true, max_length: 96, cache_dir: cache}
kernels: true
global_batch_size: 4
training: {learning_rate: 1e-3, per_device_train_batch_size: 2, max_steps: 5, logging_steps: 1,
  save_strategy: "no", max_grad_norm: 0.5, gradient_checkpointing: true}
"""
GRANITE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.25,
    "logits_scaling": 8.0,
}
"""Each multiplier is one that a kernel would lose if it took the layer for a Llama's."""
ON = {"rms_norm", "add_rms_norm", "rope", "swiglu", "linear_cross_entropy"}


@pytest.fixture(scope="module")
def project(tmp_path_factory, tiny_tokenizer):
    root = tmp_path_factory.mktemp("granite")
    ends = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
    torch.manual_seed(0)
    config = AutoConfig.for_model("granite", **GRANITE, **ends, vocab_size=len(tiny_tokenizer))
    AutoModelForCausalLM.from_config(config).save_pretrained(root / "made")
    tiny_tokenizer.save_pretrained(root / "made")
    return make_uneven(root, root / "made", RECIPE, a=range(80))


@pytest.fixture(scope="module")
def one(project):
    sft(project, "--config", "r.yaml", "kernels=false", "--output-dir", "one")
    return logged(project / "one")


@pytest.mark.parametrize("shard", ["fsdp2", "zero2"])
def test_two_ranks_on_kernels_are_one_plain_process(shard, one, project):
    """fp32: what is promised of the losses of every allowed combination, 1e-6."""
    words = [f"parallel.shard={shard}", "--output-dir", shard]
    sft(project, "--config", "r.yaml", *words, num_ranks=2)
    two = logged(project / shard)
    losses = [[row["loss"] for row in rows if "loss" in row] for rows in (one, two)]
    assert len(losses[0]) == 5
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    # Sums in another order: about 30 eps of fp32 over these layers, whichever instructions add.
    assert two[0]["grad_norm"] == pytest.approx(one[0]["grad_norm"], rel=4e-6)
    ops = json.loads((project / shard / "kernels.json").read_text())["ops"]
    assert {op["op"] for op in ops if op["status"] == "on"} >= ON
