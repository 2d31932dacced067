"""llama.cpp's own server, asked over HTTP: its template engine, its tokenizer, its numbers."""

import importlib.metadata
import importlib.util
import json
import secrets
import subprocess
import tempfile
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainkit.data.read.messages import Conversation, Message
from trainkit.errors import CheckpointError, ModelError
from trainkit.export.gguf.convert import environment
from trainkit.processes import module_command

_MOST_ASKED = 1024
"""So many of the likeliest tokens are asked for; the others share what is left."""
_FORCED = 1e6


def check_llama_cpp() -> None:
    """Refuse to begin without llama.cpp: nothing could be proved.

    Raises:
        ModelError: the package with its server is not installed.
    """
    if importlib.util.find_spec("xllamacpp") is None:
        raise ModelError(
            "llama.cpp is not installed, so the file could not be read back",
            where="trainkit export",
            fix="pip install 'trainkit[export]'",
        )


class LlamaServer:
    """A GGUF in llama.cpp's server on this machine's CPU."""

    def __init__(
        self, file: Path, context: int, variables: Mapping[str, Any] | None = None
    ) -> None:
        """Start it.

        Args:
            file: the GGUF.
            context: longest sequence that will be asked.
            variables: for the template, as its own option ``--chat-template-kwargs`` takes them.

        Raises:
            CheckpointError: llama.cpp does not load the file.
        """
        self.version = f"llama.cpp's server (xllamacpp {importlib.metadata.version('xllamacpp')})"
        self._variables = dict(variables or {})
        self._letter: int | None = None
        self._key = secrets.token_hex(16)
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        self._process = subprocess.Popen(
            module_command("trainkit.export.gguf.server", str(file), str(context)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env={**environment(), "TRAINKIT_EXPORT_KEY": self._key},
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

    def log_probs(self, input_ids: Sequence[int], vocab_size: int) -> Tensor:
        """Log probabilities of the token behind ``input_ids``: (vocab_size,)."""
        wanted = min(vocab_size, _MOST_ASKED)
        # A token that ends within a character is held back, and its probabilities with it. So a
        # plain letter is forced; what is reported is from before such a bias.
        if self._letter is None:
            self._letter = self.tokenize("a")[-1]
        body: dict[str, Any] = {"n_predict": 1, "temperature": 0, "n_probs": wanted}
        body["cache_prompt"] = True
        body["logit_bias"] = [[self._letter, _FORCED]]
        said = self._post("/completion", {"prompt": list(input_ids), **body})
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
        """Stop it."""
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
        line = self._process.stdout.readline()
        if line:
            return str(json.loads(line)["address"])
        reason = self._last_words()
        self.close()
        raise CheckpointError(f"llama.cpp does not load it: {reason}", where=file.name)

    def _last_words(self) -> str:
        self._process.wait()
        self._log.seek(0)
        lines = self._log.read().decode("utf-8", "replace").strip().splitlines()
        causes = [line for line in lines if " E " in line]  # the first names the cause
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
    """A message as a client of the server sends it."""
    sent: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.reasoning is not None:
        sent["reasoning_content"] = message.reasoning
    if message.tool_calls:
        sent["tool_calls"] = [
            {
                "type": "function",
                "id": call["id"] or f"call{place:05d}",
                "function": {"name": call["name"], "arguments": _as_text(call["arguments"])},
            }
            for place, call in enumerate(message.tool_calls)
        ]
    for key in ("name", "tool_call_id"):
        if getattr(message, key) is not None:
            sent[key] = getattr(message, key)
    return sent


def _as_text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
