"""Tokens that a recipe adds: embedding and head get rows for them.

A new row begins as the mean of the rows of the pieces that the token was cut into before, in the
embedding and, where it is not the same matrix, in the head. So the model first reads a new token
about as it read its text, and finds it about as likely as that: the start disturbs no answer, which
the random rows of a plain resize do. Rows are added one for one; nothing is rounded up, so that
peft and every server find a matrix of ``len(tokenizer)`` rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from trainkit.errors import RecipeError
from trainkit.models.tokenizer import NewTokens
from trainkit.parallel.parameters import whole_shape, written_by_all

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def grow(model: PreTrainedModel, new: NewTokens) -> None:
    """Give embedding and head rows for new tokens, which begin as the mean of their pieces' rows.

    Rows that the model has beyond its tokenizer are used first.
    """
    if not new.pieces:
        return
    rows = whole_shape(model.get_input_embeddings().weight)[0]
    if new.size > rows:
        model.resize_token_embeddings(new.size, mean_resizing=False)
    ends: list[Any] = [*vocabulary_ends(model).values()]
    bias = getattr(model.get_output_embeddings(), "bias", None)
    matrices: list[nn.Parameter] = [end.weight for end in ends] + ([] if bias is None else [bias])
    with torch.no_grad(), written_by_all(matrices):
        for matrix in matrices:
            if new.size > rows:  # also for tokens that the tokenizer had beyond the embedding
                matrix[rows : new.size] = matrix[:rows].mean(0, dtype=torch.float32)
            for row, pieces in new.pieces.items():
                if pieces:
                    matrix[row] = matrix[list(pieces)].mean(0, dtype=torch.float32)


def vocabulary_ends(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Embedding and head, by their names in the model; a tied head is not there."""
    embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
    ends: list[nn.Module] = [embeddings]
    if head is not None and head.weight is not embeddings.weight:
        ends.append(head)
    return {name: module for name, module in model.named_modules() if module in ends}


def refuse_frozen_tokens(model: PreTrainedModel) -> None:
    """Added tokens whose rows never train would stay the mean of their pieces."""
    for name, module in vocabulary_ends(model).items():
        if not any(parameter.requires_grad for parameter in module.parameters()):
            raise RecipeError(
                f"model.frozen names {name}, and the tokens of model.add_tokens would not train",
                where="model.frozen",
                fix=f"add '!{name}' to model.frozen, or remove model.add_tokens",
            )


def describe_new_tokens(new: NewTokens, rows: int | None) -> str:
    parts = []
    if new.pieces:
        first, last = min(new.pieces), max(new.pieces)
        ids = f"id {first}" if first == last else f"ids {first} to {last}"
        tokens = "token" if first == last else "tokens"
        grown = rows is not None and new.size > rows
        room = f"{rows} rows grow to {new.size}" if grown else "the embedding has rows for them"
        parts.append(f"{len(new.pieces)} {tokens} added ({ids}; {room})")
    if new.known:
        some = ", ".join(new.known[:5]) + (", ..." if len(new.known) > 5 else "")
        parts.append(f"{len(new.known)} in the vocabulary already ({some})")
    return f"vocabulary: {', '.join(parts)}"
