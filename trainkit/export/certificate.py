"""The proof that travels with an export: same prompts, same answers, and an adapter at work."""

import gc
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from trainkit.data import DataOptions
from trainkit.data.messages import Conversation, TextRow
from trainkit.data.template import ChatTemplate
from trainkit.errors import CheckpointError
from trainkit.export.conversations import Prompt
from trainkit.infer.engine import Engine, own_attention, with_adapter
from trainkit.models.loading import load_model
from trainkit.models.tokenizer import load_tokenizer
from trainkit.options import ModelOptions

FILE_NAME = "certificate.json"
MIN_AGREEMENT = 0.99
NUM_ANSWERS, ANSWER_TOKENS = 5, 40
"""Greedy answers that are compared, and their tokens: 200 in all; stop tokens end none."""
_MAX_SHOWN = 10

# -- What the trained model says ------------------------------------------------------------------


@dataclass(frozen=True)
class Answer:
    """One greedy answer of the trained model.

    Attributes:
        logits: of the trained model, (answer, vocabulary).
        base_logits: the same without the adapter; None where there is none.
    """

    id: str
    start: int
    input_ids: list[int]
    logits: Tensor
    base_logits: Tensor | None


@dataclass(frozen=True)
class Reference:
    """What the trained model says: the truth that an export is held against."""

    prompts: tuple[Prompt, ...]
    prompt_ids: tuple[list[int], ...]
    answers: tuple[Answer, ...]


def ask_trained(engine: Engine, prompts: Sequence[Prompt], *, has_adapter: bool) -> Reference:
    """Prompt ids of all prompts and greedy answers to some, of different kinds first."""
    ids = tuple(engine.prompt_ids(prompt.row) for prompt in prompts)
    chosen: dict[tuple[str, ...], int] = {}
    for place, prompt in enumerate(prompts):
        chosen.setdefault(prompt.kinds, place)
    order = list(dict.fromkeys([*chosen.values(), *range(len(prompts))]))[:NUM_ANSWERS]
    answers = []
    for place in order:
        whole, start = _continue(engine.model, ids[place]), len(ids[place])
        base = None
        logits = predictions(engine.model, whole, start)
        if has_adapter:
            with engine.model.disable_adapter():
                base = predictions(engine.model, whole, start)
        answers.append(Answer(prompts[place].id, start, whole, logits, base))
    return Reference(tuple(prompts), ids, tuple(answers))


@torch.inference_mode()
def _continue(model: Any, ids: Sequence[int]) -> list[int]:
    """Greedy; a stop token does not end it, since what follows is computed all the same."""
    new, past, whole = torch.tensor([list(ids)], device=model.device), None, list(ids)
    for _ in range(ANSWER_TOKENS):
        output = model(input_ids=new, past_key_values=past, use_cache=True)
        past = output.past_key_values
        new = output.logits[:, -1:].argmax(-1)
        whole.append(int(new))
    return whole


@torch.inference_mode()
def predictions(model: Any, input_ids: Sequence[int], start: int) -> Tensor:
    """The logits that predict the tokens from ``start`` on, in float32 on the CPU."""
    ids = torch.tensor([list(input_ids)], device=model.device)
    return model(input_ids=ids, use_cache=False).logits[0, start - 1 : -1].float().cpu()


# -- The exported model ---------------------------------------------------------------------------


class Served(Protocol):
    """An exported model in the hands of the program that serves it, or of the nearest to it."""

    read_with: str

    def prompt_ids(self, row: Conversation | TextRow) -> list[int]:
        """The token ids of a prompt as the server makes them."""

    def logits(self, input_ids: Sequence[int], start: int) -> Tensor:
        """What predicts the tokens from ``start`` on: (len(input_ids) - start, vocabulary)."""


class TransformersServed:
    """A directory read by transformers in float32; with an adapter over it, by peft.

    Prompts are made as a server makes them of it: by its template and tokenizer, nothing else.
    """

    def __init__(self, source: ModelOptions, *, base: ModelOptions | None = None) -> None:
        """Load it."""
        import transformers

        self.tokenizer = load_tokenizer(source)
        self._style: ChatTemplate | None = None
        device = "cuda" if torch.cuda.is_available() else "cpu"
        self.read_with = f"transformers {transformers.__version__}, float32, {device}"
        weights = (base or source).replace(dtype="float32")
        attention = own_attention(weights)
        model: Any = load_model(weights, attention=attention, device=torch.device(device))
        if base is not None:
            model = with_adapter(model, Path(source.name_or_path))
            self.read_with += ", peft"
        self.model = model.eval()

    def prompt_ids(self, row: Conversation | TextRow) -> list[int]:
        """Token ids: a chat's without anything added, a text's with what the tokenizer adds."""
        if not isinstance(row, Conversation):
            return list(self.tokenizer.encode(row.prompt))
        if self._style is None:  # how a server passes messages on: text or parts, as it is read
            self._style = ChatTemplate(self.tokenizer, DataOptions())
        text = self.tokenizer.apply_chat_template(
            [self._style.as_dict(message) for message in row.messages],
            tools=None if row.tools is None else list(row.tools),
            add_generation_prompt=True,
            tokenize=False,
            **row.template_kwargs,
        )
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def logits(self, input_ids: Sequence[int], start: int) -> Tensor:
        return predictions(self.model, input_ids, start)


@contextmanager
def released() -> Iterator[None]:
    """Give the memory of models back that were loaded within."""
    try:
        yield
    finally:
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


# -- The comparison -------------------------------------------------------------------------------


def certify(
    reference: Reference,
    served: Served,
    *,
    required: float | None,
    excepted: Collection[str] = (),
    notes: Sequence[str] = (),
) -> dict[str, Any]:
    """Compare an export with the trained model.

    Without ``required`` the agreement is only stated; ``excepted`` are kinds of conversations whose
    prompts may differ.
    """
    prompts = _compare_prompts(reference, served, excepted)
    logits = answered(reference, served)
    trained = [answer.logits for answer in reference.answers]
    divergence = mean_divergence(trained, logits)
    wrong = [
        each
        for answer, own in zip(reference.answers, logits, strict=True)
        for each in _disagreements(answer, own)
    ]
    num_tokens = sum(map(len, logits))
    agreement = 1 - len(wrong) / num_tokens
    bases = [answer.base_logits for answer in reference.answers if answer.base_logits is not None]
    row = {
        "schema_version": 1,
        "read_with": served.read_with,
        "prompts": prompts,
        "answers": {
            "num_tokens": num_tokens,
            "agreement": agreement,
            "divergence_nats": divergence,
            "disagreements": wrong[:_MAX_SHOWN],
            "required": required,
        },
        "adapter": _compare_adapter(trained, bases, logits, divergence) if bases else None,
        "notes": list(notes),
    }
    if required is not None and agreement < required:
        first = wrong[0]
        raise CheckpointError(
            f"the exported model agrees with the trained one on {agreement:.1%} of {num_tokens} "
            f"greedy tokens; {required:.0%} are the rule. First at token {first['position']} of "
            f"{first['id']}, where the trained model prefers {first['trained']} to "
            f"{first['exported']} by {first['margin']:.2g} nats",
            fix="export another type, or lower the bar with --min-agreement",
        )
    return row


def _compare_prompts(
    reference: Reference, served: Served, excepted: Collection[str]
) -> dict[str, Any]:
    kinds = Counter(kind for prompt in reference.prompts for kind in prompt.kinds)
    different: Counter[str] = Counter()
    num_equal = 0
    for prompt, expected in zip(reference.prompts, reference.prompt_ids, strict=True):
        found = served.prompt_ids(prompt.row)
        if found == expected:
            num_equal += 1
        elif accepted := set(excepted) & set(prompt.kinds):
            different.update(accepted)
        else:
            place = next(
                (i for i, (a, b) in enumerate(zip(expected, found, strict=False)) if a != b),
                min(len(expected), len(found)),
            )
            raise CheckpointError(
                f"the server's prompt for {prompt.id} ({', '.join(prompt.kinds)}) is not "
                f"training's: from token {place} on it is {found[place : place + 4]} where "
                f"training had {expected[place : place + 4]}",
                fix=f"where it is known and accepted: --except {prompt.kinds[0]!r}",
            )
    made = sum(prompt.id.startswith("made:") for prompt in reference.prompts)
    return {
        "num_equal": num_equal,
        "excepted": {kind: different[kind] for kind in sorted(excepted)},
        "num_prompts": len(reference.prompts),
        "num_of_the_run": len(reference.prompts) - made,
        "kinds": dict(sorted(kinds.items())),
        "num_chats": sum(isinstance(prompt.row, Conversation) for prompt in reference.prompts),
    }


def answered(reference: Reference, served: Served) -> list[Tensor]:
    """What the export says where the trained model chose its tokens, by answer."""
    found = []
    for answer in reference.answers:
        logits = served.logits(answer.input_ids, answer.start)
        if not torch.isfinite(logits).all():
            raise CheckpointError(f"the exported model's answer to {answer.id} is not finite")
        found.append(logits[:, : answer.logits.shape[1]])  # a server may pad the vocabulary
    return found


def _compare_adapter(
    trained: Sequence[Tensor], base: Sequence[Tensor], exported: Sequence[Tensor], distance: float
) -> dict[str, Any]:
    effect, from_base = mean_divergence(trained, base), mean_divergence(base, exported)
    if effect == 0.0:
        raise CheckpointError(
            "the adapter changes nothing: with and without it the model says the same",
            fix="was this the adapter of a finished run?",
        )
    if not distance < from_base:
        raise CheckpointError(
            f"the exported model is nearer to the base ({from_base:.2e} nats a token) than "
            f"to the trained model ({distance:.2e}): the adapter is not in it",
            fix="export a type with more bits, or train further",
        )
    changed = (torch.cat([*trained]).argmax(-1) != torch.cat([*base]).argmax(-1)).float().mean()
    return {
        "effect_nats": effect,
        "tokens_changed": float(changed),
        "divergence_from_base_nats": from_base,
    }


def _disagreements(answer: Answer, logits: Tensor) -> list[dict[str, Any]]:
    """The tokens that the exported model chooses otherwise, and by how many nats."""
    best = logits.argmax(-1).tolist()
    truth = answer.input_ids[answer.start :]
    return [
        {
            "id": answer.id,
            "position": place,
            "trained": mine,
            "exported": other,
            "margin": float(answer.logits[place, mine] - answer.logits[place, other]),
        }
        for place, (mine, other) in enumerate(zip(truth, best, strict=True))
        if mine != other
    ]


def mean_divergence(first: Sequence[Tensor], second: Sequence[Tensor]) -> float:
    """KL(first || second) in nats a token."""
    pairs = [
        (p.double().log_softmax(-1), q.double().log_softmax(-1))
        for p, q in zip(first, second, strict=True)
    ]
    total = sum(float((p.exp() * (p - q)).sum()) for p, q in pairs)
    return total / sum(map(len, first))
