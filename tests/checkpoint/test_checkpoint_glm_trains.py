"""A GLM and its Qwen2 conversion train alike, with the kernels of either family."""

import pytest
import torch
from families.family_models import NOT_THERE
from safetensors.torch import load_file
from tiny_glm import glm_model
from transformers import AutoModelForCausalLM

import trainkit
from trainkit.checkpoint.convert.convert import ConvertOptions, convert_model

STEPS = 12


def batches(vocab_size, *, steps, rows, length, device):
    """Rows that count in steps of 1 to 5: learnt within a few updates."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        start = torch.randint(vocab_size, (rows, 1), generator=generator)
        stride = torch.randint(1, 6, (rows, 1), generator=generator)
        yield ((start + stride * torch.arange(length)) % vocab_size).to(device)


def train(model, optimizer, data):
    losses = []
    for ids in data:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def loaded(directory, *, kernels, dtype, device):
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).to(device).train()
    if kernels:
        report = trainkit.patch(model)
        off = {row.op for row in report.rows if row.status != "on"}
        assert off == set(NOT_THERE), str(report)
    return model


def test_same_losses_and_same_weights_afterwards(tmp_path):
    """SGD treats every value alike, so reordered rows take reordered steps."""
    source = glm_model(num_hidden_layers=2)
    source.save_pretrained(tmp_path / "glm")
    convert_model(tmp_path / "glm", tmp_path / "qwen2", "qwen2", ConvertOptions())
    losses = {}
    for name in ("glm", "qwen2"):
        model = loaded(tmp_path / name, kernels=True, dtype=torch.float32, device="cpu")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
        data = batches(96, steps=STEPS, rows=4, length=32, device="cpu")
        losses[name] = train(model, optimizer, data)
        model.save_pretrained(tmp_path / f"{name}-trained")
    assert losses["glm"][-1] < losses["glm"][0] - 0.5
    # Float32 forwards that differ by 1e-6 of the loss; momentum SGD carries that on by a factor of
    # a few a step at most.
    assert losses["qwen2"] == pytest.approx(losses["glm"], rel=1e-4)
    convert_model(tmp_path / "qwen2-trained", tmp_path / "back", "glm", ConvertOptions())
    ours = load_file(tmp_path / "back" / "model.safetensors")
    theirs = load_file(tmp_path / "glm-trained" / "model.safetensors")
    before = source.state_dict()
    for name, weight in theirs.items():
        moved = (weight - before[name]).norm()
        assert (ours[name] - weight).norm() <= 1e-3 * moved + 1e-5, name


@pytest.mark.gpu
def test_losses_in_bf16_on_a_gpu(tmp_path):
    sizes = {
        "vocab_size": 1024,
        "hidden_size": 512,
        "intermediate_size": 1376,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "head_dim": 128,
    }
    source = glm_model(**sizes)
    with torch.no_grad():
        for parameter in source.parameters():
            if parameter.dim() == 2:
                parameter.normal_(0, 0.03)
    source.to(torch.bfloat16).save_pretrained(tmp_path / "glm")
    convert_model(tmp_path / "glm", tmp_path / "qwen2", "qwen2", ConvertOptions())
    losses = {}
    for name in ("glm", "qwen2"):
        for kernels in (False, True):
            model = loaded(tmp_path / name, kernels=kernels, dtype=torch.bfloat16, device="cuda")
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
            data = batches(1024, steps=80, rows=8, length=256, device="cuda")
            losses[name, kernels] = torch.tensor(train(model, optimizer, data))
    native, converted = losses["glm", True], losses["qwen2", True]
    assert native[-5:].mean() < native[:5].mean() - 1
    # How far apart rounding to bf16 alone takes the two, without any kernel.
    noise = (losses["glm", False] - losses["qwen2", False]).abs().max()
    assert (native - converted).abs().max() <= 2 * noise + 0.02
