"""A loaded model before the benchmark harness: on its rank's device, with training's prompts."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainkit.errors import ModelError, PatchError, RecipeError
from trainkit.infer.locate import ModelPaths, is_trained_on_texts, weights_digest
from trainkit.parallel import ProcessRank

if TYPE_CHECKING:
    from trainkit.evals.model import Ranks
    from trainkit.evals.tasks import LoadedTasks
    from trainkit.infer.engine import Engine

logger = logging.getLogger(__name__)

NEEDS_HARNESS = "pip install 'trainkit[eval]'"


@dataclass(frozen=True)
class Asking:
    """How a model is asked.

    Attributes:
        chat: with its chat template; None is as it was trained.
        batch_size: rows at once; None chooses by tokens.
        kernels: put trainkit's kernels into the model, where it has some.
    """

    chat: bool | None = None
    thinking: bool | None = None
    batch_size: int | None = None
    max_new_tokens: int | None = None
    kernels: bool = True


def check_harness() -> None:
    from importlib.util import find_spec

    if find_spec("lm_eval") is None:
        raise RecipeError(
            "lm-evaluation-harness is not installed", where="trainkit eval", fix=NEEDS_HARNESS
        )


def uses_chat(asking: Asking, paths: ModelPaths, tokenizer: Any) -> bool:
    """Whether questions are rendered with the chat template."""
    has_template = bool(tokenizer.chat_template)
    if asking.chat and not has_template:
        raise ModelError(
            "the tokenizer has no chat template", where="--chat-template", fix="leave it out"
        )
    if asking.chat is not None:
        return asking.chat
    return has_template and not is_trained_on_texts(paths.run)


def check_thinking(asking: Asking, tasks: LoadedTasks) -> None:
    """Refuse thoughts where answers are not written."""
    scored = [name for name, task in tasks.tasks.items() if task.OUTPUT_TYPE != "generate_until"]
    if asking.thinking and scored:
        raise RecipeError(
            f"{scored[0]} compares how likely given answers are; a model has no room to think "
            "before them",
            where="--thinking on",
            fix=f"leave out {', '.join(scored[:4])}, or --thinking",
        )


def start_ranks(process: ProcessRank) -> Ranks:
    """This process among those that torchrun has started; they exchange plain values over gloo."""
    from trainkit.evals.model import Ranks

    if process.world_size == 1:
        return Ranks()
    import torch.distributed as dist

    if not dist.is_initialized():
        dist.init_process_group("gloo")

    def gather(value: Any) -> list[Any]:
        found: list[Any] = [None] * process.world_size
        dist.all_gather_object(found, value)
        return found

    return Ranks(process.dist_rank, process.world_size, gather)


def rank_device(device: str, process: ProcessRank) -> str:
    """The device of this rank: its own GPU where several ranks share a host."""
    if device == "auto" and process.world_size > 1:
        import torch

        return f"cuda:{process.local_rank}" if torch.cuda.is_available() else "cpu"
    return device


def patch(engine: Engine, say: Callable[[str], None]) -> bool:
    """Put the kernels into a model on a GPU, where its family has some.

    Returns:
        Whether they are in.
    """
    if engine.model.device.type != "cuda":
        return False
    from trainkit.models.patch import patch_kernels

    try:
        patch_kernels(engine.model)
    except PatchError as error:
        say(f"without trainkit's kernels: {error.what}")
        return False
    return True


def harness_model(engine: Engine, asking: Asking, *, chat: bool, ranks: Ranks) -> Any:
    from trainkit.evals.model import PromptStyle, TrainedModel

    prompts = PromptStyle(engine.tokenizer, engine.options, chat=chat, thinking=asking.thinking)
    return TrainedModel(
        engine.model,
        prompts,
        stop_ids=engine.stop_ids,
        max_length=engine.context or DEFAULT_CONTEXT,
        batch_size=asking.batch_size,
        max_new_tokens=asking.max_new_tokens,
        ranks=ranks,
    )


DEFAULT_CONTEXT = 2048
"""Tokens of a model that names no limit; the harness's own."""


def settings_of(paths: ModelPaths, asking: Asking, **more: Any) -> Mapping[str, Any]:
    return {
        "model": paths.model,
        "adapter": None if paths.adapter is None else str(paths.adapter),
        "directory": None if paths.directory is None else str(paths.directory),
        "weights": weights_digest(paths),
        "thinking": asking.thinking,
        "max_new_tokens": asking.max_new_tokens,
        **more,
    }


def target_of(output: Path | None, paths: ModelPaths, stamp: str) -> Path:
    """Where results go: as asked, into the run, or into ``eval`` here."""
    if output is not None:
        return output
    if paths.run is not None:
        return paths.run / "eval" / stamp
    name = Path(str(paths.adapter or paths.model)).name or "model"
    return Path("eval") / f"{name}-{stamp}"


def on_all_gpus(arguments: list[str], device: str) -> None:
    """Start once for each GPU of this host when nobody has; does not return then."""
    from trainkit.parallel.launch import Hosts, count_local_gpus, launch_command

    count = count_local_gpus()
    if "RANK" in os.environ or device != "auto" or count < 2:
        return
    command = launch_command(arguments, Hosts.from_environment(), count)
    os.execv(command[0], command)
