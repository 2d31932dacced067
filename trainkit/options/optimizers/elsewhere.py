"""Optimizers by the names that other tools give them, and what to write here."""

from collections.abc import Iterable, Mapping

_THE_SAME: Mapping[str, tuple[str, ...]] = {
    "adamw_torch_fused": (
        "adamw",
        "adamw_hf",
        "adamw_apex_fused",
        "fusedadam",
        "fusedadamw",
        "distributedfusedadam",
        "optimi_adamw",
    ),
    "adamw_8bit": ("adamw_bnb", "bnb_adamw_8bit"),
    "adamw_torch_8bit": ("ao_adamw_8bit",),
    "adamw_torch_4bit": ("ao_adamw_4bit", "adamw_4bit"),
    "paged_adamw_32bit": ("paged_adamw",),
    "lion_32bit": ("lion", "lion_pytorch"),
    "paged_lion_32bit": ("paged_lion",),
    "ademamix": ("ademamix_32bit",),
    "paged_ademamix_32bit": ("paged_ademamix",),
    "apollo_adamw": ("apollo",),
    "galore_adamw": ("galore",),
    "stable_adamw": ("optimi_stableadamw",),
    "rmsprop_bnb_8bit": ("rmsprop_8bit",),
    "rmsprop_bnb_32bit": ("rmsprop_32bit",),
}
_NEAREST: Mapping[str, tuple[str, ...]] = {
    "adamw_torch_fused": (
        "adam",
        "adan",
        "adopt",
        "adopt_adamw",
        "came",
        "came_pytorch",
        "nadam",
        "radam",
        "sophia",
        "sophiag",
        "prodigy",
        "dadaptation",
        "lamb",
        "adabelief",
        "adamax",
        "schedule_free",
    ),
    "adamw_8bit": ("adam_8bit", "adam_mini"),
    "paged_adamw_8bit": ("paged_adam_8bit", "cpuadam", "deepspeedcpuadam", "cpuoffloadoptimizer"),
    "paged_adamw_32bit": ("paged_adam", "paged_adam_32bit"),
    "adamw_torch_8bit": ("ao_adamw_fp8", "adamw_fp8", "adam_fp8", "ao_adamwfp8"),
    "muon": ("dion", "normuon", "soap", "shampoo", "distributed_shampoo", "muon_adamw", "muonclip"),
    "galore_adamw": ("q_galore_adamw_8bit", "q_galore", "fira"),
    "apollo_adamw": ("apollo_mini", "q_apollo"),
    "paged_adamw_8bit with optim_in_backward: true": ("badam", "lisa"),
    "sgd": ("lars", "signsgd", "asgd"),
}


def _bare(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "")


def _turned(table: Mapping[str, tuple[str, ...]]) -> dict[str, str]:
    return {_bare(other): ours for ours, others in table.items() for other in others}


_SERVED_AS, _NEAR = _turned(_THE_SAME), _turned(_NEAREST)


def served_as(name: str, served: Iterable[str]) -> str | None:
    """What is the same here as another tool's optimizer; None where nothing is.

    Args:
        name: ``ao_adamw_8bit``, ``paged_adamw``, or a class, ``bitsandbytes.optim.PagedAdamW8bit``.
        served: the names of our own.
    """
    package, _, word = name.rpartition(".")
    if package.startswith("torchao"):
        return _SERVED_AS.get("ao" + _bare(word))
    own = {_bare(each): each for each in served}
    return _SERVED_AS.get(_bare(word)) or own.get(_bare(word))


def nearest_of(name: str) -> str | None:
    """What to take in place of another tool's optimizer that is not served; None for any other."""
    return _NEAR.get(_bare(name.rpartition(".")[2]))
