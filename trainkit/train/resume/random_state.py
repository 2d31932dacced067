"""Every generator that a run draws from, saved and set again; as transformers' files have it."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trainkit.checkpoint.weights.contents import taking_up


def random_state(args: Any) -> dict[str, Any]:
    """Of this rank; of several the states of all GPUs of the host."""
    state = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "cpu": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        of_all = args.world_size > 1
        of_gpus = torch.cuda.get_rng_state_all if of_all else torch.cuda.get_rng_state
        state["cuda"] = of_gpus()
    return state


def random_file(folder: Path, args: Any) -> Path:
    """Of this rank in a checkpoint."""
    return folder / f"rng_state{'' if args.world_size <= 1 else f'_{args.process_index}'}.pth"


def load_random_state(folder: Path, args: Any) -> None:
    """Go on drawing where a checkpoint left off; one without its states leaves all as it is."""
    path = random_file(folder, args)
    if not path.is_file():
        return
    numpy_state = [np.ndarray, np.dtype, type(np.dtype(np.uint32)), _reconstruct()]
    with torch.serialization.safe_globals(numpy_state):
        saved = torch.load(path, weights_only=True)
    with taking_up(path):
        random.setstate(saved["python"])
        np.random.set_state(saved["numpy"])
        torch.set_rng_state(saved["cpu"])
        if torch.cuda.is_available() and "cuda" in saved:
            of_all = args.world_size > 1
            (torch.cuda.set_rng_state_all if of_all else torch.cuda.set_rng_state)(saved["cuda"])


def _reconstruct() -> Any:
    """What numpy's arrays name in a pickle, wherever this numpy keeps it."""
    return np.zeros(0).__reduce__()[0]
