"""LoRA and QLoRA steps side by side: forward, backward and a fused AdamW step, a process per cell.

Providers: peft on SDPA, Liger under peft, Unsloth, trainkit, and ``frozen``: the same step of
trainkit on the same frozen base without adapters, which is what adapters cost nothing over. Modes:
plain, checkpointed, checkpointed on an nf4 base, and on an fp8 base (trainkit's and ``frozen``
alone), plain and checkpointed. Weights and tokens are random, made on the device; Unsloth loads
what `save_base` wrote. Every step runs under bf16 autocast with adapters in fp32.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainkit.bench.cells import FIRST_IMPORT, Cell
from trainkit.bench.measure import Training, peak_gib
from trainkit.bench.providers import Shape, build, provide

PROVIDERS = ("peft", "liger", "unsloth", "trainkit", "frozen")
MODES = ("lora", "lora_checkpointed", "qlora_checkpointed", "fp8", "fp8_checkpointed")
LORA_RANK, LORA_ALPHA = 16, 32
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def environment_of(cell: Cell, peer_path: str) -> Mapping[str, str]:
    """What a cell's process needs of its environment: Unsloth comes first, and stays offline.

    ``peer_path`` goes before PYTHONPATH for Unsloth, which needs packages of its own.
    """
    if cell.provider != "unsloth":
        return {}
    paths = [path for path in (peer_path, os.environ.get("PYTHONPATH", "")) if path]
    return {
        FIRST_IMPORT: "unsloth",
        "HF_HUB_OFFLINE": "1",
        "UNSLOTH_DISABLE_STATISTICS": "1",
        "PYTHONPATH": os.pathsep.join(paths),
    }


def save_base(shape: Shape, folder: str | Path, device: torch.device) -> None:
    """Write a random base model and a byte-level tokenizer, for peers that load from a folder."""
    model: Any = build(shape, device, "sdpa")
    model.save_pretrained(folder)
    save_tokenizer(folder)


def save_tokenizer(
    folder: str | Path, special: Sequence[str] = (), chat_template: str | None = None
) -> Any:
    """Write a tokenizer whose tokens are bytes, and special ones behind them."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: index for index, character in enumerate(alphabet)}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=list(special),
        chat_template=chat_template,
    )
    tokenizer.save_pretrained(folder)
    return tokenizer


def quantize(model: Any, compute_dtype: torch.dtype = torch.bfloat16) -> Any:
    """Replace the decoder's linear layers by nf4 ones with double quantisation, on the device.

    What ``from_pretrained`` does with a quantisation config, without a folder to load from.
    """
    from bitsandbytes.nn import Linear4bit, Params4bit

    for name, module in list(model.named_modules()):
        if type(module) is not nn.Linear or name.endswith("lm_head"):
            continue
        with torch.device("meta"):
            packed = Linear4bit(
                module.in_features,
                module.out_features,
                bias=module.bias is not None,
                compute_dtype=compute_dtype,
                quant_type="nf4",
                quant_storage=torch.bfloat16,
            )
        packed.weight = Params4bit(
            module.weight.data,
            requires_grad=False,
            quant_type="nf4",
            compress_statistics=True,
            quant_storage=torch.bfloat16,
            module=packed,
        ).to(module.weight.device)
        packed.bias = module.bias
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, packed)
    model.is_loaded_in_4bit = model.is_quantized = True
    return model


def _peft(cell: Cell, device: torch.device) -> Any:
    from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training

    model: Any = build(cell.size, device, "sdpa")
    if cell.provider == "liger":
        from liger_kernel.transformers import _apply_liger_kernel_to_instance

        _apply_liger_kernel_to_instance(model)
    if cell.mode.startswith("qlora"):
        model = prepare_model_for_kbit_training(quantize(model))
    elif cell.mode.endswith("checkpointed"):
        model.gradient_checkpointing_enable()
        model.enable_input_require_grads()
    targets = cell.settings.get("targets", TARGETS)
    config = LoraConfig(
        r=LORA_RANK, lora_alpha=LORA_ALPHA, target_modules=targets, task_type="CAUSAL_LM"
    )
    return get_peft_model(model, config)


def _unsloth(cell: Cell, device: torch.device) -> Any:
    from unsloth import FastLanguageModel

    model, _ = FastLanguageModel.from_pretrained(
        cell.settings["folder"],
        max_seq_length=cell.size.length,
        dtype=torch.bfloat16,
        load_in_4bit=cell.mode.startswith("qlora"),
        local_files_only=True,
    )
    return FastLanguageModel.get_peft_model(
        model,
        r=LORA_RANK,
        lora_alpha=LORA_ALPHA,
        target_modules=TARGETS,
        lora_dropout=0,
        use_gradient_checkpointing="unsloth" if cell.mode.endswith("checkpointed") else False,
    )


def _trainkit(cell: Cell, device: torch.device) -> Any:
    from trainkit.lora import LoraOptions, attach, fuse
    from trainkit.models.fp8.base import quantize_to_fp8
    from trainkit.models.recompute import Recomputed, every

    kernels = cell.settings.get("kernels", True)
    model: Any = provide("trainkit", cell.size, device, kernels=kernels).model
    if cell.mode.startswith("qlora"):
        model = quantize(model)
    if cell.mode.startswith("fp8"):
        quantize_to_fp8(model, device)
        torch.cuda.empty_cache()
    if cell.provider == "frozen":
        model.requires_grad_(False)
        model.enable_input_require_grads()
        adapted = model
    else:
        targets = cell.settings.get("targets", TARGETS)
        adapted = attach(model, LoraOptions(r=LORA_RANK, alpha=LORA_ALPHA, target_modules=targets))
        fuse(adapted)
    if cell.mode.endswith("checkpointed"):
        model.gradient_checkpointing_enable({"use_reentrant": False})
        if cell.settings.get("offload"):
            layers = Recomputed(model)
            layers.apply(every(len(layers.layers), 1, "offload"))
    return adapted


_BUILDERS = {
    "peft": _peft,
    "liger": _peft,
    "unsloth": _unsloth,
    "trainkit": _trainkit,
    "frozen": _trainkit,
}


def training(cell: Cell, device: torch.device) -> Training:
    """A cell's model with its step."""
    if cell.mode.startswith("fp8") and cell.provider not in ("trainkit", "frozen"):
        raise ValueError(f"{cell.provider} has no fp8 base that it trains adapters over")
    shape = cell.size
    model = _BUILDERS[cell.provider](cell, device).train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = None
    if trained:
        optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=device.type == "cuda")
    generator = torch.Generator(device).manual_seed(1)
    size = (shape.batch_size, shape.length)
    tokens = torch.randint(0, shape.config["vocab_size"], size, generator=generator, device=device)

    def step() -> torch.Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            loss: torch.Tensor = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return Training(model, step, device, cell.steps)


def measure(cell: Cell, device: torch.device) -> dict[str, Any]:
    shape, trained = cell.size, training(cell, device)
    first = trained.step()
    milliseconds = trained.milliseconds()
    return {
        "batch_size": shape.batch_size,
        "length": shape.length,
        "lora_rank": LORA_RANK,
        "offload": cell.settings.get("offload", False),
        "ms": milliseconds,
        "tokens_per_second": shape.batch_size * shape.length / milliseconds * 1e3,
        "peak_memory_gib": peak_gib(device),
        "loss": first.item(),
        "last_loss": trained.step().item(),
    }
