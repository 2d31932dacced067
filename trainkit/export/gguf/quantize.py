"""The k-quants, which only llama.cpp itself writes."""

import ctypes
import importlib.util
import logging
import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from trainkit.errors import CheckpointError, ModelError

FILE_TYPES: Mapping[str, int] = {"q4_k_m": 15, "q5_k_m": 17, "q6_k": 18}
"""llama.cpp's own numbers (``llama_ftype``)."""
_PROGRAM = "llama-quantize"


def check_quantizer() -> None:
    """Refuse to begin where nothing can quantise.

    Raises:
        ModelError: neither the program nor llama-cpp-python is there.
    """
    if shutil.which(_PROGRAM) is None and importlib.util.find_spec("llama_cpp") is None:
        raise ModelError(
            f"k-quants are written by llama.cpp's {_PROGRAM}, which is not here",
            where="--type",
            fix="pip install llama-cpp-python (compiles llama.cpp for some minutes), or put "
            f"{_PROGRAM} on the PATH; q8_0 needs neither",
        )


def quantize(source: Path, target: Path, kind: str) -> None:
    """Quantise a GGUF.

    Args:
        source: in f32, f16 or bf16.
        target: the file to write.
        kind: of ``FILE_TYPES``.

    Raises:
        CheckpointError: llama.cpp could not.
    """
    program = shutil.which(_PROGRAM)
    reason = ""
    if program is not None:
        command = [program, str(source.absolute()), str(target.absolute()), kind.upper()]
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", check=False
        )
        code, reason = done.returncode, done.stderr.strip()[-200:]
    else:
        code = _by_library(os.fsencode(source), os.fsencode(target), FILE_TYPES[kind])
    if code != 0 or not target.is_file():
        raise CheckpointError(f"llama.cpp could not quantise it to {kind} {reason}".rstrip())


def _by_library(source: bytes, target: bytes, number: int) -> int:
    import llama_cpp

    # Its own logger; otherwise it prints a hundred lines about the file.
    logging.getLogger("llama-cpp-python").setLevel(logging.ERROR)
    llama_cpp.llama_backend_init()
    parameters = llama_cpp.llama_model_quantize_default_params()
    parameters.ftype = number
    parameters.nthread = int(os.environ.get("OMP_NUM_THREADS") or os.cpu_count() or 1)
    return int(llama_cpp.llama_model_quantize(source, target, ctypes.byref(parameters)))
