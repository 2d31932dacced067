"""The proof that travels with an export: same prompts, same answers, and an adapter at work."""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from trainkit.data.read.messages import Conversation
from trainkit.errors import CheckpointError
from trainkit.export.conversations import Prompt
from trainkit.export.served import Served, predictions
from trainkit.infer.engine import Engine

FILE_NAME = "certificate.json"
MIN_AGREEMENT = 0.99
NUM_ANSWERS, ANSWER_TOKENS = 5, 40
"""Greedy answers that are compared, and their tokens: 200 in all; stop tokens end none."""
_MAX_SHOWN = 10


@dataclass(frozen=True)
class Answer:
    """One greedy answer of the trained model.

    Attributes:
        id: of the prompt.
        start: where the answer begins.
        input_ids: prompt and answer.
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


@dataclass(frozen=True)
class Disagreement:
    """A token that the exported model chooses otherwise.

    Attributes:
        id: of the prompt.
        position: in the answer, from 0.
        trained: what the trained model says, as a token id.
        exported: what the exported model says.
        margin: by how much the trained model prefers its own, in nats.
    """

    id: str
    position: int
    trained: int
    exported: int
    margin: float


def ask_trained(engine: Engine, prompts: Sequence[Prompt], *, has_adapter: bool) -> Reference:
    """Prompt ids of all prompts and greedy answers to some, of different kinds first."""
    ids = tuple(engine.prompt_ids(prompt.row) for prompt in prompts)
    chosen: dict[int, None] = {}
    seen: set[tuple[str, ...]] = set()
    for place, prompt in enumerate(prompts):
        if prompt.kinds not in seen:
            seen.add(prompt.kinds)
            chosen[place] = None
    order = list(dict.fromkeys([*chosen, *range(len(prompts))]))[:NUM_ANSWERS]
    answers = []
    for place in order:
        whole = _continue(engine.model, ids[place])
        start = len(ids[place])
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
    device = model.device
    new, past, whole = torch.tensor([list(ids)], device=device), None, list(ids)
    for _ in range(ANSWER_TOKENS):
        output = model(input_ids=new, past_key_values=past, use_cache=True)
        past = output.past_key_values
        new = output.logits[:, -1:].argmax(-1)
        whole.append(int(new))
    return whole


def certify(
    reference: Reference,
    served: Served,
    *,
    required: float | None,
    excepted: Collection[str] = (),
    notes: Sequence[str] = (),
) -> dict[str, Any]:
    """Compare an export with the trained model.

    Args:
        reference: of the trained model.
        served: the export.
        required: share of tokens that must agree; None only states it.
        excepted: kinds of conversations whose prompts may differ; it is stated how many do.
        notes: what a reader must know besides.

    Returns:
        Plain JSON values.

    Raises:
        CheckpointError: a prompt has other ids, too few tokens agree, or the adapter does nothing.
    """
    prompts = _compare_prompts(reference, served, excepted)
    answers, adapter = _compare_answers(reference, served)
    row = {
        "schema_version": 1,
        "read_with": served.read_with,
        "prompts": prompts,
        "answers": {**answers, "required": required},
        "adapter": adapter,
        "notes": list(notes),
    }
    agreement = answers["agreement"]
    if required is not None and agreement < required:
        raise CheckpointError(
            f"the exported model agrees with the trained one on {agreement:.1%} of "
            f"{answers['num_tokens']} greedy tokens; {required:.0%} are the rule. First at "
            f"{_first(answers)}",
            fix="export another type, or lower the bar with --min-agreement",
        )
    return row


def _first(answers: dict[str, Any]) -> str:
    first = answers["disagreements"][0]
    return (
        f"token {first['position']} of {first['id']}, where the trained model prefers "
        f"{first['trained']} to {first['exported']} by {first['margin']:.2g} nats"
    )


def _compare_prompts(
    reference: Reference, served: Served, excepted: Collection[str]
) -> dict[str, Any]:
    kinds = Counter(kind for prompt in reference.prompts for kind in prompt.kinds)
    different: Counter[str] = Counter()
    num_equal = 0
    for prompt, expected in zip(reference.prompts, reference.prompt_ids, strict=True):
        found = served.prompt_ids(prompt.row)
        num_equal += found == expected
        if found != expected and set(excepted) & set(prompt.kinds):
            different.update(set(excepted) & set(prompt.kinds))
        elif found != expected:
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


def _compare_answers(
    reference: Reference, served: Served
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    wrong: list[Disagreement] = []
    total, divergence, effect, base_changed = 0, 0.0, 0.0, 0
    from_base = 0.0
    for answer in reference.answers:
        size = answer.logits.shape[1]
        logits = served.logits(answer.input_ids, answer.start)
        if not torch.isfinite(logits).all():
            raise CheckpointError(f"the exported model's answer to {answer.id} is not finite")
        logits = logits[:, :size]  # a server may pad the vocabulary
        wrong += _disagreements(answer, logits)
        total += len(logits)
        divergence += _divergence(answer.logits, logits)
        if answer.base_logits is not None:
            base = answer.base_logits
            effect += _divergence(answer.logits, base)
            from_base += _divergence(base, logits)
            base_changed += int((answer.logits.argmax(-1) != base.argmax(-1)).sum())
    answers = {
        "num_tokens": total,
        "agreement": 1 - len(wrong) / total,
        "divergence_nats": divergence / total,
        "disagreements": [asdict(each) for each in wrong[:_MAX_SHOWN]],
    }
    if all(answer.base_logits is None for answer in reference.answers):
        return answers, None
    adapter = {
        "effect_nats": effect / total,
        "tokens_changed": base_changed / total,
        "divergence_from_base_nats": from_base / total,
    }
    if effect == 0.0:
        raise CheckpointError(
            "the adapter changes nothing: with and without it the model says the same",
            fix="was this the adapter of a finished run?",
        )
    if not divergence < from_base:
        raise CheckpointError(
            f"the exported model is nearer to the base ({from_base / total:.2e} nats a token) than "
            f"to the trained model ({divergence / total:.2e}): the adapter is not in it",
            fix="export a type with more bits, or train further",
        )
    return answers, adapter


def _disagreements(answer: Answer, logits: Tensor) -> list[Disagreement]:
    best = logits.argmax(-1)
    truth = torch.tensor(answer.input_ids[answer.start :])
    wrong = (best != truth).nonzero().flatten().tolist()
    return [
        Disagreement(
            answer.id,
            place,
            int(truth[place]),
            int(best[place]),
            float(answer.logits[place, truth[place]] - answer.logits[place, best[place]]),
        )
        for place in wrong
    ]


def mean_divergence(reference: Reference, served: Served) -> float:
    """KL(trained || served) in nats a token, over the answers."""
    total, count = 0.0, 0
    for answer in reference.answers:
        logits = served.logits(answer.input_ids, answer.start)[:, : answer.logits.shape[1]]
        total += _divergence(answer.logits, logits)
        count += len(logits)
    return total / count


def _divergence(p: Tensor, q: Tensor) -> float:
    """KL(p || q) in nats, summed over positions."""
    p, q = p.double().log_softmax(-1), q.double().log_softmax(-1)
    return float((p.exp() * (p - q)).sum())
