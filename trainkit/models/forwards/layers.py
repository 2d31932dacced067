"""The few forwards all families share.

Each class here is a mixin: ``patch`` builds ``type(name, (mixin, HuggingFaceClass), settings)``
and swaps it in as ``module.__class__``, so that ``super().forward`` is Hugging Face's own code and
every weight is read as ``self.x.weight`` while the forward runs (ZeRO-3 gathers it then). What
differs between families is a class attribute, set from the family's row.

``knows`` lists every name that the replaced forward may use. ``patch`` reads the names out of the
installed forward's byte code and refuses when it finds another one: a transformers release that
adds a step to a layer is an error here, never a step that silently goes missing.

Single-token decoding (evaluation mode, no gradients, sequence length 1) keeps Hugging Face's code:
at that size a step is bound by launches, and generation stays what it was, bit for bit, after the
prompt.

The attention forwards are in ``rope_forwards.py``.

Shapes: B batch, S sequence, H hidden, D head size, F feed-forward.
"""

import sys
from typing import Any, ClassVar, Literal

import torch
from torch import nn
from transformers.activations import ACT2FN

from trainkit import kernels
from trainkit.models.forwards.shared_input import apply_feed_forward, apply_linears


def names(text: str) -> frozenset[str]:
    """The words of a text, as a set of names."""
    return frozenset(text.split())


class KernelForward(nn.Module):
    """What every shared forward says about itself."""

    uses: ClassVar[tuple[str, ...]] = ()
    """The public functions of ``trainkit.kernels`` it calls."""

    knows: ClassVar[frozenset[str]] = frozenset()
    """Every name that the replaced forward may use and this one accounts for."""

    also_knows: ClassVar[frozenset[str]] = frozenset()
    """Names from the family's row that its forward uses besides, and training can do without."""

    modeling_name: ClassVar[str] = ""
    """The full name of the family's modeling module in transformers."""

    @property
    def modeling(self) -> Any:
        """The family's modeling module."""
        return sys.modules[self.modeling_name]

    @classmethod
    def known_names(cls) -> frozenset[str]:
        """The names this forward accounts for, those that the family's row adds included."""
        return cls.knows

    @classmethod
    def unfit(cls, module: nn.Module) -> str | None:
        """Why this very module cannot take the kernel, or None."""
        del module
        return None

    def decodes(self, x: torch.Tensor) -> bool:
        """Whether this call generates one token: then Hugging Face's own forward runs."""
        return not self.training and x.shape[1] == 1 and not torch.is_grad_enabled()


class RMSNorm(KernelForward):
    """``rms_norm`` instead of the family's norm; x is (B, S, H) or (B, S, heads, D)."""

    uses = ("rms_norm",)
    knows = names(
        "dtype to torch float32 pow mean rsqrt variance_epsilon weight float _norm type_as"
    )

    weight: nn.Parameter
    epsilon: ClassVar[str] = "variance_epsilon"
    offset: ClassVar[float] = 0.0
    cast: ClassVar[Literal["llama", "gemma"]] = "llama"
    feeds_fp8: bool = False
    """Whether all that reads the result quantises it; see `models.fp8_rows`."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise x over its last axis."""
        if self.decodes(x):
            return super().forward(x)
        return kernels.rms_norm(
            x,
            self.weight,
            getattr(self, self.epsilon),
            offset=self.offset,
            cast=self.cast,
            fp8_rows=self.feeds_fp8,
        )


class DecoderLayer(KernelForward):
    """Norm, attention, add and norm in one pass, feed-forward, add.

    ``after_attention`` and ``after_mlp`` name a module between a block and its addition: phi3's
    dropouts, glm4's second norms. Forward hooks set on the fused norm itself do not run; its weight
    is read from the module, so DeepSpeed and peft see it as before.
    """

    uses = ("add_rms_norm",)
    knows = names("input_layernorm self_attn post_attention_layernorm mlp")

    input_layernorm: nn.Module
    self_attn: nn.Module
    post_attention_layernorm: nn.Module
    mlp: nn.Module
    after_attention: ClassVar[str | None] = None
    after_mlp: ClassVar[str | None] = None
    norm_class: ClassVar[str] = ""
    epsilon: ClassVar[str] = "variance_epsilon"
    offset: ClassVar[float] = 0.0
    cast: ClassVar[Literal["llama", "gemma"]] = "llama"

    @classmethod
    def known_names(cls) -> frozenset[str]:
        """Also the modules that the row names."""
        return cls.knows | {name for name in (cls.after_attention, cls.after_mlp) if name}

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool | None = False,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """(B, S, H) to (B, S, H); the arguments are Hugging Face's."""
        passed = {
            "attention_mask": attention_mask,
            "position_ids": position_ids,
            "past_key_values": past_key_values,
            "use_cache": use_cache,
            "position_embeddings": position_embeddings,
            **kwargs,
        }
        norm = self.post_attention_layernorm
        if self.decodes(hidden_states) or not isinstance(
            norm, getattr(self.modeling, self.norm_class)
        ):  # peft's modules_to_save wraps the norm: its wrapper decides which weight counts
            return super().forward(hidden_states, **passed)
        residual = hidden_states
        attended, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **passed)
        if self.after_attention:
            attended = getattr(self, self.after_attention)(attended)
        normed, residual = kernels.add_rms_norm(
            attended,
            residual,
            norm.weight,
            getattr(norm, self.epsilon),
            offset=self.offset,
            cast=self.cast,
            fp8_rows=getattr(norm, "feeds_fp8", False),
        )
        output = self.mlp(normed)
        if self.after_mlp:
            output = getattr(self, self.after_mlp)(output)
        return residual + output


class SplitMLP(KernelForward):
    """``down(act(gate(x)) * up(x))`` with the gate in one kernel."""

    uses = ("swiglu",)
    knows = names("down_proj act_fn gate_proj up_proj")

    gate_proj: nn.Module
    up_proj: nn.Module
    down_proj: nn.Module
    act_fn: nn.Module
    activation: ClassVar[str] = "silu"

    @classmethod
    def unfit(cls, module: nn.Module) -> str | None:
        """Another activation than the kernel's."""
        return _other_activation(module.get_submodule("act_fn"), cls.activation)

    def gate(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """The gated activation of two (B, S, F) tensors."""
        return kernels.swiglu(gate, up)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, S, H) to (B, S, H)."""
        if self.decodes(x):
            return super().forward(x)
        layers = (self.gate_proj, self.up_proj, self.down_proj)
        y = apply_feed_forward(x, *layers, tanh_gelu=self.activation != "silu")
        if y is not None:
            return y
        gate, up = apply_linears(x, layers[:2])
        return self.down_proj(self.gate(gate, up))


class GeluMLP(SplitMLP):
    """As ``SplitMLP`` with the tanh GELU."""

    uses = ("geglu_tanh",)
    activation = "gelu_pytorch_tanh"

    def gate(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """The tanh-GELU gate of two (B, S, F) tensors."""
        return kernels.geglu_tanh(gate, up)


class PackedMLP(KernelForward):
    """``swiglu_packed`` on one projection whose first half is the gate."""

    uses = ("swiglu_packed",)
    knows = names("gate_up_proj chunk activation_fn down_proj")

    gate_up_proj: nn.Module
    down_proj: nn.Module
    activation_fn: nn.Module

    @classmethod
    def unfit(cls, module: nn.Module) -> str | None:
        """Another activation than the kernel's."""
        return _other_activation(module.get_submodule("activation_fn"), "silu")

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """(B, S, H) to (B, S, H)."""
        if self.decodes(hidden_states):
            return super().forward(hidden_states)
        packed = self.gate_up_proj(hidden_states)
        return self.down_proj(kernels.swiglu_packed(packed, order="gate_up"))


def _other_activation(found: nn.Module, wanted: str) -> str | None:
    if type(found) is type(ACT2FN[wanted]):
        return None
    return f"its activation is {type(found).__name__}, the kernel computes {wanted}"
