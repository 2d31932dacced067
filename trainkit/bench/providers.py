"""The models of the benchmarks, and the peers that train them."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from trainkit.checkpoint.convert.rope import full_base, rope_scaling
from trainkit.estimate.shape import NAMED


@dataclass(frozen=True)
class Shape:
    """A model's shape with the batch it is measured on."""

    family: str
    config: dict[str, Any]
    batch_size: int = 4
    length: int = 2048


_GLM4 = {"rms_norm_eps": 1.5625e-7, "max_position_embeddings": 131072}
_MORE: Mapping[str, dict[str, Any]] = {
    "mistral-7b": {"sliding_window": None},
    "glm4-9b": {**_GLM4, "rope_theta": 5e6, "partial_rotary_factor": 0.5},
    "glm4-9b-as-qwen2": {  # what `trainkit convert glm4-to-qwen2` makes of it
        **_GLM4,
        "rope_theta": full_base(5e6, 128, 64),
        "rope_scaling": rope_scaling(5e6, 128, 64, 131072),
    },
}
_SMALL = ("qwen2-0.5b", "llama-3.2-1b")


def _shape(name: str) -> Shape:
    sizes = {"max_position_embeddings": 32768, **NAMED[name], **_MORE.get(name, {})}
    return Shape(sizes.pop("model_type"), sizes, batch_size=16 if name in _SMALL else 4)


_SIZES = (
    "vocab_size hidden_size num_hidden_layers num_attention_heads num_key_value_heads num_experts"
)


def _of_experts(family: str, *sizes: int, **more: Any) -> Shape:
    known = dict(zip(_SIZES.split(), sizes, strict=True))
    return Shape(family, {**known, "num_experts_per_tok": 8, **more})


_EXPERTS = {
    "olmoe-1b-7b": _of_experts("olmoe", 50304, 2048, 16, 16, 16, 64, intermediate_size=1024),
    # Of 48, whose files are 61 GB.
    "qwen3-30b-a3b-12-layers": _of_experts(
        *("qwen3_moe", 151936, 2048, 12, 32, 4, 128),
        moe_intermediate_size=768,
        head_dim=128,
        norm_topk_prob=True,
    ),
}

MODELS: Mapping[str, Shape] = {name: _shape(name) for name in NAMED} | _EXPERTS
"""Every shape that has a name, with what it is measured on."""

PROVIDERS = (
    "hf_sdpa",
    "hf_flash",
    "hf_cudnn",
    "hf_efficient",
    "torch_compile",
    "hf_math",
    "liger",
    "liger_flash",
    "liger_cudnn",
    "trainkit",
    "trainkit_compile",
)
"""``hf_sdpa`` and ``liger`` take whichever attention kernel torch prefers, as their users do; an
ending names one: it runs or the cell fails. Flash attention takes no mask, so it fails on padded
batches."""


@dataclass(frozen=True)
class Provided:
    """A model as a provider trains it."""

    model: nn.Module
    call: Callable[..., Any]


def build(shape: Shape, device: torch.device, implementation: str) -> nn.Module:
    """The model in bf16 with random weights, in training mode, without a key/value cache."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(shape.family, **shape.config, use_cache=False)
    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation=implementation
        )
    return model.train()


def provide(
    provider: str,
    shape: Shape,
    device: torch.device,
    *,
    packed: bool = False,
    loss_chunk_tokens: int | None = None,
    kernels: bool | Mapping[str, bool] = True,
) -> Provided:
    if provider not in PROVIDERS:
        raise ValueError(f"unknown provider {provider!r}; known are {', '.join(PROVIDERS)}")
    if provider.startswith("trainkit"):
        import trainkit
        from trainkit.models import attention
        from trainkit.models import loss as loss_head

        chosen = attention.resolve_attention(packed=packed, device=device)
        model = build(shape, device, chosen.name)
        attention.install(model, chosen.engine)
        trainkit.patch(model, kernels)
        loss_head.configure(model, loss_head.LossOptions(chunk_tokens=loss_chunk_tokens))
        return Provided(model, torch.compile(model) if provider.endswith("compile") else model)
    if packed:
        raise ValueError(f"{provider} is not measured on packed batches")
    model = build(shape, device, "sdpa")
    if provider.startswith("liger"):
        from liger_kernel.transformers import _apply_liger_kernel_to_instance

        _apply_liger_kernel_to_instance(model)
    call = torch.compile(model) if provider == "torch_compile" else model
    return Provided(model, call)


def attention_of(provider: str) -> AbstractContextManager[Any]:
    """The context a provider's steps run in: the one SDPA kernel that its name promises.

    No second kernel is allowed, so that a provider cannot fall back to another one unseen.
    """
    from torch.nn.attention import SDPBackend, sdpa_kernel

    kernels = {
        "flash": SDPBackend.FLASH_ATTENTION,
        "cudnn": SDPBackend.CUDNN_ATTENTION,
        "efficient": SDPBackend.EFFICIENT_ATTENTION,
        "math": SDPBackend.MATH,
    }
    _, _, ending = provider.partition("_")
    return sdpa_kernel(kernels[ending]) if ending in kernels else nullcontext()
