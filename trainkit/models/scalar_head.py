"""One number for a whole text: a linear layer over the last hidden state of its last token.

The model stays the causal language model that it is, so everything that is proved of it holds, and
its saved files are those of transformers' class for sequence classification, which has its layer
under the same name.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers  # its models, seconds of imports, are found when they are asked for
from torch import Tensor, nn

from trainkit.auto_class import without_adapters
from trainkit.errors import ModelError

NAME = "score"
"""transformers' own."""


def add_scalar_head(model: transformers.PreTrainedModel) -> None:
    """Give a model the layer; the one for tokens trains no more, unless it is the embedding."""
    config = model.config
    text = config.get_text_config()
    config.num_labels = 1
    served = _served_class(config)
    wanted = f"{model.base_model_prefix}."
    if served is not None:
        with torch.device("meta"):
            names = set(served(config).state_dict())
        mine = {name for name in model.state_dict() if name.startswith(wanted)}
        served = served if names == {*mine, f"{NAME}.weight"} else None
    if served is None:
        raise ModelError(
            f"transformers has no class that reads a {config.model_type} model with a scalar head",
            where="objective",
            fix="take a model of another family, or objective: dpo",
        )
    place = next(model.parameters())
    head = nn.Linear(text.hidden_size, 1, bias=False, device=place.device, dtype=model.dtype)
    nn.init.normal_(head.weight, std=getattr(text, "initializer_range", 0.02))
    model.add_module(NAME, head)
    tokens, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
    if tokens is not None and tokens.weight is not embeddings.weight:
        tokens.weight.requires_grad_(False)


def _served_class(config: transformers.PreTrainedConfig) -> Any:
    return transformers.AutoModelForSequenceClassification._model_mapping.get(type(config), None)


def has_scalar_head(model: nn.Module) -> bool:
    return hasattr(without_adapters(model), NAME)


def name_scalar_head(directory: Path, config: transformers.PreTrainedConfig) -> None:
    """Have saved files say what they are: a classifier of one label, or an adapter of one."""
    changes: dict[str, dict[str, Any]] = {
        "config.json": {"architectures": [_served_class(config).__name__]},
        "adapter_config.json": {"task_type": "SEQ_CLS"},
    }
    for name, values in changes.items():
        path = directory / name
        if path.exists():
            found = json.loads(path.read_text(encoding="utf-8")) | values
            path.write_text(json.dumps(found, indent=2, sort_keys=True) + "\n", encoding="utf-8")


class LastStates:
    """Scores of texts in a batch: a hook on the layers below the head, within its forward."""

    def __init__(self, model: nn.Module) -> None:
        base = without_adapters(model)
        self._head: nn.Module = getattr(base, NAME)
        self._keeps = "logits_to_keep" in inspect.signature(base.forward).parameters
        self._places: Tensor | None = None
        self._scores: Tensor | None = None
        base.base_model.register_forward_hook(self._hook)

    def _hook(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._places is not None:
            states = output[0].flatten(0, 1)
            self._scores = self._head(states.index_select(0, self._places))[:, 0]

    def of(self, model: nn.Module, inputs: Mapping[str, Any], places: Tensor) -> Tensor:
        """(N,) fp32 (fp64 for fp64)."""
        self._places, self._scores = places, None
        try:
            model(**inputs, **({"logits_to_keep": 1} if self._keeps else {}))
        finally:
            self._places = None
        scores, self._scores = self._scores, None
        assert scores is not None
        return scores if scores.dtype == torch.float64 else scores.float()
