"""Linear cross entropy against the loss from full logits, and the promises of its signature."""

import pytest
import torch

from trainkit.kernels.contract import Draw
from trainkit.kernels.launch import INTERPRETING
from trainkit.kernels.linear_cross_entropy import function, products
from trainkit.kernels.linear_cross_entropy.divergence import (
    linear_divergence,
    linear_divergence_reference,
)
from trainkit.kernels.linear_cross_entropy.function import (
    linear_cross_entropy,
    linear_cross_entropy_counted,
    linear_cross_entropy_reference,
)
from trainkit.kernels.linear_cross_entropy.token_losses import linear_token_losses

VARIANTS = {
    "plain": {},
    "bias": {"bias": True},
    "num_items": {"num_items": 7},
    "num_items_tensor": {"num_items": torch.tensor(7)},
    "softcap": {"softcap": 3.0},
    "smoothing": {"label_smoothing": 0.1},
    "z_loss": {"z_loss": 1e-2},
    "all": {
        "bias": True,
        "num_items": 5,
        "softcap": 4.0,
        "label_smoothing": 0.2,
        "z_loss": 3e-2,
        "ignore_index": 3,
    },
}


def make_case(rows=40, hidden=12, vocab=37, *, dtype=torch.float64, seed=0, trained=0.6, **options):
    generator = torch.Generator().manual_seed(seed)
    ignore = options.get("ignore_index", -100)
    states = torch.randn(rows, hidden, generator=generator, dtype=torch.float64)
    weight = torch.randn(vocab, hidden, generator=generator, dtype=torch.float64) * 0.5
    labels = torch.randint(0, vocab, (rows,), generator=generator)
    labels[torch.rand(rows, generator=generator) >= trained] = ignore
    if options.get("bias"):
        options["bias"] = torch.randn(vocab, generator=generator, dtype=torch.float64).to(dtype)
    return states.to(dtype), weight.to(dtype), labels, options


def run(op, states, weight, labels, options, *, scale=None):
    leaves = [states.clone().requires_grad_(), weight.clone().requires_grad_()]
    options = dict(options)
    if isinstance(options.get("bias"), torch.Tensor):
        options["bias"] = options["bias"].clone().requires_grad_()
        leaves.append(options["bias"])
    loss = op(leaves[0], leaves[1], labels, **options)
    (loss if scale is None else loss * scale).backward()
    return [loss.detach(), *(leaf.grad for leaf in leaves)]


@pytest.fixture(autouse=True)
def small_rows(monkeypatch):
    """Chunks and compaction at the size of the test instead of multiples of 256."""
    monkeypatch.setattr(function, "ROWS_MULTIPLE", 8)


@pytest.mark.sample("plain-5", "all-*", "*-16")
@pytest.mark.parametrize("chunk_tokens", [None, 16, 5])
@pytest.mark.parametrize("name", VARIANTS)
def test_equals_the_loss_from_full_logits(name, chunk_tokens):
    case = make_case(**VARIANTS[name])
    ours = run(
        lambda *inputs, **options: linear_cross_entropy(
            *inputs, chunk_tokens=chunk_tokens, **options
        ),
        *case,
    )
    # fp64 on both sides: only the order of at most 40 * 37 sums differs. The kernel, though, keeps
    # its options as fp32 constants (a smoothing of 0.1 is off by 1e-9).
    close = {"rtol": 1e-6, "atol": 1e-8} if INTERPRETING else {"rtol": 1e-12, "atol": 1e-13}
    for got, wanted in zip(ours, run(linear_cross_entropy_reference, *case), strict=True):
        torch.testing.assert_close(got, wanted, **close)


def test_twice_differentiating_is_refused():
    states, weight, labels, _ = make_case()
    states.requires_grad_()
    incoming = torch.ones((), dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(
        linear_cross_entropy(states, weight, labels), states, incoming, create_graph=True
    )
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


@pytest.mark.parametrize("trained", [0.0, 0.1, 0.6, 1.0])
def test_only_trained_rows_are_computed(trained, monkeypatch):
    seen = []
    chunk = function.cross_entropy_chunk

    def counting(logits, labels, *rest, **options):
        seen.append(len(labels))
        chunk(logits, labels, *rest, **options)

    monkeypatch.setattr(function, "cross_entropy_chunk", counting)
    states, weight, labels, _ = make_case(trained=trained)
    ours = run(linear_cross_entropy, states, weight, labels, {"chunk_tokens": 16})
    truth = run(linear_cross_entropy_reference, states, weight, labels, {})
    for got, wanted in zip(ours, truth, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-13)
    count = int((labels != -100).sum())
    assert sum(seen) == min(-(-count // 8) * 8, 40)


def test_an_upper_bound_is_enough_but_too_few_is_refused():
    states, weight, labels, _ = make_case()
    count = int((labels != -100).sum())
    wanted = linear_cross_entropy_reference(states, weight, labels)
    got = linear_cross_entropy(states, weight, labels, num_trained=count + 7)
    torch.testing.assert_close(got, wanted, rtol=1e-12, atol=0)
    with pytest.raises(RuntimeError, match="num_trained is too small"):
        linear_cross_entropy(states, weight, labels, num_trained=count - 8)


@pytest.mark.parametrize("frozen", ["hidden", "weight", "both"])
def test_frozen_inputs_cost_nothing(frozen, monkeypatch):
    made = []
    into = products.add_product

    def add_product(out, *rest, **options):
        made.append(out.shape)
        into(out, *rest, **options)

    for module in (function, products):  # the gradients of the weight and of the rows
        monkeypatch.setattr(module, "add_product", add_product)
    states, weight, labels, _ = make_case(trained=1.0)
    truth = run(linear_cross_entropy_reference, states, weight, labels, {})
    states.requires_grad_(frozen not in ("hidden", "both"))
    weight.requires_grad_(frozen not in ("weight", "both"))
    loss = linear_cross_entropy(states, weight, labels)
    assert loss.requires_grad == (frozen != "both")
    if loss.requires_grad:
        loss.backward()
    assert len(made) == {"hidden": 1, "weight": 1, "both": 0}[frozen]
    if frozen == "hidden":
        assert states.grad is None
        torch.testing.assert_close(weight.grad, truth[2], rtol=1e-12, atol=1e-13)
    if frozen == "weight":
        assert weight.grad is None
        torch.testing.assert_close(states.grad, truth[1], rtol=1e-12, atol=1e-13)


def test_evaluation_computes_no_gradient(monkeypatch):
    for module in (function, products):
        monkeypatch.setattr(module, "add_product", None)
    states, weight, labels, _ = make_case()
    weight.requires_grad_()
    with torch.no_grad():
        loss = linear_cross_entropy(states, weight, labels)
    torch.testing.assert_close(loss, linear_cross_entropy_reference(states, weight, labels))


def test_fp16_survives_small_gradients_and_the_loss_scale():
    """Gradients near 1e-8 vanish in fp16 unless the loss scale reaches them first."""
    states, weight, labels, _ = make_case(64, 16, 64, dtype=torch.float16)
    options = {"num_items": 4_000_000}
    ours = run(linear_cross_entropy, states, weight, labels, options, scale=65536.0)
    truth = run(
        linear_cross_entropy_reference,
        states.double(),
        weight.double(),
        labels,
        options,
        scale=65536.0,
    )
    for got, wanted in zip(ours[1:], truth[1:], strict=True):
        # fp16 logits and gradients: 2^-11 relative each, a few of them.
        assert (got.double() - wanted).norm() <= 4e-3 * wanted.norm()


def test_the_gradient_of_a_certain_label_keeps_its_digits():
    """p - 1 is taken before rounding: with p near 1 rounding first would lose all of it."""
    hidden = torch.tensor([[9.0]], dtype=torch.bfloat16)
    weight = torch.tensor([[1.0], [-0.25]], dtype=torch.bfloat16)
    labels = torch.tensor([0])
    ours = run(linear_cross_entropy, hidden, weight, labels, {})
    truth = run(linear_cross_entropy_reference, hidden.double(), weight.double(), labels, {})
    for got, wanted in zip(ours[1:], truth[1:], strict=True):
        # The logits are rounded to bf16 (2^-9 of 11.25, so 2% of the small probability).
        torch.testing.assert_close(got.double(), wanted, rtol=0.04, atol=0)


def test_counts():
    states, weight, labels, _ = make_case()
    predicted = (states @ weight.T).argmax(-1)
    labels[::3] = predicted[::3]
    trained = labels != -100
    counted = linear_cross_entropy_counted(states, weight, labels, chunk_tokens=8)
    assert counted.num_trained == trained.sum()
    assert counted.num_correct == ((predicted == labels) & trained).sum()
    assert counted.num_correct >= 14


@pytest.mark.parametrize("rows", [40, 900], ids=["all-rows", "trained-rows-only"])
@pytest.mark.parametrize("variant", ["plain", "all"])
def test_each_row_has_its_loss(rows, variant):
    """fp64: only the order of sums within a row differs. 900 rows are compacted to 256."""
    states, weight, labels, options = make_case(rows=rows, trained=0.2, **VARIANTS[variant])
    num_trained = int((labels != options.get("ignore_index", -100)).sum())
    counted = linear_cross_entropy_counted(
        states.view(2, -1, 12),
        weight,
        labels.view(2, -1),
        num_trained=num_trained,
        chunk_tokens=64,
        **options,
    )
    assert counted.row_losses.shape == (2, rows // 2)
    alone = {**options, "num_items": 1}
    for row in range(0, rows, 7):
        part, loss = slice(row, row + 1), counted.row_losses.flatten()[row]
        wanted = linear_cross_entropy_reference(states[part], weight, labels[part], **alone)
        torch.testing.assert_close(loss, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.sample("1.0-0.2-F*", "0.0001-1.0-F*", "1.0-1.0-T*", "0.0001-0.2-T*")
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("trained", [0.2, 1.0])
@pytest.mark.parametrize("scale", [1.0, 1e-4])
def test_each_token_s_factor_goes_into_its_chunk(frozen, trained, scale):
    """Losses that are weighed one by one, in chunks of five rows; fp64, so only sums differ.

    A second backward pass through the same graph is as right as the first.
    """
    states, weight, labels, _ = make_case(trained=trained)
    factors = scale * torch.randn(len(labels), generator=torch.Generator().manual_seed(1)).double()
    factors[labels == -100] = float("inf")  # what nobody trains is not even multiplied
    gradients = []
    for chunk_tokens in (5, None):
        leaves = [states.clone().requires_grad_(), weight.clone().requires_grad_(not frozen)]
        if chunk_tokens:
            losses = linear_token_losses(*leaves, labels, chunk_tokens=chunk_tokens)
        else:
            logits = leaves[0] @ leaves[1].T
            losses = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
        wanted = leaves[: 1 if frozen else 2]
        weighed = torch.where(labels != -100, losses * factors, 0).sum()
        torch.autograd.grad(weighed, wanted, retain_graph=True)
        gradients.append(torch.autograd.grad(weighed, wanted))
    for found, wanted in zip(*gradients, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12 * scale)


@pytest.mark.parametrize(("wants", "passes"), [("both", 2), ("hidden", 1), ("none", 1)])
def test_token_losses_of_a_frozen_head_make_their_logits_once(wants, passes, monkeypatch):
    seen = []
    chunk = function.cross_entropy_chunk

    def counting(logits, *rest, **options):
        seen.append(options["want_grad"])
        chunk(logits, *rest, **options)

    monkeypatch.setattr(function, "cross_entropy_chunk", counting)
    states, weight, labels, _ = make_case()
    states.requires_grad_(wants != "none")
    weight.requires_grad_(wants == "both")
    losses = linear_token_losses(states, weight, labels)
    if wants != "none":
        losses.sum().backward()
    assert len(seen) == passes
    assert seen[-1] is (wants != "none")


def test_autocast_computes_in_its_dtype_and_returns_the_weights():
    states, weight, labels, _ = make_case(64, 16, 50, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours = run(linear_cross_entropy, states, weight, labels, {})
        theirs = run(linear_cross_entropy_reference, states, weight, labels, {})
    truth = run(linear_cross_entropy_reference, states.double(), weight.double(), labels, {})
    for got, plain, wanted in zip(ours, theirs, truth, strict=True):
        assert got.dtype == torch.float32
        error, allowed = ((each.double() - wanted).norm() for each in (got, plain))
        assert error <= 1.05 * allowed + 1e-6 * wanted.norm()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": torch.zeros(5, 3, dtype=torch.float64)}, "does not fit hidden"),
        ({"labels": torch.zeros(3, dtype=torch.int64)}, "labels"),
        ({"bias": torch.zeros(3)}, "bias"),
        ({"chunk_tokens": 0}, "chunk_tokens"),
        ({"weight": torch.zeros(37, 12)}, "float32"),
    ],
)
def test_what_does_not_fit_is_refused(change, message):
    states, weight, labels, _ = make_case()
    with pytest.raises(ValueError, match=message):
        linear_cross_entropy(**{"hidden": states, "weight": weight, "labels": labels, **change})


def test_chunks_are_bounded_and_equal(monkeypatch):
    monkeypatch.setattr(function, "ROWS_MULTIPLE", 256)
    assert products.default_chunk_tokens(151936, 2) == 5632
    assert products.default_chunk_tokens(128256, 2) == 6656
    assert products.default_chunk_tokens(151936, 4) * 151936 * 4 <= 1.65 * 2**30
    assert products.default_chunk_tokens(10**9, 2) == 256
    assert function.chunk_rows(16384, 6000) == 5632
    assert function.chunk_rows(16384, 100) == 100
    assert function.chunk_rows(300, 4096) == 300


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_gradient_that_is_not_kept_is_the_same_gradient(dtype, device, monkeypatch):
    """It is rounded in its own place, piece after piece, and there is no second backward pass."""
    monkeypatch.setattr(products, "PIECE", 100)
    draw = Draw.seeded(dtype, device, 0)
    hidden, weight = draw.normal(12, 33), draw.normal(57, 33)
    labels = draw.integers(57, 12)
    found = []
    for keeps in (True, False):
        leaves = [each.clone().requires_grad_() for each in (hidden, weight)]
        counted = linear_cross_entropy_counted(*leaves, labels, keeps_gradient=keeps)
        counted.loss.backward(retain_graph=True)
        found.append([leaf.grad for leaf in leaves])
    for kept, spent in zip(*found, strict=True):
        assert torch.equal(kept, spent)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        counted.loss.backward()


@pytest.mark.parametrize("frozen", [False, True])
def test_a_teacher_is_cut_into_chunks_as_its_student_is(frozen):
    """Half of the rows are trained, in chunks of a hundred; fp64, so only sums differ."""
    draw = Draw.seeded(torch.float64, "cpu", 0)
    labels = draw.integers(50, 300).masked_fill(draw.integers(2, 300) > 0, -100)
    hidden, weight = draw.normal(300, 8), draw.normal(50, 8)
    teacher = draw.normal(300, 6), draw.normal(50, 6)
    found = []
    options = {"chunk_tokens": 100, "num_trained": int((labels >= 0).sum())}
    for op, more in ((linear_divergence, options), (linear_divergence_reference, {})):
        leaves = [hidden.clone().requires_grad_(), weight.clone().requires_grad_(not frozen)]
        loss, figures = op(*leaves, labels, *teacher, kind="jsd", **more)
        loss.backward()
        found.append([loss.detach(), figures, *(each.grad for each in leaves[: 2 - frozen])])
    for ours, plain in zip(*found, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-12, atol=1e-12)
