"""The picture of ``trainkit bench ops``: every op and size, peers side by side."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from trainkit.bench.op_cases import PROVIDERS

_COLOURS = {
    "trainkit": "#d1495b",
    "quack": "#edae49",
    "liger": "#00798c",
    "torch_compile": "#66a182",
    "eager": "#8d96a3",
}


def draw_ops(records: Iterable[Mapping[str, Any]], path: Path) -> None:
    """Draw the share of the copy bandwidth that each provider reaches, kernel time alone.

    Args:
        records: of the benchmark ``ops``.
        path: the PNG file.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shares: dict[str, dict[tuple[str, str], dict[str, float]]] = {}
    gpu = ""
    for record in records:
        if record["metric"] != "share_of_copy" or record.get("clock") != "kernel":
            continue
        gpu = record["gpu"]
        group = shares.setdefault(record["op"], {})
        place = group.setdefault((record["size"], record["pass"]), {})
        place[record["provider"]] = 100 * record["value"]
    figure, axes = pyplot.subplots(len(shares), 1, figsize=(11, 2.3 * len(shares)), squeeze=False)
    for axis, (op, group) in zip(axes[:, 0], shares.items(), strict=True):
        for index, provider in enumerate(PROVIDERS):
            values = [place.get(provider, 0.0) for place in group.values()]
            at = [position + (index - 2) * 0.16 for position in range(len(values))]
            axis.bar(at, values, 0.16, color=_COLOURS[provider], label=provider)
        axis.set_title(op, loc="left", fontsize=10, fontweight="bold")
        axis.set_xticks(range(len(group)), [f"{size}\n{way}" for size, way in group], fontsize=8)
        axis.set_ylim(0, 105)
        axis.set_ylabel("% of copy", fontsize=8)
        axis.grid(axis="y", alpha=0.3)
    axes[0, 0].legend(ncols=len(PROVIDERS), fontsize=8, loc="upper right", bbox_to_anchor=(1, 1.35))
    figure.suptitle(f"Share of the copy bandwidth, kernel time, bf16, {gpu}", fontsize=11)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
