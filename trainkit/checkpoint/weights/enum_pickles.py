"""Members of enumerations as early versions of Python 3.11 pickle them: ``getattr(class, name)``.

An unpickler that runs no code refuses ``getattr``, with which a pickle reaches any attribute. Here
a function replaces it that looks up a member by its name and nothing else.
"""

import pickle
from enum import Enum
from typing import Any

GETATTR = "builtins.getattr"


def member(kind: Any, name: Any) -> Enum:
    """A member of an enumeration.

    Raises:
        pickle.UnpicklingError: the pickle asks for something else.
    """
    is_enumeration = isinstance(kind, type) and issubclass(kind, Enum)
    if is_enumeration and isinstance(name, str) and name in kind.__members__:
        return kind.__members__[name]
    raise pickle.UnpicklingError(f"it asks for {str(name)[:40]} of {str(kind)[:60]}")
