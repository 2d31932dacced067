"""The data commands: what they show is what is trained; verdicts and exit codes."""

import json

import pytest
from conftest import chat
from tiny import make_tokenizer

from trainkit.cli.app import main
from trainkit.data import DataOptions
from trainkit.data.preview import RoleTable, choose, view
from trainkit.data.stats import measure

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


def test_preview_json_says_what_is_trained(write, model, capsys, tiny_tokenizer):
    path = write(ROWS)
    code, said = run(capsys, "data", "preview", "--data", path, "--model", model, "--json", "-n", 4)
    assert code == 0
    samples = [json.loads(line) for line in said.out.splitlines()]
    assert len(samples) >= 4
    keys = {"id", "source", "input_ids", "labels", "tokens", "num_trained_tokens"}
    for sample in samples:
        assert set(sample) == keys
        number = int(sample["id"].rpartition(":")[2]) - 1
        trained = [token for token in sample["labels"] if token != -100]
        assert tiny_tokenizer.decode(trained) == ROWS[number]["messages"][2]["content"] + END
        assert sample["num_trained_tokens"] == len(trained)
        assert "".join(sample["tokens"]) == tiny_tokenizer.decode(sample["input_ids"])
        assert len(sample["tokens"]) == len(sample["labels"]) == len(sample["input_ids"])


def test_preview_marks_trained_text_without_colours(write, model, capsys):
    code, said = run(capsys, "data", "preview", "--data", write(ROWS[:1]), "--model", model)
    assert code == 0
    assert f"«answer 0{END}»" in said.out
    assert "«question" not in said.out
    assert "\x1b[" not in said.out
    table = {line.split()[0]: line.split()[1:] for line in said.out.splitlines() if line.split()}
    assert table["assistant"] == ["9", "9"]
    assert table["user"] == ["11", "0"]
    assert table["system"] == ["4", "0"]
    assert table["template"][1] == "0"


def test_preview_page_stands_alone(write, model, capsys, tmp_path):
    rows = [chat("<script>alert(1)</script>", "a & b")]
    page = tmp_path / "page.html"
    code, _ = run(
        capsys, "data", "preview", "--data", write(rows), "--model", model, "--html", page
    )
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
    table = RoleTable(data, tiny_tokenizer, DataOptions(max_length=400)).rows(range(len(data)))
    counts = {row["role"]: (row["tokens"], row["trained_tokens"]) for row in table}
    assert sum(tokens for tokens, _ in counts.values()) == int(data.lengths.sum())
    assert counts["assistant"][1] == int(data.num_trained.sum()) == counts["assistant"][0]
    assert counts["user"][1] == counts["system"][1] == counts["template"][1] == 0


def test_control_tokens_are_visible(ready, write, tiny_tokenizer):
    shown = view(ready(write(ROWS[:1])), tiny_tokenizer, 0, "random")
    assert "".join(run.text for run in shown.runs).count("<|im_start|>") == 3
    assert [run.trained for run in shown.runs] == [False, True, False]


def test_check_passes_good_data(write, model, capsys):
    code, said = run(capsys, "data", "check", "--data", write(ROWS), "--model", model)
    assert code == 0
    assert "verdict: fit to train on" in said.out


BAD = {
    "rows": [*ROWS[:9], {"x": 1}],
    "length": [*ROWS, *[chat("q", "a", "r", "b" * 3000)] * 3],
}


@pytest.mark.parametrize("what", BAD)
def test_check_fails_bad_data(write, model, capsys, what):
    path = write(BAD[what])
    code, said = run(capsys, "data", "check", "--data", path, "--model", model, "--json")
    findings = {row["check"]: row["status"] for row in map(json.loads, said.out.splitlines())}
    assert code == 2
    assert findings[what] == "error"
    assert "would train wrongly" in said.err


def test_check_fails_data_that_cannot_be_prepared(write, model, capsys):
    code, said = run(capsys, "data", "check", "--data", write([{"x": 1}]), "--model", model)
    assert code == 2
    assert "data.jsonl" in said.err
    assert "Traceback" not in said.err


def test_stats(write, model, capsys, tmp_path):
    picture = tmp_path / "h.png"
    path = write([*ROWS, ROWS[0]])
    code, said = run(
        capsys, "data", "stats", "--data", path, "--model", model, "--json", "--plot", picture
    )
    rows = [json.loads(line) for line in said.out.splitlines()]
    figures = {row["metric"]: row["value"] for row in rows if "max_length" not in row}
    assert code == 0
    assert (figures["samples"], figures["duplicates"]) == (31, 1)
    assert figures["length_max"] >= figures["length_p99"] >= figures["length_p50"]
    assert picture.read_bytes().startswith(b"\x89PNG")
    code, said = run(capsys, "data", "stats", "--data", path, "--model", model)
    assert "packed" in said.out


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
