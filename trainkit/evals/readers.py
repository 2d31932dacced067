"""The seven sets as their makers publish them: from files in a directory to the harness's rows.

A reader takes the set's directory and the name of a subset, and returns rows by split, with the
fields that the harness's own task reads. No torch, no harness.
"""

import csv
import gzip
import json
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trainkit.errors import DataError

Rows = list[dict[str, Any]]
Splits = Mapping[str, Rows]
Reader = Callable[[Path, str], Splits]

_SURROGATE = re.compile("[\ud800-\udfff]")
_EMPTY = "there are no questions in it"
_PAGE = (
    "the guide on evaluating says which file goes where; a part of a set is asked for by its own "
    "name, such as mmlu_anatomy"
)


def read_boolq(directory: Path, subset: str) -> Splits:
    """``dev.jsonl`` and, where it is there, ``train.jsonl``: question, passage, answer."""
    del subset
    return _with_examples("validation", find(directory, "dev.jsonl", "val.jsonl"), _boolq)


def _with_examples(
    split: str, path: Path, read: Callable[[Mapping[str, Any], str], dict[str, Any]]
) -> Splits:
    """Rows of a file, and those of ``train.jsonl`` next to it, where that is there."""
    paths = {split: path, "train": path.with_name("train.jsonl")}
    return {
        name: [read(row, where) for row, where in _jsonl(each)]
        for name, each in paths.items()
        if each.is_file()
    }


def _boolq(row: Mapping[str, Any], where: str) -> dict[str, Any]:
    # The original says `answer`, SuperGLUE's copy of it `label`, on the hub 0 or 1.
    answer = row.get("answer", row.get("label"))
    if "answer" not in row and answer in (0, 1):
        answer = bool(answer)
    if not isinstance(answer, bool):
        raise DataError(f"answer is {answer!r} and must be true or false", where=where)
    question, passage = _text(row, "question", where), _text(row, "passage", where)
    return {"question": question, "passage": passage, "label": int(answer)}


def read_mmlu(directory: Path, subset: str) -> Splits:
    """``test/SUBSET_test.csv`` and ``dev/SUBSET_dev.csv``: question, four choices, a letter."""
    paths = {
        split: find(
            directory, f"{split}/{subset}_{split}.csv", f"data/{split}/{subset}_{split}.csv"
        )
        for split in ("test", "dev")
    }
    return {split: [_mmlu(cells, at) for cells, at in _csv(p)] for split, p in paths.items()}


def _mmlu(cells: Sequence[str], where: str) -> dict[str, Any]:
    if len(cells) != 6:
        raise DataError(f"{len(cells)} columns; a row is question, A, B, C, D, letter", where=where)
    return {
        "question": cells[0],
        "choices": list(cells[1:5]),
        "answer": _letter(cells[5], "ABCD", where),
    }


def read_gsm8k(directory: Path, subset: str) -> Splits:
    """``test.jsonl`` and, where it is there, ``train.jsonl``: question, answer."""
    del subset
    return _with_examples("test", find(directory, "test.jsonl"), _gsm8k)


def _gsm8k(row: Mapping[str, Any], where: str) -> dict[str, Any]:
    answer = _text(row, "answer", where)
    if not answer.partition("####")[2].strip():
        raise DataError("the answer does not end with #### and a number", where=where)
    return {"question": _text(row, "question", where), "answer": answer}


def read_humaneval(directory: Path, subset: str) -> Splits:
    """``HumanEval.jsonl.gz``, packed or not: task_id, prompt, entry_point, test."""
    del subset
    path = find(directory, "HumanEval.jsonl.gz", "HumanEval.jsonl")
    keys = ("task_id", "prompt", "entry_point", "test")
    rows = []
    for row, where in _jsonl(path):
        own = {key: _text(row, key, where) for key in keys}
        if not own["entry_point"].isidentifier():
            raise DataError(f"entry_point {own['entry_point']!r} names no function", where=where)
        rows.append({**own, "canonical_solution": ""})
    return {"test": rows}


_CHINESE = (
    *("logiqa-zh", "jec-qa-kd", "jec-qa-ca", "gaokao-chinese", "gaokao-geography"),
    *("gaokao-history", "gaokao-biology", "gaokao-chemistry", "gaokao-physics", "gaokao-mathqa"),
)
_CLOZE = {"math": ("Q: ", "\nA: The answer is"), "gaokao-mathcloze": ("问题：", "\n答案：")}
_AGIEVAL_LETTERS = "ABCDEFG"


def read_agieval(directory: Path, subset: str) -> Splits:
    """``SUBSET.jsonl``, as in the repository's ``data/v1_1``: passage, question, options, label.

    The prompts are those of the set's own zero-shot setting.
    """
    path = find(
        directory, *(f"{at}{subset}.jsonl" for at in ("", "v1_1/", "data/v1_1/", "v1/", "data/v1/"))
    )
    return {"test": [_agieval(row, subset, where) for row, where in _jsonl(path)]}


def _agieval(row: Mapping[str, Any], subset: str, where: str) -> dict[str, Any]:
    passage, question = row.get("passage") or "", _text(row, "question", where)
    if subset in _CLOZE:
        before, after = _CLOZE[subset]
        return {
            "query": f"{passage}{before}{question}{after}",
            "answer": _text(row, "answer", where),
        }
    options = row.get("options")
    if not isinstance(options, list) or not 1 <= len(options) <= len(_AGIEVAL_LETTERS):
        raise DataError(
            f"options must be a list of one to {len(_AGIEVAL_LETTERS)} answers", where=where
        )
    is_chinese = subset in _CHINESE
    # The set's own code takes one option for a list that was not split.
    count = len(options) if len(options) > 1 else 4 if is_chinese else 5
    last, choices = _AGIEVAL_LETTERS[count - 1], " ".join(map(str, options))
    query = (
        f"{passage}问题：{question} 选项：{choices}\n答案：从A到{last}, 我们应选择"
        if is_chinese
        else f"{passage}Q: {question} Answer Choices: {choices}\n"
        f"A: Among A through {last}, the answer is"
    )
    label = row.get("label")
    letters = label if isinstance(label, list) else list(label) if isinstance(label, str) else []
    if not letters:
        raise DataError(f"label is {label!r} and must be a letter, or several", where=where)
    gold = [_letter(str(each), _AGIEVAL_LETTERS[:count], where) for each in letters]
    return {"query": query, "choices": [str(each) for each in options], "gold": gold}


def read_bbh(directory: Path, subset: str) -> Splits:
    """``SUBSET.json``, as in the repository's ``bbh``: examples of input and target."""
    path = find(directory, f"{subset}.json", f"bbh/{subset}.json")
    with _readable(path):
        content = _json(path.read_text(encoding="utf-8-sig"), str(path))
    examples = content.get("examples") if isinstance(content, dict) else None
    if not isinstance(examples, list):
        raise DataError("there is no list `examples` in it", where=str(path))
    if not examples:
        raise DataError(_EMPTY, where=str(path))
    rows = [
        {key: _text(row, key, f"{path}, example {number}") for key in ("input", "target")}
        for number, row in enumerate(examples, 1)
    ]
    return {"test": rows}


def read_ceval(directory: Path, subset: str) -> Splits:
    """``val/SUBSET_val.csv`` and ``dev/SUBSET_dev.csv``, with the columns' names first."""
    paths = {split: find(directory, f"{split}/{subset}_{split}.csv") for split in ("val", "dev")}
    return {split: _ceval(path) for split, path in paths.items()}


def _ceval(path: Path) -> Rows:
    (head, where), *rows = _csv(path)
    wanted = ("question", "A", "B", "C", "D", "answer")
    missing = [name for name in wanted if name not in head]
    if missing:
        raise DataError(f"there is no column {', '.join(missing)}", where=where)
    if not rows:
        raise DataError(_EMPTY, where=str(path))
    found = []
    for cells, at in rows:
        if len(cells) != len(head):
            raise DataError(f"{len(cells)} columns; the first row has {len(head)}", where=at)
        row = dict(zip(head, cells, strict=True))
        _letter(row["answer"], "ABCD", at)
        found.append({name: row[name] for name in wanted})
    return found


# -- files ----------------------------------------------------------------------------------------


def find(directory: Path, *names: str) -> Path:
    """The first of several files that is there."""
    found = next((directory / name for name in names if (directory / name).is_file()), None)
    if found is None:
        what = f"there is no {' and no '.join(names[:2])}"
        raise DataError(what, where=str(directory), fix=_PAGE)
    return found


def _jsonl(path: Path) -> Iterator[tuple[Mapping[str, Any], str]]:
    opener, is_empty = gzip.open if path.suffix == ".gz" else open, True
    with _readable(path), opener(path, "rt", encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            where = f"{path}:{number}"
            row = _json(line, where)
            if not isinstance(row, dict):
                raise DataError("the line is not a JSON object", where=where)
            is_empty = False
            yield row, where
    if is_empty:
        raise DataError(_EMPTY, where=str(path))


def _csv(path: Path) -> Iterator[tuple[list[str], str]]:
    """Each row with its place; a cell may hold line ends, which are one character each."""
    is_empty = True
    with _readable(path), path.open(encoding="utf-8-sig", newline="") as stream:
        reader = csv.reader(stream, strict=True)
        for cells in reader:
            if cells:
                is_empty = False
                yield [cell.replace("\r\n", "\n") for cell in cells], f"{path}:{reader.line_num}"
    if is_empty:
        raise DataError(_EMPTY, where=str(path))


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Within, what a damaged file raises says which file it is."""
    try:
        yield
    except (UnicodeDecodeError, csv.Error, zlib.error, EOFError, OSError) as error:
        raise DataError(f"it cannot be read: {error}", where=str(path)) from error


def _json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"it is not JSON: {error}", where=where) from None


def _text(row: Mapping[str, Any], key: str, where: str) -> str:
    value = row.get(key) if isinstance(row, Mapping) else None
    if not isinstance(value, str):
        raise DataError(f"{key} is {value!r} and must be a text", where=where)
    if _SURROGATE.search(value):
        raise DataError(f"{key} has half of a character (a lone surrogate)", where=where)
    return value


def _letter(value: str, letters: str, where: str) -> int:
    place = letters.find(value.strip()) if len(value.strip()) == 1 else -1
    if place < 0:
        raise DataError(f"the answer is {value!r} and must be one of {letters}", where=where)
    return place
