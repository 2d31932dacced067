"""How an answer is chosen: greedily, by sampling, or by beams."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trainkit.errors import RecipeError


@dataclass(frozen=True)
class SamplingOptions:
    """What the command line says; None leaves it to the model's generation settings.

    Attributes:
        temperature: above 0; lower is closer to greedy.
        top_p: sample from the likeliest tokens that make up this share, in (0, 1].
        top_k: sample from this many likeliest tokens; 0 is all.
        repetition_penalty: above 1 makes tokens already there less likely.
        num_beams: above 1 searches for the likeliest whole answer; nothing is streamed then.
    """

    max_new_tokens: int = 512
    greedy: bool = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    repetition_penalty: float | None = None
    num_beams: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        rules = (
            ("--max-new-tokens", self.max_new_tokens >= 1, "at least 1"),
            (
                "--temperature",
                self.temperature is None or 0 < self.temperature < math.inf,
                "a finite number above 0",
            ),
            ("--top-p", self.top_p is None or 0 < self.top_p <= 1, "in (0, 1]"),
            ("--top-k", self.top_k is None or self.top_k >= 0, "at least 0"),
            ("--beams", self.num_beams >= 1, "at least 1"),
            (
                "--repetition-penalty",
                self.repetition_penalty is None or 0 < self.repetition_penalty < math.inf,
                "a finite number above 0",
            ),
        )
        for option, is_kept, rule in rules:
            if not is_kept:
                fix = "give --greedy" if option == "--temperature" else None
                raise RecipeError(f"it must be {rule}", where=option, fix=fix)
        if self.greedy and self.is_sampling_asked:
            raise RecipeError(
                "it leaves nothing to sample",
                where="--greedy",
                fix="leave out --greedy, or --temperature, --top-p and --top-k",
            )

    @property
    def is_sampling_asked(self) -> bool:
        return any(value is not None for value in (self.temperature, self.top_p, self.top_k))

    def generation_config(self, own: Any, stop_ids: Sequence[int], pad_id: int | None) -> Any:
        """The model's generation settings with these on top."""
        config = type(own).from_dict(own.to_dict())
        is_sampled = not self.greedy and (bool(own.do_sample) or self.is_sampling_asked)
        is_sampled = is_sampled and (self.num_beams == 1 or self.is_sampling_asked)
        config.do_sample = is_sampled
        if is_sampled:
            config.temperature = self.temperature or own.temperature
            config.top_p = self.top_p or own.top_p
            config.top_k = own.top_k if self.top_k is None else self.top_k
        else:  # transformers warns about settings that have no effect
            config.temperature = config.top_p = config.top_k = None
        if self.repetition_penalty is not None:
            config.repetition_penalty = self.repetition_penalty
        config.num_beams = self.num_beams
        config.max_length = None
        config.max_new_tokens = self.max_new_tokens
        config.eos_token_id = list(stop_ids) or None
        config.pad_token_id = pad_id
        config.use_cache = True
        return config
