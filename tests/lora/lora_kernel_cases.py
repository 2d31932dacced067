"""Problems for the adapters' functions, and what the interpreter process runs on them."""

import torch
from lora.lora_references import lora_linear_reference, lora_mlp_reference, lora_qkv_reference

from trainkit.kernels.lora.function import lora_linear, lora_qkv
from trainkit.kernels.lora.mlp import lora_mlp
from trainkit.kernels.lora.products import Projection

H, F = 24, 88
PROBLEMS = {
    "linear": (lora_linear, lora_linear_reference, [(H, 40, 4, True)]),
    "qkv": (lora_qkv, lora_qkv_reference, [(H, 40, 4, True), (H, 8, 4, True), (H, 8, 4, False)]),
    "qkv_ranks": (lora_qkv, lora_qkv_reference, [(H, 40, 3, 1), (H, 8, 0, 0), (H, 8, 20, 0)]),
    "mlp": (lora_mlp, lora_mlp_reference, [(H, F, 4, False), (H, F, 4, False), (F, H, 4, False)]),
    "mlp_bias": (lora_mlp, lora_mlp_reference, [(H, F, 2, 1), (H, F, 5, 1), (F, H, 20, 1)]),
    "mlp_gate": (lora_mlp, lora_mlp_reference, [(H, F, 4, 0), (H, F, 0, 0), (F, H, 0, 0)]),
    "mlp_up": (lora_mlp, lora_mlp_reference, [(H, F, 0, 0), (H, F, 4, 0), (F, H, 0, 0)]),
    "mlp_down": (lora_mlp, lora_mlp_reference, [(H, F, 0, 0), (H, F, 0, 0), (F, H, 4, 0)]),
    "mlp_packed": (lora_mlp, lora_mlp_reference, [(H, 2 * F, 4, 0), None, (F, H, 4, 0)]),
    "mlp_packed_down": (lora_mlp, lora_mlp_reference, [(H, 2 * F, 0, 0), None, (F, H, 4, 0)]),
    "mlp_gelu": (lora_mlp, lora_mlp_reference, [(H, F, 4, 0), (H, F, 4, 0), (F, H, 4, 0)]),
}


class Problem:
    """One function, its reference, and the same random numbers for both in any dtype."""

    def __init__(self, name, *, tokens=(2, 37), seed=0):
        self.function, self.reference, self.shapes = PROBLEMS[name]
        self.arguments = {"activation": "gelu_tanh"} if name.endswith("gelu") else {}
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape):
            scale = shape[-1] ** -0.5 if len(shape) > 1 else 1.0
            return torch.randn(*shape, generator=generator, dtype=torch.float64) * scale

        self.x = normal(*tokens, H) * H**0.5
        self.layers = []
        for shape in self.shapes:
            if shape is None:
                self.layers.append(None)
                continue
            inputs, outputs, r, bias = shape
            factors = (normal(r, inputs), normal(outputs, r)) if r else (None, None)
            self.layers.append(
                (normal(outputs, inputs), normal(outputs) if bias else None, *factors)
            )

    def tensors(self, dtype, factors_dtype, *, rounded_to=None, device="cpu"):
        """x and the projections; ``rounded_to`` rounds all values to a dtype first."""

        def cast(tensor, wanted, grad=False):
            if tensor is None:
                return None
            value = tensor if rounded_to is None else tensor.to(rounded_to)
            return value.to(device, wanted, copy=True).requires_grad_(grad)  # each its own leaf

        projections = [
            None
            if layer is None
            else Projection(
                cast(layer[0], dtype),
                cast(layer[1], dtype),
                cast(layer[2], factors_dtype, grad=True),
                cast(layer[3], factors_dtype, grad=True),
                scaling=2.0 if index == 0 else 0.75,
            )
            for index, layer in enumerate(self.layers)
        ]
        return cast(self.x, dtype, grad=True), projections


def results(call, x, projections, arguments, *, backward_twice=False):
    """Outputs and every gradient of a fixed random functional, in fp64 on the CPU."""
    out = call(x, *projections, **arguments)
    out = out if isinstance(out, tuple) else (out,)
    generator = torch.Generator().manual_seed(9)
    loss = sum(
        (o.double().cpu() * torch.randn(o.shape, generator=generator, dtype=torch.float64)).sum()
        for o in out
    )
    leaves = [x, *(t for p in projections if p for t in (p.lora_a, p.lora_b) if t is not None)]
    grads = torch.autograd.grad(loss, leaves, retain_graph=backward_twice)
    if backward_twice:
        again = torch.autograd.grad(loss, leaves)
        assert all(torch.equal(a, b) for a, b in zip(grads, again, strict=True))
    return [tensor.detach().double().cpu() for tensor in (*out, *grads)]


def errors(found, truth):
    return [((f - t).norm() / t.norm()).item() for f, t in zip(found, truth, strict=True)]


def compare(name, dtype, device="cpu", tokens=(2, 37)):
    """(ours, the reference's own) relative errors against fp64, tensor by tensor."""
    dtype = getattr(torch, dtype)
    problem = Problem(name, tokens=tokens)
    exact = problem.tensors(torch.float64, torch.float64, rounded_to=dtype)
    truth = results(problem.reference, *exact, problem.arguments)
    # Not fp32 factors for the reference: it would compute the small products in fp32, as no
    # mixed-precision run does.
    plain = problem.tensors(dtype, dtype, rounded_to=dtype, device=device)
    reference = results(problem.reference, *plain, problem.arguments)
    factors = torch.promote_types(dtype, torch.float32)
    mixed = problem.tensors(dtype, factors, rounded_to=dtype, device=device)
    ours = results(problem.function, *mixed, problem.arguments, backward_twice=True)
    return errors(ours, truth), errors(reference, truth)


def too_far(name, dtype, device="cpu", tokens=(2, 37)):
    """The tensors in which we are further from fp64 than the plain operations are."""
    ours, plain = compare(name, dtype, device, tokens)
    # Where the plain result happens to be nearly exact, one rounding of the dtype remains. In fp32
    # the exponential of the gate is as inexact as all the sums together, and two libraries' differ.
    hair = torch.finfo(getattr(torch, dtype)).eps
    factor = 1.05 if dtype in ("bfloat16", "float16") else 2.0
    return [(o, p) for o, p in zip(ours, plain, strict=True) if not o <= factor * p + hair]


def interpreted(dtype):
    """What is wrong under the interpreter, by problem; every kernel must have run."""
    from trainkit.kernels.launch import Kernel
    from trainkit.kernels.lora import gate_kernel, kernel, products

    ran = set()
    for module in (kernel, gate_kernel):
        for each in [name for name in vars(module) if name.endswith("_kernel")]:
            noting = _Noting(getattr(module, each), each, ran)
            setattr(module, each, noting)
            for launcher in vars(module).values():
                if isinstance(launcher, Kernel) and launcher.jitted is noting.kernel:
                    launcher.jitted = noting
    bad = {name: far for name in PROBLEMS if (far := too_far(name, dtype))}
    assert products.takes_kernel(4, getattr(torch, dtype), torch.zeros(1))
    return {"bad": bad, "ran": sorted(ran)}


def interpreted_edges():
    """No rows at all, one row, and rows in several splits, in fp32."""
    bad = {}
    for tokens in ((0,), (1,), (3, 400)):
        for name in ("linear", "qkv_ranks", "mlp", "mlp_packed"):
            problem = Problem(name, tokens=tokens)
            exact = problem.tensors(torch.float64, torch.float64, rounded_to=torch.float32)
            truth = results(problem.reference, *exact, problem.arguments)
            ours = problem.tensors(torch.float32, torch.float32)
            found = results(problem.function, *ours, problem.arguments)
            pairs = [(f, t) for f, t in zip(found, truth, strict=True) if t.norm() > 0]
            worst = max(((f - t).norm() / t.norm()).item() for f, t in pairs) if pairs else 0.0
            if not (
                worst < 2e-6 and all(f.shape == t.shape for f, t in zip(found, truth, strict=True))
            ):
                bad[f"{name} {tokens}"] = worst
    return bad


class _Noting:
    def __init__(self, kernel, name, ran):
        self.kernel, self.name, self.ran = kernel, name, ran

    def __getitem__(self, grid):
        launch = self.kernel[grid]

        def noting(*arguments, **constants):
            way = {True: " of tiles", False: " of pointers", None: ""}[constants.get("TILES")]
            self.ran.add(self.name + way)
            return launch(*arguments, **constants)

        return noting
