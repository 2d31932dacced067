"""Every field of a row acts, is refused by its name, or is reported: nothing is passed over."""

import pytest
from chats import chat, trained_texts

from trainkit.data import fields
from trainkit.data.fields import (
    POLICIES,
    READS,
    REFUSED,
    ROW_SWITCHES,
    TEMPLATE_VARIABLES,
    TURN_REFUSED,
    UNDESIRED,
)
from trainkit.data.formats import FORMATS, parse_row
from trainkit.data.messages import RowError
from trainkit.data.summary import verdict
from trainkit.errors import DataError
from trainkit.options.data import ROW_FORMATS


def turns(form, **extra):
    """A question and two answers, the first of them with extra fields."""
    speaker, text = ("role", "content") if form == "messages" else ("from", "value")
    answer = {speaker: "assistant", text: "A1"}
    rows = [
        {speaker: "user", text: "Q1"},
        answer | extra,
        {speaker: "user", text: "Q2"},
        {speaker: "assistant", text: "A2"},
    ]
    return {"messages" if form == "messages" else "conversations": rows}


def parsed(form, **extra):
    return parse_row(turns(form, **extra), "auto").messages[1]


def refusal(row):
    with pytest.raises(RowError) as error:
        parse_row(row, "auto")
    return error.value


FORMS = ("messages", "sharegpt")
SWITCHES = [(name, True) for name in fields.TRAINS] + [(name, False) for name in fields.MASKS]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("name", "on"), sorted(SWITCHES))
def test_every_switch_acts(form, name, on):
    for value in (True, 1, 1.0):
        assert parsed(form, **{name: value}).train is on
    for value in (False, 0, 0.0):
        assert parsed(form, **{name: value}).train is not on
    assert parsed(form, **{name: None}).train is None
    camel = "".join(p.title() if n else p for n, p in enumerate(name.split("_")))
    assert parsed(form, **{camel: 0}).train is not on
    for value in (0.5, -1, 2, "no", [0, 1], {"begin": 0}):
        assert name in refusal(turns(form, **{name: value})).detail


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("mask", True),
        ("label", False),
        ("train_detail", [{"begin_offset": 0, "end_offset": 1, "train": False}]),
        ("trainDetail", [{"begin_offset": 0, "end_offset": 1, "train": False}]),
        ("weights", [0, 1]),
        ("loss_fn_weight", 0.0),
        ("is_train", False),
        ("token_loss_mask", [0, 1]),
        ("should_mask", True),
        ("supervise_answer", False),
        ("learnable", False),
        ("requires_grad", False),
        ("backprop", 0),
        ("is_target", False),
    ],
)
def test_a_switch_that_is_not_understood_is_refused(form, name, value):
    error = refusal(turns(form, **{name: value}))
    assert error.reason == "unknown_switch"
    assert "turn 2" in error.detail
    assert name in error.detail


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", POLICIES)
def test_settings_of_a_whole_run_are_honoured_or_refused_in_a_row(form, name):
    camel = "".join(p.title() if n else p for n, p in enumerate(name.split("_")))
    for key in (name, camel):
        for value in POLICIES[name]:
            assert key in parse_row(turns(form) | {key: value}, "auto").ignored
        others = (True, False, "all", "last", ["user"], 1.5)
        for value in [each for each in others if each not in POLICIES[name]]:
            error = refusal(turns(form) | {key: value})
            assert error.reason == "unknown_switch"
            assert key in error.detail


@pytest.mark.parametrize(
    ("name", "value"),
    [("train_on_tools", True), ("mask_user", False), ("loss_scale", [0.0]), ("x_only_loss", True)],
)
def test_settings_that_are_not_known_are_refused_in_a_row(name, value):
    assert refusal(turns("messages") | {name: value}).reason == "unknown_switch"
    harmless = {"train_split": "a", "loss": 2.5, "is_train": True, "training_step": 3}
    assert parse_row(turns("messages") | harmless, "auto").ignored == tuple(harmless)


def test_switches_that_disagree_are_refused():
    assert refusal(turns("messages", weight=0, train=True)).reason == "switches_disagree"
    assert refusal(turns("messages", masked=True, loss=True)).reason == "switches_disagree"
    assert parsed("messages", masked=True, loss=False).train is False


def test_parts_have_one_switch_or_the_row_is_refused():
    def parts(*values):
        return [{"type": "text", "text": "a", "train": value} for value in values]

    assert parsed("messages", content=parts(False, False)).train is False
    assert refusal(turns("messages", content=parts(True, False))).reason == "part_switch"
    assert (
        refusal(turns("messages", content=parts(False), train=True)).reason == "switches_disagree"
    )
    image = [{"type": "image", "text": "alt"}]
    assert refusal(turns("messages", content=image)).reason == "not_text"
    value = [{"type": "text", "value": "a"}]
    assert parsed("messages", content=value, loss_weight=0.0).content == "a"


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", sorted(TURN_REFUSED))
def test_fields_of_a_turn_that_cannot_act_are_refused(form, name):
    error = refusal(turns(form, **{name: False if name == "end_turn" else ["x"]}))
    assert error.reason == TURN_REFUSED[name][0]
    assert repr(name) in error.detail
    for empty in (None, "", []):
        parsed(form, **{name: empty})


ROWS = {
    "messages": turns("messages"),
    "sharegpt": turns("sharegpt"),
    "alpaca": {"instruction": "Q", "output": "A"},
    "belle": {"instruction": "Human: Q\nAssistant:", "output": "A"},
    "moss": {"chat": {"turn_1": {"Human": "Q", "MOSS": "A"}}},
    "leetcode": {"code_with_problem": "Q", "code_only": "A"},
    "prompt_completion": {"prompt": "Q", "completion": "A"},
    "text": {"text": "A"},
    "tokens": {"input_ids": [1, 2], "labels": [-100, 2]},
    "template": {"prompt": "Q", "completion": "A"},
}


def test_the_tables_know_every_format():
    # Pairs and marked answers are not told by their keys.
    assert {*ROWS, "preference", "rated", "distilled"} == set(FORMATS) == set(READS)
    assert set(FORMATS) == set(ROW_FORMATS)


@pytest.mark.parametrize("form", ROWS)
def test_fields_without_a_part_are_reported(form):
    row = parse_row({**ROWS[form], "id": 7, "meta": {"a": 1}, "note": None, "tags": []}, "auto")
    assert row.ignored == ("id", "meta")


@pytest.mark.parametrize("form", ROWS)
@pytest.mark.parametrize("name", sorted(REFUSED))
def test_fields_of_a_row_that_cannot_act_are_refused(form, name):
    error = refusal({**ROWS[form], name: ["x"]})
    assert error.reason == REFUSED[name][0]
    assert repr(name) in error.detail


@pytest.mark.parametrize("form", ROWS)
@pytest.mark.parametrize("name", [*sorted(ROW_SWITCHES), *sorted(fields.MASKS)])
def test_a_row_may_be_switched_off_whole(form, name):
    if (form, name) == ("tokens", "loss_mask"):
        pytest.skip("there it is the mask of the ids")
    off, on = (1, 0) if name in fields.MASKS else (0, 1)
    for said in (off, str(off), f" {bool(off)}", f"{off}.0"):  # as csv has it
        assert refusal({**ROWS[form], name: said}).reason == "switched_off"
    for said in (on, str(on), str(bool(on)).upper()):
        assert parse_row({**ROWS[form], name: said}, "auto").ignored == ()


@pytest.mark.parametrize("form", [name for name in ROWS if name != "tokens"])
@pytest.mark.parametrize("name", UNDESIRED)
def test_an_answer_marked_as_bad_is_not_trained(form, name):
    for said in (False, "false", "False"):
        assert refusal({**ROWS[form], name: said}).reason == "undesired_answer"
    if form != "text":  # whose label is a class
        assert refusal({**ROWS[form], name: 0}).reason == "undesired_answer"


@pytest.mark.parametrize("form", ["text", "leetcode", "moss", "prompt_completion"])
def test_tools_that_would_not_be_shown_are_refused(form):
    assert refusal({**ROWS[form], "tools": [{"name": "f"}]}).reason == "misplaced_tools"


@pytest.mark.parametrize("name", ["messages", "sharegpt", "alpaca", "belle"])
def test_tools_functions_and_system_act_beside_every_conversation(name):
    row = parse_row({**ROWS[name], "functions": [{"name": "f"}], "system": "S"}, "auto")
    assert row.tools == ({"type": "function", "function": {"name": "f"}},)
    assert [m.content for m in row.messages if m.role == "system"] == ["S"]
    assert row.ignored == ()


def test_two_system_prompts_are_refused():
    row = chat("Q", "A", system="S")
    assert refusal({**row, "system": "other"}).reason == "two_systems"
    assert len(parse_row({**row, "system": "S"}, "auto").messages) == 3


@pytest.mark.parametrize(
    ("role", "ours"),
    [
        *(("ai", "assistant"), ("AI", "assistant"), ("input", "user")),
        *(("tool_result", "tool"), ("observation", "tool")),
    ],
)
def test_roles_of_other_tools(role, ours):
    for speaker, text in (("role", "content"), ("from", "value")):
        row = {"conversations": [{speaker: "user", text: "Q"}, {speaker: role, text: "A"}]}
        assert parse_row(row, "auto").messages[1].role == ours


@pytest.mark.parametrize("role", ["context", "wizard", ""])
def test_an_unknown_role_is_refused_with_the_known_ones(role):
    error = refusal({"conversations": [{"from": role, "value": "x"}]})
    assert error.reason == "unknown_role"
    assert "system, developer, user, assistant or tool" in error.detail


@pytest.mark.parametrize("role", ["tool_call", "function_call", "Tool_Call"])
@pytest.mark.parametrize("form", FORMS)
def test_calls_in_turns_of_their_own(form, role):
    speaker, text = ("role", "content") if form == "messages" else ("from", "value")
    message = parsed(form, **{speaker: role, text: '{"name": "f", "arguments": {"a": 1}}'})
    assert (message.role, message.tool_calls[0]["name"]) == ("assistant", "f")


SWITCHED = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['role'] == 'assistant' and style is defined %}[{{ style }}]{% endif %}"
    "{{ message['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}"
    "{% if style is defined %}[{{ style }}]{% endif %}{% endif %}"
)


def test_a_rows_own_template_variables_act_on_it_alone(write, ready, tiny_tokenizer):
    rows = [
        chat("q", "one"),
        {**chat("q", "two"), "chat_template_kwargs": {"style": "x"}},
        {**chat("q", "three"), "chat_template_kwargs": '{"style": "y"}'},
        {**chat("q", "four"), "chat_template_kwargs": {}},
        {**chat("q", "five"), "chat_template_kwargs": {"styles": "z"}},
    ]
    data = ready(write(rows), chat_template=SWITCHED)
    texts = {data.sample_id(n).rpartition(":")[2]: data[n] for n in range(len(data))}
    shown = {line: tiny_tokenizer.decode(each["input_ids"]) for line, each in texts.items()}
    assert [("[x]" in shown[n], "[y]" in shown[n]) for n in "12345"] == [
        (False, False), (True, False), (False, True), (False, False), (False, False),
    ]  # fmt: skip
    assert trained_texts(tiny_tokenizer, texts["2"]) == ["two<|im_end|>"]
    (source,) = data.summary["sources"]
    assert source["ignored_fields"] == {"chat_template_kwargs.styles": 1}


def test_a_variable_that_no_template_reads_is_refused(write, ready):
    with pytest.raises(DataError, match="does not read 'stile'") as caught:
        ready(write([chat("q", "a")]), chat_template=SWITCHED, template_kwargs={"stile": "x"})
    assert caught.value.where == "data.template_kwargs"
    assert "did you mean style?" in str(caught.value.fix)


def test_tools_that_the_template_does_not_print_are_reported(write, ready):
    data = ready(write([{**chat("q", "a"), "tools": [{"name": "f", "parameters": {}}]}]))
    (source,) = data.summary["sources"]
    assert source["ignored_fields"] == {"tools": 1}
    assert "not used: tools (1)" in " ".join(f.detail for f in verdict(data.summary))


@pytest.mark.parametrize("name", TEMPLATE_VARIABLES)
def test_template_variables_beside_the_messages(name):
    assert parse_row({**chat("q", "a"), name: "v"}, "auto").template_kwargs == {name: "v"}


@pytest.mark.parametrize("value", [5, [1], {"tools": [1]}, {"add_generation_prompt": True}, "{"])
def test_template_variables_that_cannot_be_given_are_refused(value):
    assert (
        "chat_template_kwargs" in refusal({**chat("q", "a"), "chat_template_kwargs": value}).detail
    )


def test_ignored_fields_are_counted_once_a_source(write, ready):
    row = chat("q", "a")
    row["messages"][1]["ts"] = 5
    rows = [{**row, "id": n, f"k{n}": 1} for n in range(30)]
    (source,) = ready(write(rows)).summary["sources"]
    assert source["ignored_fields"]["id"] == 30
    assert source["ignored_fields"]["messages[].ts"] == 30
    assert source["ignored_fields"]["12 other fields"] == 1


def test_an_array_of_rows_on_one_line_is_named(write, ready, dropped):
    good = chat("q", "a")
    path = write([[good, good], good, [{"role": "user", "content": "q"}, *good["messages"]]])
    data = ready(path)
    (entry,) = dropped()
    assert (entry["line"], entry["reason"], len(data)) == (1, "array_of_rows", 2)
    assert "JSON array of 2 rows" in entry["detail"]
