"""A question is what training shows before an answer: in every format, container and template."""

import gzip
import json
import re

import pytest
from test_data_templates import TEMPLATES, tokenizer_of
from tiny import make_tokenizer

from trainkit.data.builder import SampleBuilder
from trainkit.data.files import read_rows
from trainkit.data.formats import FORMATS
from trainkit.data.messages import Conversation, TextRow, TokenRow
from trainkit.data.options import DataOptions
from trainkit.data.prompt import PromptRenderer
from trainkit.data.questions import QuestionOptions, read_questions
from trainkit.errors import DataError, ModelError
from trainkit.options import Source

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "one"},
    {"role": "user", "content": "and a half"},
    {"role": "assistant", "content": "two"},
    {"role": "user", "content": "three 你好\u2028\x85 <|im_end|>"},
    {"role": "assistant", "content": "four"},
]
ROWS = {
    "messages": {"id": 7, "messages": TALK, "tools": [WEATHER]},
    "sharegpt": {
        "system": "S",
        "conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}],
        "tools": json.dumps([WEATHER]),
    },
    "belle": {"instruction": "Human: a\nAssistant: b\nHuman: c\nAssistant:", "output": "d"},
    "alpaca": {"instruction": "Add", "input": "1 2", "output": "3", "history": [["h", "i"]]},
    "moss": {"chat": {"turn_1": {"Human": "<|Human|>: hi<eoh>", "MOSS": "<|MOSS|>: yes<eom>"}}},
    "leetcode": {"code_with_problem": "Sum\n```py\n```", "code_only": "x", "explanation_only": "y"},
    "prompt_completion": {"prompt": "Two and two is ", "completion": "four"},
    "text": {"text": "Once upon a time"},
    "tokens": {"input_ids": [5, 6, 7, 8], "labels": [-100, -100, 7, 8]},
}
ANSWERS = ("output", "completion", "code_only", "explanation_only")


def trained(path, tokenizer, **options):
    """Ids and mask of every row of a file, only its last answer trained."""
    builder = SampleBuilder(tokenizer, DataOptions(mask="last_assistant", **options))
    batch = builder.build(list(read_rows(path)), Source(str(path)))
    assert not [event for event in batch.events if event.action == "dropped"], batch.events
    return [(sample.input_ids, sample.loss_mask) for sample in batch.samples]


def check(path, tokenizer, **options):
    renderer = PromptRenderer(tokenizer, DataOptions(**options))
    questions = read_questions(str(path))
    for question, (ids, mask) in zip(questions, trained(path, tokenizer, **options), strict=True):
        first = int(mask.argmax()) or len(ids) - 1  # a plain text is trained in full, and then ends
        assert renderer.input_ids(question.row) == ids[:first].tolist()
    return questions


def test_every_format_has_a_row_here():
    # A template's rows have any keys, and of two answers to a question none is its answer.
    assert ROWS.keys() == FORMATS.keys() - {"template", "preference", "rated", "distilled"}


def test_a_template_asks_what_it_trains_behind(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"q": "two", "a": "four"}))
    columns = {"prompt": "Q: {{ q }}\nA:", "completion": " {{ a }}"}
    (question,) = read_questions(str(path), QuestionOptions("template", columns))
    tokenizer = make_tokenizer()
    asked = PromptRenderer(tokenizer).input_ids(question.row)
    source = Source(str(path), format="template", columns=columns)
    rows = list(read_rows(path))
    batch = SampleBuilder(tokenizer, DataOptions()).build(rows, source)
    (sample,) = batch.samples
    assert asked == sample.input_ids[: int(sample.loss_mask.argmax())].tolist()


@pytest.mark.parametrize("name", ROWS)
def test_prompt_ids_are_those_of_training_in_every_format(name, tmp_path):
    tokenizer = make_tokenizer()
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(ROWS[name], ensure_ascii=False) + "\n", encoding="utf-8")
    (question,) = check(path, tokenizer)
    assert question.fields == ROWS[name]
    assert question.id == "rows.jsonl:1"


@pytest.mark.parametrize("name", sorted(ROWS.keys() - {"tokens", "text"}))
def test_a_row_without_its_answer_asks_the_same(name, tmp_path):
    tokenizer = make_tokenizer()
    row = json.loads(json.dumps(ROWS[name]))
    for key in ANSWERS:
        row.pop(key, None)
    for turns in (row.get("messages"), row.get("conversations")):
        if turns is not None:
            turns.pop()
    if name == "moss":
        row["chat"]["turn_1"].pop("MOSS")
    asked = []
    for each in (ROWS[name], row):
        path = tmp_path / "rows.jsonl"
        path.write_text(json.dumps(each))
        options = QuestionOptions(plain_prompts=True)
        (question,) = read_questions(str(path), options)
        asked.append(PromptRenderer(tokenizer).input_ids(question.row))
    assert asked[0] == asked[1]


def test_a_lone_prompt_is_a_message_unless_texts_were_trained(tmp_path):
    path = tmp_path / "rows.jsonl"
    rows = [{"prompt": "q"}, {"prompt": "q", "completion": "?"}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for plain, kinds in ((False, [Conversation, TextRow]), (True, [TextRow, TextRow])):
        questions = read_questions(str(path), QuestionOptions(plain_prompts=plain))
        assert [type(each.row) for each in questions] == kinds


def containers(rows, folder):
    """The same rows in everything that training reads."""
    import pyarrow
    import pyarrow.parquet

    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    files = {
        "plain.jsonl": lines.encode(),
        "bom.jsonl": b"\xef\xbb\xbf" + lines.encode(),
        "crlf.jsonl": lines.replace("\n", "\r\n").encode(),
        "packed.jsonl.gz": gzip.compress(lines.encode()),
        "array.json": json.dumps(rows, indent=1).encode(),
        "one_line.json": json.dumps(rows, ensure_ascii=False).encode(),
        "bom_array.json": b"\xef\xbb\xbf" + json.dumps(rows).encode(),
    }
    for name, content in files.items():
        (folder / name).write_bytes(content)
    table = pyarrow.Table.from_pylist(rows)
    pyarrow.parquet.write_table(table, folder / "table.parquet")
    return [folder / name for name in (*files, "table.parquet")]


def test_every_container_asks_the_same(tmp_path):
    tokenizer = make_tokenizer()
    rows = [{"id": f"r{n}", "messages": TALK[: 4 + 2 * (n % 2)], "tag": "\u2028"} for n in range(3)]
    for path in containers(rows, tmp_path):
        questions = check(path, tokenizer)
        assert [question.fields["id"] for question in questions] == ["r0", "r1", "r2"], path
        assert len({question.id for question in questions}) == 3
        assert all(question.fields["tag"] == "\u2028" for question in questions)


def test_a_text_file_has_a_question_a_line(tmp_path):
    path = tmp_path / "asked.txt"
    path.write_bytes("\ufeffone\u2028still one\r\n\n two\x85\x1c \nthree".encode())
    questions = read_questions(str(path))
    texts = [question.row.messages[0].content for question in questions]
    assert texts == ["one\u2028still one", " two\x85\x1c ", "three"]
    assert [question.id for question in questions] == ["asked.txt:1", "asked.txt:3", "asked.txt:4"]
    path.write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    with pytest.raises(DataError, match="JSON object"):
        read_questions(str(path))


CONVERSATIONS = {
    "plain": {"messages": TALK[1:2] + TALK[3:]},
    "tools": {
        "messages": [
            {"role": "user", "content": "How is Oslo?"},
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
            {"role": "tool", "content": "rain", "name": "weather", "tool_call_id": "call00000"},
            {"role": "assistant", "content": "Rain."},
        ],
        "tools": [WEATHER],
    },
    "call": {
        "messages": [
            {"role": "user", "content": "How is Oslo?"},
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
        ],
        "tools": [WEATHER],
    },
}


THINKING = re.compile(r"<think>\s*(</think>\s*)?$")
# It opens the model's turn again behind a tool's answer, but not when asked for the next turn.
OWN_WAY = {("diffusion_gemma", "tools")}


@pytest.mark.skipif(not TEMPLATES, reason="trl is not installed (pip install --no-deps trl)")
def test_prompt_ids_are_those_of_training_for_every_template_that_trains(tmp_path):
    """Tools included; the template's own refusals of a conversation are training's affair.

    Only the opening of the thinking may differ: before an answer without any, templates print an
    empty block, which no prompt can know.
    """
    proved = {kind: [] for kind in CONVERSATIONS}
    wrong = []
    for name in TEMPLATES:
        tokenizer = tokenizer_of(name)
        for kind, row in CONVERSATIONS.items():
            path = tmp_path / "rows.jsonl"
            path.write_text(json.dumps(row) + "\n")
            try:
                ((ids, mask),) = trained(path, tokenizer)
            except (AssertionError, DataError):
                continue
            (question,) = read_questions(str(path))
            prompt = PromptRenderer(tokenizer).input_ids(question.row)
            before = ids[: int(mask.argmax())].tolist()
            texts = [THINKING.sub("", tokenizer.decode(each)).rstrip() for each in (prompt, before)]
            if prompt == before:
                proved[kind].append(name)
            elif texts[0] != texts[1]:
                wrong.append((name, kind))
    assert set(wrong) == OWN_WAY
    assert min(map(len, proved.values())) > 10, {kind: len(names) for kind, names in proved.items()}


def test_a_rows_own_template_variables_count(tmp_path):
    tokenizer = make_tokenizer()
    tokenizer.chat_template += "{% if not brief %}Long{% endif %}"
    tokenizer.chat_template = "{% if brief %}short {% endif %}" + tokenizer.chat_template
    row = {"messages": TALK, "chat_template_kwargs": {"brief": True}}
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n" + json.dumps({"messages": TALK}) + "\n")
    texts = [PromptRenderer(tokenizer).text(each.row) for each in read_questions(str(path))]
    assert [text.startswith("short ") for text in texts] == [True, False]


def test_a_row_with_tools_takes_the_template_for_tools(tmp_path):
    """As transformers chooses among the templates of a tokenizer, in training and in asking."""
    tokenizer = make_tokenizer()
    plain = tokenizer.chat_template
    tokenizer.chat_template = {"default": plain, "tool_use": "{{ tools|tojson }}" + plain}
    rows = [{"messages": TALK, "tools": [WEATHER]}, {"messages": TALK}]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = trained(path, tokenizer, escape_special=False)
    for row, (ids, _), each in zip(rows, found, read_questions(str(path)), strict=True):
        messages = [*TALK[:1], {"role": "user", "content": "one\n\nand a half"}, *TALK[3:]]
        expected = tokenizer.apply_chat_template(messages, tools=row.get("tools"), tokenize=False)
        assert tokenizer.decode(ids) == expected
        prompt = PromptRenderer(tokenizer, DataOptions(escape_special=False)).text(each.row)
        assert expected.startswith(prompt)
        assert ("weather" in prompt) == ("tools" in row)
    tokenizer.chat_template = {"tool_use": plain}
    with pytest.raises(ModelError, match="no default chat template, only tool_use"):
        trained(path, tokenizer)


def test_token_rows_beyond_the_vocabulary_are_refused():
    with pytest.raises(DataError, match="token id 999999"):
        PromptRenderer(make_tokenizer()).input_ids(TokenRow((1, 999999), (False, False)))
