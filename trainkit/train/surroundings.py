"""Environment variables that would train otherwise than the recipe says."""

import functools
import os
from collections.abc import Mapping

from trainkit.errors import RecipeError

_INSTEAD: Mapping[str, str] = {
    "ACCELERATE_DYNAMO_": "training.torch_compile and its keys",
    "ACCELERATE_MIXED_PRECISION": "training.bf16 or training.fp16",
    "ACCELERATE_GRADIENT_": "training.gradient_accumulation_steps and training.max_grad_norm",
    "ACCELERATE_USE_FSDP": "parallel.shard: fsdp2",
    "FSDP_": "parallel.shard: fsdp2",
    "ACCELERATE_USE_DEEPSPEED": "deepspeed: zero2 or another preset or file",
    "ACCELERATE_DEEPSPEED_": "deepspeed: zero2 or another preset or file",
    "ACCELERATE_FP8_": "model.fp8",
    "ACCELERATE_USE_CPU": "training.use_cpu",
    "ACCELERATE_TORCH_DEVICE": "training.use_cpu, or CUDA_VISIBLE_DEVICES",
    "ACCELERATE_USE_": "the keys of parallel",
    "PARALLELISM_CONFIG_": "the keys of parallel",
}
"""By how the name begins: the keys of a recipe that say the same."""

_OFF = frozenset({"", "no", "none", "false", "0", "default"})


@functools.cache
def refuse_contradicting_start() -> None:
    """Hold the environment as the process's first run finds it.

    The libraries of that run then set some of these variables, for which no later one is refused.

    Raises:
        RecipeError: naming the variable and the key that stands for it; the next call asks again.
    """
    refuse_contradicting_variables(os.environ)


def refuse_contradicting_variables(environ: Mapping[str, str]) -> None:
    """Refuse what accelerate reads of its environment: a recipe says all that a run does.

    Raises:
        RecipeError: naming the variable and the key that stands for it.
    """
    for name, value in sorted(environ.items()):
        instead = next((keys for prefix, keys in _INSTEAD.items() if name.startswith(prefix)), None)
        if instead is not None and value.strip().lower() not in _OFF:
            raise RecipeError(
                f"the environment sets {name}={value}, which would train otherwise than the recipe "
                "says",
                where=name,
                fix=f"unset {name}, and say it in the recipe: {instead}",
            )
