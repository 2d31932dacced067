"""The few forwards all families share.

Each class here is a mixin: ``patch`` builds ``type(name, (mixin, HuggingFaceClass), settings)`` and
swaps it in as ``module.__class__``, so that ``super().forward`` is Hugging Face's own code and every
weight is read as ``self.x.weight`` while the forward runs (ZeRO-3 gathers it then). What differs
between families is a class attribute, set from the family's row.

``knows`` lists every name that the replaced forward may use. ``patch`` reads the names out of the
installed forward's byte code and refuses when it finds another one: a transformers release that
adds a step to a layer is an error here, never a step that silently goes missing.

Single-token decoding (evaluation mode, no gradients, sequence length 1) keeps Hugging Face's code:
at that size a step is bound by launches, and generation stays what it was, bit for bit, after the
prompt.

Shapes: B batch, S sequence, H hidden, D head size, F feed-forward.
"""

from typing import Any, ClassVar, Literal

import torch
from torch import nn
from transformers.activations import ACT2FN
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from trainkit import kernels


class KernelForward(nn.Module):
    """What every shared forward says about itself."""

    uses: ClassVar[tuple[str, ...]] = ()
    """The public functions of ``trainkit.kernels`` it calls."""

    knows: ClassVar[frozenset[str]] = frozenset()
    """Every name that the replaced forward may use and this one accounts for."""

    modeling: ClassVar[Any] = None
    """The family's modeling module in transformers."""

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
    """``rms_norm`` in place of the family's norm; x is (B, S, H) or (B, S, heads, D)."""

    uses = ("rms_norm",)
    knows = frozenset(
        "dtype to torch float32 pow mean rsqrt variance_epsilon weight float _norm type_as".split()
    )

    weight: nn.Parameter
    epsilon: ClassVar[str] = "variance_epsilon"
    offset: ClassVar[float] = 0.0
    cast: ClassVar[Literal["llama", "gemma"]] = "llama"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.decodes(x):
            return super().forward(x)
        return kernels.rms_norm(
            x, self.weight, getattr(self, self.epsilon), offset=self.offset, cast=self.cast
        )


class DecoderLayer(KernelForward):
    """Norm, attention, add and norm in one pass, feed-forward, add.

    ``after_attention`` and ``after_mlp`` name a module between a block and its addition: phi3's
    dropouts, glm4's second norms. Forward hooks set on the fused norm itself do not run; its weight
    is read from the module, so DeepSpeed and peft see it as before.
    """

    uses = ("add_rms_norm",)
    knows = frozenset("input_layernorm self_attn post_attention_layernorm mlp".split())

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
        )
        output = self.mlp(normed)
        if self.after_mlp:
            output = getattr(self, self.after_mlp)(output)
        return residual + output


class SplitMLP(KernelForward):
    """``down(act(gate(x)) * up(x))`` with the gate in one kernel."""

    uses = ("swiglu",)
    knows = frozenset("down_proj act_fn gate_proj up_proj".split())

    gate_proj: nn.Module
    up_proj: nn.Module
    down_proj: nn.Module
    act_fn: nn.Module
    activation: ClassVar[str] = "silu"

    @classmethod
    def unfit(cls, module: nn.Module) -> str | None:
        return _other_activation(module.act_fn, cls.activation)

    def gate(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """The gated activation of two (B, S, F) tensors."""
        return kernels.swiglu(gate, up)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.decodes(x):
            return super().forward(x)
        return self.down_proj(self.gate(self.gate_proj(x), self.up_proj(x)))


class GeluMLP(SplitMLP):
    """As ``SplitMLP`` with the tanh GELU."""

    uses = ("geglu_tanh",)
    activation = "gelu_pytorch_tanh"

    def gate(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return kernels.geglu_tanh(gate, up)


class PackedMLP(KernelForward):
    """``swiglu_packed`` on one projection whose first half is the gate."""

    uses = ("swiglu_packed",)
    knows = frozenset("gate_up_proj chunk activation_fn down_proj".split())

    gate_up_proj: nn.Module
    down_proj: nn.Module
    activation_fn: nn.Module

    @classmethod
    def unfit(cls, module: nn.Module) -> str | None:
        return _other_activation(module.activation_fn, "silu")

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        if self.decodes(hidden_states):
            return super().forward(hidden_states)
        packed = self.gate_up_proj(hidden_states)
        return self.down_proj(kernels.swiglu_packed(packed, order="gate_up"))


def _other_activation(found: nn.Module, wanted: str) -> str | None:
    if type(found) is type(ACT2FN[wanted]):
        return None
    return f"its activation is {type(found).__name__}, the kernel computes {wanted}"


class Attention(KernelForward):
    """Attention of the Llama shape around ``apply_rope``.

    Hugging Face's attention finds ``apply_rotary_pos_emb`` as a global of its module, so a kernel
    can enter only through a new forward or through a change that every model of the process sees.
    This is the new forward; ``project`` is the seam where families (and fused adapters) differ.
    """

    uses = ("apply_rope",)
    knows = frozenset(
        "shape size head_dim q_proj k_proj v_proj o_proj view transpose apply_rotary_pos_emb update "
        "layer_idx ALL_ATTENTION_FUNCTIONS get_interface config _attn_implementation "
        "eager_attention_forward training attention_dropout scaling reshape contiguous".split()
    )

    q_proj: nn.Module
    k_proj: nn.Module
    v_proj: nn.Module
    o_proj: nn.Module
    config: Any
    head_dim: int
    layer_idx: int
    scaling: float
    attention_dropout: float
    interleaved: ClassVar[bool] = False
    window: ClassVar[Literal["module", "config"] | None] = None
    """Where the family keeps its sliding window, if it passes one to the attention function."""

    @classmethod
    def known_names(cls) -> frozenset[str]:
        found = {"module": {"sliding_window"}, "config": {"getattr"}, None: set()}[cls.window]
        return cls.knows | found

    def project(
        self, hidden_states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k and v as (B, heads, S, D) from hidden states (B, S, H)."""
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        return (
            self.q_proj(hidden_states).view(shape).transpose(1, 2),
            self.k_proj(hidden_states).view(shape).transpose(1, 2),
            self.v_proj(hidden_states).view(shape).transpose(1, 2),
        )

    def attention_settings(self) -> dict[str, Any]:
        """The keywords that the family's own forward passes to the attention function."""
        settings = {
            "dropout": self.attention_dropout if self.training else 0.0,
            "scaling": self.scaling,
        }
        if self.window == "module":
            settings["sliding_window"] = self.sliding_window
        elif self.window == "config":
            settings["sliding_window"] = getattr(self.config, "sliding_window", None)
        return settings

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if self.decodes(hidden_states):
            return super().forward(
                hidden_states=hidden_states,
                position_embeddings=position_embeddings,
                attention_mask=attention_mask,
                past_key_values=past_key_values,
                **kwargs,
            )
        query, key, value = self.project(hidden_states)
        query, key = kernels.apply_rope(
            query, key, *position_embeddings, interleaved=self.interleaved
        )
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, self.modeling.eager_attention_forward
        )
        output, weights = attend(
            self, query, key, value, attention_mask, **self.attention_settings(), **kwargs
        )
        output = output.reshape(*hidden_states.shape[:-1], -1).contiguous()
        return self.o_proj(output), weights


class NormedAttention(Attention):
    """As ``Attention`` with an RMSNorm over each head of q and k before the rotation (qwen3)."""

    knows = Attention.knows | {"q_norm", "k_norm"}

    q_norm: nn.Module
    k_norm: nn.Module

    def project(
        self, hidden_states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        return (
            self.q_norm(self.q_proj(hidden_states).view(shape)).transpose(1, 2),
            self.k_norm(self.k_proj(hidden_states).view(shape)).transpose(1, 2),
            self.v_proj(hidden_states).view(shape).transpose(1, 2),
        )


class PackedAttention(Attention):
    """As ``Attention`` with one projection for q, k and v (phi3)."""

    knows = (Attention.knows - {"q_proj", "k_proj", "v_proj"}) | {
        "qkv_proj",
        "num_attention_heads",
        "num_key_value_heads",
    }

    qkv_proj: nn.Module
    num_key_value_heads: int

    def project(
        self, hidden_states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        num_heads = self.config.num_attention_heads
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        heads = self.qkv_proj(hidden_states).view(shape).transpose(1, 2)
        sizes = (num_heads, self.num_key_value_heads, self.num_key_value_heads)
        query, key, value = heads.split(sizes, dim=1)
        return query, key, value


class VisionAttention(KernelForward):
    """Qwen2-VL's vision attention around ``apply_rope``; hidden states are (S, H), images end to end.

    Hugging Face rotates in float32 and rounds once, which is what the kernel does.
    """

    uses = ("apply_rope",)
    knows = frozenset(
        "shape qkv reshape num_heads permute unbind apply_rotary_pos_emb_vision transpose unsqueeze "
        "ALL_ATTENTION_FUNCTIONS get_interface config _attn_implementation eager_attention_forward "
        "is_flash_attention_requested get_max_seqlen scaling training attention_dropout torch split "
        "tolist zip cat contiguous proj".split()
    )

    qkv: nn.Module
    proj: nn.Module
    config: Any
    num_heads: int
    scaling: float
    attention_dropout: float

    def forward(
        self,
        hidden_states: torch.Tensor,
        cu_seqlens: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        max_seqlen: int | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        length = hidden_states.shape[0]
        packed = self.qkv(hidden_states).reshape(1, length, 3, self.num_heads, -1)
        query, key, value = packed.permute(2, 0, 3, 1, 4).unbind(0)
        cos, sin = (table.unsqueeze(0) for table in position_embeddings)
        query, key = kernels.apply_rope(query, key, cos, sin)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, self.modeling.eager_attention_forward
        )
        settings = {
            "attention_mask": None,
            "scaling": self.scaling,
            "dropout": self.attention_dropout if self.training else 0.0,
            "is_causal": False,
            **kwargs,
        }
        if self.modeling.is_flash_attention_requested(self.config):
            longest = self.modeling.get_max_seqlen(
                cu_seqlens, self.config, kwargs={"max_seqlen": max_seqlen}
            )
            bounds = {
                "cu_seq_lens_q": cu_seqlens,
                "cu_seq_lens_k": cu_seqlens,
                "max_length_q": longest,
                "max_length_k": longest,
            }
            output, _ = attend(self, query, key, value, **settings, **bounds)
        else:
            lengths = (cu_seqlens[1:] - cu_seqlens[:-1]).tolist()
            images = zip(*(states.split(lengths, dim=2) for states in (query, key, value)))
            output = torch.cat([attend(self, *image, **settings)[0] for image in images], dim=1)
        return self.proj(output.reshape(length, -1).contiguous())
