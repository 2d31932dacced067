"""The seven sets from files as their makers publish them, and what is said of other files."""

import gzip
import json
from pathlib import Path

import pytest
from set_files import PARTS, write_sets

from trainkit.errors import DataError, RecipeError
from trainkit.evals import tasks
from trainkit.evals.tasks import SETS, TaskChoice, load_tasks
from trainkit.options.training import METRICS


def test_the_prompts_are_the_sets_own(sets):
    names = ["boolq", "mmlu_anatomy", "agieval_aqua_rat", "agieval_gaokao_physics", "agieval_math"]
    tasks = load_tasks(TaskChoice([*names, "ceval-valid_law"], data=str(sets))).tasks
    docs = {name: task.eval_docs[0] for name, task in tasks.items()}
    text = {name: task.doc_to_text(docs[name]) for name, task in tasks.items()}
    assert text["boolq"].endswith("\nQuestion: is 0 even?\nAnswer:")
    assert tasks["boolq"].doc_to_target(docs["boolq"]) == 1
    assert text["mmlu_anatomy"] == 'anatomy, test 0:\n"which"?\nA. w\nB. x\nC. y\nD. z\nAnswer:'
    assert text["agieval_aqua_rat"] == (
        "Q: 1+1? Answer Choices: (A)one (B)two (C)three (D)four (E)five\n"
        "A: Among A through E, the answer is"
    )
    assert docs["agieval_aqua_rat"]["gold"] == [1]
    assert text["agieval_gaokao_physics"].endswith("\n答案：从A到D, 我们应选择")
    assert docs["agieval_gaokao_physics"]["gold"] == [0, 2]
    assert text["agieval_math"] == "Q: 2+2?\nA: The answer is"
    assert text["ceval-valid_law"].startswith("问题0\nA. 甲")


def test_shots_are_the_sets_own_and_can_be_others(sets):
    tasks = load_tasks(TaskChoice(["mmlu_anatomy", "gsm8k", "boolq"], data=str(sets))).tasks
    assert [task.get_config("num_fewshot") for task in tasks.values()] == [5, 5, 0]
    (task,) = load_tasks(TaskChoice(["boolq"], data=str(sets), shots=3)).tasks.values()
    assert task.fewshot_context(task.eval_docs[0], 3).count("Question:") == 4


def test_a_whole_set_is_a_group_of_its_parts(tmp_path):
    """All of MMLU: one file of each subject."""
    import lm_eval.tasks
    from lm_eval.tasks._yaml_loader import load_yaml

    folder = load_tasks.__globals__["_SHIPPED"] / "mmlu" / "default"
    subjects = [
        load_yaml(path, resolve_func=False)["dataset_name"] for path in folder.glob("mmlu_*.yaml")
    ]
    assert lm_eval.tasks
    write_sets(tmp_path, mmlu=subjects)
    found = load_tasks(TaskChoice(["mmlu"], data=str(tmp_path)))
    assert len(found.tasks) == 57
    assert "mmlu_stem" in found.loaded["groups"]
    (tmp_path / "mmlu/data/test/virology_test.csv").unlink()
    with pytest.raises(DataError, match="virology_test"):
        load_tasks(TaskChoice(["mmlu"], data=str(tmp_path)))


AGIEVAL = '{"question": "q", "options": ["(A)1", "(B)2"], "label": LABEL}'
PROGRAM = b'{"task_id": "a", "prompt": "p", "entry_point": "f(1)", "test": "t"}'
BROKEN = [
    ("boolq/dev.jsonl", '{"question": "q", "passage": "p", "answer": "yes"}', "1", "true or false"),
    ("boolq/dev.jsonl", '{"question": "q"}\n', "1", "answer"),
    ("boolq/dev.jsonl", "\n[1]\n", "2", "object"),
    ("boolq/dev.jsonl", "{", "1", "JSON"),
    ("gsm8k/test.jsonl", '{"question": "q", "answer": 4}', "1", "answer"),
    ("mmlu/data/test/anatomy_test.csv", "q,a,b,c,d\n", "1", "5 columns"),
    ("mmlu/data/test/anatomy_test.csv", "q,a,b,c,d,E\n", "1", "ABCD"),
    ("agieval/data/v1_1/aqua-rat.jsonl", '{"question": "q", "options": []}', "1", "options"),
    (
        "agieval/data/v1_1/aqua-rat.jsonl",
        '{"question": "q", "options": ["(A)1", "(B)2"], "label": "C"}',
        "1",
        "one of AB",
    ),
    ("bbh/bbh/word_sorting.json", "{}", "", "examples"),
    ("bbh/bbh/word_sorting.json", '{"examples": [{"input": "a"}]}', "example 1", "target"),
    ("ceval/val/law_val.csv", "id,question,A,B,C,D\n", "1", "column answer"),
    ("ceval/val/law_val.csv", "id,question,A,B,C,D,answer\n0,q,a,b,c,d,\n", "2", "ABCD"),
    ("humaneval/HumanEval.jsonl.gz", "not packed", "", "cannot be read"),
    ("boolq/dev.jsonl", "\n\n", "", "no questions"),
    ("mmlu/data/test/anatomy_test.csv", "", "", "no questions"),
    ("mmlu/data/dev/anatomy_dev.csv", "", "", "no questions"),
    ("ceval/val/law_val.csv", "", "", "no questions"),
    ("ceval/dev/law_dev.csv", "\r\n", "", "no questions"),
    ("bbh/bbh/word_sorting.json", '{"examples": []}', "", "no questions"),
    ("ceval/val/law_val.csv", "id,question,A,B,C,D,answer\n", "", "no questions"),
    ("boolq/dev.jsonl", '{"question": "\\ud800", "passage": "", "answer": true}', "1", "surrogate"),
    ("boolq/dev.jsonl", "[" * 100_000, "1", "JSON"),
    ("boolq/dev.jsonl", '{"question": "q", "passage": "p", "label": 2}', "1", "true or false"),
    ("gsm8k/test.jsonl", '{"question": "q", "answer": "so 4"}', "1", "####"),
    ("gsm8k/test.jsonl", b"\xff\xfe{\x00", "", "cannot be read"),
    ("bbh/bbh/word_sorting.json", b'{"examples": "\xff"}', "", "cannot be read"),
    ("agieval/data/v1_1/aqua-rat.jsonl", AGIEVAL.replace("LABEL", "[]"), "1", "label"),
    ("agieval/data/v1_1/aqua-rat.jsonl", AGIEVAL.replace("LABEL", "null"), "1", "label"),
    (
        "agieval/data/v1_1/aqua-rat.jsonl",
        json.dumps({"question": "q", "options": list("abcdefgh"), "label": "A"}),
        "1",
        "seven|7",
    ),
    ("humaneval/HumanEval.jsonl.gz", gzip.compress(PROGRAM, mtime=0), "1", "names no function"),
    (
        "humaneval/HumanEval.jsonl.gz",
        gzip.compress(PROGRAM, mtime=0)[:20] + b"XXXXXXXX",
        "",
        "cannot be",
    ),
]
TASK_OF = {
    "boolq": "boolq",
    "gsm8k": "gsm8k",
    "mmlu": "mmlu_anatomy",
    "agieval": "agieval_aqua_rat",
    "bbh": "bbh_fewshot_word_sorting",
    "ceval": "ceval-valid_law",
    "humaneval": "humaneval",
}


@pytest.mark.parametrize(("name", "text", "place", "word"), BROKEN)
def test_a_malformed_file_is_refused_with_its_line(tmp_path, name, text, place, word):
    write_sets(tmp_path)
    (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    task = TASK_OF[name.partition("/")[0]]
    with pytest.raises(DataError, match=word) as refused:
        load_tasks(TaskChoice([task], data=str(tmp_path), allow_code=True))
    assert str(tmp_path / name) in str(refused.value.where)
    assert place in str(refused.value.where)


@pytest.mark.parametrize("name", SETS)
def test_a_set_that_is_not_there_says_where_its_files_go(tmp_path, name):
    with pytest.raises(DataError, match="guide on evaluating") as refused:
        load_tasks(TaskChoice([TASK_OF[name]], data=str(tmp_path), allow_code=True))
    assert str(tmp_path / name) in str(refused.value)
    (tmp_path / name).mkdir()
    with pytest.raises(DataError, match="there is no"):
        load_tasks(TaskChoice([TASK_OF[name]], data=str(tmp_path), allow_code=True))


@pytest.mark.parametrize(
    ("names", "options", "word"),
    [
        (["humaneval"], {}, "--allow-code"),
        (["humaneval"], {"allow_code": True, "shots": 1}, "without examples"),
        (["agieval_aqua_rat"], {"shots": 1}, "zero-shot"),
        (["mmlu_anatomy"], {"shots": 6}, "has 5 examples"),
        (["boolq"], {"shots": 9}, "has 4 examples"),
        (["bbh_fewshot_word_sorting"], {"shots": 4}, "has 3 examples"),
    ],
)
def test_what_a_set_cannot_do_is_refused(sets, names, options, word):
    with pytest.raises(RecipeError, match=word):
        load_tasks(TaskChoice(names, data=str(sets), **options))


@pytest.mark.parametrize(
    ("name", "meant"),
    [("bool", "boolq"), ("mmlu_anatomi", "mmlu_anatomy"), ("hellaswg", "hellaswag"), ("q!", "")],
)
def test_an_unknown_task_is_refused_without_reading_all_definitions(monkeypatch, name, meant):
    manager = tasks.TaskManager

    def quick(include_defaults=True, **options):
        return (
            pytest.fail("ten seconds")
            if include_defaults
            else manager(include_defaults=False, **options)
        )

    monkeypatch.setattr(tasks, "TaskManager", quick)
    with pytest.raises(RecipeError, match=f"there is no task '{name}'") as refused:
        load_tasks(TaskChoice([name]))
    assert meant in str(refused.value.fix)


def test_examples_that_are_missing_are_asked_for(tmp_path):
    write_sets(tmp_path)
    (tmp_path / "gsm8k/train.jsonl").unlink()
    with pytest.raises(RecipeError, match=r"train\.jsonl"):
        load_tasks(TaskChoice(["gsm8k"], data=str(tmp_path)))
    assert load_tasks(TaskChoice(["gsm8k"], data=str(tmp_path), shots=0)).tasks


def test_other_forms_of_the_same_files(tmp_path):
    """SuperGLUE's BoolQ, an unpacked HumanEval, MMLU without its outer folder."""
    write_sets(tmp_path)
    rows = [{"question": "q", "passage": "p", "idx": 0, "label": label} for label in (False, 0)]
    (tmp_path / "boolq/dev.jsonl").unlink()
    text = "".join(json.dumps(row) + "\r\n" for row in rows)
    (tmp_path / "boolq/val.jsonl").write_text(text, encoding="utf-8-sig")
    packed = tmp_path / "humaneval/HumanEval.jsonl.gz"
    packed.with_suffix("").write_bytes(gzip.decompress(packed.read_bytes()))
    packed.unlink()
    for split in ("test", "dev"):
        (tmp_path / "mmlu/data" / split).rename(tmp_path / "mmlu" / split)
    found = load_tasks(
        TaskChoice(["boolq", "humaneval", "mmlu_anatomy"], data=str(tmp_path), allow_code=True)
    )
    assert [len(task.eval_docs) for task in found.tasks.values()] == [2, 2, 3]
    boolq = found.tasks["boolq"]
    assert [boolq.doc_to_target(each) for each in boolq.eval_docs] == [0, 0]


def add_a_byte_order_mark(content):
    return b"\xef\xbb\xbf" + content


def end_lines_as_windows_does(content):
    return content.replace(b"\r\n", b"\n").replace(b"\n", b"\r\n")


def end_lines_as_unix_does(content):
    return content.replace(b"\r\n", b"\n")


def add_empty_lines(content):
    return content + b"\n\n"


@pytest.mark.parametrize(
    "change",
    [add_a_byte_order_mark, end_lines_as_windows_does, end_lines_as_unix_does, add_empty_lines],
)
def test_how_a_file_was_saved_changes_no_question(sets, tmp_path, change):
    write_sets(tmp_path)
    for path in filter(Path.is_file, tmp_path.rglob("*")):
        if path.suffix == ".gz":
            path.write_bytes(gzip.compress(change(gzip.decompress(path.read_bytes()))))
        else:
            path.write_bytes(change(path.read_bytes()))
    asked = [
        {name: list(task.eval_docs) for name, task in load_tasks(choice).tasks.items()}
        for choice in (TaskChoice(PARTS, data=str(at), allow_code=True) for at in (sets, tmp_path))
    ]
    assert asked[0] == asked[1]


def test_the_tables_agree():
    assert set(SETS) == set(METRICS)
