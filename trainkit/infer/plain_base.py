"""A base that is stored in no plain weights, as the plain directory that an adapter merges into."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from trainkit.checkpoint.weights.plain_files import read_config
from trainkit.models.loading import UNPACKED_METHODS, load_model, load_tokenizer
from trainkit.options import ModelOptions


@contextmanager
def plain_base(
    base: Path, dtype: str | None, near: Path, say: Callable[[str], None]
) -> Iterator[Path]:
    """The base itself, or for a while a directory with the weights that its run computed with.

    Args:
        base: a directory, or a .gguf file.
        dtype: what the run loaded it in; None takes the stored one.
        near: where the result will be: the copy is made on the same disk.
        say: called with one line where there is something to unpack.
    """
    if not (base.is_file() or is_unpacked_to_train(base)):
        yield base
        return
    say(f"unpacking {base}, as its run did")
    options = ModelOptions(name_or_path=str(base), dtype=dtype or "auto")
    place = next(each for each in near.absolute().parents if each.is_dir())
    with TemporaryDirectory(dir=place, prefix=".base-") as directory:
        load_model(options, attention=None).save_pretrained(directory)
        load_tokenizer(options).save_pretrained(directory)
        yield Path(directory)


def is_unpacked_to_train(base: Path) -> bool:
    """Whether a directory's weights are of a kind that is always unpacked as they are loaded."""
    settings = read_config(base).get("quantization_config")
    return isinstance(settings, dict) and settings.get("quant_method") in UNPACKED_METHODS
