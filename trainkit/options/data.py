"""``data:`` what a model is trained on, and how rows become samples and batches."""

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Discriminator,
    Field,
    Tag,
    WithJsonSchema,
    model_validator,
)

from trainkit.errors import RecipeError
from trainkit.options.section import ACTS, CONSENT, OnResume, Section, broken_rule, one_of
from trainkit.places import regular

IGNORE_INDEX = -100
"""The label of a token that is not trained, as torch and transformers have it."""

ROW_FORMATS: dict[str, str] = {
    "messages": "OpenAI's and trl's: {role, content} turns",
    "sharegpt": "{from, value} turns",
    "belle": "Belle's Human: and Assistant: in one text",
    "alpaca": "instruction, input and output",
    "moss": "MOSS's turns",
    "leetcode": "a problem and its solution",
    "prompt_completion": "a prompt and what follows it",
    "text": "plain text, all of it trained",
    "tokens": "input_ids, with labels or masks",
    "template": "any columns: Jinja templates in `columns` make prompt and completion of them",
    "distilled": "input_ids and labels with a teacher's most likely tokens at each trained place",
    "rated": "a prompt and an answer, with `label` or `kto_tag`: whether it is a good one",
    "preference": "two answers to one prompt, the better one as `chosen`",
}
"""The names of ``trainkit.data.formats.FORMATS``, with what a row holds."""


RowFormat = Annotated[
    str,
    AfterValidator(lambda name: one_of(name, ("auto", *ROW_FORMATS))),
    WithJsonSchema({"type": "string", "enum": ["auto", *ROW_FORMATS]}),
]

Role = Literal["system", "developer", "user", "assistant", "tool"]
"""Who says a message, as trainkit holds conversations."""

ROLES: tuple[str, ...] = get_args(Role)


class Source(Section):
    """A source of conversations."""

    at: ClassVar[str] = "data.train[]"

    path: str = Field(min_length=1, description="A file, a directory or a glob.")
    weight: float | None = Field(
        None,
        ge=0,
        le=1e6,
        description="Share of the mixture, relative to the other weights; 0 is none of it.",
    )
    max_samples: int | None = Field(
        None, ge=1, description="Rows to draw, by a seeded choice; also written FILE#N."
    )
    epochs: float = Field(1.0, gt=0, le=1000, description="How often its rows appear in one epoch.")
    format: RowFormat = Field("auto", description="Of the rows; auto looks at them.")
    name: str | None = Field(None, description="For logs; the file's name without it.")
    split: str = Field("train", description="Of a hub data set.")
    subset: str | None = Field(None, description="Of a hub data set: its configuration's name.")
    files: list[str] = Field(
        default_factory=list, description="Of a hub data set: the files to read, not all of them."
    )
    columns: dict[str, str] = Field(
        default_factory=dict,
        description="Our column name to the file's: {messages: dialog}; or a Jinja template of the "
        "row's columns, of lists as JSON: {instruction: 'Q: {{ q }}', output: a}. With one, the "
        "row has no other columns; one for which the template `where` is false is left out.",
    )
    roles: Annotated[list[Role], Field(strict=False)] = Field(
        default_factory=list, description="Trained roles of this source; empty is data.roles."
    )

    @model_validator(mode="before")
    @classmethod
    def _spelled_out(cls, value: Any) -> Any:
        """``FILE#N`` is ``{path: FILE, max_samples: N}``, unless a file has that very name."""
        if isinstance(value, str):
            value = {"path": value}
        if isinstance(value, dict) and isinstance(value.get("path"), str):
            path, mark, count = value["path"].rpartition("#")
            if mark and path and count.isdecimal() and not _exists(value["path"]):
                if value.get("max_samples") is not None:
                    raise broken_rule(
                        "max_samples",
                        f"{value['path']} already says how many samples",
                        "remove #N or max_samples",
                    )
                value = {**value, "path": path, "max_samples": int(count)}
        return value

    @model_validator(mode="after")
    def _templates_fit(self) -> "Source":
        if self.format == "template" and not {"completion"} <= {*self.columns} <= {
            "prompt",
            "completion",
            "where",
        }:
            raise broken_rule(
                "columns",
                "`format: template` makes the prompt and the trained completion of a row's columns",
                "write `columns: {prompt: 'Q: {{ question }}', completion: '{{ answer }}'}`",
            )
        return self

    @property
    def label(self) -> str:
        """What logs call it: its name, or that of its file."""
        return self.name or Path(self.path).name.split(".")[0]


def _exists(path: str) -> bool:
    return os.path.exists(Path(path).expanduser())  # noqa: PTH110 - Path.exists raises for long names


def _sources(value: Any) -> Any:
    return [value] if isinstance(value, str | dict) else value


def _count_or_share(value: Any) -> Any:
    if isinstance(value, str) and value.endswith("%"):
        with contextlib.suppress(ValueError):  # refused below
            value = float(value[:-1]) / 100
    is_share = isinstance(value, float) and 0 <= value <= 1
    is_count = isinstance(value, int) and not isinstance(value, bool) and value >= 0
    if not (value is None or is_share or is_count):
        raise ValueError("must be a count such as 20, a share such as 1%, or null")
    return value


_EVAL_RULE = "must be files, a share such as 2% or 0.02, or a count such as 500"


def _kind_of_eval(value: Any) -> str:
    """Which of its forms ``data.eval`` has, so that errors are those of that form."""
    return "part" if isinstance(value, int | float) else "sources"


def _files_or_part(value: Any) -> Any:
    """``2%`` and 0.02 are a share of the training data, 500 so many conversations of it."""
    if isinstance(value, str) and value.endswith("%"):
        with contextlib.suppress(ValueError):  # a file may be called so
            return float(value[:-1]) / 100
    if isinstance(value, bool):
        raise ValueError(_EVAL_RULE)
    return value if isinstance(value, int | float) else _sources(value)


def _part_of_data(value: int | float) -> int | float:
    is_share = isinstance(value, float) and 0 < value < 1
    is_count = isinstance(value, int) and not isinstance(value, bool) and value >= 1
    if not (is_share or is_count):
        raise ValueError(_EVAL_RULE)
    return value


Sources = Annotated[
    list[Source],
    BeforeValidator(_sources, json_schema_input_type=list[Source | str] | Source | str),
]


class _Files(Section):
    """The first keys of ``data:``."""

    at: ClassVar[str] = "data"

    train: Sources = Field(min_length=1, description="Files to train on.")
    eval: Annotated[
        Annotated[list[Source], Tag("sources")]
        | Annotated[int | float, AfterValidator(_part_of_data), Tag("part")],
        Discriminator(_kind_of_eval),
        BeforeValidator(
            _files_or_part, json_schema_input_type=list[Source | str] | Source | str | int | float
        ),
        OnResume(ACTS),
    ] = Field(
        default_factory=list,
        description="Held-out files, or how much of the training data to hold out: 2%, 0.02, or "
        "so many conversations. Turns evaluation on.",
    )

    @property
    def eval_sources(self) -> list[Source]:
        return self.eval if isinstance(self.eval, list) else []

    @property
    def eval_part(self) -> int | float | None:
        """How much of the training data is held out: a share below 1 or a count; None is none."""
        return None if isinstance(self.eval, list) else self.eval


SCALING = ("multiple_of", "max_pixels", "min_pixels", "max_width", "processor")
"""Keys of ``data.images`` that decide the pixels that a model sees."""


class ImageOptions(Section):
    """How the images of rows are found and read."""

    at: ClassVar[str] = "data.images"
    on_resume: ClassVar[str] = CONSENT

    folder: str | None = Field(
        None,
        description="Where the relative paths of images start that are not next to their file of "
        "rows.",
    )
    fetch: str | None = Field(
        None,
        description="A folder for images on http and https: each is fetched once, while rows are "
        "prepared, and read from there. Null refuses them.",
    )
    max_file_pixels: int = Field(
        100_000_000,
        ge=1,
        le=178_000_000,
        description="A file with more pixels is not opened: its row is dropped.",
    )
    max_pixels: int | None = Field(
        None,
        ge=1024,
        description="Images of more pixels are scaled down to it (bicubic) before the model's "
        "image processor sees them.",
    )
    min_pixels: int | None = Field(
        None, ge=1, description="Images of fewer pixels are scaled up to it, likewise."
    )
    max_width: int | None = Field(
        None, ge=16, description="Wider images are scaled down to it (Lanczos), likewise."
    )
    multiple_of: int | None = Field(
        None,
        ge=2,
        description="Sides are brought to a multiple of it before all that, as qwen_vl_utils does.",
    )
    processor: dict[str, Any] = Field(
        default_factory=dict,
        description="Settings of the model's image processor over those of its file: {size: "
        "{shortest_edge: 3136, longest_edge: 1003520}}.",
    )

    mask: Literal["frame", "placeholders", "none"] = Field(
        "frame",
        description="What never trains of a turn that does: placeholders and the tokens around and "
        "between them; placeholders alone; nothing, as TRL has it.",
    )

    @model_validator(mode="after")
    def _one_way_of_scaling(self) -> "ImageOptions":
        if self.max_width is not None and (self.max_pixels or self.min_pixels):
            raise broken_rule(
                "data.images.max_width",
                "images are scaled by their width or by their pixels, not both",
                "keep max_width, or max_pixels and min_pixels",
            )
        if self.max_pixels and self.min_pixels and self.min_pixels > self.max_pixels:
            raise broken_rule(
                "data.images.min_pixels",
                f"{self.min_pixels} is above data.images.max_pixels: {self.max_pixels}",
                "lower it",
            )
        return self

    @property
    def scaling(self) -> dict[str, Any]:
        """What of `SCALING` is not the default."""
        return {key: value for key in SCALING if (value := getattr(self, key))}


class SampleOptions(Section):
    """How rows become samples: the keys of ``data:`` that packages below the recipe take.

    Whatever decides the tokens of a sample, or its mask, is a key here and enters the cache's key.
    """

    at: ClassVar[str] = "data"

    max_length: int = Field(2048, ge=2, description="Longest sample, and packed row, in tokens.")
    mask: Literal["assistant", "last_assistant", "none"] = Field(
        "assistant", description="Which turns are trained; none trains every token (pretraining)."
    )
    truncation: Literal["drop_turns", "drop", "error", "right", "left_turns"] = Field(
        "drop_turns",
        description="For samples over max_length: leave out the last turns, drop the sample, stop, "
        "cut at the right, or leave out the first turns.",
    )
    thinking: Literal["template", "split", "preserve", "empty"] = Field(
        "template",
        description="Earlier turns' <think> parts: as the chat template shows them, one sample a "
        "turn, or kept; `empty` is as `template`, and an empty one trains with its answer.",
    )
    roles: Annotated[list[Role], Field(strict=False)] = Field(
        ["assistant"], min_length=1, description="The roles trained."
    )
    system_policy: str = Field(
        "keep", description="keep, none (remove system turns), or a text for all conversations."
    )
    template_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="For the chat template: {enable_thinking: false}."
    )
    append_eos: bool = Field(
        False, description="End every answer that the template leaves open with the eos token."
    )
    end_texts: Literal[True, False, "line_break"] = Field(
        True,
        description="End rows of text, which no chat template renders, with the eos token; "
        "line_break leaves them as they are, and trains the line break that a template puts behind "
        "an answer's end, as most other tools do.",
    )
    train_behind: str = Field(
        "",
        description="A text in answers behind which they train, as <|channel|>final<|message|>; "
        "answers without it do not.",
    )
    min_length: int = Field(
        1,
        ge=1,
        description="Shorter samples, in tokens, are left out; they do not count as max_dropped.",
    )
    deduplicate: bool = Field(
        False,
        description="Leave out rows that are exact copies of one before: the same tokens, images "
        "and mask. Of evaluation data, also copies of trained rows.",
    )
    max_dropped: Annotated[
        int | float | None,
        BeforeValidator(_count_or_share, json_schema_input_type=int | float | str | None),
        OnResume(ACTS),
    ] = Field(
        None,
        description="Unusable rows allowed before the run stops: a count, a share (1% or 0.01), "
        "or null for 1%. A share also allows for as many trained tokens lost to max_length.",
    )
    images: ImageOptions = ImageOptions()


class DataSection(SampleOptions, _Files):
    """What it is trained on, and how conversations become batches.

    Relative paths start at the directory the command is typed in. The order of the samples follows
    ``training.seed`` and ``training.data_seed``.
    """

    on_resume: ClassVar[str] = CONSENT

    packing: bool = Field(
        True, description="Put several complete samples into one row; they do not see each other."
    )
    format: RowFormat = Field(
        "auto", description="Of the rows, for sources that do not say their own."
    )
    chat_template: str | None = Field(
        None, description="A Jinja template, or a file with one, instead of the tokenizer's own."
    )
    cache_dir: Annotated[str | None, OnResume(ACTS)] = Field(
        None, description="Where tokenised data is kept; null is the user's cache directory."
    )
    num_workers: Annotated[int | None, OnResume(ACTS)] = Field(
        None, ge=0, le=1024, description="Processes that tokenise; null is one a core."
    )
    streaming: bool | Annotated[int, Field(ge=1)] = Field(
        False,
        description="Read the training rows as they are needed and keep nothing on disk; a number "
        "is the samples shuffled together, true is 4096. Needs training.max_steps.",
    )
    per_source_loss: Annotated[bool | None, OnResume(ACTS)] = Field(
        None, description="Log the loss of each source; null does where there are several."
    )

    @model_validator(mode="after")
    def _sources_are_shown(self) -> "DataSection":
        if all(source.weight == 0 for source in self.train):
            raise broken_rule(
                "data.train",
                "every source has weight 0, so there is nothing to train on",
                "give one of them a weight above 0",
            )
        if self.streaming and self.deduplicate:
            raise broken_rule(
                "data.deduplicate",
                "a stream does not keep what it has read",
                "remove streaming, or leave the copies out of the files",
            )
        if self.streaming and self.eval_part is not None:
            raise broken_rule(
                "data.eval",
                "streamed rows are read as they are needed, so none can be chosen beforehand",
                "give held-out files, or remove streaming",
            )
        for index, source in enumerate(self.eval_sources):
            if source.weight is not None or source.epochs != 1:
                key = "epochs" if source.weight is None else "weight"
                raise broken_rule(
                    "data.eval",
                    f"data.eval[{index}].{key} has no effect: evaluation shows every row once",
                    "remove it; max_samples evaluates a part",
                )
        return self

    def with_format(self, sources: list[Source]) -> tuple[Source, ...]:
        return tuple(
            source.replace(format=self.format) if source.format == "auto" else source
            for source in sources
        )


# -- Tokens that a recipe adds to a model's vocabulary: a list, or a file with one a line -----


MAX_TOKENS = 100_000
"""More is another tokenizer, which is trained, not added."""


def read_tokens(choice: str | Sequence[str], key: str) -> tuple[str, ...]:
    """The tokens themselves.

    Args:
        choice: the tokens, or the path of a text file with one a line; blank lines do not count.
        key: of the recipe, for messages.
    """
    if not isinstance(choice, str):
        return _checked(choice, key, [key] * len(choice))
    path = Path(choice).expanduser()
    try:
        lines = regular(path, RecipeError).read_text(encoding="utf-8-sig").split("\n")
    except (OSError, ValueError) as error:
        raise RecipeError(
            f"{key}: {path.absolute()} cannot be read: {error}",
            where=key,
            fix="give a list of tokens, or a UTF-8 text file with one token a line",
        ) from error
    kept = {number: line.rstrip("\r") for number, line in enumerate(lines, 1) if line.strip()}
    return _checked(list(kept.values()), key, [f"{path}:{number}" for number in kept])


def _checked(tokens: Sequence[str], key: str, places: Sequence[str]) -> tuple[str, ...]:
    first: dict[str, str] = {}
    for token, place in zip(tokens, places, strict=True):
        if not token.strip() or "\0" in token:
            raise RecipeError(f"{key}: {token!r} is no token", where=place, fix="remove it")
        if token in first:
            raise RecipeError(
                f"{key}: {token!r} is given twice", where=place, fix="remove one of the two"
            )
        first[token] = place
    if not 0 < len(first) <= MAX_TOKENS:
        raise RecipeError(
            f"{key}: 1 to {MAX_TOKENS:,} tokens can be added, and these are {len(first):,}",
            where=key,
            fix="remove the key, or train a tokenizer of your own",
        )
    return tuple(first)
