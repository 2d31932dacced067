"""Masks over classes of templates and rows: each conversation's mask is its own affair.

The truth is what a hand-written renderer says the model writes, or transformers' generation tags.
"""

import json
import random

import pytest
from chats import chat, trained_texts
from oracle import CHATML, byte_level, sentencepiece
from test_data_templates import FIELD, INLINE, MULTI, PADDED, PLAIN, TEMPLATES, TOOL, tokenizer_of
from tiny import make_tokenizer
from tokenizers import AddedToken

from trainkit.data import DataOptions, Source
from trainkit.data.builder import SampleBuilder
from trainkit.data.files import RawRow

MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}"
    "{% if tools and loop.last %}{{ '[TOOLS] ' + tools|tojson + ' [/TOOLS]' }}{% endif %}"
    "{{ '[INST] ' + m.content + ' [/INST]' }}{% elif m.tool_calls is defined %}"
    "{{ '[TOOL_CALLS] [' }}{% for c in m.tool_calls %}{{ c.function|tojson }}{% endfor %}"
    "{{ ']' + eos_token }}{% elif m.role == 'tool' %}"
    "{{ '[TOOL_RESULTS] ' + m.content + ' [/TOOL_RESULTS]' }}"
    "{% else %}{{ ' ' + m.content + eos_token }}{% endif %}{% endfor %}"
)
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
TOOL_ROW = {
    "messages": [
        {"role": "user", "content": "Rome?"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "sunny"},
        {"role": "assistant", "content": "It is."},
        {"role": "user", "content": "Sure?"},
        {"role": "assistant", "content": "yes"},
    ],
    "tools": TOOLS,
}


def as_row(conversation):
    """A parsed conversation as the row of a file."""
    messages = []
    for message in conversation.messages:
        row = {"role": message.role, "content": message.content}
        if message.reasoning is not None:
            row["reasoning_content"] = message.reasoning
        if message.tool_calls:
            row["tool_calls"] = [
                {"type": "function", "function": {"name": c["name"], "arguments": c["arguments"]}}
                for c in message.tool_calls
            ]
        messages.append(row)
    return {"messages": messages, "tools": list(conversation.tools or ())}


ROWS = [as_row(c) for c in (PLAIN, MULTI, PADDED, INLINE, FIELD, TOOL)] + [
    chat("q", "yes"),
    chat("q", "    indented\n        code"),
    chat("q", "a", system="sys"),
    chat("q", "a", "q /no_think", "b", system="/no_think"),
    {
        "messages": [
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": "<think>\nR\n</think>\n\n"},
        ]
    },
    TOOL_ROW,
]


def masks(builder, rows):
    """For each row its samples, or why it is none."""
    batch = builder.build(
        [RawRow(i + 1, json.dumps(r).encode()) for i, r in enumerate(rows)], Source("x")
    )
    found = [[] for _ in rows]
    for row, _, ids, mask, _ in batch.samples:
        found[row].append((ids.tolist(), mask.tolist()))
    for event in batch.events:
        found[event.row].append((event.action, event.reason))
    return found


@pytest.mark.sample(
    "cohere2", "deepseekv3", "g*4*", "gptoss", "lfm2", "llama3_1", "mistral", "qwen3*"
)
@pytest.mark.parametrize("name", [*sorted(TEMPLATES), "mistral"])
def test_a_mask_depends_on_its_conversation_alone(name):
    tokenizer = make_tokenizer() if name == "mistral" else tokenizer_of(name)
    if name == "mistral":
        tokenizer.chat_template = MISTRAL
    orders, found = [places := range(len(ROWS)), random.Random(0).sample(places, len(ROWS))], []
    for order in orders:
        builder = SampleBuilder(tokenizer, DataOptions(max_length=100_000))
        together = masks(builder, [ROWS[place] for place in order])
        found.append([together[order.index(place)] for place in range(len(ROWS))])
    assert found[0] == found[1]


def test_workers_and_caches_do_not_change_masks(write, ready):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = MISTRAL
    rows = [*ROWS * 20, TOOL_ROW, *[chat("q", "yes")] * 300]  # more than two runs of a worker
    truth = masks(SampleBuilder(tokenizer, DataOptions()), rows)
    truth = [kind for found in truth for kind in found if isinstance(kind[0], list)]
    path, files = write(rows), []
    for options in ({"num_workers": 0}, {"num_workers": 2}, {"num_workers": 0}):
        fresh = {"cache_dir": str(path.parent / f"w{options['num_workers']}")}
        data = ready(path, tokenizer=tokenizer, **options, **fresh)
        got = [
            (data[i]["input_ids"].tolist(), data[i]["loss_mask"].tolist()) for i in range(len(data))
        ]
        assert got == truth
        files.append(data.summary["files"])
    assert files[0] == files[1] == files[2]


def trained(tokenizer, row, **options):
    sample = build_row(tokenizer, row, **options)
    return trained_texts(tokenizer, {"input_ids": sample[0], "loss_mask": sample[1]})


def build_row(tokenizer, row, **options):
    builder = SampleBuilder(tokenizer, DataOptions(max_length=4096, **options))
    batch = builder.build([RawRow(1, json.dumps(row).encode())], Source("x"))
    assert batch.samples, batch.events
    return batch.samples[0][2:4]


def with_template(template, *, tokens=(), eos="</s>", make=byte_level):
    tokenizer = make()
    tokenizer.add_tokens([AddedToken(t, special=True, normalized=False) for t in tokens])
    tokenizer.eos_token = eos
    tokenizer.chat_template = template
    return tokenizer


def test_a_tool_call_without_a_generation_prompt_is_trained_whole():
    call = '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Rome"}}]</s>'
    got = trained(with_template(MISTRAL), TOOL_ROW)
    assert got == [call, " It is.</s>", " yes</s>"]


# -- texts around the answer: (template, eos, trained before the answer, behind it) ----------------

LOOP = "{% for m in messages %}"
ASK = "{% endfor %}{% if add_generation_prompt %}"
XML = LOOP + "{{ '<' + m.role + '>' + m.content + '</' + m.role + '>' }}"
AROUND = {
    "closing-and-eos": (
        XML
        + "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}"
        + ASK
        + "{{ '<assistant>' }}{% endif %}",
        "",
        ("</assistant></s>", "</assistant></s>"),
    ),
    "closing-eos-at-the-end": (
        XML + ASK + "{{ '<assistant>' }}{% else %}{{ eos_token }}{% endif %}",
        "",
        ("</assistant>", "</assistant></s>"),
    ),
    "json": (
        LOOP
        + "{{ m.role + ': ' + m.content|tojson + eos_token + '\n' }}"
        + ASK
        + "{{ 'assistant: ' }}{% endif %}",
        '"',
        ('"</s>', '"</s>'),
    ),
    "json-without-prompt": (
        LOOP + '{{ \'{"role": "\' + m.role + \'", "content": \' + m.content|tojson + "}" }}'
        "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}",
        '{"role": "assistant", "content": "',
        ('"}</s>', '"}</s>'),
    ),
    "end-is-no-token": (
        LOOP
        + "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|stop|>\n' }}"
        + ASK
        + "{{ '<|im_start|>assistant\n' }}{% endif %}",
        "",
        ("<|stop|>", "<|stop|>"),
    ),
    "end-token-with-line-break": (
        LOOP
        + "{{ '<|im_start|>' + m.role + '\n' + m.content + '\n</s>\n' }}"
        + ASK
        + "{{ '<|im_start|>assistant\n' }}{% endif %}",
        "",
        ("\n</s>", "\n</s>"),
    ),
    "end-by-the-next-turn": (
        LOOP + "{{ '<|' + m.role + '|>' + m.content }}" + ASK + "{{ '<|assistant|>' }}{% endif %}",
        "",
        ("<|user|>", ""),
    ),
    "footer": (
        LOOP
        + "{{ '[' + m.role + '] ' + m.content + '\n' }}"
        + ASK
        + "{{ '[assistant] ' }}{% else %}{{ 'FOOTER' }}{% endif %}",
        "",
        ("", ""),
    ),
    "strips": (
        LOOP
        + "{{ '<|im_start|>' + m.role + '\n' + m.content|trim + '\n</turn></s>' }}"
        + ASK
        + "{{ '<|im_start|>assistant\n' }}{% endif %}",
        "",
        ("\n</turn></s>", "\n</turn></s>"),
    ),
}


@pytest.mark.parametrize("name", AROUND)
def test_what_stands_between_an_answer_and_its_end_is_trained(name):
    template, before, ends = AROUND[name]
    tokenizer = with_template(template)
    got = trained(tokenizer, chat("Q1", "A1", "Q2", "A2"))
    assert got == [f"{before}A1{ends[0]}", f"{before}A2{ends[1]}"]
    assert trained(tokenizer, chat("Q1", "A1")) == [f"{before}A1{ends[1]}"]


@pytest.mark.parametrize("name", AROUND)
def test_an_appended_eos_cuts_nothing_and_ends_every_turn(name):
    template, before, ends = AROUND[name]
    got = trained(with_template(template), chat("Q1", "A1", "Q2", "A2"), append_eos=True)
    want = [end if end.endswith(("</s>", "|user|>")) else f"{end}</s>" for end in ends]
    assert got == [f"{before}A1{want[0]}", f"{before}A2{want[1]}"]


# -- a prompt that ends in a blank -----------------------------------------------------------------

MAKERS = {
    "byte-level": byte_level,
    "no-words": lambda: byte_level(split=False),
    "legacy": lambda: sentencepiece("legacy"),
    "first": lambda: sentencepiece("first"),
}


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("prompt", ["A: ", "A:", "A:\n", "A:  "])
def test_the_first_word_of_a_completion_is_trained(make, prompt):
    tokenizer = with_template(CHATML, make=MAKERS[make])
    (text,) = trained(tokenizer, {"prompt": prompt, "completion": "yes"})
    assert text.strip().endswith("yes</s>")


# -- thinking ------------------------------------------------------------------------------------

QWEN3 = "qwen3"


@pytest.mark.skipif(QWEN3 not in TEMPLATES, reason="trl is not installed")
class TestQwen3:
    def trained(self, *texts):
        return trained(tokenizer_of(QWEN3), chat(*texts))

    def test_an_answer_of_thinking_alone_is_trained_through_its_end(self):
        assert self.trained("q", "<think>\nR\n</think>\n\n")[-1].endswith("</think>\n\n<|im_end|>")

    @pytest.mark.parametrize("blanks", ["    ", "\t", "  \n  ", " ", "\n\n    "])
    def test_indentation_is_trained(self, blanks):
        (text,) = self.trained("q", f"{blanks}if x:\n        y")
        assert text == f"{blanks.lstrip(chr(10))}if x:\n        y<|im_end|>"
        (text,) = self.trained("q", f"<think>\nR\n</think>\n\n{blanks.lstrip(chr(10))}if x:")
        assert text == f"<think>\nR\n</think>\n\n{blanks.lstrip(chr(10))}if x:<|im_end|>"


@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_every_template_keeps_the_indentation_it_prints(name):
    """Blanks before an answer that the template prints are the model's to write."""
    tokenizer = tokenizer_of(name)
    ids, mask = build_row(tokenizer, chat("q", "    code"))
    if "    code" in tokenizer.decode(ids):
        assert "    code" in tokenizer.decode(ids[mask.astype(bool)])


THOUGHT = {"role": "assistant", "reasoning_content": "only a thought"}


@pytest.mark.sample("{}-*", "*''}-q*", "*None}-q*")
@pytest.mark.parametrize("name", sorted(TEMPLATES))
@pytest.mark.parametrize("content", [{}, {"content": ""}, {"content": None}], ids=str)
def test_a_turn_of_thinking_alone_is_trained_where_the_template_prints_it(name, content):
    tokenizer = tokenizer_of(name)
    turn = {**THOUGHT, **content}
    asked = [{"role": "user", "content": "q"}]
    builder = SampleBuilder(tokenizer, DataOptions(max_length=4096))
    rows = [[*asked, turn], [*asked, turn, *asked, {"role": "assistant", "content": "answer two"}]]
    for number, messages in enumerate(rows):
        raw = RawRow(1, json.dumps({"messages": messages}).encode())
        batch = builder.build([raw], Source("x"))
        if not batch.samples:
            # Dropped only where nothing of the last turn is printed, or turns cannot be proved.
            assert batch.events[0].reason != "empty_assistant"
            assert not number, batch.events
            continue
        ids, mask = batch.samples[0][2:4]
        written = tokenizer.decode(ids[mask.astype(bool)])
        assert ("answer two" in written) == bool(number)
        assert ("only a thought" in written) == ("only a thought" in tokenizer.decode(ids))
