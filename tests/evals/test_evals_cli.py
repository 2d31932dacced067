"""``trainkit eval`` as a user types it."""

import json
import shutil

import pytest
from commands import trainkit
from ranks import RankFailure, run_ranks
from tiny import make_adapter, record_run

from trainkit.cli.app import main
from trainkit.evals.scores import Evaluation


@pytest.fixture(scope="module")
def run(tmp_path_factory, loud_model, tiny_tokenizer):
    """A finished run with its final model and the record of its data."""
    directory = tmp_path_factory.mktemp("runs") / "run-1"
    loud_model.save_pretrained(directory / "final")
    tiny_tokenizer.save_pretrained(directory / "final")
    record_run(directory)
    return directory


@pytest.fixture(scope="module")
def tasks(sets):
    """Those of the harness, and a file of rows."""
    rows = [{"prompt": f"Say {number}." * number, "response": "1"} for number in range(1, 6)]
    (sets / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return f"boolq,gsm8k,mmlu_anatomy,{sets / 'rows.jsonl'}"


@pytest.fixture(scope="module")
def evaluated(run, sets, tasks):
    """One evaluation of the run, which all tests look at."""
    arguments = ["eval", str(run), "--tasks", tasks, "--data", str(sets)]
    assert main([*arguments, "--max-new-tokens", "6", "--device", "cpu"]) == 0
    (found,) = (run / "eval").iterdir()
    return found


def test_results_land_in_the_run(evaluated):
    results = json.loads((evaluated / "results.json").read_text())
    by_name = {f"{row['task']}/{row['metric']}": row for row in results["scores"]}
    boolq = by_name["boolq/acc"]
    assert boolq["stderr"] > 0
    assert (boolq["shots"], boolq["version"], boolq["num_samples"]) == (0, "2.0", 6)
    assert len(boolq["prompts"]) == 64
    assert boolq["expected"]["LLaMA-7B"] == 0.742
    assert by_name["mmlu_anatomy/acc"]["shots"] == 5
    assert "gsm8k/exact_match/flexible-extract" in by_name
    assert results["chat_template"] is True
    assert results["weights"]
    rows = [json.loads(line) for line in (evaluated / "samples/boolq.jsonl").open()]
    assert [row["doc_id"] for row in rows] == list(range(6))
    assert all("<|im_start|>assistant" in row["arguments"][0][0] for row in rows)
    assert not list(evaluated.parent.glob(".*"))


def test_report_and_comparison_have_the_scores(run, evaluated, tmp_path):
    from trainkit.compare.runs import read_run
    from trainkit.compare.verdicts import verdicts
    from trainkit.run import RunDirectory
    from trainkit.run.metrics import read_scores, read_verdicts
    from trainkit.run.report import render_report

    assert "LLaMA-7B 0.742" in render_report(RunDirectory.open(run))
    scores = {f"{row['task']}/{row['metric']}": row for row in read_scores(run)}
    right = read_verdicts(scores["boolq/acc"])
    assert sum(right.values()) / len(right) == scores["boolq/acc"]["value"]
    other = tmp_path / "other"
    shutil.copytree(run / "eval", other / "eval")
    copied = other / "eval" / evaluated.name / "samples/boolq.jsonl"
    rows = [json.loads(line) for line in copied.read_text().split("\n") if line]
    copied.write_text("".join(json.dumps({**row, "acc": 1.0}) + "\n" for row in rows))
    for directory in (run, other):
        (directory / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    found = list(verdicts([[read_run(run, {})], [read_run(other, {})]]))
    verdict = next(each for each in found if each.quantity == "boolq/acc")
    assert f"{6 - sum(right.values())} only the second answers" in verdict.words


def test_two_ranks_find_what_one_does(run, sets, tasks, evaluated, tmp_path):
    output = tmp_path / "two"
    asked = {"model": str(run), "data": str(sets), "tasks": tasks}
    found = run_ranks("evals.rank_cases:evaluate", **asked, output=str(output))
    assert [code for code, _ in found] == [0, 0]
    one, two = (json.loads((path / "results.json").read_text()) for path in (evaluated, output))
    assert one["scores"] == two["scores"]  # the hash of the prompts' ids included
    for path in (evaluated / "samples").iterdir():
        first, second = (
            [json.loads(line) for line in each.open()]
            for each in (path, output / "samples" / path.name)
        )
        assert [row["doc_id"] for row in first] == [row["doc_id"] for row in second]
        assert [row["filtered_resps"] for row in first if "written" in row] == [
            row["filtered_resps"] for row in second if "written" in row
        ]


def test_an_adapter_is_measured_over_its_base(run, sets, tmp_path, capsys):
    make_adapter(run / "final", tmp_path / "adapter", ["q_proj"], size=1.0)
    values = []
    for target in (run / "final", tmp_path / "adapter"):
        arguments = ["eval", str(target), "--tasks", "boolq", "--data", str(sets), "--json"]
        out = tmp_path / f"out-{target.name}"
        assert main([*arguments, "-o", str(out), "--limit", "4"]) == 0
        row = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
        assert row["num_samples"] == 4
        assert row["num_all"] == 6
        samples = (out / "samples/boolq.jsonl").read_text()
        values.append([json.loads(line)["resps"] for line in samples.splitlines()])
    assert values[0] != values[1]


def test_a_group_knows_its_parts_and_their_prompts(run, sets, tmp_path):
    from trainkit.run.metrics import read_scores, read_verdicts

    shutil.copytree(sets / "agieval", tmp_path / "sets/agieval")
    files = tmp_path / "sets/agieval/data/v1_1"
    for name in ("gaokao-english", "logiqa-en", "lsat-lr", "lsat-rc", "sat-en", "sat-math"):
        shutil.copy(files / "lsat-ar.jsonl", files / f"{name}.jsonl")
    shutil.copy(files / "lsat-ar.jsonl", files / "sat-en-without-passage.jsonl")
    hashes = []
    for name, limit in (("one", "1"), ("two", "2")):
        out = tmp_path / name / "eval" / "1"
        arguments = ["eval", str(run), "--tasks", "agieval_en", "--data", str(tmp_path / "sets")]
        assert main([*arguments, "--limit", limit, "--max-new-tokens", "2", "-o", str(out)]) == 0
        (score,) = [row for row in read_scores(tmp_path / name) if row["metric"] == "acc"]
        assert len(score["parts"]) == 10
        assert len(read_verdicts(score)) == score["num_samples"] == 10 * int(limit)
        hashes.append(score["prompts"])
    assert hashes[0] != hashes[1]


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (["--tasks", "bolq"], "did you mean boolq"),
        (["--tasks", ","], "no task"),
        (["--tasks", "boolq,boolq", "--limit", "0"], "limit"),
        (["--tasks", "humaneval"], "--allow-code"),
        (["--tasks", "mmlu"], "abstract_algebra"),
        (["--tasks", "boolq", "--thinking", "on"], "no room to think"),
        (["--tasks", "gsm8k", "--thinking", "on"], "no switch for thinking"),
        (["--tasks", "boolq", "-o", "{full}"], "never overwritten"),
        (["--tasks", "boolq", "--backend", "vllm"], "vLLM is not installed"),
    ],
)
def test_what_cannot_be_measured_is_said_in_a_sentence(
    run, sets, tmp_path, capsys, monkeypatch, options, word
):
    from trainkit.evals import tasks

    if "bolq" in options:  # reading all tasks of the harness takes seconds
        manager = tasks.TaskManager  # of all tasks it takes ten seconds
        monkeypatch.setattr(
            tasks, "TaskManager", lambda **k: manager(**{"include_defaults": False, **k})
        )
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    options = [option.format(full=tmp_path / "full") for option in options]
    code = main(["eval", str(run), "--data", str(sets), *options])
    err = capsys.readouterr().err
    assert code == 2
    assert word in err
    assert "Traceback" not in err


def test_without_a_template_texts_are_plain(run, sets, tmp_path, capsys):
    shutil.copytree(run / "final", tmp_path / "base")
    (tmp_path / "base" / "chat_template.jinja").unlink()
    out = tmp_path / "out"
    arguments = ["eval", str(tmp_path / "base"), "--tasks", "boolq", "--data", str(sets)]
    assert main([*arguments, "-o", str(out), "--limit", "1"]) == 0
    assert "chat template: off" in capsys.readouterr().err
    assert "<|im_start|>" not in (out / "samples/boolq.jsonl").read_text()
    assert main([*arguments, "--chat-template"]) == 2


def test_what_came_to_the_place_of_an_evaluation_meanwhile_stays(tmp_path):
    class Rows(list):
        def __iter__(self):
            (tmp_path / "out").mkdir()
            (tmp_path / "out/mine.txt").touch()
            return super().__iter__()

    written = Evaluation([], {"a": Rows()}, {}).write(tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine.txt"]
    assert written.name.startswith("out-")
    assert (written / "results.json").is_file()


@pytest.mark.parametrize("moment", ["samples", "out", "report.html"])
def test_the_same_command_goes_on_wherever_it_was_killed(run, sets, tmp_path, moment):
    """Before it makes a file of its results, or while it draws them."""
    mine = tmp_path / "mine"
    shutil.copytree(run / "final", mine / "final")
    record_run(mine)
    (mine / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    (mine / "report.html").write_text("old")
    output = tmp_path / "out"
    words = [*("--tasks", "boolq", "--data", str(sets), "--limit", "3"), "-o", str(output)]
    command = ["eval", str(mine), *words, "--device", "cpu"]
    killed = {"cwd": str(tmp_path), "argv": command, "name": moment}
    with pytest.raises(RankFailure):
        run_ranks("resume.test_resume_start:killed_before", world_size=1, **killed)
    said = trainkit(tmp_path, *command)
    assert said.code == 0, said.err
    assert len(json.loads((output / "results.json").read_text())["scores"]) == 1
    assert sorted(path.name for path in output.iterdir()) == ["results.json", "samples"]
    assert trainkit(tmp_path, *command).code == 2  # it is whole
