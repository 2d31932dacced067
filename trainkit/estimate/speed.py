"""Seconds of a step: floating-point operations, bytes, and the host's launches.

Each kind of work has one efficiency, fitted to the rows of ``docs/benchmarks`` that were measured
on one H200; another GPU is scaled by its datasheet. T tokens of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from trainkit.estimate.gpus import ANCHOR, GPUS, Gpu
from trainkit.estimate.peak import ranks_of
from trainkit.estimate.plan import Plan

BAND_ANCHORED, BAND_NEAR, BAND_SCALED, BAND_GUESSED = 0.12, 0.15, 0.30, 0.50
ROUNDING = 112
"""Bytes a number that rounding by chance takes, piece by piece: one run at 8B. One kernel that
steps and rounds takes none: another run."""
SUM = 10
"""Bytes a number that summing gradients takes: bf16 is read, fp32 read and written."""


OPERATIONS = 1000
"""Of the dispatcher, of a layer that `HOST_LAYER` was measured on, at most; more take longer."""


def _traffic(plan: Plan) -> float:
    """Bytes to other ranks in a step; ZeRO-3 gathers weights in each pass, too."""
    if plan.gpus == 1:
        return 0.0
    moved = (plan.gpus - 1) / plan.gpus * plan.element
    total = 2 * moved * plan.trained
    if plan.stage_layers and not plan.stage:
        total *= 4 / plan.element  # gradients in fp32
    if plan.stage == 3:
        total += 2 * moved * plan.shape.parameters * plan.accumulation
    return total


def _exchanged(plan: Plan) -> float:
    """Bytes that ranks that share products, or rows, exchange in the layers of a micro-batch."""
    shape, passes = plan.shape, 2 + plan.recomputed_share
    a_layer = 0.0
    if plan.tensor > 1:  # two sums over ranks a pass: after attention, after the block
        a_layer += 2 * 2 * (plan.tensor - 1) / plan.tensor * shape.hidden
    if plan.sequence > 1:  # q, k, v and attention's output: tokens for heads
        query, key = _of_attention(plan)
        width = 2 * query + 2 * max(key, plan.sequence * shape.head_size)
        a_layer += (plan.sequence - 1) / plan.sequence * width
    return plan.element * plan.tokens * shape.layers * passes * a_layer


def _of_attention(plan: Plan) -> tuple[int, int]:
    """Width of queries and of keys; the model's where its layers do not say."""
    sizes = {m.role: m.outputs for kind in plan.shape.kinds for m in kind.matrices}
    return sizes.get("q_proj", plan.shape.hidden), sizes.get("k_proj", plan.shape.hidden)


@dataclass(frozen=True)
class Rates:
    """Times of the datasheet's bound, fitted to the anchors; and what the host takes.

    Those of passes, adapters and unpacking depend on whether trainkit's kernels run.
    """

    matrix: float = 1.402
    fp8: float = 1.55
    attention: float = 2.042
    passes: float = 9.693
    logits: float = 10.522
    adapters: float = 1.863
    unpacking: float = 2.515
    sums: float = 1.4
    optimizer: float = 2.534


FUSED = Rates()
PLAIN = Rates(passes=17.633, adapters=13.186, unpacking=21.882)
LINK = 0.5
"""Share of a link's datasheet that collectives reach; half of it hides behind computing."""
ENGINE = 1.04
"""DeepSpeed's own copies, on top of a step."""
FETCH, FETCH_MATRICES = 1.2e-3, 3.5e-3
"""Seconds that DeepSpeed's ZeRO-3 takes to fetch and let go of a layer's weights in one pass: all
at once, 7B on 2 H200s; or matrix by matrix, 7B on 2, 4 and 8."""
EXCHANGE = 0.2e-3
"""Seconds of an exchange between ranks that share rows or products, however small: two a layer and
pass of `tensor`, four of `sequence`; a 1B and a 7B on 2 H200s."""
AT_ONCE = 500_000_000
"""Numbers of a layer at most that are gathered at once, as in ``parallel.deepspeed``."""
HOST_LAYER: Mapping[str, float] = {
    "full": 2.1e-3,
    "full, fp8": 4.6e-3,
    "lora": 2.4e-3,
    "nf4": 4.4e-3,
    "fp8": 4.3e-3,
    "peft": 3.0e-3,
    "peft, nf4": 5.3e-3,
}
"""Seconds that Python takes to launch a layer both ways: small steps wait for it. Full fine-tuning
and LoRA were measured on an idle host, the others as the fastest of 30 steps next to other runs,
where these two took 1.01 and 1.04 times as long as on the idle one; their median 1.14."""
AGAIN: Mapping[bool, float] = {True: 0.85, False: 0.5}
"""Of that, once more where a layer is computed again: with trainkit's kernels, and without."""
ONE_PASS = 115e-6
"""Of a weight's step in the backward pass by trainkit's own kernel: 0.5B, next to other runs."""
HOST_STEP = 25e-3
"""The same for an optimizer's step."""
WAITING = 0.6
"""Of the GPU's own time: where the host takes more, a slower or busier one shows."""
HOST_BYTES = 25e9
"""Over PCIe, a second."""
HOST_ADAM = 0.8e9
"""Numbers that the host's Adam updates a second; with what travels over PCIe not measured here."""


def seconds(plan: Plan, gpu: Gpu) -> float:
    """Of one optimizer step on all GPUs."""
    shares = ranks_of(plan)
    # Where ranks pass micro-batches on, the slowest one sets the pace.
    total = _turns(plan) * max(_micro_batch(share, gpu) for share in shares)
    total += (plan.accumulation - 1) * max(_summing(share, gpu) for share in shares)
    total += max(_update(share, gpu) for share in shares)
    return total * (ENGINE if plan.stage and not plan.fsdp else 1.0)


def _turns(plan: Plan) -> float:
    """Micro-batches that a rank has time for in a step: its own, and those it waits for."""
    if not plan.stage_layers or plan.schedule == "zbv":
        return plan.accumulation
    return plan.accumulation + (len(plan.stage_layers) - 1) / len(plan.stage_layers[0])


def _computing(plan: Plan, gpu: Gpu) -> tuple[float, float]:
    """Seconds of a micro-batch on the GPU, and of the host that launches it.

    On the GPU: matrix products in 16 bits and in fp8, attention, element-wise passes over
    activations, passes over fp32 logits (none with the fused loss), low-rank products, 4-bit
    weights unpacked, and what layers wait for from other ranks.
    """
    shape, recorded, tokens = plan.shape, plan.recorded, plan.tokens
    rates = FUSED if plan.fuses("rms_norm") or plan.fuses("layer_norm") else PLAIN
    flops, moved = gpu.teraflops * 1e12, gpu.bandwidth * 1e9
    share = plan.recomputed_share
    forward = plan.over_layers(lambda layer: layer.matrix[0])
    backward = plan.over_layers(lambda layer: layer.matrix[1])
    again = 0.0 if plan.selective else share * forward
    if again and plan.fuses("lora_mlp") and plan.adapters is not None:
        again -= share * 2 * tokens * shape.numbers_of(("down_proj",))  # not computed again
    in_fp8 = recorded.fp8 * shape.has_head
    if plan.fp8 is not None:
        in_fp8 += plan.fp8 * (forward + again) + plan.fp8_backward * backward
    products = recorded.matrix * shape.has_head + forward + again + backward - in_fp8
    products += 0.0 if plan.seen is None else plan.seen.matrix
    attention = plan.over_layers(lambda layer: sum(layer.attention)) * plan.sequence
    if not plan.selective:
        attention += share * plan.over_layers(lambda layer: layer.attention[0]) * plan.sequence
    passes = plan.over_layers(lambda layer: layer.kept) * (1 + share / 3)
    total = (rates.matrix * products + rates.attention * attention) / flops
    total += rates.fp8 * in_fp8 / (2 * flops if gpu.fp8 else flops)
    total += rates.passes * passes / moved
    if not plan.fuses("linear_cross_entropy"):
        total += rates.logits * 4.0 * tokens * shape.vocab * shape.has_head / moved
    if plan.adapters is not None:
        widths = plan.over_layers(lambda layer: layer.trained) / plan.adapters.options.r
        numbers = shape.matrix_numbers
        active = min(forward / (2 * tokens * numbers), 1.0) if numbers else 0.0  # of experts
        low_rank = plan.element * tokens * widths * active * (1 + share / 3)
        total += rates.adapters * low_rank / moved
    if plan.base in ("nf4", "int8"):
        linears = shape.total(lambda kind: sum(m.numbers for m in kind.matrices if not m.in_stack))
        total += rates.unpacking * linears * 2.5 * (2 + share) / moved
    total += _exchanged(plan) / (LINK * gpu.link * 1e9)
    launched = plan.over_layers(lambda layer: max(layer.operations / OPERATIONS, 1.0))
    return total, HOST_LAYER[_launched(plan)] * launched * (1 + share * AGAIN[bool(plan.ops)])


def _launched(plan: Plan) -> str:
    if plan.adapters is None:
        return "full" if plan.fp8 is None else "full, fp8"
    dropout = plan.adapters.options.dropout
    if plan.fuses("lora_linear") and not dropout and plan.base != "int8":
        return {"nf4": "nf4", "fp8": "fp8"}.get(plan.base, "lora")
    return "peft, nf4" if plan.base in ("nf4", "int8") else "peft"


def _micro_batch(plan: Plan, gpu: Gpu) -> float:
    micro_batch, host = _computing(plan, gpu)
    # Where the two are near each other, each waits for the other now and then.
    total: float = (micro_batch**3 + host**3) ** (1 / 3)
    shape = plan.shape
    if plan.stage == 3 and not plan.fsdp and plan.gpus > 1:
        largest = max(kind.numbers for kind in shape.kinds)
        at_once = plan.ops and plan.adapters is None and largest <= AT_ONCE
        each = FETCH if at_once else FETCH_MATRICES
        total += each * (2 + plan.recomputed_share) * shape.layers
    exchanges = 2 * (plan.tensor > 1) + 4 * (plan.sequence > 1)
    total += EXCHANGE * exchanges * (2 + plan.recomputed_share) * plan.shape.layers
    if plan.offloads_weights:
        total += 2 * 2 * plan.shape.parameters / HOST_BYTES
    return total


def _summing(plan: Plan, gpu: Gpu) -> float:
    """Of adding a micro-batch's gradients to those before it."""
    summed = SUM * plan.trained / (plan.gpus if plan.stage > 1 else 1)
    return FUSED.sums * summed / (gpu.bandwidth * 1e9)


def _update(plan: Plan, gpu: Gpu) -> float:
    """Seconds of what comes once a step: gradients to other ranks, clipping, the optimizer."""
    micro_batch, host = _computing(plan, gpu)
    ranks, kept = plan.gpus if plan.stage else 1, plan.optimizer
    passed = 0.0 if kept is None else (26 + kept) * plan.trained / ranks
    if not plan.keeps_masters and not plan.one_pass:
        passed += ROUNDING * plan.trained
    update = FUSED.optimizer * passed / (gpu.bandwidth * 1e9)
    own = plan.one_pass and not plan.keeps_masters
    if own:
        update += (ONE_PASS if plan.in_backward else 0.0) * _weights(plan)
    elif not plan.stage:  # an engine steps flat vectors
        per_weight, per_number, per_width = plan.slower
        update += per_weight * _weights(plan)
        update += per_number * plan.trained * GPUS[ANCHOR].bandwidth / gpu.bandwidth
        update += FUSED.matrix * per_width * _numbers_by_width(plan) / (gpu.teraflops * 1e12)
    total = max(update, HOST_STEP) if micro_batch < host else update
    total += 0.5 * _traffic(plan) / (LINK * gpu.link * 1e9)
    if plan.offloads_optimizer:
        total += plan.trained / plan.gpus * (1 / HOST_ADAM + 6 / HOST_BYTES)
    return total


def _weights(plan: Plan) -> int:
    outside = plan.recorded.trained_tensors
    return int(plan.over_layers(lambda layer: layer.trained_tensors) + outside)


def _numbers_by_width(plan: Plan) -> float:
    """Numbers of the layers' trained matrices, each times the narrower side of its matrix."""
    if plan.adapters is not None:
        return plan.adapters.options.r * plan.trained
    return float(
        plan.shape.total(
            lambda kind: sum(m.numbers * min(m.inputs, m.outputs) for m in kind.matrices)
        )
    )


def band(plan: Plan, gpu: Gpu) -> tuple[float, str]:
    """How far a time may be off, as a share, and why."""
    if plan.offloads_optimizer or plan.offloads_weights:
        return BAND_GUESSED, "the host's part is not measured"
    if any(host > WAITING * own for own, host in (_computing(p, gpu) for p in ranks_of(plan))):
        return BAND_GUESSED, "so few tokens that the GPU waits for Python, as fast as the host is"
    if plan.recorded.assumed or any(m.in_stack for k in plan.shape.kinds for m in k.matrices):
        return BAND_GUESSED, "layers with experts, or that ask numbers, were not timed"
    if not plan.keeps_masters or plan.in_backward:
        return BAND_SCALED, "rounding by chance and steps in the backward pass: one run, on an H200"
    if plan.stage_layers:
        return BAND_SCALED, "five pipelines of 2 and 4 H200s, none of them zbv"
    if plan.tensor * plan.sequence > 1:
        return BAND_SCALED, "from one H200's measurements: what ranks exchange was not timed"
    if plan.stage == 3 and plan.gpus > 1:
        return BAND_SCALED, "from one H200's measurements: weights in shards were not timed"
    if any(plan.slower) and not plan.stage:
        return BAND_SCALED, "the optimizer was timed at 0.5B, next to other runs on its host"
    if gpu.name == ANCHOR:
        return BAND_ANCHORED, "measured on an H200: step, lora, fp8 and trainer of docs/benchmarks"
    if gpu.name == "h100":
        return BAND_NEAR, "measured on an H200, the same chip with faster memory"
    return BAND_SCALED, "scaled by the datasheet from an H200's measurements"
