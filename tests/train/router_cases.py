"""A mixture of experts whose routers have a loss of their own, in one process and on ranks."""

from pathlib import Path

import torch


def make_moe(vocab_size, **overrides):
    """Eight experts of which a token takes two; the routers' loss is much larger than usual."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=64,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=8,
        num_experts_per_tok=2,
        output_router_logits=True,
        router_aux_loss_coef=1.0,
        **overrides,
    )
    return Qwen3MoeForCausalLM(config)


def train(root, batch, accumulate, stage=0, factors=None, **options):
    """Loss, gradient norm and routers' loss of each step, and the evaluation's losses."""
    from unittest import mock

    from distributed.zero_cases import zero_file
    from lab import Lab
    from tiny import make_tokenizer

    lab = Lab(make_tokenizer(), Path(root))
    shard = zero_file(root, stage) if stage else "none"
    settings = {"batch": batch, "accumulate": accumulate, "max_steps": 3, "save_strategy": "no"}
    with mock.patch("tiny.make_qwen2", lambda vocab_size, **_: make_moe(vocab_size)):
        given = {"of_model": factors or {}}
        options |= {"shard": shard, "learning_rate": 1e-4, "given": given}
        trainer = lab.trainer("run", **settings, **options)
    trainer.train()
    rows = [row for row in trainer.state.log_history if "loss" in row]
    found = [[row["loss"], row["grad_norm"], row["router_loss"]] for row in rows]
    evaluated = trainer.evaluate()
    return [*found, [evaluated["eval_loss"], evaluated["eval_router_loss"]]]
