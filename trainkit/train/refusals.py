"""What a library refuses as it is set up, said as a fault of the recipe; contradicting starts."""

import functools
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from trainkit.errors import RecipeError, TrainkitError

# A missing package, a name or number out of place, a hub out of reach.
_REFUSALS = (
    ArithmeticError,
    AttributeError,
    ImportError,
    LookupError,
    OSError,
    TypeError,
    ValueError,
)


@contextmanager
def settings_refused_by(what: str, where: str) -> Iterator[None]:
    """Turn the errors of a library that is being set up into one about the recipe.

    Args:
        what: is being set up: ``the optimizer``.
        where: the key of the recipe that it follows.

    Raises:
        RecipeError: in place of any other error. What the GPU says passes.
    """
    try:
        yield
    except TrainkitError:
        raise
    except _REFUSALS as error:
        raise _refusal(what, where, error) from error
    except (NotImplementedError, RuntimeError) as error:
        if any(word in f"{type(error).__name__} {error}".lower() for word in ("memory", "cuda")):
            raise  # the machine's, not the recipe's
        raise _refusal(what, where, error) from error


def _refusal(what: str, where: str, error: Exception) -> RecipeError:
    said = " ".join(str(error).split()) or type(error).__name__
    return RecipeError(
        f"{what} cannot be made of these settings: {said}",
        where=where,
        fix="change or remove what the message names",
    )


# Environment variables that would train otherwise than the recipe says.

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
