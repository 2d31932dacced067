"""What of a run is not the plain model: its attention, kernels and products in fp8."""

from collections.abc import Mapping, Sequence
from typing import Any

from trainkit.run.format import format_number
from trainkit.run.report.page import details, paragraph, table


def kernels_section(kernels: Mapping[str, Any] | None) -> str:
    """Attention, what kernels replaced, and how they compare with the plain model."""
    if not kernels:
        return ""
    parts = []
    attention = kernels.get("attention")
    if attention:
        parts.append(paragraph(f"Attention: {attention.get('name')}, {attention.get('reason')}."))
    rows = [
        (row["op"], row["status"], row["num_modules"], row["reason"])
        for row in (*kernels.get("ops", ()), *kernels.get("lora", ()))
    ]
    if rows:
        parts.append(table(("op", "status", "modules", "reason"), rows))
    checks: Sequence[Mapping[str, Any]] = kernels.get("self_check", ())
    if checks:
        keys = list(dict.fromkeys(key for row in checks for key in row))
        cells = [[figure(row.get(key)) for key in keys] for row in checks]
        parts.append(details("Self-check before training", table(keys, cells)))
    return "".join(parts)


def fp8_section(kernels: Mapping[str, Any] | None) -> str:
    """Which groups of layers multiply in fp8, what that saves and what it costs."""
    chosen: Mapping[str, Any] | None = (kernels or {}).get("fp8")
    if not chosen:
        return ""
    groups: Sequence[Mapping[str, Any]] = chosen.get("groups", ())
    if not groups:
        number = sum(row["number"] for row in chosen.get("layers", ()))
        return paragraph(f"{number} linear layers of the base are in fp8, whatever that costs.")
    budget = chosen["policy"]["loss_budget"]
    about = [
        f"Saves {chosen['saved_ms']:.3g} of {chosen['most_ms']:.3g} ms a micro-batch "
        f"({chosen['timing']})."
    ]
    loss, cost = chosen.get("loss"), chosen.get("loss_increase")
    if loss is None or cost is None:
        about.append("What it costs was not measured, since no budget limits it.")
    else:
        about.append(
            f"Costs {cost:.4f} nats before training, {cost / max(loss, 1e-9):.2%} of the loss "
            f"{loss:.4f} on {chosen['num_tokens']} tokens; the budget is {budget:.2%}."
        )
    rows = [
        (
            group["group"],
            len(group["layers"]),
            group["runs"],
            figure(group["loss_increase"]),
            f"{group['forward_ms']:.3g}",
            f"{group['backward_ms']:.3g}",
            group["reason"],
        )
        for group in groups
    ]
    rows += [
        (reason, number, "16 bits", "", "", "", "") for reason, number in chosen["kept"].items()
    ]
    heads = ("group", "layers", "runs", "costs, nats", "forward, ms", "backward, ms", "why not all")
    return "".join(map(paragraph, about)) + table(heads, rows)


def figure(value: Any) -> str:
    """A value of a table's cell."""
    if value is None:
        return ""
    return format_number(value) if isinstance(value, float) else str(value)
