"""Every format turns into the same messages; what does not fit says why."""

import pytest

from trainkit.data.formats import detect, parse_row, read_row
from trainkit.data.messages import Conversation, Message, RowError, TextRow, TokenRow, validate

USER, ASSISTANT = "user", "assistant"
ROWS = {
    "messages": {
        "messages": [
            {"role": "system", "content": "S"},
            {
                "role": "user",
                "content": [{"type": "text", "text": "Q"}, {"type": "text", "text": "!"}],
            },
            {"role": "assistant", "content": "A", "weight": 0},
            {"role": "user", "content": "Q2"},
            {"role": "assistant", "content": "A2", "train": True, "reasoning_content": "R"},
        ]
    },
    "sharegpt": {
        "system": "S",
        "conversations": [
            {"from": "human", "value": "Q!"},
            {"from": "gpt", "value": "A", "weight": 0},
            {"from": "prompter", "value": "Q2"},
            {"from": "bing", "value": "A2"},
        ],
    },
    "alpaca": {
        "instruction": "Q2",
        "input": "",
        "output": "A2",
        "system": "S",
        "history": [["Q!", "A"]],
    },
    "belle": {"instruction": "Human:Q!\nAssistant:A\nHuman:Q2\nAssistant:", "output": "A2"},
    "moss": {
        "meta_instruction": "S",
        "chat": {
            "turn_2": {"Human": "<|Human|>: Q2<eoh>\n", "MOSS": "<|MOSS|>: A2<eom>\n"},
            "turn_1": {
                "Human": "<|Human|>: Q!<eoh>\n",
                "Inner Thoughts": "<|Inner Thoughts|>: None<eot>\n",
                "Commands": "<|Commands|>: None<eoc>\n",
                "Tool Responses": "<|Results|>: None<eor>\n",
                "MOSS": "<|MOSS|>: A<eom>\n",
            },
        },
    },
    "prompt_completion": {
        "prompt": [
            {"role": "system", "content": "S"},
            {"role": "user", "content": "Q!"},
            {"role": "assistant", "content": "A"},
            {"role": "user", "content": "Q2"},
        ],
        "completion": [{"role": "assistant", "content": "A2"}],
    },
}


@pytest.mark.parametrize("name", ROWS)
def test_every_conversation_format_says_the_same(name):
    row = ROWS[name]
    assert detect(row) == name
    conversation = parse_row(row, "auto")
    turns = [(m.role, m.content) for m in conversation.messages if m.role != "system"]
    assert turns == [(USER, "Q!"), (ASSISTANT, "A"), (USER, "Q2"), (ASSISTANT, "A2")]
    systems = [m.content for m in conversation.messages if m.role == "system"]
    assert systems == ([] if name == "belle" else ["S"])


@pytest.mark.parametrize("name", ROWS)
def test_keys_of_other_formats_that_are_null_change_nothing(name):
    """Files that were put together by column have every key in every row."""
    others = dict.fromkeys(key for row in ROWS.values() for key in row)
    others |= dict.fromkeys(("messages", "conversations", "input_ids", "prompt", "text", "chat"))
    assert parse_row({**others, **ROWS[name]}, "auto") == parse_row(ROWS[name], "auto")


def test_switches_and_reasoning_are_read():
    _, _, first, _, second = parse_row(ROWS["messages"], "auto").messages
    assert (first.train, second.train, second.reasoning) == (False, True, "R")
    completion = parse_row(ROWS["prompt_completion"], "auto").messages
    assert [m.is_prompt for m in completion if m.role == ASSISTANT] == [True, False]


def test_alpaca_joins_instruction_and_input():
    row = {"instruction": "Add", "input": "1 2", "output": "3"}
    assert parse_row(row, "alpaca").messages[0].content == "Add\n1 2"


def test_leetcode():
    row = {
        "code_with_problem": "Two sum.\n```python\nx\n```",
        "code_only": "```python\nx\n```",
        "explanation_only": "It adds.",
    }
    question, answer = parse_row(row, "auto").messages
    assert question.content == "Two sum."
    assert answer.content == "```python\nx\n```\n\nIt adds."


def test_text_prompt_and_tokens():
    assert parse_row({"text": "hello"}, "auto") == TextRow("hello")
    assert parse_row({"prompt": "a", "completion": "b"}, "auto") == TextRow("b", prompt="a")
    tokens = parse_row({"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}, "auto")
    assert tokens == TokenRow((5, 6, 7), (False, True, True))
    masked = parse_row({"input_ids": [5, 6, 7], "loss_mask": [False, True, True]}, "auto")
    assert masked == tokens


CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}


@pytest.mark.parametrize("arguments", ['{"a": 1}', {"a": 1}])
def test_tool_calls_with_arguments_as_text_or_object(arguments):
    call = {**CALL, "function": {"name": "f", "arguments": arguments}}
    row = {
        "messages": [
            {"role": "user", "content": "Q"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "T", "tool_call_id": "c1"},
            {"role": "assistant", "content": "A"},
        ],
        "tools": '[{"type": "function", "function": {"name": "f"}}]',
    }
    conversation = parse_row(row, "auto")
    assert conversation.messages[1].tool_calls == (
        {"name": "f", "arguments": {"a": 1}, "id": "c1"},
    )
    assert conversation.tools == ({"type": "function", "function": {"name": "f"}},)


def test_columns_are_renamed():
    row = {"q": "Q", "a": "A"}
    columns = {"instruction": "q", "output": "a"}
    assert parse_row(row, "alpaca", columns).messages[1].content == "A"


BAD = {
    "not_an_object": 5,
    "unknown_format": {"foo": 1},
    "wrong_type": {"messages": "hello"},
    "missing_role": {"messages": [{"content": "x"}]},
    "unknown_role": {"messages": [{"role": "wizard", "content": "x"}]},
    "not_text": {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
    "bad_weight": {"messages": [{"role": "assistant", "content": "x", "weight": 0.5}]},
    "bad_tool_call": {"messages": [{"role": "assistant", "tool_calls": [{"x": 1}]}]},
    "bad_tools": {"messages": [], "tools": 5},
    "bad_json": {"messages": [], "tools": "{"},
    "bad_history": {"instruction": "a", "output": "b", "history": [["x"]]},
    "not_belle": {"instruction": "Human: a\nAssistant: b", "output": "c"},
    "labels_differ": {"input_ids": [1, 2], "labels": [2, 1]},
    "lengths_differ": {"input_ids": [1, 2], "labels": [-100]},
    "token_out_of_range": {"input_ids": [-1]},
    "empty_completion": {"prompt": "a", "completion": ""},
    "empty_text": {"text": " \n"},
}


BAD_TOKENS = [
    ("wrong_type", {"input_ids": [True, False, True]}),
    ("wrong_type", {"input_ids": [1, 2, 3], "labels": [-100, True, 3]}),
    ("bad_weight", {"input_ids": [1, 2, 3], "loss_mask": [0, 2, 1]}),
    ("bad_weight", {"input_ids": [1, 2, 3], "loss_mask": [0, -1, 1]}),
]


@pytest.mark.parametrize(("reason", "row"), [*BAD.items(), *BAD_TOKENS])
def test_bad_rows_say_why(reason, row):
    with pytest.raises(RowError) as error:
        parse_row(row, "auto")
    assert error.value.reason == reason


def test_preference_data_is_called_by_its_name():
    with pytest.raises(RowError, match="compares two answers"):
        parse_row({"prompt": "p", "chosen": "a", "rejected": "b"}, "auto")


def test_a_switch_that_no_comparison_follows_is_named():
    def turn(role, **switch):
        return {"role": role, "content": role, **switch}

    answer, bad = turn(ASSISTANT), {**turn(ASSISTANT), "content": "bad"}
    for switch in ({"weight": 1}, {"train": True}):
        prompt = [turn(USER), turn(ASSISTANT, **switch), turn(USER)]
        pair = {"prompt": prompt, "chosen": [answer], "rejected": [bad]}
        whole = {"chosen": [*prompt, answer], "rejected": [*prompt, bad]}
        rated = {"prompt": prompt, "completion": [answer], "label": True}
        talk = {"messages": [*prompt, answer], "label": False}
        for row, name in (
            (pair, "preference"),
            (whole, "preference"),
            (rated, "rated"),
            (talk, "rated"),
        ):
            parsed = read_row(row, name)
            assert parsed.ignored == ("a switch that trains a turn which is not compared",)
            assert [turn.train for turn in parsed.conversations[0].messages[:3]] == [False] * 3
        row = {**pair, "prompt": [turn(USER, weight=0)], "chosen": [turn(ASSISTANT, **switch)]}
        assert read_row(row, "preference").ignored == ()


def conversation(*turns):
    return Conversation(tuple(Message(role, text) for role, text in turns))


@pytest.mark.parametrize(
    ("reason", "row"),
    [
        ("no_messages", conversation()),
        ("no_assistant_turn", conversation((USER, "x"))),
        ("empty_assistant", conversation((USER, "x"), (ASSISTANT, " \n"))),
        ("empty_user", conversation((USER, ""), (ASSISTANT, "x"))),
        ("nul_character", conversation((USER, "a\x00b"), (ASSISTANT, "x"))),
        ("lone_surrogate", conversation((USER, "a\ud800"), (ASSISTANT, "x"))),
        ("too_many_messages", conversation(*[(USER, "x"), (ASSISTANT, "y")] * 3000)),
    ],
)
def test_rules_of_a_conversation(reason, row):
    with pytest.raises(RowError) as error:
        validate(row, needs_assistant=True)
    assert error.value.reason == reason


def test_repairs_are_named():
    row = conversation((USER, "a"), (USER, "b"), (ASSISTANT, "c"), (USER, "d"))
    mended = validate(row, needs_assistant=True)
    assert [m.content for m in mended.messages] == ["a\n\nb", "c"]
    assert mended.repairs == ("user_turns_joined",)
    assert [m.content for m in mended.cut] == ["d"]


def test_templates_make_columns_of_any_format():
    row = {"q": 'a "b"', "name": "f", "arguments": '{"x": "<1>"}', "good": True, "tools": None}
    call = '{"function": {"name": {{ name | tojson }}, "arguments": {{ arguments }}}}'
    columns = {
        "prompt": '[{"role": "user", "content": {{ q | tojson }}}]',
        "completion": f'[{{"role": "assistant", "tool_calls": [{call}]}}]',
        "tools": '{# #}[{"name": "f"}]',
    }
    found = parse_row(row, "prompt_completion", columns)
    assert found.messages[0] == Message("user", 'a "b"', is_prompt=True)
    assert found.messages[1].tool_calls == ({"name": "f", "arguments": {"x": "<1>"}, "id": None},)
    assert len(found.tools) == 1
    found = parse_row(row, "rated", {"prompt": "[{{ q }}]", "completion": "q", "label": "good"})
    assert found.conversations == (TextRow('a "b"', prompt='[a "b"]'),)
    found = parse_row(row, "alpaca", {"instruction": "Q: {{ name }}", "output": "q"})
    assert [turn.content for turn in found.messages] == ["Q: f", 'a "b"']
    with pytest.raises(RowError, match="'b' is undefined"):
        parse_row(row, "alpaca", {"instruction": "{{ b }}", "output": "q"})


def test_templates_make_the_text_of_any_columns():
    columns = {
        "prompt": "Q: {{ q }}\n{% if more %}{{ more }}\n{% endif %}",
        "completion": "{{ a }}\n",
    }
    assert parse_row({"q": "1", "more": None, "a": "2"}, "template", columns) == TextRow(
        "2\n", prompt="Q: 1\n", apart=True
    )
    assert parse_row({"q": "1", "more": "b", "a": "2"}, "template", columns).prompt == "Q: 1\nb\n"
    assert parse_row({"a": "2"}, "template", {"completion": "{{ a }}"}) == TextRow("2")
    with pytest.raises(RowError, match="'a' is undefined"):
        parse_row({"q": "1", "a": None}, "template", columns)
    with pytest.raises(RowError, match="empty completion"):
        parse_row({"q": "1", "a": ""}, "template", {**columns, "completion": "{{ a }}"})
    with pytest.raises(RowError, match="template of `columns` fails"):
        parse_row({"q": "1"}, "template", {"completion": "{{ q.__class__.__mro__ }}"})
