"""Layers that share their input give what they give one by one, or are called one by one."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny import make_qwen2
from torch import nn
from torch.utils.checkpoint import checkpoint

from trainkit.models import shared_input
from trainkit.models.shared_input import apply_linears
from trainkit.patching import patch

QKV = (8, 2, 2)


def layers_of(sizes, *, bias=True, dtype=torch.float64):
    torch.manual_seed(0)
    return [nn.Linear(6, size, bias=bias, dtype=dtype) for size in sizes]


def one_by_one(x, layers):
    return tuple(layer(x) for layer in layers)


def results(call, layers, *, used=None, dtype=torch.float64):
    """Outputs and every gradient of a call; ``used`` are the outputs that reach the loss."""
    for layer in layers:
        layer.zero_grad(set_to_none=True)
    x = torch.linspace(-1, 1, 2 * 5 * 6, dtype=dtype).view(2, 5, 6).requires_grad_()
    outputs = call(x, layers)
    sum(outputs[i].square().sum() for i in used or range(len(layers))).backward()
    return [*outputs, x.grad, *(each.grad for layer in layers for each in layer.parameters())]


def assert_same(ours, theirs):
    for got, wanted in zip(ours, theirs, strict=True):
        assert (got is None) == (wanted is None)
        if got is not None:
            torch.testing.assert_close(got, wanted)


def runs_together(x, layers):
    return type(apply_linears(x, layers)[0].grad_fn).__name__ == "_LinearsBackward"


@pytest.mark.parametrize("sizes", [QKV, (8, 8, 8), (8, 8)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("used", [None, [0], [1], [0, 1]])
def test_outputs_and_gradients_are_those_of_single_calls(sizes, bias, used):
    layers = layers_of(sizes, bias=bias)
    assert_same(results(apply_linears, layers, used=used), results(one_by_one, layers, used=used))


def test_narrow_layers_share_a_product_and_wide_ones_do_not():
    assert shared_input._num_alone([torch.empty(n, 6) for n in QKV]) == 1
    assert shared_input._num_alone([torch.empty(n, 6) for n in (8, 8, 8)]) == 3
    assert shared_input._num_alone([torch.empty(n, 6) for n in (8, 4)]) == 2


@pytest.mark.parametrize("frozen", ["0.weight", "1.weight", "1.bias", "2.weight"])
def test_frozen_parameters_get_no_gradient(frozen):
    layers = nn.ModuleList(layers_of(QKV))
    layers.get_parameter(frozen).requires_grad_(False)
    assert_same(results(apply_linears, layers), results(one_by_one, layers))


def test_an_input_without_gradient_gets_none():
    layers = layers_of(QKV)
    x = torch.ones(1, 6, dtype=torch.float64)
    sum(each.sum() for each in apply_linears(x, layers)).backward()
    assert x.grad is None
    assert all(layer.weight.grad is not None for layer in layers)


@pytest.mark.parametrize("reentrant", [True, False])
def test_under_checkpointing(reentrant):
    def checkpointed(x, layers):
        return checkpoint(apply_linears, x, layers, use_reentrant=reentrant)

    layers = layers_of(QKV)
    assert_same(results(checkpointed, layers), results(one_by_one, layers))


def test_a_second_backward_pass_is_right():
    layers = layers_of(QKV)
    x = torch.randn(3, 6, dtype=torch.float64, requires_grad=True)
    loss = sum(each.square().sum() for each in apply_linears(x, layers))
    first, second = (
        torch.autograd.grad(loss, [x, layers[1].weight], retain_graph=True) for _ in range(2)
    )
    assert_same(first, second)


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def with_hook(kind):
    def change(layers):
        register = getattr(layers[1], f"register_{kind}")
        register(lambda module, *args: args[-1] if kind == "forward_hook" else None)

    return change


def bound(layers):
    layers[1].forward = lambda x: 2 * nn.Linear.forward(layers[1], x)


def subclassed(layers):
    layers[1].__class__ = Doubled


@pytest.mark.parametrize(
    "change",
    [
        *map(with_hook, ("forward_hook", "forward_pre_hook", "full_backward_hook")),
        bound,
        subclassed,
    ],
)
def test_a_layer_that_is_more_than_its_weight_is_called(change):
    layers = layers_of(QKV)
    x = torch.randn(2, 6, dtype=torch.float64, requires_grad=True)
    assert runs_together(x, layers)
    change(layers)
    assert not runs_together(x, layers)
    assert_same(results(apply_linears, layers), results(one_by_one, layers))


def test_another_dtype_than_the_weights_is_left_to_autocast():
    layers = layers_of(QKV, dtype=torch.float32)
    x = torch.randn(2, 6, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        assert not runs_together(x, layers)
        assert apply_linears(x, layers)[0].dtype == torch.bfloat16
    for layer in layers:
        layer.to(torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        assert runs_together(x.bfloat16(), layers)


def test_nothing_is_kept_without_gradients():
    with torch.no_grad():
        assert apply_linears(torch.ones(1, 6, dtype=torch.float64), layers_of(QKV))[0].is_leaf


def grad_functions(tensor):
    seen, todo = set(), [tensor.grad_fn]
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            seen.add(node)
            todo += [parent for parent, _ in node.next_functions]
    return [type(node).__name__ for node in seen]


def test_patched_models_use_it_and_adapted_layers_do_not():
    model = make_qwen2(64)
    layers = model.config.num_hidden_layers
    patch(model)
    ids = torch.arange(16)[None]
    names = grad_functions(model(input_ids=ids, labels=ids).loss)
    assert names.count("_LinearsBackward") == 2 * layers  # q/k/v and gate/up
    adapted = get_peft_model(model, LoraConfig(target_modules=["v_proj"]))
    names = grad_functions(adapted(input_ids=ids, labels=ids).loss)
    assert names.count("_LinearsBackward") == layers  # gate/up still pass gradients on


def test_who_keeps_v_does_not_keep_k_with_it():
    x = torch.ones(4, 6, dtype=torch.float64, requires_grad=True)
    value = apply_linears(x, layers_of(QKV))[2]
    assert value.untyped_storage().nbytes() == value.numel() * value.element_size()
