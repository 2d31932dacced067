"""An estimate in words, for a terminal."""

from __future__ import annotations

from collections.abc import Iterator

from trainkit.estimate.advice import host_gib
from trainkit.estimate.estimate import Estimate

_WIDTH = 16


def lines(found: Estimate) -> Iterator[str]:
    plan, gpu = found.plan, found.gpu
    ranks = f"{plan.ranks} x {gpu.name}" if plan.ranks > 1 else gpu.name
    yield _line(
        "model",
        f"{plan.shape.name}: {_count(plan.shape.parameters)} parameters, "
        f"{_count(plan.trained)} trained",
    )
    yield _line(
        "step",
        f"{plan.batch_size} x {plan.length} tokens"
        + (f", {plan.accumulation} times" if plan.accumulation > 1 else ""),
    )
    yield _line("gpu", f"{ranks}, {gpu.memory_gib:.1f} GiB each")
    yield _line("peak memory", f"{found.peak.gib:.1f} GiB a GPU, at {found.peak.moment}")
    for owner, gib in found.peak.by_owner.items():
        if gib >= 0.005:
            yield f"  {owner:<{_WIDTH - 2}}{gib:8.2f} GiB"
    if host := host_gib(plan):
        yield _line("host memory", f"{host:.1f} GiB over all ranks, besides what Python takes")
    needed = f"{found.peak.needed_gib:.1f} GiB with the allocator's reserve and the driver"
    yield _line("fits", f"{'yes' if found.fits else 'NO'}: needs {needed}")
    share = f"within {found.time_band:.0%}; {found.basis}"
    yield _line(
        "speed",
        f"{found.tokens_per_second:,.0f} tokens/s, {found.step_seconds:.3g} s a step ({share})",
    )
    per_million = 1e6 / found.tokens_per_second / 3600
    hours = found.total_hours
    if hours is None:
        yield _line("time", f"{_hours(per_million)} per million tokens")
    else:
        assert found.total_tokens is not None
        yield _line(
            "time", f"{_hours(hours)} for {_count(found.total_tokens)} tokens ({found.counted})"
        )
    if not found.fits:
        if found.suggestions:
            yield "what would fit, those that train the same weights first:"
        else:
            yield "nothing in the recipe alone makes it fit: take a larger GPU, or more of them"
    for each in found.suggestions:
        cost = f"{each.time - 1:+.0%} time" if abs(each.time - 1) >= 0.005 else "the same time"
        result = "; the trained weights differ" if each.changes_result else ""
        away = f", {each.host_gib:.1f} GiB of host memory" if each.host_gib >= 0.05 else ""
        yield f"  {each.settings}\n    {each.peak_gib:.1f} GiB{away}, {cost}{result}"
    for note in found.notes:
        yield _line("note", note)


def _line(label: str, text: str) -> str:
    return f"{label:<{_WIDTH}}{text}"


def _count(number: float) -> str:
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g} {letter}"
    return f"{number:.0f}"


def _hours(hours: float) -> str:
    if hours < 1 / 60:
        return f"{hours * 3600:.0f} s"
    return f"{hours * 60:.0f} min" if hours < 2 else f"{hours:.1f} h"
