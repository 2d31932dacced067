"""Pictures of measurements."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.ops import PROVIDERS as OP_PROVIDERS

_PROVIDERS = {
    "hf_sdpa": ("Hugging Face", "#7b8794"),
    "hf_cudnn": ("Hugging Face, cuDNN attention", "#9aa5b1"),
    "hf_flash": ("Hugging Face, flash attention", "#b8c1cb"),
    "hf_efficient": ("Hugging Face, memory-efficient attention", "#3e4c59"),
    "hf_math": ("Hugging Face, plain attention", "#b8860b"),
    "torch_compile": ("torch.compile", "#5f8a72"),
    "liger_flash": ("Liger, flash attention", "#f3c98b"),
    "liger_cudnn": ("Liger, cuDNN attention", "#f0bd6e"),
    "liger": ("Liger", "#e8a33d"),
    "trainkit_compile": ("trainkit, torch.compile", "#a9c4f2"),
    "trainkit": ("trainkit", "#2f6fde"),
}
"""Names and colours, in the order of the bars."""


def draw_steps(records: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Bars of tokens per second and of peak memory, a group per model.

    Args:
        records: of ``trainkit bench step``; those with a chunk size of their own are left out.
        path: the PNG to write.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    records = [r for r in records if r.get("loss_chunk_tokens") is None]
    cases = list(dict.fromkeys(r["case"] for r in records if r["metric"] == "ms"))
    providers = [p for p in _PROVIDERS if any(r["provider"] == p for r in records)]
    figure, axes = pyplot.subplots(1, 2, figsize=(13, 4.2))
    for axis, metric, title in (
        (axes[0], "tokens_per_second", "training speed, tokens/s of Liger = 1"),
        (axes[1], "peak_memory_gib", "peak memory, GiB"),
    ):
        values = {(r["case"], r["provider"]): r["value"] for r in records if r["metric"] == metric}
        width = 0.88 / len(providers)
        for place, provider in enumerate(providers):
            for group, case in enumerate(cases):
                value = values.get((case, provider))
                if value is None:
                    continue
                base = values.get((case, "liger"), value) if axis is axes[0] else 1.0
                x = group + (place - (len(providers) - 1) / 2) * width
                color = _PROVIDERS[provider][1]
                axis.bar(x, value / base, width * 0.94, color=color)
                text = f"{value / base:.2f}" if axis is axes[0] else f"{value:.0f}"
                axis.text(x, value / base, text, ha="center", va="bottom", fontsize=6)
        axis.set_xticks(range(len(cases)), cases)
        axis.set_title(title, fontsize=10)
        axis.spines[["top", "right"]].set_visible(False)
        axis.margins(y=0.1)
    names, colors = zip(*(_PROVIDERS[provider] for provider in providers), strict=True)
    swatches = [pyplot.Rectangle((0, 0), 1, 1, color=color) for color in colors]
    figure.legend(swatches, names, fontsize=8, frameon=False, loc="lower center", ncols=4)
    gpu = next(iter(records))["gpu"]
    figure.suptitle(f"Forward and backward, bf16, one {gpu}", fontsize=10)
    figure.tight_layout(rect=(0, 0.12, 1, 1))
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def draw_curves(losses: Mapping[str, Sequence[float]], path: Path) -> None:
    """Loss curves over one another, and below how far each is from the first.

    Args:
        losses: per run the loss of every step; the first is what the others are compared with.
        path: the PNG to write.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    base_name = next(iter(losses))
    figure, (top, bottom) = pyplot.subplots(
        2, 1, figsize=(8, 5), sharex=True, height_ratios=(2, 1), constrained_layout=True
    )
    for name, values in losses.items():
        label, color = _PROVIDERS[name]
        top.plot(values, color=color, label=label, linewidth=1.2)
        if name != base_name:
            gaps = [abs(a - b) for a, b in zip(values, losses[base_name], strict=True)]
            bottom.plot(gaps, color=color, linewidth=0.9)
    top.set_ylabel("loss")
    top.legend(frameon=False)
    bottom.set_yscale("log")
    base_label = _PROVIDERS[base_name][0].replace(", ", ",\n")
    bottom.set_ylabel(f"distance to\n{base_label}")
    bottom.set_xlabel("optimizer step")
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


_Shares = dict[str, dict[tuple[str, str], dict[str, float]]]
_PAIRED = 6  # sizes of an op that still fit half of the width
_COLOURS = {
    "trainkit": "#d1495b",
    "quack": "#edae49",
    "liger": "#00798c",
    "torch_compile": "#66a182",
    "eager": "#8d96a3",
}


def draw_ops(records: Iterable[Mapping[str, Any]], path: Path) -> None:
    """Draw the share of the copy bandwidth that each provider reaches.

    Kernel time alone; events around the call where a provider waits for the device.

    Args:
        records: of the benchmark ``ops``.
        path: the PNG file.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shares: _Shares = {}
    gpu = ""
    for record in sorted(records, key=lambda record: record.get("clock") == "kernel"):
        if record["metric"] != "share_of_copy" or record.get("clock") not in ("autograd", "kernel"):
            continue
        gpu = record["gpu"]
        group = shares.setdefault(record["op"], {})
        bars = group.setdefault((record["size"], record["pass"]), {})
        bars[record["provider"]] = 100 * record["value"]
    figure, axes = pyplot.subplot_mosaic(_rows(shares), figsize=(11, 2.2 * len(_rows(shares))))
    for op, group in shares.items():
        _draw_op(axes[op], op, group)
    axes[next(iter(shares))].legend(
        ncols=len(OP_PROVIDERS) + 1, fontsize=8, loc="upper right", bbox_to_anchor=(1, 1.35)
    )
    figure.suptitle(f"Share of the copy bandwidth, bf16, {gpu}", fontsize=11)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _rows(shares: _Shares) -> list[list[str]]:
    """Ops of many sizes get a row to themselves, the others share one in pairs."""
    wide = [[op, op] for op, group in shares.items() if len(group) > _PAIRED]
    small = [op for op, group in shares.items() if len(group) <= _PAIRED]
    pairs = [small[at : at + 2] for at in range(0, len(small), 2)]
    return wide + [pair if len(pair) == 2 else pair * 2 for pair in pairs]


def _draw_op(axis: Any, op: str, group: Mapping[tuple[str, str], Mapping[str, float]]) -> None:
    drawn = [name for name in OP_PROVIDERS if any(name in place for place in group.values())]
    width = 0.8 / len(drawn)
    for index, provider in enumerate(drawn):
        at = [number + (index - (len(drawn) - 1) / 2) * width for number in range(len(group))]
        values = [bars.get(provider, 0.0) for bars in group.values()]
        axis.bar(at, values, width, color=_COLOURS[provider], label=provider)
    for position, bars in enumerate(group.values()):
        if "copy" in bars:
            label = "a copy of the same bytes" if position == 0 else None
            axis.hlines(
                bars["copy"], position - 0.45, position + 0.45, color="black", lw=1, label=label
            )
    axis.set_title(op, loc="left", fontsize=10, fontweight="bold")
    axis.set_xticks(range(len(group)), [f"{size}\n{way}" for size, way in group], fontsize=7)
    axis.set_xlim(-0.6, max(len(group), 3) - 0.4)
    axis.set_ylim(0, 110)
    axis.set_ylabel("% of copy", fontsize=8)
    axis.grid(axis="y", alpha=0.3)
