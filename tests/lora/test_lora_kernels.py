"""What the adapters' functions promise beyond the contract of every op."""

import pytest
import torch
from op_cases.table import OPS

from trainkit.kernels.contract import Draw
from trainkit.kernels.lora.function import lora_linear
from trainkit.kernels.lora.products import Projection

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64


def drawn(name, dtype):
    """The operands of an op, each a leaf that wants a gradient where it is trained."""
    case = OPS[name].cases[0]
    tensors = case.inputs(Draw.seeded(dtype, "cpu", 0))
    return {key: each.requires_grad_(key in case.grads) for key, each in tensors.items()}


def test_an_output_that_nobody_uses_gets_no_gradient():
    tensors, plain = drawn("lora_qkv", FP64), drawn("lora_qkv", FP64)
    query, _, _ = OPS["lora_qkv"].function(**tensors)
    query.sum().backward()
    assert tensors["a0"].grad is not None
    assert tensors["a1"].grad is None
    OPS["lora_qkv"].reference(**plain)[0].sum().backward()
    torch.testing.assert_close(tensors["x"].grad, plain["x"].grad)


@pytest.mark.parametrize("name", [name for name in OPS if name.startswith("lora_")])
def test_fp32_under_autocast_computes_in_bf16(name):
    """Activations, weights and factors alike, as plain linear layers do."""
    found = []
    for dtype in (FP32, BF16):
        leaves = drawn(name, BF16)
        given = {
            key: each if key[0] in "ab" and key[1:].isdigit() else each.to(dtype)
            for key, each in leaves.items()
        }
        with torch.autocast("cpu", BF16, enabled=dtype == FP32):
            outputs = OPS[name].function(**given, **OPS[name].cases[0].options)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        assert {each.dtype for each in outputs} == {BF16}
        torch.autograd.backward(outputs, [torch.ones_like(each) for each in outputs])
        trained = [leaves[key] for key in OPS[name].cases[0].grads]
        found.append([*outputs, *(each.grad for each in trained)])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_the_weight_is_unpacked_once_in_each_direction():
    calls = []

    def unpack(storage, dtype):
        calls.append(dtype)
        return storage.to(dtype).view(8, 4)

    x = torch.randn(3, 4, requires_grad=True)
    packed = Projection(
        torch.randn(32, 1),
        None,
        torch.randn(2, 4, requires_grad=True),
        torch.randn(8, 2, requires_grad=True),
        1.0,
        unpack,
    )
    lora_linear(x, packed).sum().backward()
    assert calls == [torch.float32] * 2


def test_an_unknown_activation_is_refused():
    tensors = drawn("lora_mlp", FP32)
    with pytest.raises(ValueError, match="activation"):
        OPS["lora_mlp"].function(**tensors, activation="relu")
