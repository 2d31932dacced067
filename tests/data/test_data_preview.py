"""The data commands: what they show is what is trained; verdicts and exit codes."""

import json

import pytest
from chats import chat
from render import test_data_masks
from tiny import make_qwen2, make_tokenizer

from trainkit.cli.app import main
from trainkit.cli.commands import data as data_commands
from trainkit.data import DataOptions
from trainkit.data.preview import Authors, choose, measure, view

END = "<|im_end|>"
ROWS = [chat(f"question {n}", f"answer {n}" * (n % 5 + 1), system="sys") for n in range(30)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    make_tokenizer().save_pretrained(directory)
    return directory


def run(capsys, *arguments):
    code = main([str(argument) for argument in arguments])
    return code, capsys.readouterr()


@pytest.fixture
def look(model, capsys):
    """``trainkit data WHAT`` of a file, as the model reads it."""
    return lambda what, path, *more, by=model: run(
        capsys, "data", what, "--data", path, "--model", by, *more
    )


def test_preview_json_says_what_is_trained(write, look, tiny_tokenizer):
    path = write(ROWS)
    code, said = look("preview", path, "--json", "-n", 4)
    assert code == 0
    samples = [json.loads(line) for line in said.out.splitlines()]
    assert len(samples) >= 4
    keys = {"id", "source", "input_ids", "labels", "tokens", "num_trained_tokens"}
    keys.add("untrained_answer")
    for sample in samples:
        assert set(sample) == keys
        number = int(sample["id"].rpartition(":")[2]) - 1
        trained = [token for token in sample["labels"] if token != -100]
        assert tiny_tokenizer.decode(trained) == ROWS[number]["messages"][2]["content"] + END
        assert sample["num_trained_tokens"] == len(trained)
        assert "".join(sample["tokens"]) == tiny_tokenizer.decode(sample["input_ids"])
        assert len(sample["tokens"]) == len(sample["labels"]) == len(sample["input_ids"])


def test_preview_marks_trained_text_without_colours(write, look):
    code, said = look("preview", write(ROWS[:1]))
    assert code == 0
    assert f"«answer 0{END}»" in said.out
    assert "«question" not in said.out
    assert "\x1b[" not in said.out
    table = {line.split()[0]: line.split()[1:] for line in said.out.splitlines() if line.split()}
    assert table["assistant"] == ["9", "9"]
    assert table["user"] == ["11", "0"]
    assert table["system"] == ["4", "0"]
    assert table["template"][1] == "0"


def test_preview_page_stands_alone(write, look, tmp_path):
    rows = [chat("<script>alert(1)</script>", "a & b")]
    page = tmp_path / "page.html"
    code, _ = look("preview", write(rows), "--html", page)
    assert code == 0
    text = page.read_text()
    assert "<script" not in text
    assert '<span class="trained">a &amp; b<span class="control">' in text
    assert "http" not in text.replace("http-equiv", "")


def test_worst_samples_are_shown(ready, write, tiny_tokenizer):
    rows = [*ROWS, chat("long", "x" * 300), chat("q" * 200, "a"), chat("q", "a", "r", "b" * 5000)]
    data = ready(write(rows), max_length=400)
    why = {
        reason: data.sample_id(index).rpartition(":")[2]
        for index, reason in choose(data, 2, seed=0)
    }
    assert why["longest"] == "31"
    assert why["least trained"] == "32"
    assert why["most cut"] == "33"
    authors = Authors(data, tiny_tokenizer, DataOptions(max_length=400))
    authors.read(range(len(data)))
    table = authors.table()
    counts = {row["role"]: (row["tokens"], row["trained_tokens"]) for row in table}
    assert sum(tokens for tokens, _ in counts.values()) == int(data.lengths.sum())
    assert counts["assistant"][1] == int(data.num_trained.sum()) == counts["assistant"][0]
    assert counts["user"][1] == counts["system"][1] == counts["template"][1] == 0


def test_control_tokens_are_visible(ready, write, tiny_tokenizer):
    shown = view(ready(write(ROWS[:1])), tiny_tokenizer, 0, "random")
    assert "".join(run.text for run in shown.runs).count("<|im_start|>") == 3
    assert [run.trained for run in shown.runs] == [False, True, False]


@pytest.mark.parametrize("option", [["--data"], []])
def test_check_passes_good_data(write, model, capsys, option):
    code, said = run(capsys, "data", "check", *option, write(ROWS), "--model", model)
    assert code == 0
    assert "verdict: fit to train on" in said.out


BAD = {"rows": [*ROWS[:9], {"x": 1}], "length": [*ROWS, *[chat("q", "a", "r", "b" * 3000)] * 3]}


@pytest.mark.parametrize("what", BAD)
def test_check_fails_bad_data(write, look, what):
    path = write(BAD[what])
    code, said = look("check", path, "--json")
    findings = {row["check"]: row["status"] for row in map(json.loads, said.out.splitlines())}
    assert code == 2
    assert findings[what] == "error"
    assert "would train wrongly" in said.err


def test_check_reads_rows_again_only_for_the_length_of_those_cut(write, look, monkeypatch):
    prepare, limits = data_commands._prepare, []
    counted = lambda _, options: limits.append(options.max_length) or prepare(_, options)  # noqa: E731
    monkeypatch.setattr(data_commands, "_prepare", counted)
    for rows in (ROWS, BAD["length"]):
        look("check", write(rows))
    assert limits == [2048, 2048, data_commands.NO_LIMIT]


def test_files_in_a_recipes_place_are_read_as_its_objective_says(write, model, capsys, tmp_path):
    recipe = f"objective: dpo\nmodel: {{name_or_path: {model}}}\ndata: {{train: [other.jsonl]}}\n"
    (tmp_path / "r.yaml").write_text(recipe)
    words = ("data", "preview", "--json", "--config", tmp_path / "r.yaml", "--data")
    pair = {"prompt": "q", "chosen": "yes", "rejected": "no"}
    assert len(run(capsys, *words, write([pair]))[1].out.splitlines()) == 2
    assert "guides/preferences.md" in run(capsys, *words, write([{"text": "t"}]))[1].err


def test_check_fails_data_that_cannot_be_prepared(write, look):
    code, said = look("check", write([{"x": 1}]))
    assert code == 2
    assert "data.jsonl" in said.err


def test_stats(write, look, tmp_path):
    picture = tmp_path / "h.png"
    path = write([*ROWS, ROWS[0]])
    code, said = look("stats", path, "--json", "--plot", picture)
    rows = [json.loads(line) for line in said.out.splitlines()]
    figures = {row["metric"]: row["value"] for row in rows if "max_length" not in row}
    assert code == 0
    assert (figures["samples"], figures["duplicates"]) == (31, 1)
    assert figures["length_max"] >= figures["length_p99"] >= figures["length_p50"]
    assert picture.read_bytes().startswith(b"\x89PNG")
    code, said = look("stats", path)
    assert "packed" in said.out


def test_the_suggested_length_takes_99_percent_of_the_samples(ready, write):
    """A long one of 31 is 3% of them: a length between it and the others leaves it out."""
    data = ready(write([*ROWS, chat("x" * 2000, "ok")]), max_length=10**9)
    stats = measure(data)
    assert (data.lengths <= stats.suggested_max_length).mean() >= 0.99


def test_cuts_are_counted(ready, write):
    data = ready(write([chat("q", "a" * n) for n in (10, 100, 700)]), max_length=10**9)
    stats = measure(data, (64, 512))
    lengths = data.lengths
    for cut in stats.cuts:
        over = lengths[lengths > cut.max_length]
        assert cut.samples == len(over)
        assert cut.tokens == int((over - cut.max_length).sum())
        assert cut.trained_tokens == cut.tokens - len(over)  # but for the blank after the end
    assert sum(count for _, count in stats.histogram) == 3


def test_a_recipe_may_be_given(write, model, capsys, tmp_path):
    recipe = tmp_path / "r.yaml"
    recipe.write_text(
        f"model: {{name_or_path: {model}}}\n"
        f"data: {{train: [{write(ROWS)}], max_length: 64, cache_dir: {tmp_path / 'c'}}}\n"
    )
    code, said = run(capsys, "data", "preview", "--config", recipe, "--json", "data.max_length=512")
    assert code == 0, said.err
    assert len(said.out.splitlines()) >= 3


def test_nothing_to_look_at_is_an_error(capsys):
    code, said = run(capsys, "data", "stats")
    assert code == 2
    assert "--config" in said.err


SOME_BAD = [*ROWS, *ROWS, *ROWS, *ROWS, {"x": 1}]


def test_words_of_an_answer_that_are_not_trained_are_marked(write, look, tmp_path):
    row = chat("q1", "silent words", "q2", "spoken")
    row["messages"][1]["weight"] = 0
    page = tmp_path / "p.html"
    code, said = look("preview", write([row]), "--html", page)
    assert code == 0, said.err
    assert f"⟦silent words{END}⟧" in said.out
    assert f"«spoken{END}»" in said.out
    assert '<span class="missed">silent words' in page.read_text()
    code, said = look("preview", write([row]), "--json")
    shown = json.loads(said.out)
    missed = [token for a, b in shown["untrained_answer"] for token in shown["tokens"][a:b]]
    assert "".join(missed) == f"silent words{END}"


def test_answers_whose_thinking_is_left_untrained_are_marked(ready, write):
    tokenizer = test_data_masks.with_template(test_data_masks.QWEN3_LIKE)
    data = ready(write([test_data_masks.TestThinking.row]), tokenizer=tokenizer)
    authors = Authors(data, tokenizer, DataOptions())
    authors.read([0])
    shown = view(data, tokenizer, 0, "", authors.turns(0))
    assert [run.text for run in shown.runs if run.missed] == [f"A1{END}"]


HOSTILE = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202etxt\u2028\x00\x7f\rover"


def test_control_characters_of_data_do_not_reach_the_terminal(write, look, tmp_path):
    rows = [chat(HOSTILE, HOSTILE), *SOME_BAD, {HOSTILE: HOSTILE}, {"messages": HOSTILE}]
    path = write(rows)
    page = tmp_path / "p.html"
    for extra in ((), ("--json",), ("--html", page)):
        code, said = look("preview", path, "-n", 200, *extra)
        assert code == 0, said.err
        for each in HOSTILE.replace("txt", "").replace("over", "").replace("owned", ""):
            if not each.isprintable():
                assert each not in said.out
    assert not any(each in page.read_text() for each in "\x1b\x9b\u202e")
    code, said = look("check", path)
    assert not any(each in said.out + said.err for each in "\x1b\x9b\u202e")


def test_bad_rows_are_named_where_only_some_are_bad(write, look):
    path = write(SOME_BAD)
    code, said = look("check", path)
    assert code == 0
    assert f"{path}:{len(SOME_BAD)}: " in said.out
    code, said = look("preview", path)
    assert f"{path}:{len(SOME_BAD)} · not used" in said.out
    assert '{"x": 1}' in said.out


# -- one verdict ----------------------------------------------------------------------------------


@pytest.fixture
def endless(tmp_path):
    """A model whose template ends no turn but those that say 'fin'."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = test_data_masks.NO_END.replace(
        "m.content +", "m.content + ('<|im_end|>' if 'fin' in m.content else '') +"
    )
    tokenizer.save_pretrained(tmp_path / "endless")
    return tmp_path / "endless"


def test_missing_ends_are_judged_as_shares(write, look, endless):
    path = write([chat("q", f"a{n}") for n in range(100)] + [chat("q", "fin")])
    code, said = look("check", path, by=endless)
    assert code == 2
    assert "100 of 101 trained turns have no end-of-turn token" in said.out
    assert "append_eos" in said.out
    path = write([chat("q", "fin")] * 199 + [chat("q", "a")], "few.jsonl")
    code, said = look("check", path, by=endless)
    assert code == 0
    assert "1 of 200 trained turns have no end-of-turn token" in said.out


@pytest.mark.parametrize("what", ["endless", "rows", "length", "fine"])
def test_a_run_stops_where_check_says_error(write, endless, capsys, tmp_path, what):
    rows = {"endless": [chat("q", "a")] * 30, "fine": ROWS, **BAD}[what]
    place = endless if what == "endless" else tmp_path / "model"
    make_qwen2(len(make_tokenizer())).save_pretrained(place)
    if what != "endless":
        make_tokenizer().save_pretrained(place)
    recipe = tmp_path / "r.yaml"
    recipe.write_text(
        f"model: {{name_or_path: {place}, dtype: float32}}\n"
        f"data: {{train: [{write(rows)}], max_length: 512, cache_dir: {tmp_path / 'c'}}}\n"
        f"training: {{max_steps: 1, output_dir: {tmp_path / 'out'}, use_cpu: true}}\n"
    )
    checked, said = run(capsys, "data", "check", "--config", recipe)
    trained, told = run(capsys, "sft", "--config", recipe, "--dry-run")
    assert (checked, trained) == ((0, 0) if what == "fine" else (2, 2)), said.out + told.err
    if what != "fine":
        assert {"endless": "end-of-turn", "rows": "dropped", "length": "lost"}[what] in told.err


def test_check_reads_the_evaluation_data_of_a_recipe(write, model, capsys, tmp_path):
    held = tmp_path / "held.jsonl"
    held.write_text(json.dumps(ROWS[0]) + '\n{"x": 1}\n')
    recipe = tmp_path / "r.yaml"
    recipe.write_text(
        f"model: {{name_or_path: {model}}}\ndata: {{train: [{write(ROWS)}], eval: [{held}]}}\n"
    )
    code, said = run(capsys, "data", "check", recipe)
    assert code == 0
    assert "warning  evaluation data: rows: 1 of 2 rows kept" in said.out
    assert "held.jsonl:2: unknown_format" in said.out
    assert "also trained on: 1 rows of held" in said.out
    held.unlink()
    assert run(capsys, "data", "check", recipe)[0] == 2


def test_check_reads_the_generation_config_of_a_model(write, look, tmp_path):
    tokenizer = make_tokenizer()
    tokenizer.eos_token = "<|endoftext|>"
    tokenizer.save_pretrained(tmp_path / "m")
    path = write(ROWS)
    _, said = look("check", path, by=tmp_path / "m")
    assert "is not a stop token" in said.out
    stop = tokenizer.convert_tokens_to_ids(END)
    (tmp_path / "m" / "generation_config.json").write_text(json.dumps({"eos_token_id": [stop]}))
    _, said = look("check", path, by=tmp_path / "m")
    assert "is not a stop token" not in said.out


def test_a_token_inside_answers_is_not_made_a_stop_token(ready, write):
    """Two turns end with it, but it stands in the middle of the others."""
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|part|>"]})
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}"
        "{% for c in m.tool_calls or [] %}{{ c.function.name + '<|part|>' }}"
        "{{ c.function.arguments|tojson }}{% endfor %}"
        "{{ m.content + ('<|part|>' if m.name is defined else '<|im_end|>\\n') }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    )
    rows = [chat("q", "") for _ in range(10)]
    for row in rows:
        row["messages"][1]["tool_calls"] = [{"name": "look", "arguments": {}}]
    named = chat("q", "a")
    named["messages"][1]["name"] = "Ada"
    data = ready(write([*rows, named, named]), tokenizer=tokenizer)
    assert data.summary["ends"] == {"<|im_end|>": 10, "<|part|>": 2}
    assert [*data.summary["end_of_turn"].values()] == [tokenizer.convert_tokens_to_ids(END)]
    assert any("is not made one" in warning for warning in data.summary["warnings"])
