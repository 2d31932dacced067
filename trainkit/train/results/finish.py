"""What a finished run leaves behind: the final model, its answers, the curves and the report."""

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import GenerationConfig, PreTrainedTokenizerBase

from trainkit.auto_class import auto_class
from trainkit.models.loading import set_use_cache
from trainkit.train.checkpoints import written_together
from trainkit.train.results.evaluations import undisturbed
from trainkit.train.results.generation_eval import GenerationEvalResult
from trainkit.train.results.questions import Questions


@dataclass(frozen=True)
class AfterTraining:
    """What to do with the trained model.

    Attributes:
        base_model: what the model card names as its origin.
        questions: what the model is asked, during training and after it.
    """

    base_model: str
    questions: Questions


def save_final(
    loop: Any,
    target: Path,
    *,
    tokenizer: PreTrainedTokenizerBase,
    stop_token_ids: Iterable[int],
    metadata: Mapping[str, Any],
    card: str | None = None,
) -> None:
    """Write ``final/``: weights or adapter, tokenizer, chat template, generation settings.

    Every rank calls it; sharded weights are gathered on the way.

    Args:
        loop: after training.
        target: the directory to appear; one from before the run was continued is replaced.
        tokenizer: with the chat template that was trained.
        stop_token_ids: the end-of-turn tokens found in the template.
        metadata: plain JSON values for the manifest.
        card: the model card, in place of peft's empty one.

    Raises:
        CheckpointError: it could not be written; nothing half-written is left.
        NumberError: a weight is NaN or infinite; one from before stays.
    """
    loop.numbers.check(loop, target.name)
    whole = written_together(target, loop.ranks, metadata, replace=True)
    with whole as inner, _with_cache(loop):
        loop.save_model(inner)
        if loop.ranks.is_main_process:
            settings = generation_config(loop.model, tokenizer, stop_token_ids)
            settings.save_pretrained(inner)
            if card is not None:
                (inner / "README.md").write_text(card, encoding="utf-8")


def generation_config(
    model: Any, tokenizer: PreTrainedTokenizerBase, stop_token_ids: Iterable[int]
) -> GenerationConfig:
    """The model's generation settings, stopping at the trained end-of-turn tokens as well.

    Args:
        model: a transformers or peft model.
        tokenizer: names the padding token.
        stop_token_ids: what training taught the model to end its turn with.
    """
    settings = GenerationConfig.from_dict(model.generation_config.to_dict())
    known = settings.eos_token_id
    already = [] if known is None else known if isinstance(known, list) else [known]
    settings.eos_token_id = list(dict.fromkeys([*stop_token_ids, *already])) or None
    if settings.pad_token_id is None:
        settings.pad_token_id = tokenizer.pad_token_id
    return settings


@contextlib.contextmanager
def _with_cache(loop: Any) -> Iterator[None]:
    """Save ``use_cache: true``: it is off for training, and a served model wants it on."""
    config = loop.model.config
    set_use_cache(config, True)
    try:
        yield
    finally:
        set_use_cache(config, False)


def answer_held_out(
    loop: Any,
    final: Path,
    tokenizer: PreTrainedTokenizerBase,
    stop_token_ids: Sequence[int],
    questions: Questions,
) -> GenerationEvalResult:
    """Answer held-out conversations greedily and count exact matches; every rank takes a share.

    Args:
        loop: after training.
        final: the saved model, loaded again where no rank holds the model whole.
        tokenizer: of the model.
        stop_token_ids: what the model was taught to end its turn with.
        questions: the conversations, and how they are answered.
    """
    model = _whole_model(loop, final)
    with undisturbed(model):
        return questions.answer(loop.ranks, model, tokenizer, stop_token_ids)


def _whole_model(loop: Any, final: Path) -> Any:
    engine, trained = loop.engine, loop.model

    def reload() -> Any:
        dtype = engine.saved_dtype(*next(iter(trained.named_parameters())))
        model = auto_class(trained.config).from_pretrained(final, dtype=dtype)
        return model.to(loop.args.device)

    return engine.whole_model(trained, reload)


def best_of(loop: Any) -> dict[str, object]:
    """Which checkpoint the final model is, where the best one was asked for."""
    checkpoint = loop.state.best_model_checkpoint
    if not loop.args.load_best_model_at_end or checkpoint is None:
        return {}
    name = loop.args.metric_for_best_model
    return {"best": f"{Path(checkpoint).name}, {name} {loop.state.best_metric:.4f}"}
