"""Converts a LoRA adapter between a GLM layout and Qwen2.

The update ``B @ A`` of a module has that module's output features as rows of B, so what a keymap
does to the rows of a weight it does to the rows of B, and A is shared by all parts. The way back
joins parts into one module: if they share A, their B's are stacked; if they do not (an adapter
trained on Qwen2), the A's are stacked too and the B's become blocks on a diagonal, whose rank is
the sum of the ranks. Either way the function is the same.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainkit.checkpoint.convert.convert import keymap_between
from trainkit.checkpoint.convert.glm_formats import FORMATS, Geometry, detect_format, qwen2_shape
from trainkit.checkpoint.convert.keymap import Step
from trainkit.checkpoint.weights.adapter import (
    CONFIG_NAME,
    PREFIX,
    Adapter,
    ModuleAdapter,
    read_adapter,
)
from trainkit.checkpoint.weights.companions import copy_companions
from trainkit.checkpoint.weights.plain_files import read_config
from trainkit.checkpoint.weights.writer import save_tensors
from trainkit.checkpoint.whole.atomic import staged_directory
from trainkit.errors import CheckpointError

_WEIGHT = ".weight"


def convert_adapter(source: Path, target: Path, base: Path, target_format: str) -> int:
    """Write an adapter for the converted model.

    Of ``base``, the model that it belongs to, only config.json is read.
    """
    adapter = read_adapter(source)
    config = read_config(Path(base))
    source_format = detect_format(config)
    geometry = FORMATS[source_format].geometry(config)
    keymap = keymap_between(source_format, target_format, geometry)
    modules: dict[str, ModuleAdapter] = {}
    replaced: dict[str, Tensor] = {}
    taken: set[str] = set()
    for step in keymap.all_steps(geometry.num_layers):
        taken.update(step.source)
        if found := {n: adapter.replaced[n] for n in step.source if n in adapter.replaced}:
            replaced.update(_convert_whole(step, found, adapter))
        parts = {n: adapter.modules.get(n.removesuffix(_WEIGHT)) for n in step.source}
        if any(parts.values()) and step.source[0].endswith(_WEIGHT):
            modules.update(_convert_step(step, parts, geometry, adapter))
    wanted = {f"{module}{_WEIGHT}" for module in adapter.modules} | adapter.replaced.keys()
    if unknown := sorted(wanted - taken):
        raise CheckpointError(
            f"the adapter holds {', '.join(unknown[:4])}, which the base's layout does not have",
            where=str(adapter.directory),
        )
    with staged_directory(Path(target), metadata={"kind": "adapter conversion"}) as staging:
        save_tensors(staging / "adapter_model.safetensors", _tensors(modules, replaced))
        new_config = _new_config(adapter.config, modules, replaced)
        text = json.dumps(new_config, indent=2, ensure_ascii=False) + "\n"
        (staging / CONFIG_NAME).write_text(text, encoding="utf-8")
        copy_companions((Path(source),), staging)
    return len(modules)


def _convert_whole(step: Step, found: Mapping[str, Tensor], adapter: Adapter) -> dict[str, Tensor]:
    if len(found) != len(step.source):
        raise CheckpointError(
            f"of {', '.join(step.source)} only a part was trained in full; they become one",
            where=str(adapter.directory),
        )
    results = step.transform.forward([found[name] for name in step.source])
    return dict(zip(step.target, results, strict=True))


def _convert_step(
    step: Step, parts: Mapping[str, ModuleAdapter | None], geometry: Geometry, adapter: Adapter
) -> dict[str, ModuleAdapter]:
    """The modules of one step: joined into one, taken apart, or only reordered."""
    present = [part for part in parts.values() if part is not None]
    if present[0].is_embedding:  # the rows of its B are not output features; the step copies
        return {step.target[0].removesuffix(_WEIGHT): present[0]}
    if any(part.bias is not None for part in present):
        raise CheckpointError("lora_bias is not known here", where=str(adapter.directory))
    rows = [
        qwen2_shape(name, geometry)[0] if part is None else part.up.shape[0]
        for name, part in parts.items()
    ]
    down, ups = _joined(list(parts.values()), rows)
    magnitudes: list[Tensor] | None = None
    if any(part.magnitude is not None for part in present):
        known = [part.magnitude for part in present if part.magnitude is not None]
        if len(known) != len(parts):
            raise CheckpointError(
                f"DoRA adapts only a part of {', '.join(step.source)}, which become one module",
                where=str(adapter.directory),
            )
        magnitudes = _forward(step, known, adapter)
    return {
        name.removesuffix(_WEIGHT): ModuleAdapter(
            down=down,
            up=up,
            bias=None,
            magnitude=magnitudes[i] if magnitudes is not None else None,
            is_embedding=False,
            scaling=present[0].scaling,
        )
        for i, (name, up) in enumerate(zip(step.target, _forward(step, ups, adapter), strict=True))
    }


def _joined(
    parts: Sequence[ModuleAdapter | None], rows: Sequence[int]
) -> tuple[Tensor, list[Tensor]]:
    present = [part for part in parts if part is not None]
    first = present[0]
    if len(present) == len(parts) and all(
        torch.equal(part.down, first.down) and part.scaling == first.scaling for part in present
    ):
        return first.down, [part.up for part in present]
    down = torch.cat([part.down for part in present])
    ups = []
    column = 0
    for part, height in zip(parts, rows, strict=True):
        up = torch.zeros(height, down.shape[0], dtype=first.up.dtype)
        if part is not None:
            width = part.up.shape[1]
            up[:, column : column + width] = part.up * (part.scaling / first.scaling)
            column += width
        ups.append(up)
    return down, ups


def _forward(step: Step, tensors: Sequence[Tensor], adapter: Adapter) -> list[Tensor]:
    try:
        return [tensor.contiguous() for tensor in step.transform.forward(tensors)]
    except (RuntimeError, ValueError) as error:
        raise CheckpointError(
            f"the adapter of {step.source[0]} does not fit the sizes of the base's config.json "
            f"({error})",
            where=str(adapter.directory),
        ) from None


def _tensors(
    modules: Mapping[str, ModuleAdapter], replaced: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """With peft's names."""
    tensors = {}
    for name, tensor in replaced.items():
        module = name.removesuffix(_WEIGHT)  # next to an adapter, peft looks one level deeper
        key = f"{module}.base_layer{_WEIGHT}" if module in modules else name
        tensors[f"{PREFIX}{key}"] = tensor
    for module, part in modules.items():
        name = f"{PREFIX}{module}."
        down, up = ("lora_embedding_A", "lora_embedding_B")
        if not part.is_embedding:
            down, up = ("lora_A.weight", "lora_B.weight")
        # Parts of one module share an A; a file holds no two names for one storage.
        tensors[name + down], tensors[name + up] = part.down.clone(), part.up
        if part.magnitude is not None:
            tensors[name + "lora_magnitude_vector"] = part.magnitude
    return tensors


def _new_config(
    config: Mapping[str, Any],
    modules: Mapping[str, ModuleAdapter],
    replaced: Mapping[str, Tensor],
) -> dict[str, Any]:
    """adapter_config.json of the result; ranks and alphas that differ go into the patterns."""
    new = {**config, "rank_pattern": {}, "alpha_pattern": {}}
    # The model of the source's layout has modules of the same names: over it, this adapter would
    # load and compute something else.
    new["base_model_name_or_path"] = None
    for module, part in modules.items():
        lora_rank = part.down.shape[0]
        alpha = part.scaling * (math.sqrt(lora_rank) if config.get("use_rslora") else lora_rank)
        alpha = round(alpha) if math.isclose(alpha, round(alpha), rel_tol=1e-12) else alpha
        if lora_rank != config["r"]:
            new["rank_pattern"][re.escape(module)] = lora_rank
        if alpha != config["lora_alpha"]:
            new["alpha_pattern"][re.escape(module)] = alpha
    new["target_modules"] = sorted(modules)
    saved = sorted({name.removesuffix(_WEIGHT) for name in replaced} - modules.keys())
    new["modules_to_save"] = saved or None
    return new
