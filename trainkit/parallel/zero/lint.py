"""A DeepSpeed configuration file, held against the installed version and the recipe.

DeepSpeed passes over keys that it does not know, and fails on wrong values when the model is loaded
already.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from trainkit.errors import RecipeError
from trainkit.options.section import ask, nearest

_NOT_READ_HERE = {
    "optimizer": "training.optim and what belongs to it decide",
    "scheduler": "training.lr_scheduler_type and what belongs to it decide",
    "elasticity": "the number of processes is the launch's",
    "autotuning": "a run measures nothing but itself",
    "compression_training": "trainkit does not train smaller models",
}
"""Sections that another key of the recipe decides, or nothing here follows."""

_DECIDED_ELSEWHERE = {
    "activation_checkpointing": "recompute and training.gradient_checkpointing decide",
    "bf16.bf16_master_weights_and_grads": "weights are stepped in fp32 (model.master_weights)",
    "bf16.bf16_optimizer_states": "weights are stepped in fp32 (model.master_weights)",
    "compile": "training.torch_compile decides",
    "comet": "training.report_to decides",
    "csv_monitor": "the run directory holds the curves",
    "data_efficiency": "data and its order are the recipe's",
    "data_types.param_dtype": "model.dtype decides",
    "expert_parallel": "experts are not spread over ranks here",
    "flops_profiler.output_file": "a run writes into its directory alone",
    "fp16.fp16_master_weights_and_grads": "weights are stepped in fp32 (model.master_weights)",
    "hybrid_engine": "nothing is generated while a step is computed",
    "nebula": "checkpoints lie in the run directory",
    "pipeline": "parallel.pipeline decides",
    "tensor_parallel": "parallel.tensor decides",
    "tensorboard": "training.report_to decides",
    "torch_autocast": "training.bf16 and training.fp16 decide, which follow model.dtype",
    "wandb": "training.report_to decides",
    "weight_quantization": "lora.quantize decides",
    "zero_optimization.offload_optimizer.nvme_path": "a run writes into its directory alone",
    "zero_optimization.offload_param.nvme_path": "a run writes into its directory alone",
}
"""Sections and keys likewise, which pass as long as they ask for nothing."""

_OF_RECIPE = {
    "train_micro_batch_size_per_gpu": "per_device_train_batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "max_grad_norm",
}
"""DeepSpeed's key to the field of ``training`` that says the same."""

RECIPES_KEYS = (*_OF_RECIPE, "train_batch_size")
"""Of DeepSpeed: what the recipe says already."""

_DTYPES = ("fp32", "bf16", "fp16")


class _Noting(dict[str, Any]):
    """A mapping that knows which of its keys were read, also inside."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        inner = {
            key: _Noting(value) if isinstance(value, dict) else value
            for key, value in values.items()
            if value != "auto"  # transformers fills it in
        }
        super().__init__(inner)
        self.read: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self.read.add(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self.read.add(str(key))
        return super().__contains__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.read.add(key)
        return super().get(key, default)

    def unknown(self, prefix: str = "") -> Iterator[tuple[str, Iterable[str]]]:
        """Keys that nobody read, with those of the same section that were."""
        for key, value in self.items():
            if key not in self.read:
                yield f"{prefix}{key}", self.read
            elif isinstance(value, _Noting) and value.read:
                yield from value.unknown(f"{prefix}{key}.")


def lint_file(config: Mapping[str, Any], path: Path) -> None:
    """Refuse what the installed DeepSpeed does not know, or would fail on."""
    from deepspeed.runtime.config import DeepSpeedConfig

    for section, reason in _NOT_READ_HERE.items():
        if section in config:
            raise RecipeError(
                f"{path}: {section} does nothing here: {reason}", fix=f"leave {section} out"
            )
    for place, reason in _DECIDED_ELSEWHERE.items():
        if _asks(_at(config, place)):
            raise RecipeError(
                f"{path}: {place} asks for what is not done so here: {reason}",
                fix=f"leave {place} out",
            )
    bf16 = config.get("bf16")
    if isinstance(bf16, Mapping) and bf16.get("check_grad_overflow") is False:
        raise RecipeError(
            f"{path}: bf16.check_grad_overflow is false: a step with NaN or infinite gradients "
            "would be taken",
            fix="leave check_grad_overflow out",
        )
    read, default = (DeepSpeedConfig.__new__(DeepSpeedConfig) for _ in range(2))
    noting = _Noting(config)
    try:
        read._initialize_params(noting)
    except Exception as error:  # pydantic's, its own, KeyError, AssertionError: all name the value
        said = " ".join(str(error).split(" [type=")[0].split())
        raise RecipeError(
            f"{path}: DeepSpeed refuses this: {said}", fix="change the key that is named"
        ) from error
    default._initialize_params({})
    problems = []
    for key, known in noting.unknown():
        name = key.rpartition(".")[2]
        advice = ask(nearest(name, sorted(known)))
        problems.append(f"{key} is no key of this DeepSpeed" + (f"; {advice}" if advice else ""))
    problems += _wrong_types(noting, default)
    if problems:
        raise RecipeError(f"{path}: " + "; ".join(problems), fix="change or remove what is named")


def _at(config: Mapping[str, Any], place: str) -> Any:
    """The value at a path of keys, None where there is none."""
    value: Any = config
    for key in place.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _asks(value: object) -> bool:
    """Whether a section switches anything on; sizes of 1 and below do not."""
    if isinstance(value, Mapping):
        return value.get("enabled") is not False and any(map(_asks, value.values()))
    if value is True or isinstance(value, list):
        return bool(value)
    if isinstance(value, str):
        return value not in ("auto", "none")
    return isinstance(value, int | float) and value > 1


def _wrong_types(config: Mapping[str, Any], default: Any) -> Iterator[str]:
    """Plain values that DeepSpeed takes as they are, of another type than its own default."""
    for key, value in config.items():
        like = 1 if key.endswith(("batch_size", "_per_gpu", "_steps")) else None
        like = getattr(default, key, None) if like is None else like
        if key == "steps_per_print":
            like = 1
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if isinstance(like, bool) and not isinstance(value, bool):
            yield f"{key}: {value!r} must be true or false"
        elif isinstance(like, int | float) and not isinstance(like, bool) and not is_number:
            yield f"{key}: {value!r} must be a number"
    types = config.get("data_types") or {}
    for key in ("grad_accum_dtype", "param_dtype"):
        value = types.get(key) if isinstance(types, Mapping) else None
        if value is not None and value not in _DTYPES:
            yield f"data_types.{key}: {value!r} must be one of {', '.join(_DTYPES)}"


def refuse_contradictions(
    config: Mapping[str, Any], path: Path, training: Mapping[str, Any], world_size: int
) -> None:
    """Refuse numbers that the recipe gives otherwise; transformers would when all is loaded.

    Args:
        config: the content of the file.
        path: names it.
        training: every field of the section that `_OF_RECIPE` names, and ``bf16`` and ``fp16``,
            None where the model's files decide.
        world_size: processes of the run.
    """
    wanted = {key: (f"training.{field}", training[field]) for key, field in _OF_RECIPE.items()}
    rows = training["per_device_train_batch_size"] * training["gradient_accumulation_steps"]
    wanted["train_batch_size"] = ("the recipe's rows of a step", rows * world_size)
    for key in ("bf16", "fp16"):
        wanted[f"{key}.enabled"] = (f"training.{key}, which follows model.dtype,", training[key])
    for key, (name, value) in wanted.items():
        given = _at(config, key)
        if value is not None and given not in (None, "auto", value):
            raise RecipeError(
                f"{path}: {key} is {given}, and {name} {value}",
                fix=f'write "{key.rpartition(".")[2]}": "auto", and the recipe decides',
            )
