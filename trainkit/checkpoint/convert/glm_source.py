"""A GLM or Qwen2 checkpoint as the conversion's table expects it, where its files say less or more.

Qwen2's q, k and v have biases. A GLM without them is the same function with biases of zero. A model
that ties its output matrix to its embeddings and stores it all the same stores it twice.
"""

from collections.abc import Mapping
from typing import Any

import torch

from trainkit.checkpoint.convert.glm_formats import Geometry
from trainkit.checkpoint.weights.reader import TensorInfo, WeightsReader
from trainkit.errors import CheckpointError

_HEAD_AND_EMBEDDING = {
    "chatglm": ("transformer.output_layer.weight", "transformer.embedding.word_embeddings.weight"),
    "glm": ("lm_head.weight", "model.embed_tokens.weight"),
    "qwen2": ("lm_head.weight", "model.embed_tokens.weight"),
}
# With the value where it is absent; configs of GLM are too often written without it.
_BIAS_SWITCH = {"chatglm": ("add_qkv_bias", False), "glm": ("attention_bias", None)}
_PROJECTIONS = {
    "chatglm": ("transformer.encoder.layers.{}.self_attention.query_key_value",),
    "glm": tuple(f"model.layers.{{}}.self_attn.{part}_proj" for part in "qkv"),
    "qwen2": tuple(f"model.layers.{{}}.self_attn.{part}_proj" for part in "qkv"),
}


class GlmSource:
    """The tensors of a checkpoint with zeros for biases that it lacks and no matrix twice.

    Args:
        reader: of its files.
        layout: a key of ``FORMATS``.
        config: its config.json.
        geometry: its sizes.

    Raises:
        CheckpointError: config and files contradict each other.
    """

    def __init__(
        self, reader: WeightsReader, layout: str, config: Mapping[str, Any], geometry: Geometry
    ) -> None:
        self._reader = reader
        self.directory = reader.directory
        self._zeros = _missing_biases(reader, layout, config, geometry)
        self.doubled = _doubled_head(reader, layout, geometry)
        self.tensors: Mapping[str, TensorInfo] = {
            **{name: info for name, info in reader.tensors.items() if name != self.doubled},
            **self._zeros,
        }

    def load(self, name: str) -> torch.Tensor:
        """Read one tensor, or make it."""
        info = self._zeros.get(name)
        return (
            self._reader.load(name) if info is None else torch.zeros(info.shape, dtype=info.dtype)
        )


def biases_of(layout: str, geometry: Geometry) -> set[str]:
    """The names of all biases of q, k and v in a layout."""
    return {
        f"{module.format(layer)}.bias"
        for layer in range(geometry.num_layers)
        for module in _PROJECTIONS[layout]
    }


def has_biases(layout: str, config: Mapping[str, Any]) -> bool | None:
    """What a GLM's config says of the biases of q, k and v; None where it says nothing."""
    if layout not in _BIAS_SWITCH:
        return True
    key, default = _BIAS_SWITCH[layout]
    value = config.get(key, default)
    if value is not None and not isinstance(value, bool):
        raise CheckpointError(f"config.json: {key} is {value!r}, not a switch")
    return value


def head_and_embedding(layout: str) -> tuple[str, str]:
    """The names of the output matrix and of the embedding."""
    return _HEAD_AND_EMBEDDING[layout]


def _missing_biases(
    reader: WeightsReader, layout: str, config: Mapping[str, Any], geometry: Geometry
) -> dict[str, TensorInfo]:
    wanted = biases_of(layout, geometry)
    present = wanted & reader.tensors.keys()
    said = has_biases(layout, config)
    if present and said is False:
        raise CheckpointError(
            f"config.json: {_BIAS_SWITCH[layout][0]} is false, and there are biases such as "
            f"{min(present)}: a model that follows the config would not use them",
            where=str(reader.directory),
        )
    if present or said:
        return {}  # one that is missing then is named with all the others
    rows = {}
    for name in wanted:
        weight = reader.tensors.get(f"{name.removesuffix('.bias')}.weight")
        if weight is not None:
            rows[name] = TensorInfo(name, weight.dtype, weight.shape[:1])
    return rows


def _doubled_head(reader: WeightsReader, layout: str, geometry: Geometry) -> str | None:
    head, embedding = _HEAD_AND_EMBEDDING[layout]
    if not geometry.is_tied or not {head, embedding} <= reader.tensors.keys():
        return None
    if not torch.equal(reader.load(head), reader.load(embedding)):
        raise CheckpointError(
            f"config.json: tie_word_embeddings is true, and {head} differs from {embedding}",
            where=str(reader.directory),
            fix="say tie_word_embeddings: false if the model has its own output matrix",
        )
    return head
