"""What a finished run leaves behind: the final model, with the stop tokens it was taught."""

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from transformers import GenerationConfig, PreTrainedTokenizerBase

from trainkit.train.checkpoints import written_together
from trainkit.train.trainer import SftTrainer


def save_final(
    trainer: SftTrainer,
    target: Path,
    *,
    tokenizer: PreTrainedTokenizerBase,
    stop_token_ids: Iterable[int],
    metadata: Mapping[str, Any],
) -> None:
    """Write ``final/``: weights or adapter, tokenizer, chat template, generation settings.

    Every rank calls it; sharded weights are gathered on the way.

    Args:
        trainer: after training.
        target: the directory to appear.
        tokenizer: with the chat template that was trained.
        stop_token_ids: the end-of-turn tokens found in the template.
        metadata: plain JSON values for the manifest.

    Raises:
        CheckpointError: it could not be written; nothing half-written is left.
    """
    with written_together(target, trainer.accelerator, metadata) as inner, _with_cache(trainer):
        trainer.save_model(str(inner), _internal_call=True)
        if trainer.accelerator.is_main_process:
            settings = generation_config(trainer.model, tokenizer, stop_token_ids)
            settings.save_pretrained(inner)


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
def _with_cache(trainer: SftTrainer) -> Iterator[None]:
    """Save ``use_cache: true``: it is off for training, and a served model wants it on."""
    config = trainer.model.config
    config.use_cache = True
    try:
        yield
    finally:
        config.use_cache = False
