"""Masks on published chat templates, against the generation tags that were put into them by hand.

Which characters a model writes is what transformers' own renderer says of the tags; which tokens
those are is read off the tokens' own strings.
"""

import json

import numpy as np
import pytest
from chats import trained_texts
from oracle import TOKENIZERS, token_ranges
from published import PUBLISHED
from transformers.utils.chat_template_utils import render_jinja_template

from trainkit.data import DataOptions, Source
from trainkit.data.builder import SampleBuilder
from trainkit.data.files import RawRow

ALL = PUBLISHED
MARKERS = (
    "[/INST] </s> <|im_end|> <|assistant|> ### Response:\nASSISTANT: Assistant: <|eot|> "
    "[|endofturn|] <|end_of_text|> <AI> <|end|>"
)
TEXTS = {
    "plain": ("Q1", "A1"),
    "turns": ("Q1", "A1", "Q2", "A2", "Q3", "A3"),
    "padded": (" Q1 \n", "\n  A1 \n\n", "\n\nQ2", "  A2\n", "Q3", "A3"),
    "indented": ("code?", "    def f(x):\n        return x\n", "more", "\tif x:\n\t\ty"),
    "blank-ends": ("q", "line\n\n\n", "q", "line \t ", "q", "a"),
    "unicode": ("三日本", "né 😀 e\u0301 日本語", "😀", "😀😀\u200d🔥 שלום"),
    "rare-blanks": ("q\u00a0", "\u00a0x\u00a0", "q", "\u2028y\u2028", "q", "\u3000z"),
    "no-blanks": ("q", "\u200bx\u200b", "\ufeffq", "\ufeffy\ufeff"),
    "crlf": ("q\r\nr", "\r\nx\r\ny\r\n", "q", "y\r", "q", "a"),
    "markers": (MARKERS, f"see {MARKERS} end", f"x {MARKERS}\n", MARKERS),
    "same": ("same", "same", "same", "same"),
    "roles": ("assistant", "assistant", "a", "a", "user", "user", "?", "."),
    "json": ("<b>", '{"a": "b\\n", "c": [1, 2]}', "q", "<p>&amp; <b>x</b></p>"),
    "jinja": ("$x$ \\n {{ m }}", "{% for %} {{ eos_token }} \\boxed{4}"),
    "marks": ("\U000f0001", "x\U000f0000y", "q", "z"),
    "long": ("word " * 50, "answer " * 80 + "end.", "b", "x\n" * 30 + "y"),
    "thoughts": (*("Q1", "<think>\nR1\n</think>\n\nA1"), *("Q2", "<think>\nR2\n</think>\n\nA2")),
    "a-thought": ("Q1", "A1", "Q2", "<think>\nR2\n</think>\n\n"),
    "open-thought": ("q", "<think> is open only", "q", "a"),
}


def talk(texts):
    """Messages of the user and the assistant in turn."""
    roles = ("user", "assistant") * len(texts)
    return [{"role": r, "content": t} for r, t in zip(roles, texts, strict=False)]


def said(role, text, **fields):
    return {"role": role, "content": text, **fields}


CALL = {"name": "weather", "arguments": {"city": "Rome", "n": [1, "x"]}}
CALLS = [{"id": f"call0000{n}", "type": "function", "function": CALL} for n in range(2)]
RESULTS = [said("tool", "sunny", name="weather", tool_call_id=f"call0000{n}") for n in range(2)]
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
CASES = {name: talk(texts) for name, texts in TEXTS.items()} | {
    "system": [said("system", "Be nice."), *talk(TEXTS["turns"])],
    "no-think": [said("system", "be brief /no_think"), *talk(TEXTS["indented"])],
    "developer": [said("developer", "D"), *talk(["Q", "A"])],
    "last-is-a-question": talk(["Q1", "A1", "Q2"]),
    "two-answers": [*talk(["Q1", "A1"]), said("assistant", "A2"), *talk(["Q2", "A3"])],
    "system-later": [*talk(["Q1", "A1"]), said("system", "rude"), *talk(["Q2", "A2"])],
    "answer-first": [said("assistant", "Hello"), *talk(["Q", "A"])],
    "thought-fields": [
        *(said("user", "Q1"), said("assistant", "A1", reasoning_content="R1")),
        *(said("user", "Q2"), said("assistant", "A2", reasoning_content="R2")),
    ],
    "switches": [
        *(said("user", "Q1"), said("assistant", "A1", train=False)),
        *(said("user", "Q2"), said("assistant", "A2", train=True)),
    ],
    "tools": [
        *(said("user", "Rome?"), said("assistant", "", tool_calls=CALLS[:1]), RESULTS[0]),
        *(said("assistant", "It is."), *talk(["Sure?", "yes"])),
    ],
    "two-calls": [
        *(said("user", "both?"), said("assistant", "", tool_calls=CALLS), *RESULTS),
        said("assistant", "Done."),
    ],
    "call-last": [said("user", "Rome?"), said("assistant", "", tool_calls=CALLS[:1])],
    "tools-unused": talk(TEXTS["turns"]),
}
USES_TOOLS = ("tools", "two-calls", "call-last", "tools-unused")


CALLING = ("tools", "two-calls", "call-last")
SYSTEMS = ("system", "no-think", "developer")
ALTERNATING = ("two-answers", "system-later", "answer-first")
TURN, TEXT, REFUSES = "template_drops_turn", "template_drops_text", "template_refuses"
DROPS = {
    "llama-2": dict.fromkeys((*ALTERNATING, *CALLING[:2]), REFUSES),
    "mistral-7b-v0.1": dict.fromkeys((*SYSTEMS, *ALTERNATING, *CALLING[:2]), REFUSES),
    "mistral-7b-v0.3": dict.fromkeys(SYSTEMS, TURN) | dict.fromkeys(ALTERNATING, REFUSES),
    "mistral-nemo": dict.fromkeys(SYSTEMS, TURN) | dict.fromkeys(ALTERNATING, REFUSES),
    "mistral-small-3": {"answer-first": "mask_unproved"} | dict.fromkeys(CALLING[:2], REFUSES),
    "alpaca": {"system-later": TURN},
    "smollm3": {"system-later": TURN},
    "minimax-m2": {"system-later": TURN},
    "minimax-m2-special": {"system-later": TURN},
}
"""Rows that a template cannot be given: it raises an error, or leaves a text or a turn out."""


def expected_drops(name):
    calls = {} if name in ("mistral-7b-v0.3", "mistral-nemo", "hermes-2-pro") else CALLING
    return dict.fromkeys(calls, TEXT) | DROPS.get(name, {})


def truth(tokenizer, published, messages, tools):
    """The text, and for each character whether the model writes it and is taught to."""
    shown, taught = [], []
    while messages[-1]["role"] != "assistant":
        messages = messages[:-1]
    for message in messages:
        message = dict(message)
        if message["role"] == "developer":
            message["role"] = "system"
        if message["role"] == "assistant":
            taught.append(message.pop("train", True))
        thought, content = message.get("reasoning_content"), message["content"]
        if thought and not published.thoughts:
            message["content"] = (
                f"<think>\n{message.pop('reasoning_content')}\n</think>\n\n{content}"
            )
        elif published.thoughts and message["role"] == "assistant" and "</think>" in content:
            thought, _, content = content.partition("</think>")
            message["reasoning_content"] = thought.removeprefix("<think>").strip()
            message["content"] = content.lstrip()
        shown.append(message)
    (text,), (spans,) = render_jinja_template(
        [shown],
        chat_template=published.tagged.replace("strftime_now('%Y-%m-%d')", "'2024-07-26'"),
        tools=tools,
        return_assistant_tokens_mask=True,
        **tokenizer.special_tokens_map,
    )
    joined = []
    for start, end in spans:
        if joined and joined[-1][1] == start:
            joined[-1][1] = end  # one turn's answer and its end
        else:
            joined.append([start, end])
    written = np.zeros(len(text), dtype=bool)
    for number, (start, end) in enumerate(joined):
        written[start:end] = all(taught) or taught[number]
    return text, written


def check(tokenizer, ids, mask, text, written):
    of_bytes = np.repeat(written, [len(character.encode()) for character in text])
    for place, (start, end) in enumerate(token_ranges(tokenizer, text, ids)):
        if end > start:
            assert mask[place] == of_bytes[start:end].any(), (
                tokenizer.convert_ids_to_tokens(ids),
                mask,
            )


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("make", ["byte-level", "legacy-prefix"])
def test_what_the_model_writes_is_trained(name, make):
    published = ALL[name]
    tokenizer = published.tokenizer(TOKENIZERS[make])
    stops = tuple(tokenizer.convert_tokens_to_ids(list(published.stops)))
    options = DataOptions(max_length=100_000, escape_special=False, stop_token_ids=stops)
    builder = SampleBuilder(tokenizer, options)
    dropped = {}
    for case, messages in CASES.items():
        tools = TOOLS if case in USES_TOOLS else None
        row = json.dumps({"messages": messages, "tools": tools}).encode()
        built = builder.build([RawRow(1, row)], Source("x"))
        if not built.samples:
            dropped[case] = built.events[-1].reason
            continue
        text, written = truth(tokenizer, published, messages, tools)
        (sample,) = built.samples
        check(tokenizer, sample.input_ids.tolist(), sample.loss_mask.tolist(), text, written)
    assert dropped == expected_drops(name)


def built(name, texts, **options):
    tokenizer = ALL[name].tokenizer()
    builder = SampleBuilder(tokenizer, DataOptions(max_length=100_000, **options))
    row = json.dumps({"messages": talk(texts)}).encode()
    return tokenizer, builder.build([RawRow(1, row)], Source("x"))


END = "<｜end▁of▁sentence｜>"


def test_preserved_thinking_begins_where_the_prompt_opens_it():
    kwargs = {"thinking": True}
    tokenizer, rows = built(
        "deepseek-v3.1", TEXTS["thoughts"], thinking="preserve", template_kwargs=kwargs
    )
    sample = rows.samples[0]._asdict()
    want = [f"\nR{n}\n</think>\n\nA{n}{END}" for n in (1, 2)]
    assert trained_texts(tokenizer, sample) == want
    assert "</think><think>" not in tokenizer.decode(sample["input_ids"])


def test_a_thought_that_is_never_printed_is_told_and_nothing_is_taught_instead():
    tokenizer, rows = built("deepseek-v3.1", TEXTS["thoughts"][:2])
    assert rows.counts["turns_trained_without_their_thinking"] == 1
    _, rows = built("deepseek-v3.1", TEXTS["a-thought"][2:])
    assert rows.events[0].reason == "thinking_stripped"
    tokenizer, rows = built("deepseek-v3.1", TEXTS["a-thought"])
    sample = rows.samples[0]._asdict()
    assert trained_texts(tokenizer, sample) == [f"A1{END}"]
    assert rows.counts["turns_not_trained_for_stripped_thinking"] == 1
    _, rows = built("deepseek-v3.1", TEXTS["a-thought"], mask="last_assistant")
    assert rows.events[0].reason == "thinking_stripped"


@pytest.mark.parametrize("last", ["thoughts", "a-thought"])
def test_a_split_row_trains_each_turn_once(last):
    _, rows = built("deepseek-v3.1", TEXTS["plain"] + TEXTS[last], thinking="split")
    assert [sample.part for sample in rows.samples] == ([0, 1, 2] if last == "thoughts" else [0, 1])
    assert rows.counts["turns_not_trained_for_stripped_thinking"] == (last == "a-thought")
