"""Experts: recognised by what they compute, and refused where a branch could hide another thing."""

import pytest
import torch
import transformers
from families.survey import build, step
from torch.nn import functional as F
from transformers import Qwen3MoeConfig
from transformers.activations import ACT2FN
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from trainkit.models.linears import expert_parameters
from trainkit.models.patch import patch_kernels
from trainkit.models.proof.gates import find_experts

PLAIN = """
qwen3_moe qwen2_moe mixtral olmoe glm4_moe deepseek_v2 deepseek_v3 qwen3_next qwen3_5_moe_text
granitemoe ernie4_5_moe minimax lfm2_moe aria_text
"""
TYPES = [
    *PLAIN.split(),
    "gpt_oss",  # clamped, interleaved, biased, transposed
    "llama4_text",  # rows sorted by expert, the router's score on them
    "minimax_m3_vl_text",
    "deepseek_v4",
]
H, WIDTH, E = 32, 16, 5


def experts(**changes):
    torch.manual_seed(0)
    kind = type("Mutant", (Qwen3MoeExperts,), changes)
    module = kind(Qwen3MoeConfig(num_experts=E, hidden_size=H, moe_intermediate_size=WIDTH))
    module.config._experts_implementation = "eager"
    for parameter in module.parameters():
        parameter.data.normal_(0, 0.3)
    return module.double().train()


def looped(body, scale=1.0):
    """Hugging Face's loop over experts with another middle."""

    def forward(self, hidden_states, top_k_index, top_k_weights):
        final_hidden_states = torch.zeros_like(hidden_states)
        with torch.no_grad():
            expert_mask = F.one_hot(top_k_index, self.num_experts + 1).permute(2, 1, 0)
            expert_hit = torch.greater(expert_mask.sum(dim=(-1, -2)), 0).nonzero()
        for expert_idx in expert_hit:
            expert_idx = expert_idx[0]
            if expert_idx == self.num_experts:
                continue
            choice, token = torch.where(expert_mask[expert_idx])
            h = body(self, F.linear(hidden_states[token], self.gate_up_proj[expert_idx]))
            y = F.linear(h, self.down_proj[expert_idx]) * top_k_weights[token, choice, None]
            final_hidden_states.index_add_(0, token, y * scale)
        return final_hidden_states

    return forward


def found(module):
    x, scale = torch.randn(7, H).double(), torch.rand(7, 2).double()
    index = torch.rand(7, E).argsort(1)[:, :2]
    return find_experts(module, [x, index, scale], module(x, index, scale))


def halves(y):
    return y.chunk(2, -1)


MISSES = {
    "up_first": lambda s, y: F.silu(halves(y)[1]) * halves(y)[0],
    "up_interleaved_first": lambda s, y: F.silu(y[..., 1::2]) * y[..., ::2],
    "clamped_low": lambda s, y: F.silu(halves(y)[0].clamp(-7, 7)) * halves(y)[1].clamp(-7, 7),
    "two_limits": lambda s, y: F.silu(halves(y)[0].clamp(max=6)) * halves(y)[1].clamp(-7, 7),
    "clamped_after": lambda s, y: (F.silu(halves(y)[0].clamp(max=7)) * halves(y)[1]).clamp(-7, 7),
    "clamped_at_1e6": lambda s, y: F.silu(halves(y)[0].clamp(max=1e6)) * halves(y)[1],
    "chosen": lambda s, y: torch.where(torch.greater(y, 1e6), 0, y)[..., :WIDTH].mul(0),
    "quick_gelu": lambda s, y: halves(y)[0] * torch.sigmoid(1.702 * halves(y)[0]) * halves(y)[1],
    "plus_one": lambda s, y: F.silu(halves(y)[0]) * (halves(y)[1] + 1),
    "detached": lambda s, y: F.silu(halves(y)[0]) * halves(y)[1].detach(),
    "evaluated": lambda s, y: F.silu(halves(y)[0]) * halves(y)[1] * (1 if s.training else 1.01),
    "few_rows": lambda s, y: F.silu(halves(y)[0]) * halves(y)[1] * (1 if len(y) < 99 else 2),
}


def test_experts_are_recognised():
    one = found(experts())
    assert (one.verdict, dict(one.settings["options"])["activation"]) == ("on", "silu")
    assert one.error < 1e-13
    tanh = experts()
    tanh.act_fn = ACT2FN["gelu_pytorch_tanh"]
    assert dict(found(tanh).settings["options"])["activation"] == "gelu_tanh"
    for middle in HITS:  # so a miss is refused for its middle
        assert found(experts(forward=looped(middle))).verdict == "on"


HITS = (
    lambda s, y: F.silu(halves(y)[0]) * halves(y)[1],
    lambda s, y: F.silu(y[..., ::2]) * y[..., 1::2],
    lambda s, y: F.silu(halves(y)[0].clamp(max=7)) * halves(y)[1].clamp(-7, 7),
    lambda s, y: F.silu(halves(y)[0].clamp(max=1e6)) * halves(y)[1].clamp(-1e6, 1e6),
)


@pytest.mark.parametrize("name", MISSES)
def test_near_misses_are_refused(name):
    assert found(experts(forward=looped(MISSES[name]))).verdict == "refused"


def test_a_choice_by_values_inside_hugging_faces_own_loop_is_refused():
    def act(x):
        return F.silu(torch.where(torch.greater(x, 1e6), 0.0 * x, x))

    module = experts()
    del module.act_fn
    module.act_fn = act
    assert found(module).verdict == "refused"


def test_parameters_that_the_experts_do_not_use_keep_them_plain():
    module = experts()
    module.bias = torch.nn.Parameter(torch.zeros(E, H).double())
    assert found(module).verdict == "refused"


@pytest.mark.sample("*-eager-dtype0", "qwen3_moe-*", "gpt_oss-*", "deepseek_v4-grouped_mm-dtype1")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("implementation", ["eager", "grouped_mm"])
@pytest.mark.parametrize("model_type", TYPES)
def test_a_step_is_hugging_faces(model_type, implementation, dtype):
    """In fp32 by the truth in fp64: three times what the plain model is off, or 32 roundings."""
    exact = step(build(model_type).double().train()) if dtype == torch.float32 else None
    model = build(model_type).to(dtype).train()
    if not expert_parameters(model):
        pytest.skip(f"transformers {transformers.__version__} has no stacks in {model_type}")
    plain = step(model)
    if model_type != "llama4_text":  # which has one implementation
        model.set_experts_implementation(implementation)
    report = patch_kernels(model, dict.fromkeys(OTHERS, False) | {"experts": True})
    row = report.row("experts")
    assert (row.status, row.kernels) == ("on", ("moe_mlp",)), row
    for name, gradient in step(model).items():
        size = plain[name].abs().max().item() + 1e-6
        if exact is None:
            assert (gradient - plain[name]).abs().max().item() <= 2e-2 * size, name
            continue
        ours, theirs = ((each - exact[name]).abs().max() for each in (gradient, plain[name]))
        assert ours <= 3 * theirs + 32 * torch.finfo(dtype).eps * size, name


OTHERS = (
    "rms_norm", "add_rms_norm", "layer_norm", "add_layer_norm", "rope", "swiglu",
    "gated_delta_rule", "linear_cross_entropy",
)  # fmt: skip
