"""What another process makes of a pickled model."""

import pickle
from pathlib import Path

from trainkit.models import swap


def unpickled(path):
    """The classes that it knows already, and what came back."""
    knows = [kind.__name__ for kind in swap._generated.values() if "Qwen2" in kind.__name__]
    model = pickle.loads(Path(path).read_bytes())
    number = sum(swap.plain_class(each) is not type(each) for each in model.modules())
    return [knows, type(model).__name__, swap.plain_class(model).__module__, number]
