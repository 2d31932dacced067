"""Layers that carry a state by a gated delta rule: packed documents stay apart, on our kernel."""

import json

import pytest
import torch
from commands import trainkit
from tiny import DELTA_NET, make_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM

from trainkit import patch
from trainkit.errors import ModelError
from trainkit.models.attention.packable import kept_apart, refuse_recurrent, state_of
from trainkit.models.leak_test import packed_inputs
from trainkit.models.proof import delta
from trainkit.models.proof.plan import plan_for
from trainkit.models.swap import plain_class

KINDS = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")


def make(kind, **overrides):
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 90,
        **DELTA_NET,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
        "attn_implementation": "eager",
    }
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**sizes, **overrides}))
    for module in model.modules():  # not ones and zeros, so that a mix-up shows
        if hasattr(module, "dt_bias"):
            torch.nn.init.normal_(module.dt_bias)
            torch.nn.init.normal_(module.norm.weight, 1, 0.3)
    return model


def layer_of(model):
    return next(module for module in model.modules() if delta.delta_functions(type(module)))


@pytest.fixture(scope="module", params=KINDS)
def layer(request):
    """A layer of each kind, with its forward swapped in, and plain."""
    model = make(request.param)
    with kept_apart(model, True):
        yield layer_of(model)


LENGTHS = (1, 2, 3, 5, 63, 64, 65, 4)


def test_packed_is_alone_and_no_document_moves_another(layer):
    """fp32 sums in chunks that begin at other rows: 1e-6 of the largest, a few units of 2^-24."""
    module = layer
    x = torch.randn(1, sum(LENGTHS), 32, requires_grad=True)
    bounds = packed_inputs([LENGTHS], sum(LENGTHS))["cu_seq_lens_q"]
    y = module(hidden_states=x, cu_seq_lens_q=bounds)
    weight = torch.randn_like(y)
    (dx,) = torch.autograd.grad((y * weight).sum(), x)
    with torch.no_grad():
        changed = x.clone()
        starts = [0, *torch.tensor(LENGTHS).cumsum(0).tolist()]
    for number, length in enumerate(LENGTHS):
        rows = slice(starts[number], starts[number] + length)
        alone = x.detach()[:, rows].clone().requires_grad_()
        y_alone = plain_class(module).forward(module, hidden_states=alone)
        (dx_alone,) = torch.autograd.grad((y_alone * weight[:, rows]).sum(), alone)
        torch.testing.assert_close(y[:, rows], y_alone, rtol=0, atol=1e-6 * float(y.abs().max()))
        torch.testing.assert_close(dx[:, rows], dx_alone, rtol=0, atol=3e-6 * float(dx.abs().max()))
        other = changed.clone()
        other[:, rows] += 1.0
        other.requires_grad_()
        moved = module(hidden_states=other, cu_seq_lens_q=bounds)
        (dx_moved,) = torch.autograd.grad((moved * weight).sum(), other)
        rest = torch.ones(sum(LENGTHS), dtype=torch.bool)
        rest[rows] = False
        assert torch.equal(moved[:, rest], y[:, rest])
        assert torch.equal(dx_moved[:, rest], dx[:, rest])
        assert not torch.equal(moved[:, rows], y[:, rows])


@pytest.mark.parametrize("kind", KINDS)
def test_the_layer_is_found_and_proved(kind):
    model = make(kind)
    assert "is a recurrence" in state_of(model)
    report = patch(model, {"gated_delta_rule": True})
    row = report.row("gated_delta_rule")
    assert (row.status, row.kernels, row.num_modules) == (
        "on",
        ("causal_conv", "gated_delta_rule"),
        1,
    )
    assert row.error < 1e-6
    assert state_of(model) is None
    assert plan_for(model).whole_error < 1e-9
    report.revert()
    assert state_of(model)


def test_generation_keeps_hugging_faces_own_states():
    model = make("qwen3_5_text").eval()
    ids = torch.randint(3, 90, (1, 9))
    want = model.generate(ids, max_new_tokens=6, do_sample=False)
    patch(model, True)
    assert torch.equal(model.generate(ids, max_new_tokens=6, do_sample=False), want)


def test_another_rule_is_refused(monkeypatch):
    """The numbers of a rule that only looks like it: its decay acts after the correction."""
    model = make("qwen3_5_text")
    module = layer_of(model)
    scope = delta.inspect.unwrap(type(module).forward).__globals__
    plain = scope["torch_chunk_gated_delta_rule"]

    def other(*args, g, **kwargs):
        return plain(*args, g=g.roll(1, 1), **kwargs)

    monkeypatch.setitem(scope, "torch_chunk_gated_delta_rule", other)
    found = delta.find_delta(module.double(), torch.zeros(1, 1, 32), torch.zeros(1, 1, 32))
    assert found.verdict == "refused"
    assert "another one" in found.detail


def test_packing_without_the_kernel_is_refused():
    config = make("qwen3_5_text").config
    refuse_recurrent(config)
    with pytest.raises(ModelError, match="carries state") as error:
        refuse_recurrent(config, apart=False)
    assert "kernels to true" in error.value.fix


def test_sft_packs_from_a_recipe(tmp_path):
    """Packed rows train to the losses that the same samples have one a row."""
    tokenizer = make_tokenizer()
    model = make("qwen3_5_text", vocab_size=len(tokenizer))
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"say {n}"},
                {"role": "assistant", "content": "word " * (n % 5 + 1)},
            ]
        }
        for n in range(12)
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    curves = []
    for packing in ("true", "false"):
        recipe = tmp_path / f"packing-{packing}.yaml"
        recipe.write_text(
            f"model: {{name_or_path: {tmp_path / 'model'}, dtype: float32}}\n"
            f"data: {{train: [{tmp_path / 'rows.jsonl'}], max_length: 4096, packing: {packing}}}\n"
            "kernels: true\n"
            "training: {num_train_epochs: 1, per_device_train_batch_size: 12, use_cpu: true,\n"
            "  logging_steps: 1}\n"
        )
        run = tmp_path / packing
        said = trainkit(tmp_path, "sft", "--config", recipe, "--output-dir", run)
        assert said.code == 0, said.err
        curves.append([json.loads(line) for line in (run / "metrics.jsonl").open()])
    assert [len(curve) for curve in curves] == [1, 1]
    assert curves[0][0]["loss"] == pytest.approx(curves[1][0]["loss"], rel=1e-6)
    assert curves[0][0]["grad_norm"] == pytest.approx(curves[1][0]["grad_norm"], rel=3e-6)
