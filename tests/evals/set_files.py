"""A handful of rows of each set, in the very format in which its makers publish it."""

import csv
import gzip
import io
import json


def _jsonl(rows):
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def _csv(rows):
    out = io.StringIO()
    csv.writer(out).writerows(rows)
    return out.getvalue()


def write_sets(directory, *, mmlu=("anatomy", "professional_law"), ceval=("law", "logic")):
    """Write all seven below ``directory``, each in a directory of its name."""
    files = {
        "boolq/dev.jsonl": _jsonl(
            {
                "question": f"is {n} even",
                "title": "numbers",
                "passage": f"A number is even if two divides it. {'More about it. ' * n}",
                "answer": n % 2 == 0,
            }
            for n in range(6)
        ),
        "boolq/train.jsonl": _jsonl(
            {"question": f"is {n} odd", "passage": "Odd it is.", "answer": True} for n in range(4)
        ),
        "gsm8k/test.jsonl": _jsonl(
            {"question": f"Ann has {n} pens and buys one.", "answer": f"{n}+1\n#### {n + 1}"}
            for n in range(3)
        ),
        "gsm8k/train.jsonl": _jsonl(
            {"question": f"Bob has {n} cups.", "answer": f"so {n}\n#### {n}"} for n in range(6)
        ),
    }
    for subject in mmlu:
        for split, count in (("test", 3), ("dev", 5), ("val", 2)):
            files[f"mmlu/data/{split}/{subject}_{split}.csv"] = _csv(
                [f'{subject}, {split} {n}:\n"which"?', "w", "x", "y", "z", "ABCD"[n % 4]]
                for n in range(count)
            )
    for subject in ceval:
        head = ["id", "question", "A", "B", "C", "D", "answer"]
        files[f"ceval/val/{subject}_val.csv"] = _csv(
            [head, *([n, f"问题{n}", "甲", "乙", "丙", "丁", "ABCD"[n]] for n in range(3))]
        )
        files[f"ceval/dev/{subject}_dev.csv"] = _csv(
            [
                [*head, "explanation"],
                *([n, f"例{n}", "甲", "乙", "丙", "丁", "A", "因为"] for n in range(5)),
            ]
        )
    options = ["(A)one", "(B)two", "(C)three", "(D)four", "(E)five"]
    agieval = {
        "aqua-rat": {"passage": None, "question": "1+1?", "options": options, "label": "B"},
        "lsat-ar": {"passage": "P. ", "question": "Who?", "options": options, "label": "E"},
        "gaokao-physics": {
            "passage": None,
            "question": "哪些?",
            "options": options[:4],
            "label": ["A", "C"],
        },
        "math": {
            "passage": None,
            "question": "2+2?",
            "options": None,
            "label": None,
            "answer": "4",
        },
    }
    for name, row in agieval.items():
        files[f"agieval/data/v1_1/{name}.jsonl"] = _jsonl([{"answer": None, **row}] * 2)
    for name, target in (("boolean_expressions", "True"), ("word_sorting", "a b")):
        examples = [{"input": f"{name} {n}", "target": target} for n in range(2)]
        files[f"bbh/bbh/{name}.json"] = json.dumps({"canary": "no", "examples": examples})
    for name, text in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    rows = [
        {
            "task_id": f"HumanEval/{n}",
            "prompt": "def one():\n",
            "entry_point": "one",
            "canonical_solution": "    return 1\n",
            "test": "def check(f):\n    assert f() == 1\n",
        }
        for n in range(2)
    ]
    (directory / "humaneval").mkdir(exist_ok=True)
    with gzip.open(directory / "humaneval" / "HumanEval.jsonl.gz", "wt") as out:
        out.write(_jsonl(rows))
    return directory


PARTS = [
    "boolq", "mmlu_anatomy", "mmlu_professional_law", "gsm8k", "humaneval", "agieval_aqua_rat",
    "agieval_lsat_ar", "agieval_gaokao_physics", "agieval_math",
    "bbh_cot_fewshot_boolean_expressions", "bbh_fewshot_word_sorting", "ceval-valid_law",
    "ceval-valid_logic",
]  # fmt: skip
"""A task of each kind of file."""
