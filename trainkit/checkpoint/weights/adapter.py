"""A saved LoRA adapter as what it does to weights.

peft's own layout (``adapter_config.json`` and ``adapter_model.safetensors``) is read without peft
and without the base model, so that a merge can go tensor by tensor.
"""

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainkit.auto_class import refuse_scalar_head
from trainkit.checkpoint.weights.plain_files import plain_file, read_json
from trainkit.checkpoint.weights.reader import adapter_file, tensors_in
from trainkit.errors import CheckpointError, TrainkitError
from trainkit.options.model import OTHER_ADAPTERS
from trainkit.patterns import refuse_endless, refuse_variants

CONFIG_NAME = "adapter_config.json"
PREFIX = "base_model.model."
_PARTS = (
    "lora_A.weight",
    "lora_B.weight",
    "lora_B.bias",
    "lora_embedding_A",
    "lora_embedding_B",
    "lora_magnitude_vector",
)
OWN_PART = re.compile(rf"\.({'|'.join(['lora', *OTHER_ADAPTERS.values()])})_")
"""What adapters of any kind keep next to a layer's own weights begins so."""
_WHOLE_EMBEDDING = re.compile(r"\.embed_tokens\.((base_layer|modules_to_save)\.)?weight$")
# What these initialisations leave behind fits only the base that they changed when training began.
_BASE_CHANGING = ("pissa", "olora", "corda", "loftq")
_UNKNOWN_HERE = (
    "trainable_token_indices",
    "use_qalora",
    "alora_invocation_tokens",
)
_KNOWN_TO_PEFT = ("target_parameters", "fan_in_fan_out")


@dataclass
class ModuleAdapter:
    """The adapter of one module.

    Attributes:
        down: lora_A, (r, in_features); for an embedding (r, rows of the table).
        up: lora_B, (out_features, r); for an embedding (width, r).
        bias: added to the module's bias, scaled, or None.
        magnitude: DoRA's norms, (out_features,) or the embedding's (width,), or None.
        is_embedding: the update of the table is the transpose of ``up @ down``.
        scaling: alpha / r, or alpha / sqrt(r).
    """

    down: Tensor
    up: Tensor
    bias: Tensor | None
    magnitude: Tensor | None
    is_embedding: bool
    scaling: float

    @property
    def delta_shape(self) -> tuple[int, int]:
        rows, columns = self.up.shape[0], self.down.shape[1]
        return (columns, rows) if self.is_embedding else (rows, columns)

    def delta(self) -> Tensor:
        """What plain LoRA adds to the weight, in float32."""
        update = self.scaling * (self.up.float() @ self.down.float())
        return update.T if self.is_embedding else update

    def merged(self, weight: Tensor) -> Tensor:
        """The weight with the adapter in it, in float32, rounded nowhere."""
        total = weight.float() + self.delta()
        if self.magnitude is None:
            return total
        # peft's DoRA takes the norm of each output: of a row, or of a column of an embedding.
        norms = torch.linalg.vector_norm(total, dim=0 if self.is_embedding else 1)
        factors = self.magnitude.float() / norms
        return total * (factors if self.is_embedding else factors[:, None])


@dataclass(frozen=True)
class Adapter:
    """A complete adapter.

    Attributes:
        replaced: tensors trained in full, by tensor name (``modules_to_save``).
    """

    directory: Path
    config: Mapping[str, Any]
    modules: Mapping[str, ModuleAdapter] = field(default_factory=dict)
    replaced: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def base_name(self) -> str | None:
        name = self.config.get("base_model_name_or_path")
        return name if isinstance(name, str) and name else None


def is_adapter(directory: Path) -> bool:
    return (Path(directory) / CONFIG_NAME).is_file()


def read_adapter_config(directory: Path, *, with_peft: bool = False) -> dict[str, Any]:
    """adapter_config.json, refused where it asks for what a plain merge cannot give.

    ``with_peft``: peft is at hand to merge what has no place in a table of modules.
    """
    config = read_json(plain_file(Path(directory), CONFIG_NAME))
    where = str(directory)
    kind = config.get("peft_type") if isinstance(config, dict) else type(config).__name__
    kinds = ["LORA", *map(str.upper, OTHER_ADAPTERS)] if with_peft else ["LORA"]
    if not isinstance(config, dict) or kind not in kinds:
        raise CheckpointError(f"{CONFIG_NAME}: {kind!r} is not a LoRA adapter", where=where)
    refuse_scalar_head([config.get("task_type")], where)
    refuse_variants(config, where)
    for key in (*_UNKNOWN_HERE, *(() if with_peft else _KNOWN_TO_PEFT)):
        if config.get(key):
            raise CheckpointError(
                f"{CONFIG_NAME}: {key} is not supported",
                where=where,
                fix="peft merges it in memory: PeftModel.from_pretrained(base, adapter)"
                ".merge_and_unload().save_pretrained(...)",
            )
    if config.get("bias", "none") != "none":
        raise CheckpointError(
            f"{CONFIG_NAME}: bias={config['bias']!r} trains the base's own biases, which the "
            "adapter does not hold as differences",
            where=where,
        )
    check_scaling(config, Path(directory))
    init = config.get("init_lora_weights", True)
    if isinstance(init, str) and init.lower().startswith(_BASE_CHANGING):
        raise CheckpointError(
            f"{CONFIG_NAME}: init_lora_weights={init!r} changed the base when training began; "
            "this adapter belongs to that changed base",
            where=where,
            fix="save it with peft's path_initial_model_for_weight_conversion first",
        )
    return config


def check_scaling(config: Mapping[str, Any], directory: Path) -> None:
    """Refuse a scale that is 0, NaN or infinite: JSON readers take NaN and Infinity."""
    alphas = config.get("alpha_pattern")
    alphas = alphas if isinstance(alphas, dict) else {}  # of others `refuse_endless` speaks
    named = {f"alpha_pattern.{key}": alphas[key] for key in alphas}
    for key, alpha in {"lora_alpha": config.get("lora_alpha"), **named}.items():
        if isinstance(alpha, int | float) and not (alpha and math.isfinite(alpha)):
            raise CheckpointError(
                f"{key} is {alpha}: an answer would be {'NaN' if alpha else 'as of the base'}",
                where=str(directory / CONFIG_NAME),
                fix=f"write the {key} that the adapter was trained with",
            )


def read_adapter(directory: Path, *, with_peft: bool = False) -> Adapter:
    """Read a saved adapter; its tensors are small and held in memory.

    ``with_peft`` takes what `needs_peft` too, which has no modules here.
    """
    directory = Path(directory)
    config = read_adapter_config(directory, with_peft=with_peft)
    if needs_peft(config):
        return Adapter(directory, config)
    with adapter_file(directory) as file:
        tensors = {key: file.load(key) for key in file.tensors}
    return adapter_from_tensors(directory, config, tensors)


@contextmanager
def read_by_peft(directory: Path) -> Iterator[None]:
    """Peft raises nearly anything on a file that is not its own."""
    try:
        yield
    except (TrainkitError, ImportError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        lines = str(error).strip().split("\n")
        reason = next((each.strip() for each in lines if "size mismatch" in each), lines[0])
        raise CheckpointError(
            f"the adapter cannot be put over the model: {type(error).__name__}: {reason}",
            where=str(directory),
            fix="check that adapter_config.json and adapter_model.safetensors are as they were "
            "saved, and that the base is the one it was trained on",
        ) from error


def needs_peft(config: Mapping[str, Any]) -> bool:
    """Whether no table of modules says what an adapter changes: experts, transposed layers."""
    return config["peft_type"] != "LORA" or any(config.get(key) for key in _KNOWN_TO_PEFT)


def is_of_text_alone(directory: Path) -> bool:
    """Whether an adapter names no text part of a model that sees: its base was text alone."""
    with adapter_file(directory) as file:
        return not any(".language_model." in key for key in file.tensors)


def vocabulary_rows(directory: Path) -> int | None:
    """Rows of the embedding that an adapter brings along; None if it brings none.

    peft saves it where it was trained, or where the vocabulary was resized before training.
    """
    if not (Path(directory) / "adapter_model.safetensors").exists():
        return None
    found = tensors_in(plain_file(Path(directory), "adapter_model.safetensors"))
    rows = {info.shape[0] for name, info in found.items() if _WHOLE_EMBEDDING.search(name)}
    return rows.pop() if len(rows) == 1 else None


def adapter_from_tensors(
    directory: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> Adapter:
    parts: dict[str, dict[str, Tensor]] = {}
    replaced: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        if not key.startswith(PREFIX):
            raise CheckpointError(f"{key!r} is not a name that peft writes", where=str(directory))
        name = key.removeprefix(PREFIX).removesuffix(".default")
        name = name.replace(".default.weight", ".weight").replace(".modules_to_save.", ".")
        name = name.replace("lora_magnitude_vector.weight", "lora_magnitude_vector")
        part = next((part for part in _PARTS if name.endswith(f".{part}")), None)
        if part is not None:
            parts.setdefault(name.removesuffix(f".{part}"), {})[part] = tensor
        elif "lora_" in name:
            raise CheckpointError(f"{key!r} is not known here", where=str(directory))
        elif ".original_module." not in name:  # peft's copy from before training
            name = name.replace(".base_layer.", ".")
            if name in replaced and not torch.equal(replaced[name], tensor):
                raise CheckpointError(
                    f"{name} is there twice, with other values", where=str(directory)
                )
            replaced[name] = tensor
    refuse_endless(config, parts, Path(directory) / CONFIG_NAME)
    modules = {
        module: _module_adapter(module, found, config, directory) for module, found in parts.items()
    }
    return Adapter(directory, config, modules, replaced)


def _module_adapter(
    module: str, found: Mapping[str, Tensor], config: Mapping[str, Any], directory: Path
) -> ModuleAdapter:
    is_embedding = "lora_embedding_A" in found
    down = found.get("lora_embedding_A" if is_embedding else "lora_A.weight")
    up = found.get("lora_embedding_B" if is_embedding else "lora_B.weight")
    magnitude = found.get("lora_magnitude_vector")
    fits = (
        down is not None
        and up is not None
        and down.dim() == up.dim() == 2
        and down.shape[0] == up.shape[1]
        and (magnitude is None or magnitude.numel() == up.shape[0])
    )
    if not fits or down is None or up is None:
        shapes = {part: list(tensor.shape) for part, tensor in found.items()}
        raise CheckpointError(
            f"{module}: lora_A and lora_B do not fit: {shapes}", where=str(directory)
        )
    if bool(config.get("use_dora")) != (magnitude is not None):
        raise CheckpointError(
            f"{module}: use_dora is {bool(config.get('use_dora'))}, but the magnitude vector is "
            f"{'missing' if magnitude is None else 'there'}",
            where=str(directory),
        )
    return ModuleAdapter(
        down=down,
        up=up,
        bias=found.get("lora_B.bias"),
        magnitude=None if magnitude is None else magnitude.reshape(-1),
        is_embedding=is_embedding,
        scaling=scaling_of(module, down.shape[0], config, directory),
    )


def scaling_of(module: str, lora_rank: int, config: Mapping[str, Any], directory: Path) -> float:
    """Peft's factor for a module: alpha over r, or over its root, with the patterns applied."""
    wanted = _by_pattern(module, config.get("rank_pattern") or {}, config.get("r"))
    alpha = _by_pattern(module, config.get("alpha_pattern") or {}, config.get("lora_alpha"))
    if wanted != lora_rank or not isinstance(alpha, int | float):
        raise CheckpointError(
            f"{module}: the adapter has rank {lora_rank}; {CONFIG_NAME} says {wanted} "
            f"(alpha {alpha})",
            where=str(directory),
        )
    return alpha / (math.sqrt(lora_rank) if config.get("use_rslora") else lora_rank)


def _by_pattern(module: str, patterns: Mapping[str, Any], default: Any) -> Any:
    """Peft matches a pattern as a regular expression on the end of the module's name."""
    try:
        for pattern, value in patterns.items():
            if re.match(rf"(.*\.)?({pattern})$", module):
                return value
    except (AttributeError, re.error) as error:
        raise CheckpointError(f"{CONFIG_NAME}: the patterns are damaged: {error}") from None
    return default
