"""Modules that look right and differ are refused, or recognised as what they are.

Each near miss is a class that a comparison on random inputs, on one length, in one mode, or of
outputs alone would take for the real thing.
"""

import ast
import contextlib
import textwrap
from inspect import getsource

import pictures
import pytest
import torch
from families.family_models import make
from torch import nn
from torch.nn import functional as F
from transformers import AutoModelForImageTextToText, LlamaConfig
from transformers.models.cohere.modeling_cohere import CohereLayerNorm
from transformers.models.glm.modeling_glm import apply_rotary_pos_emb as glm_rope
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRMSNorm,
    apply_rotary_pos_emb,
    rotate_half,
)
from transformers.models.mamba2.modeling_mamba2 import MambaRMSNormGated
from transformers.models.nemotron.modeling_nemotron import NemotronLayerNorm1P
from transformers.models.nemotron_h import modeling_nemotron_h
from transformers.models.olmo.modeling_olmo import OlmoLayerNorm
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated

from trainkit import kernels
from trainkit.models.loss import LazyLogits, LogitsChange, LossCall
from trainkit.models.patch import patch_kernels
from trainkit.models.proof.gates import find_gate
from trainkit.models.proof.norms import find_gated_norm, find_norm
from trainkit.models.proof.plan import plan_for
from trainkit.models.proof.rewritten import find_turn
from trainkit.models.proof.source import join_linears, join_norms
from trainkit.models.swap import subclass_of

H = 64
# releases of transformers name it differently
NEMOTRON_H_NORM = next(
    kind for name, kind in vars(modeling_nemotron_h).items() if name.endswith("RMSNormGated")
)


def over_root(x, eps=1e-5):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def helper_that_looks_at_the_length(x):
    return 2 if x.shape[1] > 4096 else 1


class Odd(nn.Module):
    """An activation that is SiLU up to a length."""

    def forward(self, x):
        return F.silu(x) if x.shape[-2] < 4096 else F.gelu(x)


def norm_of(body, **settings):
    torch.manual_seed(0)
    module = type("MutantNorm", (LlamaRMSNorm,), {"forward": body})(H, 1e-5)
    module.weight.data.normal_(1, 0.3)
    for name, value in settings.items():
        setattr(module, name, value)
    return module.train()


def found_norm(module):
    x = torch.randn(2, 7, H)
    return find_norm(module, x, module(x))


def wide(body):
    return lambda self, x: body(self, x.to(torch.float32)).to(x.dtype)


NORMS = {
    "llama": (LlamaRMSNorm.forward, "llama rounding, eps 1e-05"),
    "rounded_once": (wide(lambda s, x: s.weight * over_root(x)), "gemma rounding, eps 1e-05"),
    "one_more": (
        wide(lambda s, x: (1 + s.weight.float()) * over_root(x)),
        "gemma rounding, eps 1e-05, weight + 1",
    ),
    "its_eps_attribute_lies": (
        lambda s, x: s.weight * over_root(x.float(), 1e-6).to(x.dtype),
        "eps 1e-06",
    ),
    "layer_norm": (lambda s, x: F.layer_norm(x, (H,), s.weight, None, 1e-5), "LayerNorm"),
}
NO_NORMS = {
    "eps_outside_the_root": lambda s, x: s.weight * x / (x.pow(2).mean(-1, True).sqrt() + 1e-5),
    "largest_instead_of_the_sum": lambda s, x: (
        s.weight
        * x
        / torch.maximum(x.pow(2).mean(-1, True).sqrt(), torch.tensor(1e-5, dtype=x.dtype))
    ),
    "weight_squared": lambda s, x: s.weight.square() * over_root(x),
    "offset_of_a_ten_thousandth": lambda s, x: (s.weight + 1e-4) * over_root(x),
    "weight_detached": lambda s, x: s.weight.detach() * over_root(x),
    "input_detached": lambda s, x: s.weight * over_root(x.detach()) + (x - x.detach()),
    "root_detached": lambda s, x: (
        s.weight * x * torch.rsqrt(x.pow(2).mean(-1, True) + 1e-5).detach()
    ),
    "over_two_axes": lambda s, x: s.weight * x * torch.rsqrt(x.pow(2).mean((-1, -2), True) + 1e-5),
    "over_the_first_half": lambda s, x: (
        s.weight * x * torch.rsqrt(x[..., : H // 2].pow(2).mean(-1, True) + 1e-5)
    ),
    "unbiased": lambda s, x: s.weight * x * torch.rsqrt(x.pow(2).sum(-1, True) / (H - 1e-6) + 1e-5),
    "clamped_at_1e4": lambda s, x: (s.weight * over_root(x)).clamp(-1e4, 1e4),
    "clamped_in_place": lambda s, x: (s.weight * over_root(x)).clamp_(-1e4, 1e4),
    "squares_clamped": lambda s, x: (
        s.weight * x * torch.rsqrt(x.pow(2).mean(-1, True).clamp_min(1e-30) + 1e-5)
    ),
    "infinities_hidden": lambda s, x: torch.nan_to_num(s.weight * over_root(x)),
    "large_values_masked": lambda s, x: torch.where(x > 1e6, x, s.weight * over_root(x)),
    "large_rows_filled": lambda s, x: (s.weight * over_root(x)).masked_fill(x > 1e6, 0.0),
    "other_in_evaluation": lambda s, x: s.weight * over_root(x) * (1 if s.training else 1.01),
    "other_when_long": lambda s, x: s.weight * over_root(x) * (1 if x.shape[1] < 4096 else 2),
    "other_for_many_rows": lambda s, x: s.weight * over_root(x) * (1 + (x.numel() > 10**9)),
    "length_in_thousands": lambda s, x: s.weight * over_root(x) * (1 + x.shape[1] // 4096),
    "length_capped": lambda s, x: s.weight * over_root(x) * (max(x.shape[1], 4096) / 4096),
    "helper_decides": lambda s, x: s.weight * over_root(x) * helper_that_looks_at_the_length(x),
    "a_loop": lambda s, x: sum(s.weight * over_root(x) for _ in range(1 + x.shape[1] // 4096)),
    "noise": lambda s, x: s.weight * over_root(x) + 1e-30 * torch.randn_like(x),
    "dropout": lambda s, x: F.dropout(s.weight * over_root(x), 1e-9, s.training),
    "absolute_values": lambda s, x: s.weight * x / x.abs().mean(-1, True),
    "power_of_almost_two": lambda s, x: (
        s.weight * x * torch.rsqrt(x.abs().pow(2.0001).mean(-1, True) + 1e-5)
    ),
    "shifted": lambda s, x: s.weight * over_root(x) + 1e-7,
}


@pytest.mark.parametrize("name", NORMS)
def test_norms_are_recognised(name):
    body, wanted = NORMS[name]
    found = found_norm(norm_of(body))
    assert found.verdict == "on"
    assert wanted in found.detail


@pytest.mark.parametrize("name", NO_NORMS)
def test_near_misses_of_norms_are_refused(name):
    found = found_norm(norm_of(NO_NORMS[name]))
    assert found.verdict == "refused", found


def test_the_proof_of_a_norm_leaves_it_as_it_was():
    module = norm_of(LlamaRMSNorm.forward)
    before = module.weight.clone()
    found_norm(module)
    assert module.training
    assert torch.equal(module.weight, before)
    assert module.weight.dtype == torch.float32


# That of an older transformers decides by a device that none of ours is.
NEMOTRON = [] if "mps" in getsource(NemotronLayerNorm1P) else [NemotronLayerNorm1P]


@pytest.mark.parametrize("kind", [nn.LayerNorm, *NEMOTRON, CohereLayerNorm, OlmoLayerNorm])
def test_layer_norms_of_every_kind_are_recognised(kind):
    found = found_norm(kind(H).train())
    assert (found.op, found.verdict) == ("layer_norm", "on")
    assert found.settings["made"].own_under_autocast == issubclass(kind, nn.LayerNorm)


def test_a_layer_norm_rounds_as_torchs_does_under_autocast():
    """torch keeps fp32 there and Nemotron's does not: the module's own lines decide."""
    x = torch.randn(2, 7, H)
    for kind in (nn.LayerNorm, *NEMOTRON):
        module = kind(H).train()
        found = found_norm(module)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            plain = module(x)
            module.__class__ = subclass_of(kind, found.forward, found.settings)
            assert module(x).dtype == plain.dtype
            assert torch.equal(module(x), plain)


def gated_of(body, **settings):
    torch.manual_seed(0)
    module = type("MutantNorm", (Qwen3NextRMSNormGated,), {"forward": body})(H, eps=1e-5)
    module.weight.data.normal_(1, 0.3)
    for name, value in settings.items():
        setattr(module, name, value)
    return module.train()


def found_gated(module):
    x, gate = torch.randn(2, 7, H), torch.randn(2, 7, H)
    return find_gated_norm(module, x, gate, module(x, gate))


def gated(body):
    """A forward of the arguments' names, in fp32."""

    def forward(self, hidden_states, gate=None):
        x, z = hidden_states.to(torch.float32), gate.to(torch.float32)
        return body(self, x, z).to(hidden_states.dtype)

    return forward


def columns_by_length(self, hidden_states, gate=None):
    hidden_states = hidden_states.transpose(1, 2)
    *_rest, last_dim = hidden_states.shape
    n = 1 + last_dim // self.group_size
    return self.weight * over_root(hidden_states.transpose(1, 2)) * F.silu(gate) * n


GATED = [
    (Qwen3NextRMSNormGated, {}, "llama rounding, eps 1e-05, silu gate behind it"),
    (MambaRMSNormGated, {}, "llama rounding, eps 1e-05, silu gate before it"),
    (NEMOTRON_H_NORM, {"group_size": 16}, "before it, groups of 16"),
]
with contextlib.suppress(ImportError):  # not in transformers 5.17
    from transformers.models.bailing_hybrid.modeling_bailing_hybrid import BailingHybridRMSNormGated

    found_in_bailing = "gemma rounding, eps 1e-05, sigmoid gate behind it"
    GATED.append((BailingHybridRMSNormGated, {}, found_in_bailing))


@pytest.mark.parametrize(("kind", "settings", "wanted"), GATED)
def test_gated_norms_are_recognised(kind, settings, wanted):
    make = (
        {"group_size": H, **settings} if "group_size" in kind.__init__.__code__.co_varnames else {}
    )
    module = kind(H, eps=1e-5, **make).train()
    module.weight.data.normal_(1, 0.3)
    found = found_gated(module)
    assert (found.verdict, wanted in found.detail) == ("on", True), found
    assert found.bits == 0
    x, gate = torch.randn(2, 7, H), torch.randn(2, 7, 3 * H)[..., :H]
    plain = module(x, gate)
    module.__class__ = subclass_of(kind, found.forward, found.settings)
    torch.testing.assert_close(module(x, gate=gate), plain, rtol=0, atol=0)


NO_GATED = {
    "gate_in_the_square_only": gated(
        lambda s, x, z: s.weight * x * torch.rsqrt((x * F.silu(z)).pow(2).mean(-1, True) + 1e-5)
    ),
    "gate_twice": gated(lambda s, x, z: s.weight * over_root(x * F.silu(z)) * F.silu(z)),
    "tanh_gate": gated(lambda s, x, z: s.weight * over_root(x) * torch.tanh(z)),
    "gate_and_half": gated(lambda s, x, z: s.weight * over_root(x) * F.silu(0.5 * z)),
    "gate_detached": gated(lambda s, x, z: s.weight * over_root(x) * F.silu(z.detach())),
    "eps_outside": gated(
        lambda s, x, z: s.weight * x / (x.pow(2).mean(-1, True).sqrt() + 1e-5) * F.silu(z)
    ),
    "centred": gated(lambda s, x, z: s.weight * over_root(x - x.mean(-1, True)) * F.silu(z)),
    "clamped": gated(lambda s, x, z: s.weight * over_root(x) * F.silu(z).clamp(max=1e6)),
    "other_in_evaluation": gated(
        lambda s, x, z: s.weight * over_root(x) * F.silu(z) * (1 if s.training else 2)
    ),
    "other_when_long": gated(
        lambda s, x, z: s.weight * over_root(x) * F.silu(z) * (1 + x.shape[1] // 4096)
    ),
    "length_as_columns": columns_by_length,
}


@pytest.mark.parametrize("name", NO_GATED)
def test_near_misses_of_gated_norms_are_refused(name):
    found = found_gated(gated_of(NO_GATED[name], group_size=4096))
    assert found.verdict == "refused", found


def mlp_of(body=None, **modules):
    torch.manual_seed(0)
    kind = type("MutantMLP", (LlamaMLP,), {"forward": body} if body else {})
    module = kind(LlamaConfig(hidden_size=H, intermediate_size=48))
    for parameter in module.parameters():
        parameter.data.normal_(0, 0.2)
    for name, each in modules.items():
        setattr(module, name, each)
    return module.double().train()


def found_gate(module):
    x = torch.randn(2, 7, H, dtype=torch.float64)
    return find_gate(module, x, module(x))


def g(s, x):
    return s.gate_proj(x)


def u(s, x):
    return s.up_proj(x)


GATES = {
    "llama": (None, "silu(gate) * up, split", "on"),
    "roles_exchanged": (lambda s, x: s.down_proj(g(s, x) * F.silu(u(s, x))), "silu", "on"),
    "written_out": (lambda s, x: s.down_proj(g(s, x) * g(s, x).sigmoid() * u(s, x)), "silu", "on"),
    "tanh_gelu": (
        lambda s, x: s.down_proj(F.gelu(g(s, x), approximate="tanh") * u(s, x)),
        "gelu_tanh",
        "on",
    ),
    "exact_gelu": (lambda s, x: s.down_proj(F.gelu(g(s, x)) * u(s, x)), "gelu(", "no kernel"),
}
NO_GATES = {
    "quick_gelu": lambda s, x: s.down_proj(g(s, x) * torch.sigmoid(1.702 * g(s, x)) * u(s, x)),
    "silu_with_beta": lambda s, x: s.down_proj(g(s, x) * torch.sigmoid(1.0001 * g(s, x)) * u(s, x)),
    "clamped_at_1e6": lambda s, x: s.down_proj(F.silu(g(s, x)).clamp(max=1e6) * u(s, x)),
    "clamped_in_place": lambda s, x: s.down_proj(F.silu(g(s, x)).clamp_(max=1e6) * u(s, x)),
    "smallest_of_two": lambda s, x: s.down_proj(
        torch.minimum(F.silu(g(s, x)), torch.full_like(u(s, x), 1e6)) * u(s, x)
    ),
    "hardtanh": lambda s, x: s.down_proj(F.hardtanh(F.silu(g(s, x)), -1e6, 1e6) * u(s, x)),
    "up_plus_one": lambda s, x: s.down_proj(F.silu(g(s, x)) * (u(s, x) + 1)),
    "a_multiplier": lambda s, x: s.down_proj(F.silu(g(s, x)) * u(s, x)) * 0.22,
    "a_multiplier_inside": lambda s, x: s.down_proj(F.silu(g(s, x)) * u(s, x) * 0.999999),
    "two_activations": lambda s, x: s.down_proj(F.silu(g(s, x)) * F.silu(u(s, x))),
    "residual_inside": lambda s, x: s.down_proj(F.silu(g(s, x)) * u(s, x)) + x,
    "up_detached": lambda s, x: s.down_proj(F.silu(g(s, x)) * u(s, x).detach()),
    "gate_detached": lambda s, x: s.down_proj(F.silu(g(s, x)).detach() * u(s, x)),
    "input_detached": lambda s, x: s.down_proj(F.silu(g(s, x.detach())) * u(s, x)),
    "other_when_long": lambda s, x: (
        s.down_proj(F.silu(g(s, x)) * u(s, x)) * (1 if x.shape[1] < 4096 else 2)
    ),
    "other_in_evaluation": lambda s, x: (
        s.down_proj(F.silu(g(s, x)) * u(s, x)) * (1 if s.training else 1.01)
    ),
    "dropout": lambda s, x: s.down_proj(F.dropout(F.silu(g(s, x)) * u(s, x), 1e-9)),
    "a_whole_item": lambda s, x: s.down_proj(F.silu(g(s, x)) * u(s, x)) * (1 + 0 * x.sum().item()),
    "normalised": lambda s, x: s.down_proj(over_root(F.silu(g(s, x)) * u(s, x))),
    "sorted_for_nothing": lambda s, x: (
        s.down_proj(F.silu(g(s, x)) * u(s, x)) + 0 * x.sort(-1).values
    ),
}


@pytest.mark.parametrize("name", GATES)
def test_gates_are_recognised(name):
    body, wanted, verdict = GATES[name]
    found = found_gate(mlp_of(body))
    assert (found.verdict, wanted in found.detail) == (verdict, True), found


@pytest.mark.parametrize("name", NO_GATES)
def test_near_misses_of_gates_are_refused(name):
    found = found_gate(mlp_of(NO_GATES[name]))
    assert found.verdict == "refused", found


def test_a_gate_whose_activation_decides_by_the_length_is_refused():
    assert "decides by" in found_gate(mlp_of(act_fn=Odd())).detail


def test_a_branch_on_training_is_no_setting():
    class Norm(LlamaRMSNorm):
        def forward(self, hidden_states):
            if self.training:
                return super().forward(hidden_states)
            return super().forward(hidden_states)

    assert "decides by self.training" in found_norm(Norm(H, 1e-5)).detail


class Packed(nn.Module):
    """Gate and up of one layer, in an order."""

    def __init__(self, take):
        super().__init__()
        torch.manual_seed(0)
        self.both, self.out = nn.Linear(H, 96), nn.Linear(48, H)
        self.take = take
        self.double()

    def forward(self, x):
        gate, up = self.take(self.both(x))
        return self.out(F.silu(gate) * up)


@pytest.mark.parametrize(
    ("take", "wanted"),
    [
        (lambda y: y.chunk(2, -1), ("on", "gate_up")),
        (lambda y: y.chunk(2, -1)[::-1], ("on", "up_gate")),
        (lambda y: (y[..., ::2], y[..., 1::2]), ("on", None)),
        (lambda y: (y[..., :48], y[..., 48:].roll(1, -1)), ("refused", None)),
    ],
)
def test_packed_gates(take, wanted):
    found = found_gate(Packed(take))
    assert (found.verdict, found.settings.get("order")) == wanted


def limited(s, x, limit=2.0):
    return g(s, x).clamp(max=limit), u(s, x).clamp(min=-limit, max=limit)


def glu(gate, up, alpha=1.702):
    return (up + 1) * gate * torch.sigmoid(alpha * gate)


LIMITED = {
    "deepseek_v4": lambda s, x: s.down_proj(product(*limited(s, x))),
    "gpt_oss": lambda s, x: s.down_proj(glu(*limited(s, x))),
    "own_alpha": lambda s, x: s.down_proj(glu(*limited(s, x), s.alpha)),
}
NOT_LIMITED = {
    "a_third_clamp_that_nothing_reaches": lambda s, x: s.down_proj(
        product(*limited(s, x)).clamp(max=1e6)
    ),
    "gate_only": lambda s, x: s.down_proj(F.silu(g(s, x).clamp(max=2.0)) * u(s, x)),
    "one_side_of_up": lambda s, x: s.down_proj(
        F.silu(g(s, x).clamp(max=2.0)) * u(s, x).clamp(max=2.0)
    ),
    "another_limit_for_up": lambda s, x: s.down_proj(
        F.silu(g(s, x).clamp(max=2.0)) * u(s, x).clamp(-3.0, 3.0)
    ),
    "clamped_behind": lambda s, x: s.down_proj(
        F.silu(g(s, x)).clamp(max=2.0) * u(s, x).clamp(-2.0, 2.0)
    ),
    "exchanged": lambda s, x: s.down_proj(
        F.silu(g(s, x).clamp(-2.0, 2.0)) * u(s, x).clamp(max=2.0)
    ),
    "a_limit_that_depends": lambda s, x: s.down_proj(product(*limited(s, x, x.detach().mean()))),
    "gate_detached": lambda s, x: s.down_proj(product(limited(s, x)[0].detach(), limited(s, x)[1])),
    "another_sigmoid": lambda s, x: s.down_proj(glu(*limited(s, x), 1.7021)),
}


def product(gate, up):
    return F.silu(gate) * up


@pytest.mark.parametrize("name", LIMITED)
def test_clamped_gates_are_recognised_and_run(name):
    module = mlp_of(LIMITED[name])
    module.alpha = 1.5
    x = torch.cat([torch.randn(2, 7, H), 50 * torch.randn(2, 7, H)]).double()
    found = find_gate(module, x, module(x))
    assert (found.verdict, "clamped at 2" in found.detail) == ("on", True), found
    plain = module(x)
    module.__class__ = subclass_of(type(module), found.forward, found.settings)
    torch.testing.assert_close(module(x), plain, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", NOT_LIMITED)
def test_near_misses_of_clamped_gates_are_refused(name):
    found = found_gate(mlp_of(NOT_LIMITED[name]))
    assert found.verdict == "refused", found


# Rotary functions.


def angles(repeat=True):
    half = torch.randn(1, 5, 8, dtype=torch.float64)
    whole = torch.cat([half, half], -1) if repeat else torch.randn(1, 5, 16, dtype=torch.float64)
    return whole.cos(), whole.sin()


def turned(function, repeat=True):
    q, k = torch.randn(2, 4, 5, 16), torch.randn(2, 2, 5, 16)
    return find_turn(function, (q, k, *angles(repeat)), {})


def back(q, k, cos, sin):
    return q * cos[:, None] - rotate_half(q) * sin[:, None], k * cos[:, None] - rotate_half(
        k
    ) * sin[:, None]


def only_q(q, k, cos, sin):
    return q * cos[:, None] + rotate_half(q) * sin[:, None], k


def scaled(q, k, cos, sin):
    q, k = apply_rotary_pos_emb(q, k, cos, sin)
    return q * 1.0001, k


def long_ones(q, k, cos, sin):
    q, k = apply_rotary_pos_emb(q, k, cos, sin)
    return (q * 2, k) if q.shape[2] > 4096 else (q, k)


def stopped(q, k, cos, sin):
    q, k = apply_rotary_pos_emb(q, k, cos, sin)
    return q, k.detach()


def capped(q, k, cos, sin):
    q, k = apply_rotary_pos_emb(q, k, cos, sin)
    return q.clamp(-1e6, 1e6), k


def test_turning_functions_are_recognised():
    assert turned(apply_rotary_pos_emb).detail == "halves"
    assert turned(glm_rope).detail == "neighbours"
    assert "turned back" in turned(back).detail


@pytest.mark.parametrize("function", [only_q, scaled, long_ones, stopped, capped])
def test_near_misses_of_turning_functions_are_refused(function):
    assert turned(function).verdict == "refused"


def test_angles_whose_halves_differ_are_refused():
    assert turned(apply_rotary_pos_emb, repeat=False).verdict == "refused"


# Joined statements.


def joined(body, join, names):
    text = "def forward(self, x, r, flag=None):\n" + textwrap.indent(textwrap.dedent(body), "    ")
    definition = ast.parse(text).body[0]
    return join(definition, names), ast.unparse(definition)


@pytest.mark.parametrize(
    "body",
    [
        "h = r + self.a(x)\nreturn self.norm(h)",
        "h = self.a(x) * 0.22 + r\nr = h\nh = self.norm(h)\nreturn r + h",
        "if flag:\n    h = r + x\n    return self.norm(h)",
        "return self.norm(self.a(x) + r)",
        "y = self.norm(x + r)\nreturn y",
    ],
)
def test_an_addition_and_its_norm_are_joined(body):
    found, source = joined(body, join_norms, ("norm",))
    assert found == ("norm",)
    assert "self.add_norm('norm'," in source


@pytest.mark.parametrize(
    "body",
    [
        "h = r + x\nh = h * 2\nreturn self.norm(h)",
        "h = r + x\nh.mul_(2)\nreturn self.norm(h)",
        "h = r - x\nreturn self.norm(h)",
        "h = r + x\nreturn self.norm(r)",
        "h = r + x\nreturn self.other(h)",
        "h = r + x\nreturn self.norm(h) + self.norm(h)",
        "h = r + x\nreturn self.norm(h) if flag else h",
        "h = r + x\nif flag:\n    return self.norm(h)\nreturn h",
        "h += x\nreturn self.norm(h)",
        "h = r + x\nreturn [self.norm(h) for _ in flag]",
        "h = r + x\nreturn self.norm(h, flag)",
        "return self.norm(r - x)",
        "return self.norm(x + r, flag)",
        "return self.norm(x + r) if flag else x",
        "return [self.norm(x + r) for _ in flag]",
    ],
)
def test_what_is_not_an_addition_right_before_its_norm_is_left_alone(body):
    found, source = joined(body, join_norms, ("norm",))
    assert found == ()
    assert "add_norm" not in source


def test_layers_that_read_one_variable_are_read_together():
    body = "q = self.q(x).view(1)\nk = self.k(x)\nreturn q, k, self.v(x)"
    found, source = joined(body, join_linears, ("q", "k", "v"))
    assert found == (("q", "k", "v"),)
    assert "= self.read_linears(x, self.q, self.k, self.v)" in source


@pytest.mark.parametrize(
    "body",
    [
        "q = self.q(x)\nk = self.k(r)",
        "q = self.q(x)\nx = r\nk = self.k(x)",
        "q = self.q(x)\nif flag:\n    k = self.k(x)",
        "q = self.q(x)\nk = self.k(x) if flag else r",
        "q = self.q(x)\nk = self.k(x)\nk = self.k(x)\nq = self.q(x)",
        "q = self.q(x)\nk = self.k(x)\nw = self.k.weight\nreturn self.q",
    ],
)
def test_layers_that_read_other_things_are_read_one_by_one(body):
    found, source = joined(body, join_linears, ("q", "k"))
    assert found == ()
    assert "read_linears" not in source


# Logits that nobody computes.


@pytest.fixture
def lazy():
    torch.manual_seed(0)
    head = nn.Linear(8, 11, dtype=torch.float64)
    hidden = torch.randn(2, 5, 8, dtype=torch.float64)
    call = LossCall(lambda *_, **__: None, head, 11)
    return LazyLogits(hidden, call, LogitsChange()), head(hidden), call


@pytest.mark.parametrize(
    "change",
    [
        lambda y: y / 3,
        lambda y: y * 0.25 * 3,
        lambda y: 30.0 * torch.tanh(y / 30.0),
        lambda y: torch.tanh(y / 30.0) * 30.0 / 4,
        lambda y: 5 * torch.tanh(y * 0.5),
        lambda y: (y / 7)[:, 1:, :],
        lambda y: y[..., :-1, :].contiguous().view(-1, 11),
        lambda y: y * torch.tensor(2.0, dtype=torch.float64),
    ],
)
def test_scales_caps_and_slices_are_remembered(lazy, change):
    late, logits, call = lazy
    found = change(late)
    assert isinstance(found, LazyLogits)
    assert not call.num_computed
    torch.testing.assert_close(found.computed(), change(logits))


@pytest.mark.parametrize(
    "change",
    [
        lambda y: y + 1,
        lambda y: -30.0 * torch.tanh(y / 30.0),
        lambda y: torch.tanh(torch.tanh(y)),
        lambda y: y * torch.ones(11, dtype=torch.float64),
        lambda y: y[..., :7],
        lambda y: y[0],
        lambda y: y.transpose(1, 2),
        lambda y: y.softmax(-1),
        lambda y: torch.cat([y, y], 1),
        lambda y: y.view(2, 55),
        lambda y: F.cross_entropy(y.view(-1, 11), torch.zeros(10).long(), torch.ones(11).double()),
        lambda y: F.cross_entropy(y.transpose(1, 2), torch.zeros(2, 5).long()),
    ],
)
def test_whatever_else_is_done_to_logits_computes_them(lazy, change):
    late, logits, call = lazy
    found = change(late)
    assert not isinstance(found, LazyLogits)
    assert call.num_computed
    torch.testing.assert_close(found, change(logits))


# The whole.


def test_plans_of_one_configuration_are_equal_and_others_are_not():
    plan, again = plan_for(make("llama")), plan_for(make("llama", seed=3))
    assert plan is again
    other = plan_for(make("llama", rms_norm_eps=1e-3))
    assert plan.digest() != plan_for(make("qwen3")).digest()
    assert other.digest() != plan.digest()
    assert plan.whole_error < 1e-12


def test_layers_of_several_kinds_are_all_proved():
    """gemma2: soft caps, windows in every other layer, norms before and behind each block."""
    from transformers import Gemma2Config, Gemma2ForCausalLM

    sizes = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = Gemma2Config(num_hidden_layers=8, **sizes, **heads)
    torch.manual_seed(0)
    model = Gemma2ForCausalLM(config).train()
    ids = torch.randint(3, 120, (2, 9))
    plain = model(ids, labels=ids).loss
    report = patch_kernels(model)
    assert {row.op: row.num_modules for row in report.rows} == {
        "rms_norm": 33,
        "add_rms_norm": 8,
        "layer_norm": 0,
        "add_layer_norm": 0,
        "gated_rms_norm": 0,
        "rope": 8,
        "swiglu": 8,
        "experts": 0,
        "gated_delta_rule": 0,
        "linear_cross_entropy": 2,
    }
    output = model(ids, labels=ids)
    assert output.logits is None
    torch.testing.assert_close(output.loss, plain, rtol=1e-5, atol=0)


def test_what_fails_the_whole_step_alone_is_taken_out():
    """inkling gives its norms views that are not contiguous after an addition in one pass."""
    from tiny_classes import classes, make_tiny

    report = patch_kernels(make_tiny(*classes()["inkling_text"]))
    assert set(report.plan.dropped) == {"add_rms_norm"}
    assert "the whole model does not run with it" in report.row("add_rms_norm").reason
    assert {row.op for row in report.rows if row.status == "on"} >= {
        "rms_norm",
        "linear_cross_entropy",
    }


# Each module with its own weights.


class Scaled(LlamaRMSNorm):
    """What a checkpoint brings besides the weight: one, where nothing was loaded."""

    def __init__(self, hidden_size, eps=1e-6):
        super().__init__(hidden_size, eps)
        self.register_buffer("gain", torch.ones(()))

    def forward(self, hidden_states):
        return super().forward(hidden_states) * self.gain


def test_what_a_checkpoint_alone_brings_keeps_its_modules_plain(monkeypatch):
    monkeypatch.setattr(modeling_llama, "LlamaRMSNorm", Scaled)
    ids = torch.randint(3, 120, (2, 9))
    assert patch_kernels(make("llama", seed=5)).own.num == 3  # two layers and the last norm
    model = make("llama")
    model.model.layers[1].input_layernorm.gain.fill_(1.5)
    plain = model(ids, labels=ids).loss
    report = patch_kernels(model)
    assert set(report.own.refused) == {"model.layers.1"}
    assert "float32" not in report.own.refused["model.layers.1"]  # it is seen in fp64
    assert "off by" in report.row("rms_norm").reason
    assert (report.own.num, report.row("rms_norm").num_modules) == (3, 3)
    assert type(model.model.layers[1].mlp) is LlamaMLP
    torch.testing.assert_close(model(ids, labels=ids).loss, plain)
    assert report.to_dict()["plan"] != patch_kernels(make("llama", seed=5)).to_dict()["plan"]


def test_rounding_worse_than_the_modules_own_keeps_it_plain(monkeypatch):
    exact = kernels.rms_norm

    def coarse(x, *args, **options):
        y = exact(x, *args, **options)
        return y.to(torch.float8_e5m2).to(y) if x.dtype == torch.bfloat16 else y

    monkeypatch.setattr(kernels, "rms_norm", coarse)
    report = patch_kernels(make("llama").bfloat16())
    assert "in bfloat16" in report.own.refused["model.norm"]


def test_weights_in_parts_are_proved_by_kind():
    model = make("llama")
    with torch.device("meta"):
        model.model.layers[0].to_empty(device="meta")
    report = patch_kernels(model)
    assert report.own.by_kind == {"weights in parts or nowhere": 1}
    assert report.row("swiglu").num_modules == 2
    assert "2 with their own weights" in str(report)


def test_modules_of_one_class_run_on_what_one_of_their_shape_was_given():
    """The norms of a tower's mergers are wider where they stand behind deeper layers."""
    config = pictures.make_config("qwen3_vl", pictures.make_tokenizer("patches"))
    assert not patch_kernels(AutoModelForImageTextToText.from_config(config)).own.by_kind
