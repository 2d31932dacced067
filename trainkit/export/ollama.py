"""``trainkit export ollama``: a GGUF and a Modelfile with the trained template as Go writes it.

Ollama is not run here. Its Modelfile and its templates are as documented; what its template makes
of a conversation is computed from the same texts that the template is made of, and proved on
llama.cpp's tokenizer and numbers.
"""

import json
import shlex
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from trainkit.checkpoint.weights.plain_files import read_config
from trainkit.data.messages import Conversation, TextRow
from trainkit.errors import ModelError
from trainkit.export.gguf import COPIES, GgufServed, check, is_quantized, served_gguf, write_gguf
from trainkit.export.llama_cpp import LlamaServer
from trainkit.export.source import Job, Source, Written
from trainkit.models.context import context_of
from trainkit.models.tokenizer import load_tokenizer

__all__ = ["COPIES", "check", "write"]
_SAMPLING = ("temperature", "top_p", "top_k", "repeat_penalty")
_LONGEST_CONTEXT = 8192  # Ollama's own is 4096, beyond which it drops turns without a word


def write(source: Source, staging: Path, job: Job) -> Written:
    if source.template is None:
        raise ModelError(
            "it was trained on plain texts, and Ollama chats", fix="trainkit export gguf"
        )
    file, work = write_gguf(source, staging, job), staging / "merged"
    with served_gguf(file, source) as served:
        through_ollama = OllamaServed(served.server, source, work)
        note = "Ollama itself was not run; llama.cpp read its file"
        quantized = is_quantized(source, job)
        certificate = job.certify(source, through_ollama, note, is_quantized=quantized)
    text = modelfile(file.name, through_ollama.wrapping, source, job.system, work)
    (staging / "Modelfile").write_text(text, encoding="utf-8")
    notes = ["Ollama gets the text model alone"] if "vision_config" in read_config(work) else []
    shutil.rmtree(work)
    name, path = shlex.quote(job.name), shlex.quote(str((job.out / "Modelfile").absolute()))
    return Written(certificate, f"ollama create {name} -f {path} && ollama run {name}", notes)


class OllamaServed(GgufServed):
    """A GGUF with the prompts that the Modelfile's template makes."""

    def __init__(self, server: LlamaServer, source: Source, work: Path) -> None:
        super().__init__(server, source.reference.answers[0].logits.shape[1])
        tokenizer = load_tokenizer(source.paths.at(work))
        bos = tokenizer.bos_token if self.server.tokenize("") else None
        self.wrapping = wrapping_of(
            lambda messages: tokenizer.apply_chat_template(
                list(messages), add_generation_prompt=True, tokenize=False
            ),
            bos or "",
        )

    def prompt_ids(self, row: Conversation | TextRow) -> list[int]:
        """Ollama's template here has no tools."""
        if not isinstance(row, Conversation):
            return super().prompt_ids(row)
        messages = [(message.role, message.content) for message in row.messages]
        return self.server.tokenize(self.wrapping.render(messages))


def modelfile(
    file: str, wrapping: "Wrapping", source: Source, system: str | None, model: Path
) -> str:
    """The text of a Modelfile.

    ``model`` is the plain one, for its settings; ``file`` the GGUF next to it.
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


# -- A chat template as Go's text/template, found by rendering probes -----------------------------
# Most templates put each message between two texts that depend on its role alone. Those texts are
# read off the trained template, and a template for Ollama is made of them. Whether the trained one
# is really of this kind is proved afterwards, on every prompt of the certificate.

_FIRST, _SECOND, _THIRD = "probe-a", "probe-b", "probe-c"
Render = Callable[[Sequence[Mapping[str, Any]]], str]


@dataclass(frozen=True)
class Wrapping:
    """A template that only wraps messages.

    Attributes:
        default: what comes first where there is no system prompt.
    """

    default: str
    around: Mapping[str, tuple[str, str]]
    opening: str

    def render(self, messages: Sequence[tuple[str, str]]) -> str:
        """What Ollama makes of (role, content) pairs with ``text``."""
        has_system = bool(messages) and messages[0][0] == "system"
        pieces = ["" if has_system else self.default]
        for role, content in messages:
            before, behind = self.around.get(role, ("", ""))
            pieces += [before, content, behind] if role in self.around else []
        return "".join([*pieces, self.opening])

    def text(self) -> str:
        """The template in Go's language."""
        lines = []
        if self.default:
            first = '{{ if ne (index .Messages 0).Role "system" }}'
            lines.append(f"{first}{_literal(self.default)}{{{{ end }}}}")
        lines.append("{{ range .Messages }}")
        for number, (role, (before, behind)) in enumerate(self.around.items()):
            word = "else if" if number else "if"
            lines.append(f'{{{{ {word} eq .Role "{role}" }}}}{_literal(before)}')
            lines.append(f"{{{{ .Content }}}}{_literal(behind)}")
        lines.append(f"{{{{ end }}}}{{{{ end }}}}{_literal(self.opening)}")
        return "".join(lines)


def _literal(text: str) -> str:
    """A text as a string of Go, which neither braces nor line breaks can end early."""
    return f"{{{{ {json.dumps(text, ensure_ascii=False)} }}}}" if text else ""


def wrapping_of(render: Render, bos: str) -> Wrapping:
    """Read the texts around messages off a template."""

    def rendered(*messages: Mapping[str, Any]) -> str:
        return render(messages).removeprefix(bos)

    user, answer = {"role": "user", "content": _FIRST}, {"role": "assistant", "content": _SECOND}
    system = {"role": "system", "content": _THIRD}
    again = {"role": "user", "content": _THIRD}
    try:
        one, several = rendered(user), rendered(user, answer, again)
    except TemplateError as error:
        raise _refused(f"it fails on a plain question: {error}") from None
    try:
        with_system = rendered(system, user)
    except TemplateError:
        with_system = ""
    head, _, tail = one.partition(_FIRST)
    between_user, _, rest = several.removeprefix(head).removeprefix(_FIRST).partition(_SECOND)
    between_answer, found, last = rest.partition(_THIRD)
    if not found or last != tail or not several.startswith(head):
        raise _refused("its turns are not each between two texts of their own")
    # Behind a question: its end, then the header of an answer, which also opens one at the end.
    end = _common(between_user, tail)
    opening = tail.removeprefix(end)
    answer_header = between_user.removeprefix(end)
    # The header of a question is what the start and a later turn end with alike.
    user_header = _common(head[::-1], between_answer[::-1])[::-1]
    if not user_header:
        raise _refused("questions begin in more than one way")
    end_of_answer = between_answer.removesuffix(user_header)
    around = {"user": (user_header, end), "assistant": (answer_header, end_of_answer)}
    if _THIRD in with_system:
        before, _, behind = with_system.partition(_THIRD)
        behind = behind.partition(_FIRST)[0]
        if behind.endswith(user_header):
            around = {"system": (before, behind.removesuffix(user_header)), **around}
    return Wrapping(head.removesuffix(user_header), around, opening)


def _common(first: str, second: str) -> str:
    pairs = enumerate(zip(first, second, strict=False))
    return first[: next((at for at, (a, b) in pairs if a != b), min(len(first), len(second)))]


def _refused(why: str) -> ModelError:
    return ModelError(
        f"the chat template cannot be written for Ollama: {why}",
        where="chat_template",
        fix="trainkit export gguf: llama.cpp's server reads the template itself",
    )
