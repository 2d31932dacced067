"""A loaded model before benchmarks: the harness's, with training's prompts, and files of rows."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any, NoReturn

from trainkit.data.image_rows import as_turn
from trainkit.data.messages import Conversation, RowError
from trainkit.errors import DataError, ModelError, PatchError, RecipeError
from trainkit.evals.metrics import contains, is_exact
from trainkit.evals.scores import Evaluation, Ranks, Score
from trainkit.infer.locate import ModelPaths, is_trained_on_texts, weights_digest
from trainkit.infer.sampling import SamplingOptions
from trainkit.options import ImageOptions, Source
from trainkit.parallel import ProcessRank

if TYPE_CHECKING:
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


# -- Files of rows --------------------------------------------------------------------------------

Files = Mapping[str, Sequence[Conversation]]
"""The conversations of files, by the name under which their figures are kept."""

_BATCH_SIZE, _MAX_NEW_TOKENS = 8, 256
"""Where the command does not say; the second is the harness's own."""
_JUDGES = {"exact_match": is_exact, "contains": contains}


def read_files(tasks: Sequence[str], paths: ModelPaths, limit: int | None) -> Files:
    """The conversations of files, with every image looked at; nothing large is loaded.

    Raises:
        DataError: a row cannot be asked: a question that is left out would change the score.
    """
    from trainkit.models.tokenizer import load_tokenizer
    from trainkit.train.data import conversations_in
    from trainkit.train.images import vision_of

    def refuse(file: Path, line: int, error: RowError) -> NoReturn:
        raise DataError(
            f"{error.reason}: {error.detail}",
            where=f"{file}:{line}",
            fix="fix the row, or take it out: every row of a benchmark counts",
        )

    found: dict[str, list[Conversation]] = {}
    images = ImageOptions()
    vision = vision_of(paths.source, load_tokenizer(paths.at(paths.tokenizer)), images)
    for task in dict.fromkeys(tasks):
        name = Path(task).name
        if name in found:
            raise RecipeError(f"two files are called {name}", where="--tasks", fix="rename one")
        rows = conversations_in(Source(path=task), vision, images, refuse)
        found[name], number = [], 0
        while (limit is None or number < limit) and (row := next(rows, None)) is not None:
            found[name].append(row)
            number += len(questions_of(row))
        if not number:
            raise DataError("there is no question in it", where=task)
    return found


def questions_of(row: Conversation) -> list[int]:
    """The turns of the assistant that have something before them."""
    roles = [message.role for message in row.messages]
    return [turn for turn, role in enumerate(roles) if role == "assistant" and turn > 0]


def evaluate_files(
    engine: Engine, files: Files, asking: Asking, ranks: Ranks, settings: Mapping[str, Any]
) -> Evaluation:
    """Have every turn of the assistant written, greedily, behind those of the row before it."""
    scores: list[Score] = []
    samples: dict[str, list[dict[str, Any]]] = {}
    for name, rows in files.items():
        turns = [(row, turn) for row in rows for turn in questions_of(row)][: settings["limit"]]
        numbers = range(ranks.rank, len(turns), ranks.size)
        shares = ranks.gather(_answered(engine, name, turns, numbers, asking))
        samples[name] = sorted((row for own in shares for row in own), key=lambda r: r["doc_id"])
        prompts = hashlib.sha256("\n".join(r["prompt_hash"] for r in samples[name]).encode())
        for metric in _JUDGES:
            values = [row[metric] for row in samples[name]]
            stderr = stdev(values) / len(values) ** 0.5 if len(values) > 1 else None
            scores.append(
                Score(
                    name, metric, fmean(values), stderr, 0, None, len(values), None,
                    prompts.hexdigest(), is_main=metric == "exact_match",
                )
            )  # fmt: skip
    every = [row for rows in samples.values() for row in rows]
    cut = sum(not row["written"][0]["is_whole"] for row in every)
    notes = [f"{cut} of {len(every)} answers were cut off before their end"] if cut else []
    return Evaluation(scores, samples, settings, notes)


def _answered(
    engine: Engine,
    name: str,
    turns: Sequence[tuple[Conversation, int]],
    numbers: Sequence[int],
    asking: Asking,
) -> list[dict[str, Any]]:
    """The samples of some of a file's turns, those with prompts of like length asked together."""
    from trainkit.evals.answers import after_thinking  # torch

    sampling = SamplingOptions(
        asking.max_new_tokens or _MAX_NEW_TOKENS, greedy=True, repetition_penalty=1.0
    )
    questions, sizes = {}, {}
    for number in numbers:
        row, turn = turns[number]
        questions[number] = row.first(turn)
        try:
            engine.check_fit(questions[number])
        except DataError as error:
            where = f"{name}: answer {number + 1}"
            raise DataError(error.what, where=where, fix=error.fix or "shorten it") from None
        sizes[number] = len(engine.prompt_ids(questions[number]))
    found, waiting = [], sorted(numbers, key=sizes.__getitem__)
    for start in range(0, len(waiting), size := asking.batch_size or _BATCH_SIZE):
        batch = waiting[start : start + size]
        answers = engine.answer_batch([questions[number] for number in batch], sampling)
        for number, answer in zip(batch, answers, strict=True):
            row, turn = turns[number]
            target = engine.expected(row.first(turn + 1))
            is_thinking, given = after_thinking(answer.text, thinks=False)
            seen = [image.digest for image in engine.images(questions[number])]
            doc = {"messages": [as_turn(each) for each in questions[number].messages]}
            found.append(
                {
                    "doc_id": number,
                    "doc": doc,
                    "doc_hash": _hash(doc, target),
                    "prompt_hash": _hash(answer.input_ids, seen),
                    "target": target,
                    "filtered_resps": [given],
                    "filter": "none",
                    "written": [
                        {
                            "text": answer.text,
                            "is_whole": answer.finish == "stop" and not is_thinking,
                        }
                    ],
                    **{metric: judge(given, target) for metric, judge in _JUDGES.items()},
                }
            )
    return found


def _hash(*values: Any) -> str:
    return hashlib.sha256(repr(values).encode()).hexdigest()


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
