"""``kernels:`` which of trainkit's kernels a model takes."""

from collections.abc import Mapping
from typing import Annotated

from pydantic import AfterValidator, Field

from trainkit.options.section import broken_rule
from trainkit.options.words import did_you_mean

OPS: tuple[str, ...] = ("rms_norm", "add_rms_norm", "rope", "swiglu", "linear_cross_entropy")
"""The ops of a model, in the order of the report; each row of ``models.families`` answers all."""

LORA_OPS: tuple[str, ...] = ("lora_mlp", "lora_qkv", "lora_linear")
"""The ops of a model with adapters, in the order of the report; see ``lora.fused``."""


def _known_ops(kernels: bool | dict[str, bool]) -> bool | dict[str, bool]:
    known = (*OPS, *LORA_OPS)
    for op in kernels if isinstance(kernels, Mapping) else ():
        if op not in known:
            near = did_you_mean(op, known)
            raise broken_rule(
                f"kernels.{op}",
                f"kernels has no op {op!r}",
                f"{near or ''} The ops are {', '.join(known)}".strip(),
            )
    return kernels


Kernels = Annotated[
    bool | dict[str, bool],
    AfterValidator(_known_ops),
    Field(description="trainkit's kernels: all, none, or per op; ops not named are on."),
]
"""All, none, or a switch per op; an op that is not named is on."""
