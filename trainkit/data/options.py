"""How rows become samples: the keys of a recipe's ``data:``, and what no recipe says."""

from typing import Annotated

from pydantic import Field

from trainkit.options.data import SampleOptions

BUFFER = 4096
"""Samples of a block of a stream, by default."""


class DataOptions(SampleOptions):
    """How rows become samples. All of it, except ``CACHE_ONLY_OPTIONS``, enters the cache key."""

    chat_template: str | None = Field(
        None,
        description="The Jinja text used instead of the tokenizer's own, which then counts as "
        "changed.",
    )
    escape_special: bool = Field(
        True, description="Break up control tokens found inside message text."
    )
    stop_token_ids: Annotated[tuple[int, ...], Field(strict=False)] = Field(
        (),
        description="What generation stops at, besides the tokenizer's eos (from the model's "
        "generation_config); an end-of-turn token outside of these is warned about.",
    )
    num_embeddings: int | None = Field(
        None, description="Rows of the model's embedding; a token id beyond them stops the run."
    )
    seed: int = Field(
        0, description="Chooses the rows of max_samples and the order of samples in an epoch."
    )
    num_workers: int = Field(
        0, ge=0, description="Processes that tokenise; 0 works in the calling one."
    )
    cache_dir: str | None = Field(
        None, description="Where prepared data is kept; None is $XDG_CACHE_HOME/trainkit/data."
    )
