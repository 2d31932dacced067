"""What an exported model is asked, whatever program reads it; and the reader for transformers."""

import gc
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from trainkit.data import DataOptions
from trainkit.data.read.messages import Conversation, TextRow
from trainkit.data.render.template import ChatTemplate
from trainkit.infer.engine import own_attention
from trainkit.models.loading import load_model, load_tokenizer
from trainkit.options import ModelOptions


class Served(Protocol):
    """An exported model in the hands of the program that serves it, or of the nearest to it.

    Attributes:
        read_with: the program, its version, and how it computes.
    """

    read_with: str

    def prompt_ids(self, row: Conversation | TextRow) -> list[int]:
        """The token ids of a prompt as the server makes them."""

    def logits(self, input_ids: Sequence[int], start: int) -> Tensor:
        """What predicts the tokens from ``start`` on: (len(input_ids) - start, vocabulary)."""

    def close(self) -> None:
        """Let go of the model."""


class ServedTemplate:
    """Prompts as a server makes them of a directory: its template, its tokenizer, nothing else."""

    def __init__(self, source: ModelOptions) -> None:
        self.tokenizer = load_tokenizer(source)
        self._style: ChatTemplate | None = None

    def text(self, row: Conversation) -> str:
        """A conversation with the opening of an answer behind it."""
        if self._style is None:  # how a server passes messages on: text or parts, as it is read
            self._style = ChatTemplate(self.tokenizer, DataOptions())
        text = self.tokenizer.apply_chat_template(
            [self._style.as_dict(message) for message in row.messages],
            tools=None if row.tools is None else list(row.tools),
            add_generation_prompt=True,
            tokenize=False,
            **row.template_kwargs,
        )
        assert isinstance(text, str)
        return text

    def prompt_ids(self, row: Conversation | TextRow) -> list[int]:
        """Token ids: a chat's without anything added, a text's with what the tokenizer adds."""
        if isinstance(row, Conversation):
            return list(self.tokenizer.encode(self.text(row), add_special_tokens=False))
        return list(self.tokenizer.encode(row.prompt))


class TransformersServed:
    """A directory read by transformers in float32; with an adapter over it, by peft."""

    def __init__(self, source: ModelOptions, *, base: ModelOptions | None = None) -> None:
        """Load it.

        Args:
            source: weights and tokenizer; or an adapter and tokenizer.
            base: the weights under the adapter.
        """
        import transformers

        self._prompts = ServedTemplate(source)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        weights = (base or source).replace(dtype="float32")
        model: Any = load_model(
            weights, attention=own_attention(weights), device=torch.device(device)
        )
        self.read_with = f"transformers {transformers.__version__}, float32, {device}"
        if base is not None:
            from trainkit.checkpoint.weights.adapter import vocabulary_rows
            from trainkit.lora.adapter import load_adapter

            directory = Path(source.name_or_path)
            rows = vocabulary_rows(directory)
            if rows not in (None, model.get_input_embeddings().weight.shape[0]):
                model.resize_token_embeddings(rows, mean_resizing=False)
            model = load_adapter(model, directory)
            self.read_with = f"{self.read_with}, peft"
        self.model = model.eval()

    def prompt_ids(self, row: Conversation | TextRow) -> list[int]:
        """As the protocol says."""
        return self._prompts.prompt_ids(row)

    def logits(self, input_ids: Sequence[int], start: int) -> Tensor:
        """As the protocol says."""
        return predictions(self.model, input_ids, start)

    def close(self) -> None:
        """As the protocol says."""
        del self.model
        release()

    def __enter__(self) -> "TransformersServed":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@torch.inference_mode()
def predictions(model: Any, input_ids: Sequence[int], start: int) -> Tensor:
    """The logits that predict the tokens from ``start`` on, in float32 on the CPU."""
    ids = torch.tensor([list(input_ids)], device=model.device)
    logits = model(input_ids=ids, use_cache=False).logits[0, start - 1 : -1]
    return logits.float().cpu()


def release() -> None:
    """Give the memory of deleted models back."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
