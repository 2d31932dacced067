"""LoRA and QLoRA steps side by side: forward, backward and a fused AdamW step, a process per cell.

A cell is a provider in a mode. Providers: peft on SDPA, Unsloth, trainkit, and ``frozen``: the same
step of trainkit on the same frozen base without adapters, which is what adapters cost nothing over.
Modes: plain, checkpointed, checkpointed on an nf4 base, and on an fp8 base (trainkit's and
``frozen`` alone), plain and checkpointed. Weights and tokens are random, made on
the device; Unsloth loads what `save_base` wrote. Every step runs under bf16 autocast with adapters
in fp32.

Run as ``python -m trainkit.bench.lora`` it is the process of one cell.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainkit.bench.measure.clock import peak_gib, timed
from trainkit.bench.measure.processes import run_in_processes
from trainkit.bench.providers import MODELS, Shape, build, provide

PROVIDERS = ("peft", "liger", "unsloth", "trainkit", "frozen")
MODES = ("lora", "lora_checkpointed", "qlora_checkpointed", "fp8", "fp8_checkpointed")
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
QWEN2_1_5B = Shape(
    "qwen2",
    {
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
        "max_position_embeddings": 32768,
    },
    4,
    2048,
)
_FIRST_IMPORT = "TRAINKIT_BENCH_FIRST_IMPORT"
SHAPES = {**MODELS, "qwen2-1.5b": QWEN2_1_5B}


@dataclass(frozen=True)
class Cell:
    """What one process measures.

    Args:
        model: a key of `SHAPES`.
        provider: one of `PROVIDERS`.
        mode: one of `MODES`.
        lora_rank: of every adapter.
        offload: trainkit keeps checkpointed activations on the host.
        loss_chunk_tokens: of trainkit's loss; None is its default.
        warmups: steps before the clock runs.
        steps: steps on the clock.
        folder: where `save_base` wrote; for Unsloth.
        batch_size: instead of the shape's.
        length: instead of the shape's.
        profile: a file to write the GPU's time by kernel to; empty for none.
        shape: measured instead of the model's own; for tests.
    """

    model: str
    provider: str
    mode: str
    lora_rank: int = 16
    offload: bool = False
    loss_chunk_tokens: int | None = None
    warmups: int = 3
    steps: int = 7
    folder: str = ""
    batch_size: int = 0
    length: int = 0
    profile: str = ""
    shape: Shape | None = None

    def shape_to_measure(self) -> Shape:
        """The shape this cell runs."""
        shape = self.shape or SHAPES[self.model]
        return replace(
            shape,
            batch_size=self.batch_size or shape.batch_size,
            length=self.length or shape.length,
        )

    @property
    def checkpointed(self) -> bool:
        """Whether the mode recomputes activations."""
        return self.mode.endswith("checkpointed")

    @property
    def quantized(self) -> bool:
        """Whether the base is nf4."""
        return self.mode.startswith("qlora")


def run(cells: Sequence[Cell], *, peer_path: str = "") -> Iterator[dict[str, Any]]:
    """Measure cells one after another, each in its own process.

    Args:
        cells: what to measure.
        peer_path: put before PYTHONPATH for Unsloth's processes, which need their own packages.

    Yields:
        Per cell its model, provider, mode and the measured values, or ``error``.
    """
    answers = run_in_processes(
        "trainkit.bench.lora",
        [asdict(cell) for cell in cells],
        environments=[_environment(cell, peer_path) for cell in cells],
    )
    for cell, answer in zip(cells, answers, strict=True):
        yield {"model": cell.model, "provider": cell.provider, "mode": cell.mode, **answer}


def _environment(cell: Cell, peer_path: str) -> dict[str, str]:
    if cell.provider != "unsloth":
        return {}
    paths = [path for path in (peer_path, os.environ.get("PYTHONPATH", "")) if path]
    return {
        _FIRST_IMPORT: "unsloth",
        "HF_HUB_OFFLINE": "1",
        "UNSLOTH_DISABLE_STATISTICS": "1",
        "PYTHONPATH": os.pathsep.join(paths),
    }


def save_base(shape: Shape, folder: str | Path, device: torch.device) -> None:
    """Write a random base model and a byte-level tokenizer, for peers that load from a folder."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    model: Any = build(shape, device, "sdpa")
    model.save_pretrained(folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: index for index, character in enumerate(alphabet)}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    tokenizer.save_pretrained(folder)


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
        device = module.weight.device
        packed.weight = Params4bit(
            module.weight.data.cpu() if device.type == "cpu" else module.weight.data,
            requires_grad=False,
            quant_type="nf4",
            compress_statistics=True,
            quant_storage=torch.bfloat16,
            module=packed,
        ).to(device)
        packed.bias = module.bias
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, packed)
    model.is_loaded_in_4bit = True
    model.is_quantized = True
    return model


def _peft(cell: Cell, device: torch.device) -> Any:
    from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training

    model: Any = build(cell.shape_to_measure(), device, "sdpa")
    if cell.provider == "liger":
        from liger_kernel.transformers import _apply_liger_kernel_to_instance

        _apply_liger_kernel_to_instance(model)
    if cell.quantized:
        model = prepare_model_for_kbit_training(quantize(model))
    elif cell.checkpointed:
        model.gradient_checkpointing_enable()
        model.enable_input_require_grads()
    config = LoraConfig(
        r=cell.lora_rank, lora_alpha=32, target_modules=list(TARGETS), task_type="CAUSAL_LM"
    )
    return get_peft_model(model, config)


def _unsloth(cell: Cell, device: torch.device) -> Any:
    from unsloth import FastLanguageModel

    shape = cell.shape_to_measure()
    model, _ = FastLanguageModel.from_pretrained(
        cell.folder,
        max_seq_length=shape.length,
        dtype=torch.bfloat16,
        load_in_4bit=cell.quantized,
        local_files_only=True,
    )
    return FastLanguageModel.get_peft_model(
        model,
        r=cell.lora_rank,
        lora_alpha=32,
        target_modules=list(TARGETS),
        lora_dropout=0,
        use_gradient_checkpointing="unsloth" if cell.checkpointed else False,
    )


def _trainkit(cell: Cell, device: torch.device) -> Any:
    from trainkit.lora import LoraOptions, attach, fuse
    from trainkit.models.fp8_linear import quantize_to_fp8
    from trainkit.models.recompute.layers import Recomputed, every

    provided = provide(
        "trainkit", cell.shape_to_measure(), device, loss_chunk_tokens=cell.loss_chunk_tokens
    )
    model: Any = provided.model
    if cell.quantized:
        model = quantize(model)
    if cell.mode.startswith("fp8"):
        quantize_to_fp8(model, device)
        torch.cuda.empty_cache()
    if cell.provider == "frozen":
        model.requires_grad_(False)
        model.enable_input_require_grads()
        adapted = model
    else:
        adapted = attach(model, LoraOptions(r=cell.lora_rank, alpha=32))
        fuse(adapted)
    if cell.checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        if cell.offload:
            layers = Recomputed(model)
            layers.apply(every(len(layers.layers), 1, "offload"))
    return adapted


_BUILDERS: dict[str, Callable[[Cell, torch.device], Any]] = {
    "peft": _peft,
    "liger": _peft,
    "unsloth": _unsloth,
    "trainkit": _trainkit,
    "frozen": _trainkit,
}


def build_cell(cell: Cell, device: torch.device) -> Any:
    """A cell's model, adapters and all.

    Raises:
        ValueError: the provider does not have the mode.
    """
    if cell.mode.startswith("fp8") and cell.provider not in ("trainkit", "frozen"):
        raise ValueError(f"{cell.provider} has no fp8 base that it trains adapters over")
    return _BUILDERS[cell.provider](cell, device)


def measure(cell: Cell, device: torch.device) -> dict[str, Any]:
    """Build a cell's model and time its steps."""
    shape = cell.shape_to_measure()
    model = build_cell(cell, device).train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = None
    if trained:
        optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=device.type == "cuda")
    generator = torch.Generator(device).manual_seed(1)
    size = (shape.batch_size, shape.length)
    tokens = torch.randint(0, shape.config["vocab_size"], size, generator=generator, device=device)

    def step() -> torch.Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    first = step()
    for _ in range(cell.warmups - 1):
        step()
    milliseconds, loss = timed(step, cell.steps, device)
    values = {
        "batch_size": shape.batch_size,
        "length": shape.length,
        "lora_rank": cell.lora_rank,
        "offload": cell.offload,
        "ms": milliseconds,
        "tokens_per_second": shape.batch_size * shape.length / milliseconds * 1e3,
        "peak_memory_gib": peak_gib(device),
        "loss": first.item(),
        "last_loss": loss.item(),
    }
    if cell.profile:
        _profile(step, Path(cell.profile), device)
    return values


def _profile(step: Callable[[], torch.Tensor], file: Path, device: torch.device) -> None:
    """Write the GPU time of two steps by kernel."""
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities, acc_events=True) as profiler:
        step()
        step()
        if device.type == "cuda":
            torch.cuda.synchronize()
    order = "self_cuda_time_total" if device.type == "cuda" else "self_cpu_time_total"
    table = profiler.key_averages().table(sort_by=order, row_limit=60, max_name_column_width=110)
    file.write_text(table)


def main() -> None:
    """Read one cell from stdin, measure it, write one JSON line."""
    if os.environ.get(_FIRST_IMPORT) == "unsloth":
        import unsloth  # noqa: F401  (it must come before transformers and peft)
    import peft  # noqa: F401  (imported while other cells have the GPU)

    values = json.loads(sys.stdin.readline())
    shape = values.pop("shape")
    cell = Cell(**values)
    if shape is not None:
        cell = replace(cell, shape=Shape(**shape))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    sys.stdout.write("\n" + json.dumps(measure(cell, device)) + "\n")


if __name__ == "__main__":
    main()
