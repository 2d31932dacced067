"""Weights, masters, optimizer states and gradients of one rank. Bytes."""

from __future__ import annotations

from trainkit.estimate.plan import Plan
from trainkit.estimate.shape import ModelShape
from trainkit.options.optimizers import Optimizer

SUB_GROUP = 1e9
"""Numbers that DeepSpeed's ZeRO-3 gathers ahead, and steps at a time."""

NF4 = 0.5 + 1 / 64 + 4 / (64 * 256)
"""Bytes of a weight in 4 bits: blocks of 64 with 8-bit scales, these in blocks of 256."""

MATRIX_BYTES = {"bfloat16": 2.0, "float16": 2.0, "float32": 4.0, "nf4": NF4, "fp8": 1.0}

RANK = 128
"""Of GaLore's and APOLLO's projections, where ``training.optim_args`` says nothing."""

PIECE = 2**25
"""Numbers that are fp32 at a time without masters, as in ``train.optimizer.rounding``."""


def optimizer_bytes(
    row: Optimizer, shape: ModelShape, *, full: bool, rank: int = RANK, args: str | None = None
) -> float:
    """Bytes of state per trained number, on the GPU.

    Args:
        row: of the table of optimizers.
        shape: the model.
        full: all weights are trained; else matrices of adapters, which are too thin to project.
        rank: of projections.
        args: ``training.optim_args``, of which some keep more.
    """
    if not full:
        return row.matrix_bytes + row.kept_by(args)
    matrices = row.matrix_bytes * shape.layer_matrices
    if row.per_rank_bytes is not None:
        # A moment has rank rows (or columns) of the longer side; the projection, of the shorter.
        matrices = sum(
            rank * (row.per_rank_bytes * max(sizes) + 4 * min(sizes))
            for sizes in shape.linears().values()
        )
    total = shape.layers * (matrices + 8 * shape.layer_vectors) + row.embedding_bytes * shape.table
    if not shape.tied:
        total += row.head_bytes * shape.table
    return total / shape.parameters + row.kept_by(args)


def passing(plan: Plan, numel: int) -> float:
    """What a parameter of so many numbers has for its step in the backward pass."""
    element = plan.element if plan.adapters is None else plan.adapters.element
    step = sum(plan.stepping) * numel
    if element == 4:
        return 4.0 * numel + step
    if plan.keeps_masters:
        return (element + 4.0) * numel + step
    if plan.one_pass:
        return element * numel
    # In fp32: weight, gradient and noise, and one byte for what is finite.
    return element * numel + 13.0 * min(numel, PIECE) + step


def stepping(plan: Plan) -> float:
    """Temporaries of the optimizer's step, where it comes after the backward pass."""
    of_all, of_largest = plan.stepping
    shape = plan.shape
    largest = max(inputs * outputs for inputs, outputs in shape.linears().values())
    if plan.adapters is not None:
        largest = 0
    elif shape.tables:
        largest = max(largest, shape.table)
    if not plan.keeps_masters:  # one weight after another
        return (of_all + of_largest) * largest
    return of_all * plan.trained * _share(plan, 1) + of_largest * largest


def _share(plan: Plan, least: int) -> float:
    return 1 / plan.gpus if plan.stage >= least else 1.0


def weights(plan: Plan) -> float:
    """The model's, adapters included."""
    shape = plan.shape
    per_layer = MATRIX_BYTES[plan.base] * shape.layer_matrices
    if plan.base == "fp8":
        per_layer += (2 - MATRIX_BYTES["fp8"]) * (1 - (plan.fp8 or 0.0)) * shape.layer_matrices
    if plan.base in ("nf4", "fp8"):
        plain = 4.0 if plan.upcast else 2.0
    else:
        plain = MATRIX_BYTES[plan.base]
    if plan.base == "fp8":
        per_layer += 4 * sum(outputs for _, outputs in shape.linears().values())
    total = shape.layers * (per_layer + plain * shape.layer_vectors) + plain * shape.outside
    total += plain * shape.tower
    if plan.adapters is not None:
        total += plan.adapters.element * plan.trained
    elif plan.fp8 is not None:
        total += plan.fp8 * shape.layers * shape.layer_matrices  # codes, kept between steps
    if plan.fsdp and plan.adapters is None:  # its fp32 shards are the masters
        return 0.0
    return 0.0 if plan.offloads_weights else total * _share(plan, 3)


def masters(plan: Plan) -> float:
    """fp32 copies of trained half-precision weights."""
    engine = plan.stage > 0
    if not (plan.trainer or engine) or plan.offloads_optimizer or plan.optimizer is None:
        return 0.0
    element = plan.element if plan.adapters is None else plan.adapters.element
    if (element == 4 and (not engine or plan.fsdp)) or not plan.keeps_masters:
        return 0.0
    return 4.0 * plan.trained * _share(plan, 1)


def optimizer(plan: Plan) -> float:
    """The optimizer's states."""
    if plan.optimizer is None or plan.offloads_optimizer:
        return 0.0
    return plan.optimizer * plan.trained * _share(plan, 1)


def gradient_bytes(plan: Plan) -> float:
    """Of one trained number, from the moment its layer's backward pass is done."""
    element = plan.element if plan.adapters is None else plan.adapters.element
    if plan.offloads_optimizer and plan.stage > 1:
        return 0.0
    if plan.fsdp:
        return 4.0 / plan.gpus
    if plan.stage > 0:
        if plan.accumulation > 1 and element == 2:  # DeepSpeed sums them in fp32
            return 6.0 if plan.stage == 1 else 4.0 / plan.gpus
        return element * _share(plan, 2)
    if plan.flat and plan.accumulation == 1:
        return float(element)
    return 4.0 if plan.trainer else float(element)


def buffers(plan: Plan) -> float:
    """Of libraries: products' workspaces, an engine's buckets and gathered weights."""
    total = 0.09 * 2**30
    if plan.gpus == 1 and plan.stage == 0:
        return total
    element = plan.element if plan.adapters is None else plan.adapters.element
    # Nobody wraps the model.
    if plan.stage == 0 and (plan.in_backward or plan.flat or plan.stage_layers):
        return total
    if plan.stage == 0:  # DDP's buckets hold every gradient once more
        return total + element * plan.trained
    if plan.fsdp:
        return total
    bucket = min(plan.shape.hidden**2, plan.trained)
    total += 2 * element * bucket
    if plan.stage == 3:
        live = min(2 * plan.shape.layer_matrices + plan.shape.table, SUB_GROUP)
        total += MATRIX_BYTES[plan.base] * (live + plan.shape.table)
    return total


AVERAGED = 2**26
"""Numbers that the data ranks of a pipeline average at once, or else one weight's gradient."""


def averaged(plan: Plan) -> float:
    """Bytes of the copy in which ranks that have the same stage average their gradients."""
    if not plan.stage_layers or plan.stage or plan.gpus == 1:
        return 0.0
    largest = plan.shape.table if plan.shape.tables and plan.adapters is None else 0
    return 4.0 * min(max(AVERAGED, largest), plan.trained)


STAYS_WHOLE = 1 / 8
"""Share of a GPU's memory: a smaller model stays gathered from forward to backward under FSDP2, as
in ``parallel.fsdp``."""


def gathered(plan: Plan, layer: int) -> float:
    """FSDP2: weights that are whole in the backward pass of a layer, and its whole gradient.

    Args:
        plan: the step.
        layer: from 0; their number is the moment of the loss.
    """
    if not plan.fsdp:
        return 0.0
    shape, each = plan.shape, MATRIX_BYTES[plan.base] * plan.shape.layer_matrices
    at_loss = layer == shape.layers
    table = plan.element * shape.table if shape.tables else 0
    tables = plan.element * shape.outside if at_loss else table
    if MATRIX_BYTES[plan.base] * shape.parameters > STAYS_WHOLE * plan.gpu_gib * 2**30:
        # Two layers: one that computes, and the one that is fetched meanwhile.
        layers, tables = 0.0 if at_loss else 2 * each, table
    else:
        layers = each * min(layer + 1, shape.layers)
        if at_loss and not shape.tied:  # what the head's weight was gathered into
            tables += table
    if at_loss:
        return layers + tables
    numbers = shape.layer_matrices if plan.adapters is None else plan.adapter_numbers_per_layer
    return layers + tables + 4 * numbers
