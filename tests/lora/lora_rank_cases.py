"""What the ranks of the distributed LoRA tests run; each function returns plain JSON values."""

import os

import torch
from families.family_models import make, make_batch
from lab import zero_engine
from torch.nn.parallel import DistributedDataParallel

from trainkit.lora import LoraOptions, attach, fuse, quantization_config
from trainkit.models.linears import packed_kind
from trainkit.models.patch import patch_kernels

STEPS = 3
LEARNING_RATE = 0.1
FAMILIES = ("qwen2", "glm", "phi3", "gemma")


def train(name, stage, checkpointing=None):
    """The largest difference of a trained parameter to one process on peft's own path.

    Stage 0 is DistributedDataParallel; ``checkpointing`` is None, "reentrant" or "non_reentrant".
    """
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    batch = make_batch(name, rows=2 * world_size)
    batch["attention_mask"].fill_(1)  # as many trained tokens on every rank
    batch["labels"][:, 4:] = batch["input_ids"][:, 4:]
    plain = adapted(name)
    _steps(plain, batch)

    model = adapted(name)
    patch_kernels(model)
    fuse(model)
    if checkpointing:
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing == "reentrant"})
    part = {key: value.chunk(world_size)[rank] for key, value in batch.items()}
    if stage == 0:
        torch.distributed.init_process_group("gloo")
        wrapped = DistributedDataParallel(model)
        _steps(wrapped, part)
        return _difference(model, plain, gather=False)
    import deepspeed

    deepspeed.init_distributed("gloo")
    engine = zero_engine(model, stage, micro_batch=2, learning_rate=LEARNING_RATE)
    for _ in range(STEPS):
        engine.backward(engine(**part).loss)
        engine.step()
    return _difference(model, plain, gather=stage == 3)


def adapted(name, **arguments):
    model = attach(make(name, **arguments), LoraOptions(r=4))
    torch.manual_seed(3)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "lora_B" in key:
                parameter.normal_(std=0.05)
    return model


def _steps(model, batch):
    optimizer = torch.optim.SGD(
        [p for p in model.parameters() if p.requires_grad], lr=LEARNING_RATE
    )
    for _ in range(STEPS):
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def _difference(model, plain, *, gather):
    import deepspeed

    largest = 0.0
    for found, expected in zip(model.parameters(), plain.parameters(), strict=True):
        if found.requires_grad:
            with deepspeed.zero.GatheredParameters([found], enabled=gather):
                largest = max(largest, (found - expected).abs().max().item())
    return largest


def quantized(folder, stage, quantize, head=False):
    """Losses of a few steps on packed weights that ZeRO shards (stage 3) or not."""
    import deepspeed
    from transformers import AutoModelForCausalLM

    rank = int(os.environ["RANK"])
    deepspeed.init_distributed("gloo")
    config = quantization_config(quantize, torch.float32)
    if head:
        config.llm_int8_skip_modules = []
    base = AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=config, dtype=torch.float32
    )
    assert hasattr(base.lm_head.weight, "quant_state") is head
    if (convert := packed_kind(quantize).convert) is not None:
        convert(base, torch.device("cpu"), ())
    torch.manual_seed(0)
    model = attach(base, LoraOptions(r=4))
    patch_kernels(model)
    report = fuse(model)
    assert report.row("lora_mlp").status == "on", report
    engine = zero_engine(model, stage, micro_batch=2, learning_rate=LEARNING_RATE)
    batch = make_batch("qwen2", rows=4)
    part = {key: value.chunk(2)[rank] for key, value in batch.items()}
    losses = []
    for _ in range(STEPS):
        loss = engine(**part).loss
        losses.append(loss.item())
        engine.backward(loss)
        engine.step()
    return losses
