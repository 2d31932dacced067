"""What a model writes behind several prompts at once."""

from collections.abc import Sequence
from typing import Any

import torch


def generate_rows(
    model: Any, prompts: Sequence[Sequence[int]], pad_id: int, **how: Any
) -> list[list[int]]:
    """The token ids behind each prompt; short prompts are padded on the left, where none looks.

    Args:
        model: a transformers or peft model.
        prompts: token ids.
        pad_id: fills short rows.
        how: arguments of ``generate``; and ``kinds``, the name of one that says which tokens stand
            for images (None: there is none), with that token.
    """
    width = max(map(len, prompts))
    input_ids = torch.full((len(prompts), width), pad_id)
    attention_mask = torch.zeros_like(input_ids)
    for row, prompt in enumerate(prompts):
        input_ids[row, width - len(prompt) :] = torch.tensor(prompt)
        attention_mask[row, width - len(prompt) :] = 1
    name, token = how.pop("kinds", (None, 0))
    if name is not None:
        how[name] = (input_ids == token).long().to(model.device)
    output = model.generate(
        input_ids=input_ids.to(model.device), attention_mask=attention_mask.to(model.device), **how
    )
    rows: list[list[int]] = output[:, width:].tolist()
    return rows
