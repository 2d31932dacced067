"""What the log says of the steps since the last row: tokens, speed, figures, dropped rows."""

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from trainkit.models.attention import attention_heads
from trainkit.models.linears import num_weights
from trainkit.models.loss.loss_head import take_counts as take_correct
from trainkit.objectives.batches import BatchCounts
from trainkit.objectives.objective import Metrics
from trainkit.parallel.engine import Ranks

if TYPE_CHECKING:
    from trainkit.estimate.gpus import Gpu
    from trainkit.train.data.loaders import StreamState


@dataclass
class StepCounts:
    """What happened since the last logged step, on this rank."""

    num_steps: int = 0
    num_tokens: int = 0
    num_trained_tokens: int = 0
    data_seconds: float = 0.0
    started: float = field(default_factory=time.perf_counter)


class Meter:
    """Counts on each rank, adds up over the ranks when a row is logged.

    Args:
        ranks: the processes.
        counts_rows: whether this rank's rows are counted (``Layout.counts_rows``).
        counts_losses: whether its losses are (``Layout.counts_losses``).
        own: the objective's figures, or None.
        stream: of this rank, or None.
        flops_per_token: of one training step, for ``mfu``; None when the peak is unknown.
        peak_flops: of one device.
    """

    def __init__(
        self,
        ranks: Ranks,
        *,
        counts_rows: bool = True,
        counts_losses: bool = True,
        own: Metrics | None,
        stream: "StreamState | None",
        flops_per_token: float | None,
        peak_flops: float | None,
    ) -> None:
        self._counts_rows = counts_rows
        self._counts_losses = counts_losses
        self._own = own
        self._ranks = ranks
        self._stream = stream
        self._flops_per_token = flops_per_token
        self._peak_flops = peak_flops
        self._counts = StepCounts()
        self._carried_correct: torch.Tensor | None = None
        self._before: torch.Tensor | None = None

    def state(self, model: nn.Module) -> dict[str, Any]:
        """What this rank has counted since the last logged row, as plain JSON values."""
        counts = asdict(self._counts)
        counts["seconds"] = time.perf_counter() - counts.pop("started")
        correct = self._take_correct(model)
        self._carried_correct = correct
        sums = None if self._own is None else self._own.sums
        return {
            "counts": counts,
            "correct": None if correct is None else correct.tolist(),
            "sources": None if sums is None else sums.tolist(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on counting where :meth:`state` was taken."""
        device = self._ranks.device
        counts = dict(state["counts"])
        started = time.perf_counter() - counts.pop("seconds")
        self._counts = StepCounts(**counts, started=started)
        if state["correct"] is not None:
            self._carried_correct = torch.tensor(state["correct"], device=device)
        if state["sources"] is not None and self._own is not None:
            self._own.sums = torch.tensor(state["sources"], dtype=torch.float64, device=device)

    def _take_correct(self, model: nn.Module) -> torch.Tensor | None:
        correct, carried = take_correct(model), self._carried_correct
        self._carried_correct = None
        if correct is None or carried is None:
            return carried if correct is None else correct
        return correct + carried

    def count_step(self, seconds: float) -> None:
        """A step's batches were fetched in so many seconds."""
        self._counts.num_steps += 1
        self._counts.data_seconds += seconds

    def begin_step(self) -> None:
        """Remember the objective's figures: the step that begins may have to be left out."""
        sums = None if self._own is None else self._own.sums
        self._before = None if sums is None else sums.clone()

    def leave_out(self, is_left_out: torch.Tensor) -> None:
        """Take the objective's figures of the step back where the flag (0-d, on the device) is set.

        Its tokens stay counted: they were read.
        """
        if self._own is not None and self._own.sums is not None:
            before = torch.zeros_like(self._own.sums) if self._before is None else self._before
            self._own.sums = torch.where(is_left_out, before, self._own.sums)

    def count_batch(self, counts: BatchCounts) -> None:
        """What is in one batch."""
        if not self._counts_rows:
            return
        self._counts.num_tokens += counts.num_tokens
        self._counts.num_trained_tokens += counts.num_trained_tokens

    def read(self, model: nn.Module) -> dict[str, float]:
        """The figures since the last call, over all ranks.

        All ranks must call it at the same step; it is the only place that waits for the device.

        Raises:
            DataError: more streamed rows were dropped than allowed.
        """
        counts, self._counts = self._counts, StepCounts()
        seconds = self._counts.started - counts.started
        sums = self._add_up(model, counts)
        num_tokens, num_trained = sums["counts"]
        num_steps = max(counts.num_steps, 1)
        metrics: dict[str, float] = {
            "num_tokens": int(num_tokens),
            "num_trained_tokens": int(num_trained),
            "step_seconds": seconds / num_steps,
            "tokens_per_second": num_tokens / max(seconds, 1e-9),
            "data_seconds": counts.data_seconds / num_steps,
        }
        if self._own is not None:
            metrics |= self._own.rows(sums["own"])
        if self._stream is not None:
            num_rows, num_dropped = map(int, sums["stream"][:2])
            self._stream.stream.check_dropped(num_rows, num_dropped)
            metrics |= {"num_rows": num_rows, "num_dropped": num_dropped}
            metrics["num_passes"] = sums["stream"][2] / sums["stream"][3]
        correct, trained = sums["correct"]
        if trained:
            metrics["token_accuracy"] = correct / trained
        if self._peak_flops and self._flops_per_token:
            per_device = num_tokens / max(seconds, 1e-9) / self._ranks.num_processes
            metrics["mfu"] = per_device * self._flops_per_token / self._peak_flops
        if torch.cuda.is_available():
            metrics["peak_memory_gib"] = torch.cuda.max_memory_allocated() / 2**30
        return metrics

    def _add_up(self, model: nn.Module, counts: StepCounts) -> dict[str, list[float]]:
        """The ranks' sums by name, in one reduction."""
        device = self._ranks.device
        tokens = [counts.num_tokens, counts.num_trained_tokens]
        mine = {"counts": torch.tensor(tokens, dtype=torch.float64, device=device)}
        if self._own is not None:
            mine["own"] = self._own.take(device).flatten() * self._counts_losses
        if self._stream is not None:
            passes = [0 if p is None else p.epoch for p in self._stream.positions]
            rows = [self._stream.num_rows, self._stream.num_dropped, sum(passes), len(passes)]
            counted = [row * self._counts_rows for row in rows]
            mine["stream"] = torch.tensor(counted, dtype=torch.float64, device=device)
        correct = self._take_correct(model)
        # Only some ranks have the head where a model is spread over several.
        nothing = torch.zeros(2, device=device)
        mine["correct"] = (nothing if correct is None else correct).double()
        total = self._ranks.reduce(torch.cat(list(mine.values())), reduction="sum").tolist()
        sums = {}
        for name, values in mine.items():
            sums[name], total = total[: len(values)], total[len(values) :]
        return sums


# Floating-point operations of a training step, and what GPUs could do at most, for MFU.

# Dense bf16 tensor-core peaks in FLOP/s by NVIDIA's datasheets (without sparsity). The first name
# found in the device's own name counts.
_PEAK_BF16_FLOPS = (
    ("B200", 2.25e15),
    ("H200", 989e12),
    ("H100 PCIe", 756e12),
    ("H100 NVL", 835e12),
    ("H100", 989e12),
    ("H800", 989e12),
    ("A100", 312e12),
    ("A800", 312e12),
    ("L40S", 362e12),
    ("RTX 4090", 165e12),
    ("A6000", 155e12),
)


def peak_flops() -> float | None:
    """The dense bf16 peak of the current GPU, or None where it is not known."""
    if not torch.cuda.is_available():
        return None
    name = torch.cuda.get_device_name()
    return next((peak for part, peak in _PEAK_BF16_FLOPS if part in name), None)


def training_flops_per_token(model: Any, max_length: int) -> float:
    """Forward and backward FLOPs per token: 6 per parameter that multiplies, plus causal attention.

    Counted as PaLM (arXiv:2204.02311, appendix B) counts them, attention halved because it is
    causal. The input embedding is a look-up and does not count, the output head does. A frozen
    weight needs no gradient of its own and counts 4. Of a mixture's experts, those count that a
    token is sent to.

    Args:
        model: the transformers or peft model as it is trained.
        max_length: tokens per sequence, for the attention term.
    """
    config = model.config.get_text_config()
    trained = frozen = 0.0
    active_share = _active_share(config)
    counted: set[int] = set()
    embeddings = {id(p) for p in model.get_input_embeddings().parameters()}
    head = model.get_output_embeddings()
    head_parameters = {id(p) for p in head.parameters()} if head is not None else set()
    for name, parameter in model.named_parameters():
        is_lookup = id(parameter) in embeddings and id(parameter) not in head_parameters
        if id(parameter) in counted or is_lookup:
            continue
        counted.add(id(parameter))
        is_expert = ".experts." in name
        size = num_weights(parameter) * (active_share if is_expert else 1.0)
        trained += size if parameter.requires_grad else 0
        frozen += 0 if parameter.requires_grad else size
    attention = 6 * sum(heads * size for heads, size in attention_heads(config)) * max_length
    return 6.0 * trained + 4.0 * frozen + attention


def _active_share(config: Any) -> float:
    """The share of the routed experts that one token goes through; 1 without experts."""

    def first(*names: str) -> int | None:
        values = (getattr(config, name, None) for name in names)
        return next((value for value in values if isinstance(value, int) and value > 0), None)

    num_active = first("num_experts_per_tok", "top_k_experts", "moe_topk", "moe_k")
    num_experts = first("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    return num_active / num_experts if num_active and num_experts else 1.0


_UNKNOWN_GPU = "a100-80g"
"""Whose speed is taken for a GPU that the table does not have."""


def this_gpu() -> "Gpu | None":
    """This process's GPU with the memory that it really has; None without one."""
    if not torch.cuda.is_available():
        return None
    from trainkit.estimate.gpus import GPUS, gpu_named

    name = torch.cuda.get_device_name()
    row = gpu_named(name) or replace(GPUS[_UNKNOWN_GPU], name=name)
    total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    return replace(row, memory_gib=total / 2**30)
