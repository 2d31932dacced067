"""Ranks that train with flat_adamw; see test_train_flat."""

import os


def trained(steps=3):
    """The weights after some steps, and how many reductions each took."""
    import torch
    from torch import distributed, nn

    from trainkit.train.flat import FlatAdamW

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    distributed.init_process_group("gloo")
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(9, 20), nn.Tanh(), nn.Linear(20, 3))
    optimizer = FlatAdamW([{"params": list(layers.parameters())}], lr=1e-2, num_ranks=size)
    count, plain = 0, distributed.all_reduce

    def counted(*arguments, **options):
        nonlocal count
        count += 1
        return plain(*arguments, **options)

    distributed.all_reduce = counted
    for number in range(steps):
        rows = torch.randn(8, 9, generator=torch.Generator().manual_seed(number))
        optimizer.begin_micro_batch(layers, accumulates=False)
        layers(rows.chunk(size)[rank]).square().mean().backward()
        optimizer.clip(0.1)
        optimizer.step()
        layers.zero_grad()
    distributed.all_reduce = plain
    return {
        "weights": [parameter.flatten().tolist() for parameter in layers.parameters()],
        "reductions": count / steps,
    }
