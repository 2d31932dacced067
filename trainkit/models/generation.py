"""What a model writes behind several prompts at once."""

import traceback
from collections.abc import Sequence
from typing import Any

import torch
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)

from trainkit.auto_class import without_adapters
from trainkit.evaluation_mode import changed
from trainkit.models.context import table_of
from trainkit.models.tokenizer import unusable


def generate_rows(
    model: Any,
    prompts: Sequence[Sequence[int]],
    pad_id: int,
    context: int | None = None,
    **how: Any,
) -> list[list[int]]:
    """The token ids behind each prompt; short prompts are padded on the left, where none looks.

    Args:
        model: a transformers or peft model.
        prompts: token ids.
        pad_id: fills short rows.
        context: so many tokens end a row; with a table of positions that has to be its size.
        how: arguments of ``generate``; and ``kinds``, the name of one that says which tokens stand
            for images (None: there is none), with that token.
    """
    width = max(map(len, prompts))
    wanted: int = how.get("max_new_tokens") or how["generation_config"].max_new_tokens
    table = table_of(model.config.get_text_config().to_dict(), model)
    context = table if context is None else context
    if table is not None and width + wanted > table:  # a full row would read on behind it
        if len(prompts) > 1:
            alone = (generate_rows(model, [each], pad_id, context, **how) for each in prompts)
            return [row for rows in alone for row in rows]
        if width >= table:
            return [[]]
    if context is not None and width + wanted > context:
        full = _ContextIsFull(context, [width - len(prompt) for prompt in prompts])
        criteria = [*how.get("stopping_criteria", ()), full]
        how["stopping_criteria"] = StoppingCriteriaList(criteria)
    input_ids = torch.full((len(prompts), width), pad_id)
    attention_mask = torch.zeros_like(input_ids)
    for row, prompt in enumerate(prompts):
        input_ids[row, width - len(prompt) :] = torch.tensor(prompt)
        attention_mask[row, width - len(prompt) :] = 1
    name, token = how.pop("kinds", (None, 0))
    if name is not None:
        how[name] = (input_ids == token).long().to(model.device)
    how["input_ids"] = input_ids.to(model.device)
    how["attention_mask"] = attention_mask.to(model.device)
    rows_alone = {"num_return_sequences": 1, "return_dict_in_generate": False}
    if "generation_config" in how:
        how["generation_config"].update(**rows_alone)
    else:
        how |= rows_alone
    try:
        output = model.generate(**how)
    except (ValueError, TypeError, LookupError) as error:
        *_, (frame, _) = traceback.walk_tb(error.__traceback__)
        if "/transformers/generation/" not in frame.f_code.co_filename:
            raise
        raise unusable(str(error), str(model.config.name_or_path)) from error
    rows: list[list[int]] = output[:, width:].tolist()
    return rows


def draw_rows(
    model: Any,
    prompts: Sequence[Sequence[int]],
    seeds: Sequence[int],
    stop_ids: Sequence[int],
    pad_id: int,
    *,
    max_new_tokens: int,
    temperature: float,
) -> list[list[int]]:
    """Answers drawn from the model's own distribution, each up to its stop token.

    Each row has random numbers of its own seed: what it is batched with does not change it.
    """
    table = table_of(model.config.get_text_config().to_dict(), model)
    if len(prompts) > 1 and table is not None and max(map(len, prompts)) + max_new_tokens > table:
        how: dict[str, Any] = {"max_new_tokens": max_new_tokens, "temperature": temperature}
        return [
            draw_rows(model, [prompt], [seed], stop_ids, pad_id, **how)[0]
            for prompt, seed in zip(prompts, seeds, strict=True)
        ]
    noise = _Noise(seeds, temperature, model.device)
    base = without_adapters(model)
    # Without the settings that a model is published with, such as a penalty on repetitions.
    with changed([(base, "generation_config", GenerationConfig())]):
        rows = generate_rows(
            model,
            prompts,
            pad_id,
            max_new_tokens=max_new_tokens,
            do_sample=False,
            use_cache=True,
            pad_token_id=pad_id,
            eos_token_id=list(stop_ids) or None,
            logits_processor=LogitsProcessorList([noise]),
        )
    ends = (next((i + 1 for i, each in enumerate(row) if each in stop_ids), None) for row in rows)
    return [row[:end] for row, end in zip(rows, ends, strict=True)]


class _Noise(LogitsProcessor):
    """Adds what makes the likeliest token one that is drawn (Gumbel-max).

    In fp64: the noise of an unlikely token may have to be drawn from far out in its tail.
    """

    def __init__(self, seeds: Sequence[int], temperature: float, device: torch.device) -> None:
        self._temperature = temperature
        self._generators = [torch.Generator(device).manual_seed(seed) for seed in seeds]

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        logits = scores.double() / self._temperature
        rows = zip(logits, self._generators, strict=True)
        noise = [torch.empty_like(row).exponential_(generator=each) for row, each in rows]
        return logits - torch.stack(noise).log()


class _ContextIsFull(StoppingCriteria):
    """Ends each row of a batch where its own tokens fill the model's context."""

    def __init__(self, context: int, padding: Sequence[int]) -> None:
        self._context = context
        self._padding = torch.tensor(padding)

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        beams = input_ids.shape[0] // len(self._padding)
        lengths = input_ids.shape[1] - self._padding.repeat_interleave(beams)
        return (lengths >= self._context).to(input_ids.device)
