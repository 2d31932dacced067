"""What the harness asks a model, in the words and token ids that training used."""

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from transformers import PreTrainedTokenizerBase

from trainkit.data.options import DataOptions
from trainkit.data.render.prompt import PromptRenderer, conversation_of
from trainkit.data.render.template import THINK_CLOSE, THINK_OPEN, own_template
from trainkit.errors import DataError, ModelError

# -- Many texts to token ids at once: what they share is tokenised once, on all cores -------------
# The questions of a set begin with the same examples, and a context is asked for with each of its
# answers. A text is cut at places where the tokenizer cuts it too, so the ids of the pieces, one
# after the other, are those of the whole text. Pieces that come again are not tokenised again.
#
# Where a tokenizer is not known to cut there, texts are tokenised whole.


_CUT = re.compile("(?<=[a-z]) (?=[a-z])")
"""Before a blank between two words."""

_STEP = 256
"""Characters of a piece at least: shorter ones share more, and are more to put together."""

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LATER = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+END"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*END"
)
_PATTERNS = {
    # GPT-2
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    # Llama 3, Qwen 2 to 3, Qwen 3.5
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_LATER}",
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_LATER}",
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_LATER}",
    # gpt-oss and Mistral's later ones
    _CASED.replace("END", f"{_CONTRACTIONS}?")
    + rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_LATER}",
    _CASED.replace("END", "") + rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_LATER}",
}
"""Patterns that never look back, and match a blank before a word only at their beginning."""


def encode_texts(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], *, add_special_tokens: bool
) -> list[list[int]]:
    """Token ids, exactly those of ``tokenizer(text)``.

    Args:
        tokenizer: a fast one shares pieces; any other takes the texts whole.
        texts: any number.
        add_special_tokens: those that the tokenizer adds to a text by itself.
    """
    around = _around(tokenizer, add_special_tokens) if cuts_between_words(tokenizer) else None
    if around is None:
        return _encoded(tokenizer, texts, add_special_tokens=add_special_tokens)
    before, behind = around
    cut = [list(_pieces(text)) for text in texts]
    unique = list(dict.fromkeys(chain.from_iterable(cut)))
    known = dict(zip(unique, _pieces_encoded(tokenizer, unique), strict=True))
    return [
        [*before, *chain.from_iterable(known[piece] for piece in pieces), *behind] for pieces in cut
    ]


def cuts_between_words(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether a text's ids are those of its part before a blank between words and of the rest."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return False
    model = backend.model
    is_plain = (
        type(model).__name__ == "BPE"
        and not model.dropout
        and not model.continuing_subword_prefix
        and not model.end_of_word_suffix
    )
    normalizer = backend.normalizer
    is_local = normalizer is None or type(normalizer).__name__ == "NFC"
    added = backend.get_added_tokens_decoder().values()
    if getattr(tokenizer, "split_special_tokens", False):
        return False
    reaches = any(each.rstrip or _CUT.search(each.content) for each in added)
    return is_plain and is_local and not reaches and _splits(_state(backend.pre_tokenizer))


def _state(part: Any) -> Mapping[str, Any]:
    """A part of a tokenizer as in ``tokenizer.json``."""
    state: Mapping[str, Any] = {} if part is None else json.loads(part.__getstate__())
    return state


def _splits(state: Mapping[str, Any]) -> bool:
    """Whether a pre-tokenizer cuts before a blank between words, and does nothing beyond a cut."""
    steps = state["pretokenizers"] if state.get("type") == "Sequence" else [state]
    return all(map(_is_known, steps)) and any(map(_has_pattern, steps))


def _is_known(step: Mapping[str, Any]) -> bool:
    kind = step.get("type")
    if kind == "Split":
        return _has_pattern(step) and step["behavior"] == "Isolated" and not step["invert"]
    return kind == "Digits" or (kind == "ByteLevel" and not step["add_prefix_space"])


def _has_pattern(step: Mapping[str, Any]) -> bool:
    if step.get("type") == "ByteLevel":
        return bool(step["use_regex"])
    return step.get("type") == "Split" and step["pattern"].get("Regex") in _PATTERNS


def _around(
    tokenizer: PreTrainedTokenizerBase, add_special_tokens: bool
) -> tuple[list[int], list[int]] | None:
    """The special tokens that go before a text and behind it; None where that is not clear."""
    if not add_special_tokens:
        return [], []
    (plain,) = _encoded(tokenizer, ["a"], add_special_tokens=False)
    (whole,) = _encoded(tokenizer, ["a"], add_special_tokens=True)
    starts = [at for at in range(len(whole)) if whole[at : at + len(plain)] == plain]
    if len(starts) != 1:
        return None
    return whole[: starts[0]], whole[starts[0] + len(plain) :]


def _pieces(text: str) -> Iterator[str]:
    """A text's pieces; texts with the same beginning have the same pieces there."""
    start = 0
    while (found := _CUT.search(text, start + _STEP)) is not None:
        yield text[start : found.start()]
        start = found.start()
    yield text[start:]


def _encoded(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], *, add_special_tokens: bool
) -> list[list[int]]:
    with _all_cores():
        found = tokenizer(list(texts), add_special_tokens=add_special_tokens, verbose=False)
    return [list(ids) for ids in found["input_ids"]]


def _pieces_encoded(tokenizer: Any, pieces: Sequence[str]) -> Iterator[list[int]]:
    """Ids alone: of a hundred thousand pieces, masks and offsets take longer than the ids."""
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()  # what a call of the tokenizer leaves behind
    backend.no_padding()
    with _all_cores():
        found = backend.encode_batch_fast(pieces, add_special_tokens=False)
    return (each.ids for each in found)


@contextmanager
def _all_cores() -> Iterator[None]:
    """Within, a tokenizer uses threads; RAYON_NUM_THREADS says how many.

    They are switched off elsewhere because of processes that are forked, and none is forked here.
    """
    name = "TOKENIZERS_PARALLELISM"
    before = os.environ.get(name)
    os.environ[name] = "true"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


_THINKING_SWITCHES = ("enable_thinking", "thinking")
"""The variables by which chat templates switch thinking."""


@dataclass
class PromptStyle:
    """How prompts are made.

    Attributes:
        tokenizer: with a chat template, where ``chat`` is on.
        options: how training rendered conversations.
        chat: render with the chat template; else texts are plain.
        thinking: switch it on or off where the template can; None leaves it as it was trained.
    """

    tokenizer: PreTrainedTokenizerBase
    options: DataOptions = field(default_factory=DataOptions)
    chat: bool = False
    thinking: bool | None = None

    def __post_init__(self) -> None:
        self._keeps_system = self.options.system_policy == "keep"
        self._renderer = PromptRenderer(self.tokenizer, self._switched(self.thinking))
        # A letter that is scored behind the prompt is no place to think.
        self._at_once = PromptRenderer(self.tokenizer, self._switched(False))

    def _switched(self, thinking: bool | None) -> DataOptions:
        if thinking is None or not self.chat:
            return self.options
        template = self.options.chat_template or own_template(self.tokenizer)
        names = [name for name in _THINKING_SWITCHES if name in template]
        if not names and self.thinking:
            raise ModelError(
                "its chat template has no switch for thinking",
                where="--thinking on",
                fix="leave it out: a model that always thinks does so without it",
            )
        kwargs = {**self.options.template_kwargs, **dict.fromkeys(names, thinking)}
        return self.options.replace(template_kwargs=kwargs)

    def text(
        self, messages: Sequence[Mapping[str, Any]], *, is_scored: bool, continues: bool = False
    ) -> str:
        """A conversation up to where the model goes on.

        Args:
            messages: of the harness.
            is_scored: answers are scored behind the prompt, not generated.
            continues: the last message is the beginning of the model's answer.

        Raises:
            ModelError: the template refuses the conversation.
        """
        renderer = self._at_once if is_scored else self._renderer
        begun = str(messages[-1]["content"]) if continues else ""
        before = list(messages[:-1] if continues else messages)
        rendered = self._rendered(renderer, before)
        if is_scored and rendered.rstrip().endswith(THINK_OPEN):
            rendered = f"{rendered.rstrip()}\n\n{THINK_CLOSE}\n\n"
        return rendered + begun

    def _rendered(self, renderer: PromptRenderer, messages: list[Mapping[str, Any]]) -> str:
        has_system = messages[0]["role"] == "system"
        # A run that sets the system prompt itself would drop a task's description.
        attempts = [messages] if self._keeps_system or not has_system else []
        attempts += [_without_system(messages)] if has_system else []
        refused: DataError | None = None
        for attempt in attempts:
            try:
                return renderer.text(conversation_of(attempt))
            except DataError as error:
                refused = error
        assert refused is not None
        raise ModelError(
            f"the chat template does not take the task's prompt: {refused.what}",
            fix="--no-chat-template asks in plain text",
        )

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids with one bos where the tokenizer has it, and never an eos behind the text."""
        if not texts:
            return []
        ids = encode_texts(self.tokenizer, texts, add_special_tokens=not self.chat)
        if self.chat:
            return ids
        bos, eos = self.tokenizer.bos_token_id, self.tokenizer.eos_token_id
        added_eos = eos if self.tokenizer.num_special_tokens_to_add() > 0 else None
        return [_trimmed(each, bos, added_eos) for each in ids]

    def encode_pairs(self, pairs: Sequence[tuple[str, str]]) -> list[tuple[list[int], list[int]]]:
        """Contexts and continuations as the harness splits them: each pair tokenised whole.

        Blanks at the end of a context belong to the continuation.
        """
        split = []
        for context, continuation in pairs:
            kept = context.rstrip()
            split.append((kept, context[len(kept) :] + continuation))
        texts = dict.fromkeys(text for a, b in split for text in (a, a + b) if a)
        ids = dict(zip(texts, self.encode(list(texts)), strict=True))
        return [
            (ids[a], ids[a + b][len(ids[a]) :]) if a else self._unconditional(b) for a, b in split
        ]

    def _unconditional(self, text: str) -> tuple[list[int], list[int]]:
        ids = list(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        prefix = self.prefix_id
        return ([prefix], ids) if ids[0] != prefix else (ids[:1], ids[1:])

    @property
    def prefix_id(self) -> int:
        """What stands before a text without context: bos, or eos where there is none."""
        bos, eos = self.tokenizer.bos_token_id, self.tokenizer.eos_token_id
        return int(bos if bos is not None else eos)


def _trimmed(ids: list[int], bos: int | None, added_eos: int | None) -> list[int]:
    """Token ids without a second bos, and without the eos that the tokenizer adds."""
    if bos is not None and len(ids) > 1 and ids[0] == bos == ids[1]:
        ids = ids[1:]
    return ids[:-1] if added_eos is not None and len(ids) > 1 and ids[-1] == added_eos else ids


def _without_system(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The system prompt at the beginning of the first question."""
    system, first, *rest = messages
    return [{**first, "content": f"{system['content'].rstrip()}\n\n{first['content']}"}, *rest]


class AskedAsTrained:
    """Goes before a model class of the harness: its prompts become those of training."""

    def ask_with(self, prompts: PromptStyle) -> None:
        """Take the prompts of training."""
        self.prompts = prompts
        self.record = PromptRecord()
        self.written: dict[tuple[str, int], list[dict[str, Any]]] = {}
        self._is_scored = False

    def prepare_for(self, task: Any) -> None:
        """Know whether a task's answers are scored or written: prompts of the two differ."""
        self._is_scored = task.OUTPUT_TYPE != "generate_until"

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """A conversation as training renders it, up to where the model goes on."""
        return self.prompts.text(
            chat_history, is_scored=self._is_scored, continues=not add_generation_prompt
        )

    def tok_encode(
        self, string: str | list[str], add_special_tokens: bool | None = None, **kwargs: Any
    ) -> Any:
        """Token ids of one text or of several."""
        del add_special_tokens, kwargs
        ids = self.prompts.encode([string] if isinstance(string, str) else string)
        return ids[0] if isinstance(string, str) else ids

    def encode_pairs(self, requests: Sequence[Any]) -> list[tuple[list[int], list[int]]]:
        """Contexts and continuations of requests; they are noted."""
        pairs = self.prompts.encode_pairs([request.args[:2] for request in requests])
        for request, (context, continuation) in zip(requests, pairs, strict=True):
            self.record.add(request, context, continuation)
        return pairs

    def note_written(self, request: Any, text: str, *, is_whole: bool) -> None:
        """Keep all of what was written, which the harness does not see."""
        key = (request.task_name, request.doc_id)
        self.written.setdefault(key, []).append({"text": text, "is_whole": is_whole})


class PromptRecord:
    """A hash of every prompt's token ids, by task: equal hashes, equal prompts."""

    def __init__(self) -> None:
        self.hashes: dict[str, dict[str, str]] = {}
        self._last: tuple[Sequence[int], Any] = ((), hashlib.sha256())

    def add(self, request: Any, context: Sequence[int], continuation: Sequence[int] = ()) -> None:
        """Note one request's prompt, a scored continuation included."""
        if context is not self._last[0]:  # answers of one question share it
            self._last = (context, hashlib.sha256(",".join(map(str, context)).encode()))
        whole = self._last[1].copy()
        whole.update("".join(f",{each}" for each in continuation).encode())
        digest = whole.hexdigest()
        key = f"{request.doc_id}.{request.idx}"
        self.hashes.setdefault(str(request.task_name), {})[key] = digest

    @staticmethod
    def joined(records: Sequence[Mapping[str, Mapping[str, str]]]) -> dict[str, str]:
        """One hash a task, from the records of all ranks."""
        whole: dict[str, dict[str, str]] = {}
        for record in records:
            for task, hashes in record.items():
                whole.setdefault(task, {}).update(hashes)
        return {
            task: hashlib.sha256(
                "\n".join(f"{key} {each}" for key, each in sorted(hashes.items())).encode()
            ).hexdigest()
            for task, hashes in whole.items()
        }
