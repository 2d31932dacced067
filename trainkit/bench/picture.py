"""Pictures of measurements."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_COLORS = {
    "hf_sdpa": "#9aa5b1",
    "hf_flash": "#616e7c",
    "hf_cudnn": "#7b8794",
    "hf_efficient": "#3e4c59",
    "hf_math": "#b8860b",
    "torch_compile": "#cbd2d9",
    "liger": "#e8a33d",
    "liger_flash": "#c07f1d",
    "liger_cudnn": "#f0bd6e",
    "trainkit": "#2f6fde",
    "trainkit_compile": "#8fb3ee",
}
_NAMES = {
    "hf_sdpa": "Hugging Face",
    "hf_flash": "Hugging Face, flash attention",
    "hf_cudnn": "Hugging Face, cuDNN attention",
    "hf_efficient": "Hugging Face, memory-efficient attention",
    "hf_math": "Hugging Face, plain attention",
    "torch_compile": "torch.compile",
    "liger": "Liger",
    "liger_flash": "Liger, flash attention",
    "liger_cudnn": "Liger, cuDNN attention",
    "trainkit_compile": "trainkit, torch.compile",
}


def draw_steps(records: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Bars of tokens per second and of peak memory, a group per model.

    Args:
        records: of ``trainkit bench step``.
        path: the PNG to write.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    cases = list(dict.fromkeys(r["case"] for r in records if r["metric"] == "ms"))
    providers = [p for p in _COLORS if any(r["provider"] == p for r in records)]
    figure, axes = pyplot.subplots(1, 2, figsize=(11, 3.6), constrained_layout=True)
    for axis, metric, title in (
        (axes[0], "tokens_per_second", "training speed, tokens/s of Liger = 1"),
        (axes[1], "peak_memory_gib", "peak memory, GiB"),
    ):
        values = {(r["case"], r["provider"]): r["value"] for r in records if r["metric"] == metric}
        width = 0.8 / len(providers)
        for place, provider in enumerate(providers):
            for group, case in enumerate(cases):
                value = values.get((case, provider))
                if value is None:
                    continue
                base = values.get((case, "liger"), value) if axis is axes[0] else 1.0
                x = group + (place - (len(providers) - 1) / 2) * width
                label = _NAMES.get(provider, provider) if group == 0 else None
                axis.bar(x, value / base, width * 0.94, color=_COLORS[provider], label=label)
                text = f"{value / base:.2f}" if axis is axes[0] else f"{value:.0f}"
                axis.text(x, value / base, text, ha="center", va="bottom", fontsize=7)
        axis.set_xticks(range(len(cases)), cases)
        axis.set_title(title, fontsize=10)
        axis.spines[["top", "right"]].set_visible(False)
        axis.margins(y=0.12)
    axes[0].legend(fontsize=7, frameon=False, loc="upper right", ncols=2)
    gpu = next(iter(records))["gpu"]
    figure.suptitle(f"Forward and backward, bf16, one {gpu}", fontsize=10)
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
        color, label = _COLORS.get(name), _NAMES.get(name, name)
        top.plot(values, color=color, label=label, linewidth=1.2)
        if name != base_name:
            gaps = [abs(a - b) for a, b in zip(values, losses[base_name], strict=True)]
            bottom.plot(gaps, color=color, linewidth=0.9)
    top.set_ylabel("loss")
    top.legend(frameon=False)
    bottom.set_yscale("log")
    bottom.set_ylabel(f"distance to\n{_NAMES.get(base_name, base_name)}")
    bottom.set_xlabel("optimizer step")
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
