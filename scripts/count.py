#!/usr/bin/env python3
"""Lines of code: neither blank, comment nor docstring; and those of comments and docstrings.

python scripts/count.py [FOLDER ...]
"""

import ast
import sys
from collections import Counter
from pathlib import Path

DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def count(path: Path) -> dict[str, int]:
    """Of one file; a string that documents an attribute is a docstring."""
    text = path.read_text(encoding="utf-8")
    strings = {
        line
        for node in ast.walk(ast.parse(text))
        if isinstance(node, DOCUMENTED)
        for each in node.body
        if isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant)
        if isinstance(each.value.value, str)
        for line in range(each.lineno, (each.end_lineno or each.lineno) + 1)
    }
    words = code = 0
    for number, line in enumerate(text.split("\n"), 1):
        is_words = number in strings or line.strip().startswith("#")
        words += bool(line.strip()) and is_words
        code += bool(line.strip()) and not is_words
    return {"files": 1, "code": code, "words": words}


def total(folder: Path) -> Counter[str]:
    """Of all files below a folder."""
    return sum((Counter(count(path)) for path in folder.rglob("*.py")), Counter[str]())


if __name__ == "__main__":
    for name in sys.argv[1:] or ["trainkit", "tests", "scripts", "benchmarks"]:
        print(
            f"{name:12}", "  ".join(f"{value:6} {key}" for key, value in total(Path(name)).items())
        )
