"""NEFTune: noise on the embeddings while a model trains (``training.neftune_noise_alpha``)."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainkit.train.hooks import Hook, LoopState


class EmbeddingNoise(Hook):
    """Uniform noise of at most alpha / sqrt(tokens of a row * hidden size)."""

    _handle: Any = None

    def begin(self, loop: LoopState, checkpoint: Path | None) -> None:
        """Put it in."""
        alpha = loop.args.neftune_noise_alpha

        def disturb(module: nn.Module, _: Any, embedded: torch.Tensor) -> torch.Tensor:
            if not module.training:
                return embedded
            size = float(alpha / torch.tensor(embedded.shape[1] * embedded.shape[2]).sqrt())
            return embedded + torch.zeros_like(embedded).uniform_(-size, size)

        self._handle = loop.model.get_input_embeddings().register_forward_hook(disturb)

    def end(self, loop: LoopState) -> None:
        """Take it out."""
        if self._handle is not None:
            self._handle.remove()
