"""What a library refuses while it is set up from a recipe, said as a fault of the recipe."""

from collections.abc import Iterator
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
