"""``generation_eval:`` questions that a trained model answers."""

from typing import ClassVar

from pydantic import Field

from trainkit.options.data import Sources
from trainkit.options.section import Section


class GenerationOptions(Section):
    """After training, answer held-out conversations greedily and count exact matches."""

    at: ClassVar[str] = "generation_eval"

    data: Sources = Field(min_length=1, description="Files of conversations with their answers.")
    max_new_tokens: int = Field(128, ge=1, description="Longest answer, in tokens.")
    max_samples: int | None = Field(None, ge=1, description="Answers to ask for; null is all.")
    batch_size: int = Field(16, ge=1, description="Conversations answered at once.")
