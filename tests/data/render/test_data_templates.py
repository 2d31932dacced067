"""Masks on the chat templates that the TRL package ships, against trained text written by hand.

The templates are read from an installed trl; nothing of it is copied here. The expected strings say
what a model has to write itself: its thinking where the template keeps it, its answer, its tool
call, its end-of-turn token; and no role header, no blanks behind the turn, nothing of the others.
"""

import contextlib
import functools
import importlib.util
import re
import time
import warnings
from pathlib import Path

import pytest
from tiny import make_tokenizer
from tokenizers import AddedToken

from trainkit.data import template as bounded
from trainkit.data.encode import Encoder
from trainkit.data.masking import MaskFinder
from trainkit.data.messages import Conversation, Message, RowError
from trainkit.data.options import DataOptions
from trainkit.data.template import ChatTemplate
from trainkit.errors import DataError


def shipped_templates():
    """The stock templates of an installed trl, by name; its patched training variants left out."""
    spec = importlib.util.find_spec("trl")
    if spec is None or not spec.submodule_search_locations:
        return {}
    folder = Path(next(iter(spec.submodule_search_locations))) / "chat_templates"
    files = [file for file in folder.glob("*.jinja") if not file.stem.endswith("_training")]
    return {file.stem: file for file in sorted(files)}


TEMPLATES = shipped_templates()
if not TEMPLATES:
    warnings.warn("trl is not installed: the masks of its templates are NOT checked", stacklevel=1)
    pytestmark = pytest.mark.skip(reason="trl is not installed (pip install --no-deps trl)")

CONTROL = re.compile(
    r"<\|[a-zA-Z_ ]+\|>|<｜[^｜]*｜>|</?s>|<(?:start|end)_of_(?:turn|utterance)>"
    r"|<\|(?:turn|tool_call|tool_response|channel|tool)>|<(?:turn|tool_call|tool_response|channel"
    r"|tool)\|>|</?think>|</?tool_call>|<sop>|\[gMASK\]"
)
TEXT_TOKENS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
EOS = {
    "chatml": "<|im_end|>",
    "cohere": "<|END_OF_TURN_TOKEN|>",
    "cohere2": "<|END_OF_TURN_TOKEN|>",
    "deepseek_r1_distill": "<｜end▁of▁sentence｜>",
    "deepseekv3": "<｜end▁of▁sentence｜>",
    "glm4moe": "<|endoftext|>",
    "gptoss": "<|return|>",
    "idefics3": "<end_of_utterance>",
    "llava_next": "</s>",
    "muse_glimmer": "<|eot|>",
    "phi3": "<|endoftext|>",
    "phi3_5": "<|endoftext|>",
    "smolvlm": "<end_of_utterance>",
}


@functools.cache
def tokenizer_of(name):
    source = TEMPLATES[name].read_text()
    tokenizer = make_tokenizer()
    default = (
        "<turn|>"
        if name.startswith(("gemma4", "diffusion"))
        else "<end_of_turn>"
        if name.startswith("gemma")
        else "<|eot_id|>"
        if name.startswith("llama3")
        else EOS["chatml"]
    )
    eos = EOS.get(name, default)
    found = sorted({*CONTROL.findall(source), eos, "<|begin|>"})
    tokenizer.add_tokens(
        [AddedToken(text, special=text not in TEXT_TOKENS, normalized=False) for text in found]
    )
    tokenizer.eos_token, tokenizer.bos_token = eos, "<|begin|>"
    tokenizer.chat_template = source
    return tokenizer


CALL = ({"name": "get_weather", "arguments": {"city": "Paris"}, "id": None},)
TOOLS = (
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Weather now",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    },
)


def user(text):
    return Message("user", text)


def answer(text, **fields):
    return Message("assistant", text, **fields)


PLAIN = Conversation((user("Q1"), answer("A1")))
MULTI = Conversation((user("Q1"), answer("A1"), user("Q2"), answer("A2")))
PADDED = Conversation((user(" Q1 \n"), answer("\n  A1 \n\n"), user("Q2"), answer("  A2\n")))
INLINE = Conversation(
    (
        user("Q1"),
        answer("<think>\nR1\n</think>\n\nA1"),
        user("Q2"),
        answer("<think>\nR2\n</think>\n\nA2"),
    )
)
FIELD = Conversation(
    (user("Q1"), answer("A1", reasoning="R1"), user("Q2"), answer("A2", reasoning="R2"))
)
TOOL = Conversation(
    (
        user("Q1"),
        answer("", tool_calls=CALL),
        Message("tool", "SUNNY", name="get_weather", tool_call_id="call00000"),
        answer("A1"),
        user("Q2"),
        answer("A2"),
    ),
    tools=TOOLS,
)

KEPT = ("<think>\nR1\n</think>\n\n", "<think>\nR2\n</think>\n\n")
LAST_ONLY = ("", "<think>\nR2\n</think>\n\n")
OPENED_LAST = ("", "R2\n</think>\n\n")
CHANNEL = ("", "<|channel>thought\nR2\n<channel|>")
GEMMA_CALL = '<|tool_call>call:get_weather{city:<|"|>Paris<|"|>}<tool_call|>'
JSON_CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
XML_CALL = (
    "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n"
    "</tool_call>"
)
LFM_CALL = "<|tool_call_start|>[get_weather(city='Paris')]<|tool_call_end|>"
LLAMA_CALL = '{"name": "get_weather", "parameters": {"city": "Paris"}}'
NO_TOOLS = None
"""There is no way to write a tool call: the right answer is an error that names the turn."""


def row(end, thinking, call, *, last_end=None, lead="", call_end=None):
    """Trained text of one template.

    ``end``: behind an answer; ``last_end``: behind the last one, where it differs; ``thinking``:
    before the two answers; ``lead``: what the model writes between prompt and answer; ``call``: the
    tool call, with ``call_end`` behind it where that differs from ``end``.
    """
    return {
        "ends": (end, end if last_end is None else last_end),
        "thinking": thinking,
        "call": call if call is NO_TOOLS else call + (end if call_end is None else call_end),
        "lead": lead,
    }


CHATML = "<|im_end|>"
GEMMA4 = row("<turn|>", KEPT, GEMMA_CALL, call_end="<|tool_response>")
NEMOTRON = row(CHATML, OPENED_LAST, XML_CALL + "\n")
EXPECTED = {
    "cohere": row("<|END_OF_TURN_TOKEN|>", KEPT, NO_TOOLS),
    "cohere2": row("<|END_RESPONSE|><|END_OF_TURN_TOKEN|>", KEPT, NO_TOOLS),
    "deepseek_r1_distill": row("<｜end▁of▁sentence｜>", ("\n\n", "\n\n"), NO_TOOLS),
    "deepseekv3": row(
        "<｜end▁of▁sentence｜>",
        ("\n\n", "\n\n"),
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
        '{"city": "Paris"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    ),
    "diffusion_gemma": GEMMA4 | {"thinking": CHANNEL},
    "gemma": row("<end_of_turn>", KEPT, NO_TOOLS),
    "gemma3": row("<end_of_turn>", KEPT, NO_TOOLS),
    "gemma4": GEMMA4,
    "gemma4_v2": row("<turn|>", KEPT, GEMMA_CALL),
    "gemma4_v3": GEMMA4,
    "gemma4_v4": GEMMA4,
    "gemma4_v5": GEMMA4 | {"thinking": CHANNEL},
    "glm4moe": row(
        "<|user|>",
        ("", "\n<think>R2</think>\n"),
        "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n"
        "</tool_call>",
        last_end="",
        call_end="<|observation|>",
    ),
    "gptoss": row(
        "<|end|>",
        ("", "<|channel|>analysis<|message|>R2<|end|><|start|>assistant"),
        ' to=functions.get_weather<|channel|>commentary json<|message|>{"city": "Paris"}',
        last_end="<|return|>",
        lead="<|channel|>final<|message|>",
        call_end="<|call|>",
    ),
    "idefics3": row("<end_of_utterance>", KEPT, NO_TOOLS, lead=" "),
    "lfm2": row(CHATML, KEPT, NO_TOOLS),
    "lfm2_2_5": row(CHATML, LAST_ONLY, LFM_CALL),
    "lfm2_2_5_v2": row(CHATML, LAST_ONLY, LFM_CALL),
    "lfm2_2_5_vl": row(CHATML, LAST_ONLY, LFM_CALL),
    "lfm2_v2": row(CHATML, KEPT, LFM_CALL),
    "llama3": row("<|eot_id|>", KEPT, NO_TOOLS),
    "llama3_1": row("<|eot_id|>", KEPT, LLAMA_CALL),
    "llama3_2": row("<|eot_id|>", KEPT, LLAMA_CALL),
    "llava_next": row("</s>", KEPT, NO_TOOLS, lead=" "),
    "muse_glimmer": row(
        "<|eot|>",
        tuple(f" to=self<|message|>{r}<|eom|><|start|>assistant" for r in ("R1", "R2")),
        ' to=get_weather<|message|><atem:function_calls>\n<atem:invoke name="get_weather">\n'
        '<atem:parameter name="city">Paris</atem:parameter>\n</atem:invoke>\n'
        "</atem:function_calls>",
        lead=" to=user<|message|>",
    ),
    "nemotron_3_5_lightning": NEMOTRON,
    "nemotron_3_nano": NEMOTRON,
    "nemotron_3_super": NEMOTRON,
    "nemotron_3_ultra": NEMOTRON,
    "phi3": row("<|end|>", KEPT, NO_TOOLS),
    "phi3_5": row("<|end|>", KEPT, NO_TOOLS),
    "qwen2_5": row(CHATML, KEPT, JSON_CALL),
    "qwen2_5_vl": row(CHATML, KEPT, NO_TOOLS),
    "qwen3": row(CHATML, LAST_ONLY, JSON_CALL),
    "qwen3_5_nothink": row(CHATML, LAST_ONLY, XML_CALL),
    "qwen3_5_think": row(CHATML, OPENED_LAST, XML_CALL),
    "qwen3_6": row(CHATML, OPENED_LAST, XML_CALL),
    "qwen3_8": row(CHATML, ("R1\n</think>\n\n", "R2\n</think>\n\n"), XML_CALL),
    "qwen3_instruct_2507": row(CHATML, KEPT, JSON_CALL),
    "qwen3_vl": row(CHATML, KEPT, JSON_CALL),
    "smolvlm": row("<end_of_utterance>", KEPT, NO_TOOLS, lead=" "),
}


@functools.cache
def finder_of(name):
    template = ChatTemplate(tokenizer_of(name), DataOptions())
    return template, MaskFinder(template)


def trained_text(name, conversation):
    """Decoded trained tokens of each assistant turn, through the same path as training."""
    tokenizer = tokenizer_of(name)
    template, finder = finder_of(name)
    masked = finder.find(template.prepare(conversation)[0])
    spans = [(span.start, span.end) for span in masked.spans]
    (encoded,) = Encoder(tokenizer).encode([masked.text], [spans])
    assert tokenizer.decode(encoded.input_ids) == masked.text
    assert encoded.num_straddling == 0
    return [tokenizer.decode(encoded.input_ids[first:last]) for first, last in encoded.ranges]


def test_every_shipped_template_has_a_row():
    assert len(TEMPLATES) >= 28
    missing = sorted(set(TEMPLATES) - set(EXPECTED))
    if missing:
        warnings.warn(f"new templates without hand-written truth: {missing}", stacklevel=1)
    assert len(set(TEMPLATES) & set(EXPECTED)) >= 28


@pytest.mark.parametrize("name", sorted(set(TEMPLATES) & set(EXPECTED)))
class TestTemplate:
    def test_plain(self, name):
        want = EXPECTED[name]
        assert trained_text(name, PLAIN) == [f"{want['lead']}A1{want['ends'][1]}"]

    def test_several_turns(self, name):
        want = EXPECTED[name]
        pairs = zip(("A1", "A2"), want["ends"], strict=True)
        assert trained_text(name, MULTI) == [f"{want['lead']}{text}{end}" for text, end in pairs]

    def test_blanks_around_the_text(self, name):
        want = EXPECTED[name]
        got = trained_text(name, PADDED)
        for text, words, end in zip(got, ("A1", "A2"), want["ends"], strict=True):
            assert text.endswith(end)
            inner = text.removeprefix(want["lead"].rstrip()).removesuffix(end)
            assert inner.strip() == words

    @pytest.mark.parametrize("conversation", [INLINE, FIELD], ids=["in_text", "in_field"])
    def test_thinking(self, name, conversation):
        want = EXPECTED[name]
        got = trained_text(name, conversation)
        for text, thought, words, end in zip(
            got, want["thinking"], ("A1", "A2"), want["ends"], strict=True
        ):
            # Templates differ in blanks around a thought that comes in its own field.
            lead = want["lead"]
            want_text = (
                (lead + thought if thought.startswith("<think>") else thought + lead) + words + end
            )
            assert "".join(text.split()) == "".join(want_text.split())
            if conversation is INLINE:
                assert text == want_text

    def test_tool_call(self, name):
        want = EXPECTED[name]
        if want["call"] is NO_TOOLS:
            # Some versions of transformers do render it: refused or there, never left out.
            with contextlib.suppress(RowError):
                assert '{"city": "Paris"}' in trained_text(name, TOOL)[0]
            return
        first, *answers = trained_text(name, TOOL)
        assert first == want["call"]
        pairs = zip(("A1", "A2"), want["ends"], strict=True)
        assert answers == [f"{want['lead']}{text}{end}" for text, end in pairs]


def test_a_template_that_does_not_end_is_stopped(monkeypatch):
    monkeypatch.setattr(bounded, "SECONDS", 0.2)
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    tokenizer = make_tokenizer()
    tokenizer.chat_template = endless
    with pytest.raises(DataError, match="still rendering one row"):
        ChatTemplate(tokenizer, DataOptions())


def test_what_swallows_the_alarm_is_stopped_all_the_same():
    """As Jinja does with whatever a constant raises while it compiles, to compute it later."""

    def render():
        with contextlib.suppress(DataError):
            time.sleep(9)
        time.sleep(9)

    with pytest.raises(DataError, match="still rendering"), bounded.patience(0.05):
        render()
