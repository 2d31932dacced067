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
        near: where the result will be: the copy is made next to it, where the next command that
            writes there clears away what a killed one has left.
        say: called with one line where there is something to unpack.
    """
    if is_plain(base):
        yield base
        return
    say(f"unpacking {base}, as its run did")
    options = source.replace(name_or_path=str(base), dtype=dtype or "auto")
    directory = stage(near.absolute().parent / "base", replace=True)
    try:
        load_model(options, attention=None).save_pretrained(directory)
        load_tokenizer(options).save_pretrained(directory)
        yield directory
    finally:
        discard(directory)


def is_plain(base: Path) -> bool:
    """Whether it is a directory, and its weights are not always unpacked as they are loaded."""
    if base.is_file():
        return False
    settings = read_config(base).get("quantization_config")
    return not (isinstance(settings, dict) and settings.get("quant_method") in UNPACKED_METHODS)
