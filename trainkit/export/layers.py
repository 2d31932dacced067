"""The linear layers of a stored model, which quantised formats hold one by one."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from trainkit.auto_class import auto_class
from trainkit.checkpoint.weights.plain_files import read_config
from trainkit.errors import ModelError
from trainkit.export.plain import weights_directory
from trainkit.infer.locate import ModelPaths
from trainkit.models.loading import load_config
from trainkit.options import ModelOptions


@dataclass(frozen=True)
class LinearLayers:
    """Names as the files have them.

    Attributes:
        kept: layers that stay as they are: the output matrix.
        shapes: (out, in) of the others' weights, by the weight's name.
    """

    kept: tuple[str, ...]
    shapes: Mapping[str, tuple[int, int]]


def layers_to_quantize(paths: ModelPaths, kind: str) -> LinearLayers:
    """The layers of the model under an adapter, or of a whole one, before anything is loaded.

    Args:
        paths: of ``find_model``.
        kind: the format, for the message.

    Raises:
        ModelError: the model is stored quantised, has experts, or no linear layers.
    """
    directory = weights_directory(paths)
    if read_config(directory).get("quantization_config") and paths.adapter is None:
        raise ModelError("it is stored quantised already", where=str(directory))
    layers = linear_layers(directory, kind)
    if not layers.shapes:
        raise ModelError("it has no linear layers", where=str(directory))
    return layers


def linear_layers(directory: Path, kind: str) -> LinearLayers:
    """The linear layers of a directory's model.

    Raises:
        ModelError: experts, which are kept together in one parameter.
    """
    config = load_config(ModelOptions(name_or_path=str(directory)))
    with torch.device("meta"):
        model = auto_class(config).from_config(config)
    if any(parameter.dim() == 3 for parameter in model.parameters()):
        raise ModelError(
            f"experts cannot be exported to {kind} here",
            where=str(directory),
            fix="trainkit export vllm, and vllm serve --quantization fp8; or llm-compressor",
        )
    head = model.get_output_embeddings()
    names = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    kept = tuple(name for name, module in names.items() if module is head)
    shapes = {
        f"{name}.weight": (module.out_features, module.in_features)
        for name, module in names.items()
        if name not in kept
    }
    return LinearLayers(kept, shapes)
