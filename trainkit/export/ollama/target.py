"""``trainkit export ollama``: a GGUF and a Modelfile, proved on llama.cpp's tokenizer and numbers.

Ollama is not run here. Its Modelfile and its templates are as documented; what its template makes
of a conversation is computed from the same texts that the template is made of.
"""

import json
import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from trainkit.data.read.messages import Conversation, TextRow
from trainkit.errors import ModelError
from trainkit.estimate.context import context_of
from trainkit.export.certificate import certify
from trainkit.export.gguf.target import COPIES, GgufServed, check, is_plain, open_gguf, write_gguf
from trainkit.export.ollama.go_template import Wrapping, wrapping_of
from trainkit.export.run import Job, Written
from trainkit.export.served import ServedTemplate
from trainkit.export.source import Source

__all__ = ["COPIES", "check", "write"]
_SAMPLING = ("temperature", "top_p", "top_k", "repeat_penalty")
_LONGEST_CONTEXT = 8192  # Ollama's own is 4096, beyond which it drops turns without a word


def write(source: Source, staging: Path, job: Job) -> Written:
    """Write the GGUF and the Modelfile."""
    if source.template is None:
        raise ModelError(
            "it was trained on plain texts, and Ollama chats",
            fix="trainkit export gguf",
        )
    file = write_gguf(source, staging, job)
    work = staging / "merged"
    job.say("asking llama.cpp")
    inner = open_gguf(file, source)
    try:
        inner.check_ends(source)
        plain = ServedTemplate(source.paths.at(work))
        bos = plain.tokenizer.bos_token if inner.server.tokenize("") else None
        wrapping = wrapping_of(
            lambda messages: plain.tokenizer.apply_chat_template(
                list(messages), add_generation_prompt=True, tokenize=False
            ),
            bos or "",
        )
        served = OllamaServed(inner, wrapping)
        certificate = certify(
            source.reference,
            served,
            required=job.options.required(is_quantized=not is_plain(source, job)),
            excepted=job.options.excepted,
            notes=["Ollama itself was not run; llama.cpp read its file"],
        )
    finally:
        inner.close()
    text = modelfile(file.name, wrapping, source, job.options.system, work)
    (staging / "Modelfile").write_text(text, encoding="utf-8")
    shutil.rmtree(work)
    name = shlex.quote(job.options.name)
    path = shlex.quote(str((job.out / "Modelfile").absolute()))
    return Written(certificate, f"ollama create {name} -f {path} && ollama run {name}")


class OllamaServed:
    """A GGUF with the prompts that the Modelfile's template makes."""

    def __init__(self, inner: GgufServed, wrapping: Wrapping) -> None:
        self._inner, self._wrapping = inner, wrapping
        self.read_with = inner.read_with

    def prompt_ids(self, row: Conversation | TextRow) -> list[int]:
        """As the protocol says; Ollama's template here has no tools."""
        if not isinstance(row, Conversation):
            return self._inner.prompt_ids(row)
        messages = [(message.role, message.content) for message in row.messages]
        return self._inner.server.tokenize(self._wrapping.render(messages))

    def logits(self, input_ids: Sequence[int], start: int) -> Tensor:
        """As the protocol says."""
        return self._inner.logits(input_ids, start)

    def close(self) -> None:
        """As the protocol says."""
        self._inner.close()


def modelfile(
    file: str, wrapping: Wrapping, source: Source, system: str | None, model: Path
) -> str:
    """The text of a Modelfile.

    Args:
        file: name of the GGUF next to it.
        wrapping: the template.
        source: its stop tokens.
        system: a system prompt for every chat, or None.
        model: the plain model, for its settings.

    Raises:
        ModelError: a text holds three quotes, which end a text of a Modelfile.
    """
    settings = json.loads((model / "generation_config.json").read_text("utf-8"))
    config = json.loads((model / "config.json").read_text("utf-8"))
    settings["repeat_penalty"] = settings.get("repetition_penalty")
    lines = [f"FROM ./{file}", f"TEMPLATE {_quoted(wrapping.text(), 'chat_template')}"]
    if system is not None:
        lines.append(f"SYSTEM {_quoted(system, '--system')}")
    lines += [f"PARAMETER stop {json.dumps(token)}" for token in source.stop_tokens]
    context = context_of(config) or _LONGEST_CONTEXT
    lines.append(f"PARAMETER num_ctx {min(int(context), _LONGEST_CONTEXT)}")
    for name in _SAMPLING:
        if isinstance(settings.get(name), int | float):
            lines.append(f"PARAMETER {name} {settings[name]}")
    return "\n".join(lines) + "\n"


def _quoted(text: str, where: str) -> str:
    if '"""' in text or text.endswith('"'):
        raise ModelError("a Modelfile cannot hold three quotes in a row", where=where)
    return f'"""{text}"""'
