"""``model.fp8:`` which matrix products run in 8 bits."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from trainkit.options.lora import Names
from trainkit.options.section import Section

ALL = "all"
"""No limit to what the loss may lose: every product that gains time."""


class Fp8Options(Section):
    """Products in fp8 (e4m3, quantised as they are made), as far as the loss bears it."""

    at: ClassVar[str] = "model.fp8"

    loss_budget: Annotated[float, Field(ge=0, lt=1)] | Literal["all"] = Field(
        0.005,
        description="By which share the loss may rise when products are rounded to fp8, measured "
        "on the run's own data before the first step; all: no limit.",
    )
    skip: Names = Field(
        default_factory=list,
        description="Layers that keep 16 bits: names, or parts of them between dots, as down_proj "
        "or layers.0.",
    )
    min_size: int = Field(
        16, ge=16, description="Layers with fewer inputs or outputs than this keep 16 bits."
    )
    head: Literal["bf16", "fp8"] = Field(
        "bf16", description="fp8: the output layer is measured and chosen like the others."
    )

    @classmethod
    def of(cls, value: "bool | str | Fp8Options") -> "Fp8Options | None":
        """What ``model.fp8`` says, spelt out; None for bf16 everywhere."""
        if isinstance(value, Fp8Options):
            return value
        if value == ALL:
            return cls(loss_budget=ALL)
        return cls() if value else None
