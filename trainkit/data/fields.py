"""Typed reading of decoded rows, and the switches that say what is trained.

Each function returns the wanted type or raises RowError. A turn's switch has many names; every one
is in a table with its meaning. A name that is in none but speaks of training is refused: a switch
that is passed over trains what its author switched off.
"""

import contextlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from operator import ge
from typing import Any

import numpy as np

from trainkit.data.messages import Conversation, Message, RowError, TokenRow, check_depth


def decoded(text: str, place: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RowError("bad_json", f"{place} holds JSON that cannot be read: {error}") from error


def items(row: Mapping[str, Any], key: str) -> list[Any]:
    value = row.get(key)
    if isinstance(value, str) and value.lstrip().startswith("["):
        value = decoded(value, repr(key))
    if not isinstance(value, list):
        raise RowError("wrong_type", f"{key!r} is {kind(value)}, not a list")
    return value


def text(row: Mapping[str, Any], key: str) -> str:
    value = row.get(key)
    if not isinstance(value, str):
        raise RowError("wrong_type", f"{key!r} is {kind(value)}, not text")
    return value


def optional_text(row: Mapping[str, Any], key: str) -> str | None:
    return None if row.get(key) is None else text(row, key)


def string_or_none(item: Mapping[str, Any], key: str, number: int) -> str | None:
    """The same for a field of turn ``number``."""
    value = item.get(key)
    if value is None or isinstance(value, str):
        return value
    raise RowError("wrong_type", f"turn {number}: {key!r} is {kind(value)}, not text")


def integers(row: Mapping[str, Any], key: str) -> tuple[int, ...]:
    """The whole numbers under ``key``."""
    items = switches(row, key)
    if any(isinstance(item, bool) for item in items):
        raise RowError("wrong_type", f"{key!r} holds true or false among numbers")
    return items


def switches(row: Mapping[str, Any], key: str) -> tuple[int, ...]:
    """The same, where true and false may stand for 1 and 0."""
    value = row.get(key)
    if not isinstance(value, Iterable) or isinstance(value, (str, bytes, Mapping)):
        raise RowError("wrong_type", f"{key!r} is {kind(value)}, not a list of whole numbers")
    items = tuple(value)
    if not all(isinstance(item, int) for item in items):
        raise RowError("wrong_type", f"{key!r} holds something that is not an integer")
    return items


def kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "text", bool: "true/false", type(None): "null"}
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return "a number"
    return "missing" if value is None else names.get(type(value), type(value).__name__)


TRAINS = frozenset(
    [
        *("train", "training"),  # axolotl
        "weight",  # OpenAI
        *("loss", "loss_scale"),  # ms-swift
        "loss_weight",  # LLaMA-Factory
        *("trained", "trainable", "loss_mask", "train_mask", "compute_loss", "calculate_loss"),
        *("learn", "supervised"),
    ]
)
"""Switches where 1 or true means that the turn is trained."""

MASKS = frozenset(
    [
        *("masked", "is_masked", "mask_loss", "ignore", "ignored", "ignore_loss", "skip_loss"),
        *("no_loss", "no_train", "exclude_from_loss"),
    ]
)
"""Switches where 1 or true means that the turn is not trained."""

UNCLEAR: Mapping[str, str] = {
    "mask": "which some read as trained and others as not trained",
    "label": "which may be a class or a switch",
    "train_detail": "which trains parts of a turn; a turn is trained in full or not at all",
    "training_detail": "which trains parts of a turn; a turn is trained in full or not at all",
}
"""Switches that are refused by name, and why."""

ABOUT_TRAINING = re.compile(
    r"(^|_)(loss|losses|train\w*|mask\w*|weights?|supervis\w*|learn\w*|grads?|gradients?|backprop\w*"
    r"|targets?)(_|$)"
)


@lru_cache(maxsize=4096)
def is_switch(name: str) -> bool:
    plain = plain_name(name)
    known = plain in TRAINS or plain in MASKS or plain in UNCLEAR
    return known or ABOUT_TRAINING.search(plain) is not None


def read_switch(item: Mapping[str, Any], place: str) -> bool | None:
    """What the switches of a turn or of a part of one say together."""
    found: dict[str, bool] = {}
    for name, said in item.items():
        plain, value = plain_name(str(name)), spelt(said)
        if value is None or not is_switch(plain):
            continue
        if plain in TRAINS or plain in MASKS:
            found[str(name)] = on_or_off(value, f"{place}: {name!r}") == (plain in TRAINS)
        elif plain in UNCLEAR and not (plain == "label" and not isinstance(value, bool)):
            raise _refused(name, place, UNCLEAR[plain])
        elif plain not in UNCLEAR and isinstance(value, (bool, int, float, list)):
            raise _refused(name, place, "which is not a switch that trainkit knows")
    if len(set(found.values())) > 1:
        shown = ", ".join(f"{name}: {item[name]!r}" for name in found)
        raise RowError("switches_disagree", f"{place} has switches that disagree: {shown}")
    return next(iter(found.values()), None)


def parts_switch(parts: Sequence[Any], number: int) -> bool | None:
    """The switch that all parts of a turn's content share; None where they have none."""
    said = {
        read_switch(part, f"turn {number}, a part of its content")
        for part in parts
        if isinstance(part, Mapping)
    }
    if len(said) > 1:
        raise RowError(
            "part_switch",
            f"turn {number} has parts with switches of their own; a turn is trained in full or not "
            "at all",
        )
    return next(iter(said), None)


def on_or_off(value: Any, place: str) -> bool:
    """Read true, false, 1 or 0."""
    if isinstance(value, bool) or (isinstance(value, (int, float)) and value in (0, 1)):
        return bool(value)
    shown = repr(value)[:40] if isinstance(value, (str, int, float)) else kind(value)
    raise RowError("bad_weight", f"{place} is {shown}; it must be 0 or 1, or true or false")


def spelt(value: Any) -> Any:
    """A truth value or number that csv has as text."""
    if not isinstance(value, str) or len(value) > 20:
        return value
    word = value.strip().lower()
    with contextlib.suppress(ValueError):
        return word == "true" if word in ("true", "false") else float(word)
    return value


@lru_cache(maxsize=4096)
def plain_name(name: str) -> str:
    """``lossWeight`` and ``loss-weight`` as ``loss_weight``."""
    snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name.strip())
    return snake.replace("-", "_").lower()


def _refused(name: Any, place: str, why: str) -> RowError:
    return RowError(
        "unknown_switch", f"{place} has {str(name)[:40]!r}, {why}; write train: true or false"
    )


TOKEN_MASKS = (
    *("loss_mask", "completion_mask", "assistant_masks", "assistant_mask"),
    "attention_mask",
)
"""0 or 1 for each id. ``completion_mask`` and ``assistant_masks`` are TRL's, ``attention_mask`` is
the tokenizer's: its zeros are pads."""

BOUNDARIES = ("seq_lengths", "seq_lens", "cu_seqlens", "cu_seq_lens", "cu_seq_lens_q")
"""Fields that say where the documents of a packed row begin or how long they are."""

HARMLESS = ("special_tokens_mask", "offset_mapping")
"""As long as the ids, and without a say in what is trained."""

TOKEN_FIELDS = (
    *("input_ids", "labels", "position_ids", "token_type_ids"),
    *(*TOKEN_MASKS, *BOUNDARIES, *HARMLESS),
)
"""Every field of a tokenised row that is read."""


def parse_tokens(row: Mapping[str, Any]) -> TokenRow:
    """``input_ids`` with any of ``labels`` (-100 is not trained) and ``TOKEN_MASKS``."""
    ids = integers(row, "input_ids")
    size = len(ids)
    if not ids:
        raise RowError("no_tokens", "'input_ids' is empty")
    if any(not 0 <= token < 2**31 for token in ids):
        raise RowError("token_out_of_range", "'input_ids' holds a number that is not a token id")
    for name, value in row.items():
        # A field that may be one more mask: passing over it could train a prompt.
        if name in TOKEN_FIELDS or not isinstance(value, (list, tuple)):
            continue
        fits = len(value) == size > 1
        if is_switch(str(name)) or (fits and all(isinstance(v, (int, float)) for v in value)):
            raise RowError(
                "unknown_mask",
                f"{str(name)[:40]!r} may say which tokens are trained, and is not known; write it "
                "as loss_mask, or leave it out",
            )
    chosen: dict[str, tuple[bool, ...]] = {}
    for name in (*TOKEN_MASKS, "labels"):
        if row.get(name) is None:
            continue
        values = integers(row, name) if name == "labels" else switches(row, name)
        odd = next((v for v in values if v not in (0, 1)), None) if name != "labels" else None
        if odd is not None:
            raise RowError("bad_weight", f"{name!r} holds {odd}; it must be 0 or 1")
        _same_length(name, len(values), size)
        if name == "labels":
            for place, (token, label) in enumerate(zip(ids, values, strict=True)):
                if label not in (-100, token):
                    raise RowError(
                        "labels_differ",
                        f"label {label} at position {place} is neither -100 nor the input id "
                        f"{token}; labels are given unshifted",
                    )
        chosen[name] = tuple(v != -100 if name == "labels" else v == 1 for v in values)
    _refuse_contradictions(chosen)
    start, end = _without_pads(chosen.get("attention_mask"), size)
    _refuse_packed(row, start, end, size)
    trained = tuple(all(mask[place] for mask in chosen.values()) for place in range(start, end))
    is_masked = bool(chosen.keys() - {"attention_mask"})
    return TokenRow(ids[start:end], trained, is_masked=is_masked)


def _same_length(name: str, count: int, size: int) -> None:
    if count != size:
        raise RowError("lengths_differ", f"{size} input_ids, {count} in {name!r}")


def _refuse_contradictions(chosen: Mapping[str, tuple[bool, ...]]) -> None:
    """``labels`` or ``loss_mask`` that choose tokens must choose among those of the other masks.

    Where they hold every id but the pads they are a copy that chooses nothing, and the other masks
    decide.
    """
    for name in ("labels", "loss_mask"):
        own = chosen.get(name)
        if own is None or all(map(ge, own, chosen.get("attention_mask", (True,) * len(own)))):
            continue
        for other, mask in chosen.items():
            place = next(
                (n for n, (mine, its) in enumerate(zip(own, mask, strict=True)) if mine > its), None
            )
            if place is not None:
                raise RowError(
                    "masks_disagree",
                    f"{name!r} trains the token at position {place}, where {other!r} does not",
                )


def _without_pads(attention: tuple[bool, ...] | None, size: int) -> tuple[int, int]:
    if attention is None:
        return 0, size
    if not any(attention):
        raise RowError("no_tokens", "'attention_mask' leaves no token")
    start, end = attention.index(True), size - attention[::-1].index(True)
    if not all(attention[start:end]):
        hole = attention.index(False, start)
        raise RowError(
            "attention_hole",
            f"'attention_mask' is 0 at position {hole}, amid tokens; only pads at the ends may be",
        )
    return start, end


def _refuse_packed(row: Mapping[str, Any], start: int, end: int, size: int) -> None:
    """Several documents in a row would see each other: trainkit packs by itself."""
    for name in ("position_ids", "token_type_ids", *BOUNDARIES):
        if row.get(name) is None:
            continue
        values = integers(row, name)
        if name in BOUNDARIES:
            lengths = (
                values if name.startswith("seq") else tuple(b - a for a, b in pairwise(values))
            )
            is_one = lengths in ((size,), (end - start,))
        else:
            _same_length(name, len(values), size)
            step = 1 if name == "position_ids" else 0
            is_one = all(values[n] == (n - start) * step for n in range(start, end))
        if not is_one:
            raise RowError(
                "packed_elsewhere",
                f"{name!r} says that the row is not a single text from position 0 on; give one "
                "document a row, data.packing puts them together",
            )


def teacher_of(row: Any) -> tuple[np.ndarray, np.ndarray]:
    """What a teacher has said of a row: ids and log-probabilities, (trained tokens, K) each."""
    given = [row.get(name) if isinstance(row, Mapping) else None for name in TEACHER_FIELDS]
    try:
        ids, logs = np.array(given[0], dtype=np.int64), np.array(given[1], dtype=np.float32)
    except (ValueError, TypeError, OverflowError) as error:
        raise RowError("no_teacher", f"what the teacher has said is not numbers: {error}") from None
    if ids.ndim != 2 or ids.shape != logs.shape or not ids.shape[1]:
        raise RowError(
            "no_teacher",
            "'teacher_ids' and 'teacher_logprobs' must have as many tokens at each trained place",
        )
    mass = np.exp(logs.astype(np.float64)).sum(1)
    if not (logs <= 1e-4).all() or (mass > 1 + 1e-2).any() or (ids < 0).any():
        raise RowError("no_teacher", "'teacher_logprobs' are not logarithms of probabilities")
    return ids, logs


def parse_distilled(row: Mapping[str, Any]) -> TokenRow:
    """What `trainkit generate --logprobs` writes: ``labels``, and a teacher's words about them."""
    if row.get("input_ids") is None:
        raise RowError("no_tokens", "the row has no 'input_ids': its question was not answered")
    ids, _ = teacher_of(row)
    parsed = parse_tokens({name: row.get(name) for name in ("input_ids", "labels")})
    trained = sum(parsed.trained[1:])
    if len(ids) != trained:
        raise RowError(
            "no_teacher", f"the teacher has spoken of {len(ids)} tokens, and {trained} are trained"
        )
    return parsed


TEACHER_FIELDS = ("teacher_ids", "teacher_logprobs")

RATINGS = ("label", "kto_tag")
"""Where a row says whether its answer is a good one."""

TALK = ("tools", "functions", "system", "chat_template_kwargs")

READS: Mapping[str, tuple[str, ...]] = {
    "messages": ("messages", *TALK),
    "sharegpt": ("conversations", "conversation", *TALK),
    "alpaca": ("instruction", "input", "output", "history", *TALK),
    "belle": ("instruction", "output", "history", *TALK),
    "moss": ("chat", "meta_instruction", "chat_template_kwargs"),
    "leetcode": ("code_with_problem", "code_only", "explanation_only", "chat_template_kwargs"),
    "prompt_completion": ("prompt", "completion", *TALK),
    "text": ("text",),
    "tokens": TOKEN_FIELDS,
    "template": ("prompt", "completion"),
    "distilled": (*TOKEN_FIELDS, *TEACHER_FIELDS),
    "rated": (
        *("prompt", "completion", "messages", "conversations", "instruction", "input", "output"),
        *("history", *RATINGS, *TALK),
    ),
    "preference": (
        *("prompt", "chosen", "rejected", "conversations", "messages", "instruction", "input"),
        *("preferred_output", "non_preferred_output", *TALK),
    ),
}
"""The fields that each format reads."""

TURN_READS = (
    *("role", "content", "from", "value", "name", "tool_calls", "function_call", "tool_call_id"),
    *("reasoning_content", "reasoning", "thinking"),
)
"""The fields of a turn that are read, besides its switches."""

PART_READS = ("type", "text", "value")

MEDIA = ("image", "images", "video", "videos", "audio", "audios", "image_url", "objects")

REFUSED: Mapping[str, tuple[str, str]] = {
    **dict.fromkeys(MEDIA, ("not_text", "and only text is trained")),
    "documents": ("documents", "which templates print in ways of their own; write them as a turn"),
    "mask": ("unknown_switch", UNCLEAR["mask"]),
    "weights": ("unknown_switch", "and turns have switches of their own: weight, 0 or 1"),
    "add_generation_prompt": ("not_an_answer", "which renders a prompt without its answer"),
    "continue_final_message": ("not_an_answer", "which leaves the answer without its end"),
}
"""Fields of a row that would change what is trained: the reason, and the rest of the sentence."""

TURN_REFUSED: Mapping[str, tuple[str, str]] = {
    **dict.fromkeys(MEDIA, ("not_text", "and only text is trained")),
    "refusal": ("refusal", "next to its text; write the refusal as its content"),
    "prefix": ("not_an_answer", "which leaves the answer without its end"),
    "tools": ("misplaced_tools", "and tools are next to the messages, for all turns"),
    "documents": ("documents", "which templates print in ways of their own; write them as a turn"),
    "tool_plan": ("unknown_turn_field", "and thinking is read from reasoning_content"),
    "tool_responses": ("unknown_turn_field", "and a tool's answer is a turn with the role tool"),
    "tool_results": ("unknown_turn_field", "and a tool's answer is a turn with the role tool"),
    "channel": ("unknown_turn_field", "and thinking is read from reasoning_content"),
    "recipient": ("unknown_turn_field", "and calls are read from tool_calls"),
    **dict.fromkeys(
        ("end_turn", "eos", "eot", "add_eos", "add_eot", "eos_token", "stop_token"),
        ("not_an_answer", "and where an answer ends is the template's to say"),
    ),
}
"""Fields of a turn that would change how it is rendered, likewise."""

DEFAULTS: Mapping[str, tuple[Any, ...]] = {
    "channel": ("final",),
    "recipient": ("all",),
    **dict.fromkeys(("end_turn", "eos", "eot", "add_eos", "add_eot"), (True,)),
}
"""What a refused field may say, since it is so anyway."""

POLICIES: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(("train_on_inputs", "train_on_input", "train_on_prompt"), (False,)),
    **dict.fromkeys(("train_on_source", "loss_on_prompt", "mask_history"), (False,)),
    **dict.fromkeys(("mask_prompt", "mask_prompts", "mask_input", "mask_inputs"), (True,)),
    **dict.fromkeys(("train_on_response", "train_on_responses", "train_on_outputs"), (True,)),
    **dict.fromkeys(("train_on_responses_only", "train_on_completions_only"), (True,)),
    **dict.fromkeys(("assistant_only_loss", "completion_only_loss"), (True,)),
    **dict.fromkeys(("train_on_eos", "train_on_eot"), ("turn", True)),
    "roles_to_train": (["assistant"], ["gpt"], "assistant"),
}
"""Other tools' settings for a whole run, and what they may say in a row, since it is so anyway."""

POLICY = re.compile(r"^(train(ing)?_on|mask|loss_on|roles_to)_|_only_loss$|_(to|loss)_mask$")
"""What such settings are called."""

UNDESIRED = ("kto_tag", "label", "desirable")
"""Where false marks an answer as one that should not be given."""

ROW_SWITCHES = TRAINS | {"sample_weight"}
"""Switches where 0 or false leaves out the whole row; those of ``MASKS`` do so with 1."""

WEIGHTS = ("weight", "loss_weight", "loss_scale", "sample_weight")
"""Those whose every number is meant as a weight; elsewhere other numbers are mere figures."""

TEMPLATE_VARIABLES = (
    *("enable_thinking", "thinking_budget", "reasoning_effort", "preserve_thinking"),
    *("clear_thinking", "date_string", "model_identity", "builtin_tools", "custom_tools"),
    *("tools_in_user_message", "safety_prompt", "citation_mode"),
)
"""Variables of well-known chat templates that rows carry next to their messages."""

PROTOCOL = (
    *("messages", "conversation", "tools", "documents", "chat_template", "tokenize"),
    *("add_generation_prompt", "continue_final_message", "add_special_tokens", "padding"),
    *("truncation", "max_length", "return_tensors", "return_dict"),
    *("return_assistant_tokens_mask", "bos_token", "eos_token"),
)
"""Names that are not variables of a template, but how it is called."""


def template_kwargs(row: Mapping[str, Any], name: str) -> dict[str, Any]:
    if "chat_template_kwargs" not in _reads(row, name):
        return {}
    found = {key: row[key] for key in TEMPLATE_VARIABLES if row.get(key) is not None}
    given = row.get("chat_template_kwargs")
    if isinstance(given, str) and given.strip():
        given = decoded(given, "'chat_template_kwargs'")
    if given is None or given == "":
        return found
    if not isinstance(given, Mapping):
        raise RowError("wrong_type", f"'chat_template_kwargs' is {kind(given)}, not an object")
    for key, value in given.items():
        if key in PROTOCOL and value not in (None, False, [], {}):
            raise RowError(
                "template_kwargs", f"'chat_template_kwargs' holds {key!r}, which a row cannot set"
            )
    found |= {str(key): value for key, value in given.items() if key not in PROTOCOL}
    check_depth(found, "'chat_template_kwargs'")
    return found


_TURNS = ("messages", "conversations", "conversation", "prompt", "completion", "chosen", "rejected")

EXCHANGE = ("human", "assistant")
"""In one object, as ms-swift has them."""


def unused(row: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """The row's fields that play no part."""
    reads = _reads(row, name)
    ignored = []
    for key, said in row.items():
        value = spelt(said)
        if key in reads or _is_empty(value):
            continue
        if "chat_template_kwargs" in reads and key in TEMPLATE_VARIABLES:
            continue
        if not _row_switch(key, value):
            _refuse(key, value, REFUSED, "the row")
            _refuse_policy(key, value)
            is_off = value is False or (value == 0 and name != "text")
            if key in UNDESIRED and is_off:
                what = (
                    f"the row has {key}: {json.dumps(value)}: its answer is a bad one, as "
                    "objective: kto takes it (a class is left out by columns that are templates)"
                )
                raise RowError("undesired_answer", what)
            is_mask = (key == "labels" or key in TOKEN_MASKS) and "input_ids" not in row
            is_list = isinstance(value, (list, tuple))
            if is_mask and is_list and all(isinstance(item, int) for item in value):
                what = f"the row has {key!r}, and no 'input_ids'"
                raise RowError("mask_without_tokens", what)
            if key in ("tools", "functions"):
                raise RowError("misplaced_tools", f"rows of {name} have no {key!r}")
            ignored.append(short_name(key))
    if name in ("messages", "sharegpt", "prompt_completion", "preference", "rated"):
        for place in _TURNS:
            if place in reads and isinstance(row.get(place), list):
                ignored += _unused_in_turns(row[place], place)
    return tuple(dict.fromkeys(ignored))


def _reads(row: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """What the format reads of this row; two plain texts meet no chat template."""
    if name == "prompt_completion" and isinstance(row.get("prompt"), str):
        return ("prompt", "completion")
    return READS[name]


def _row_switch(key: str, value: Any) -> bool:
    """Whether a field is a switch for the whole row, and says that it is trained."""
    plain = plain_name(str(key))
    if plain not in ROW_SWITCHES and plain not in MASKS:
        return False
    if not isinstance(value, (bool, int, float)) or (plain not in WEIGHTS and value not in (0, 1)):
        return False
    if on_or_off(value, f"the row's {key!r}") == (plain in MASKS):
        raise RowError("switched_off", f"the row has {key}: {value!r}, so nothing of it is trained")
    return True


def _refuse_policy(key: Any, value: Any) -> None:
    """A setting of another tool, or a list of weights, that asks for another mask than ours."""
    plain = plain_name(str(key))
    is_list = isinstance(value, (list, tuple)) and plain in WEIGHTS
    unknown = isinstance(value, bool) and POLICY.search(plain) is not None
    known = POLICIES.get(plain)
    if is_list or (known is None and unknown) or (known is not None and value not in known):
        raise RowError(
            "unknown_switch",
            f"the row has {short_name(key)!r}, which asks for another mask; data.mask and "
            "data.roles of the recipe choose it for all rows, and each turn has a switch: train",
        )


def _refuse(key: Any, value: Any, refused: Mapping[str, tuple[str, str]], place: str) -> None:
    defaults = DEFAULTS.get(key, (False,))
    if key in refused and value not in defaults:
        reason, why = refused[key]
        raise RowError(reason, f"{place} has {key!r}, {why}")


def _unused_in_turns(turns: list[Any], place: str) -> Iterator[str]:
    for number, turn in enumerate(turns, 1):
        if not isinstance(turn, Mapping) or {*turn} == {*EXCHANGE}:
            continue  # refused where it is read
        speaks = ("from", "value") if "from" in turn else ("role", "content")
        for key, value in turn.items():
            if _is_empty(value):
                continue
            _refuse(key, value, TURN_REFUSED, f"turn {number}")
            is_other = key in ("from", "value", "role", "content") and key not in speaks
            if is_other or not (key in TURN_READS or is_switch(str(key))):
                yield short_name(f"{place}[].{key}")
        parts = turn.get(speaks[1])
        for part in parts if isinstance(parts, list) else ():
            for key, value in part.items() if isinstance(part, Mapping) else ():
                if not (key in PART_READS or is_switch(str(key)) or _is_empty(value)):
                    yield short_name(f"{place}[].{speaks[1]}[].{key}")


def with_system(row: Mapping[str, Any], messages: list[Message]) -> list[Message]:
    system = optional_text(row, "system")
    if not system or not system.strip():
        return messages
    first = messages[0] if messages else None
    if first is None or first.role != "system":
        return [Message("system", system), *messages]
    if first.content.strip() != system.strip():
        raise RowError("two_systems", "'system' and the first turn are two system prompts")
    return messages


def without_effect(conversation: Conversation, template: str) -> tuple[str, ...]:
    """What the row gives the chat template and the template does not read: variables, tools."""
    idle = [
        f"chat_template_kwargs.{name}"
        for name in conversation.template_kwargs
        if name not in template
    ]
    unseen = conversation.tools is not None and "tools" not in template
    return (*idle, "tools") if unseen else tuple(idle)


def _is_empty(value: Any) -> bool:
    return value is None or (isinstance(value, (str, list, tuple, Mapping)) and not len(value))


def short_name(name: Any) -> str:
    """A field's name, fit to be printed."""
    text = str(name)
    text = text if text.isprintable() else repr(text)
    return text if len(text) <= 60 else f"{text[:57]}..."
