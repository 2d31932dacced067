"""One process of the sum over all processes that ``trainkit doctor`` starts; rank 0 prints it."""

import sys
import time

import torch
from torch import distributed

_NUMBERS = 2**24
_REPEATS = 5


def main(backend: str) -> None:
    """Sum a tensor over all processes, check the sum, print what it took."""
    distributed.init_process_group(backend)
    rank, size = distributed.get_rank(), distributed.get_world_size()
    on_gpu = backend == "nccl"
    device = torch.device("cuda", rank % torch.cuda.device_count()) if on_gpu else "cpu"
    if on_gpu:
        torch.cuda.set_device(device)
    seconds = 0.0
    for _ in range(_REPEATS):  # the first one connects
        numbers = torch.full((_NUMBERS,), float(rank + 1), device=device)
        started = time.perf_counter()
        distributed.all_reduce(numbers)
        total = numbers[-1].item()  # waits for the device
        seconds = time.perf_counter() - started
        if total != size * (size + 1) / 2:
            raise RuntimeError(f"the sum over {size} processes is {total}")
    if rank == 0:
        rate = 4 * _NUMBERS * 2 * (size - 1) / size / seconds / 1e9
        sys.stdout.write(f"{size} processes, {rate:.1f} GB/s\n")
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
