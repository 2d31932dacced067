"""A base that is stored in no plain weights, as the plain directory that an adapter merges into."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from trainkit.checkpoint.weights.plain_files import read_config
from trainkit.checkpoint.whole.atomic import discard, stage
from trainkit.models.loading import UNPACKED_METHODS, load_model, load_tokenizer
from trainkit.options import ModelOptions


@contextmanager
def plain_base(
    source: ModelOptions, base: Path, dtype: str | None, near: Path, say: Callable[[str], None]
) -> Iterator[Path]:
    """The base itself, or for a while a directory with the weights that its run computed with.

    Args:
        source: the base, and whether code that comes with it may run.
        base: where it is: a directory, or a .gguf file.
        dtype: what the run loaded it in; None takes the stored one.
        near: where the result will be: the copy is made next to it. What a killed process left
            there of its own goes first.
        say: called with one line where there is something to unpack.
    """
    if not (base.is_file() or is_unpacked_to_train(base)):
        yield base
        return
    say(f"unpacking {base}, as its run did")
    options = source.replace(name_or_path=str(base), dtype=dtype or "auto")
    place = next(each for each in near.absolute().parents if each.is_dir())
    directory = stage(place / "base", replace=True)
    try:
        load_model(options, attention=None).save_pretrained(directory)
        load_tokenizer(options).save_pretrained(directory)
        yield directory
    finally:
        discard(directory)


def is_unpacked_to_train(base: Path) -> bool:
    """Whether a directory's weights are of a kind that is always unpacked as they are loaded."""
    settings = read_config(base).get("quantization_config")
    return isinstance(settings, dict) and settings.get("quant_method") in UNPACKED_METHODS
