"""The processes of a run once they have met: who this is, where it computes, sums over all."""

from typing import Any

import torch


class Ranks:
    """All that the parts of a run ask of the others.

    Args:
        args: transformers' TrainingArguments, which have started the process group.
    """

    def __init__(self, args: Any) -> None:
        self.device: torch.device = args.device
        self.num_processes: int = args.world_size
        self.process_index: int = args.process_index
        self.is_main_process = self.process_index == 0

    def reduce(self, tensor: torch.Tensor, reduction: str = "sum") -> torch.Tensor:
        """The sum, or the mean, over the ranks; all of them get it."""
        total = tensor.clone()
        if self.num_processes > 1:
            torch.distributed.all_reduce(total)
        return total / self.num_processes if reduction == "mean" else total
