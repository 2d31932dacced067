"""Rows that Unsloth's notebooks make, run here up to their trainers, against their translations.

    python -m benchmarks.foreign_scripts CLONES [NAME ...]

CLONES holds notebooks and unsloth. Data sets are sixty rows with every column that the notebooks
read; models, and whatever is not installed, are placeholders. A line for each notebook: rows of
theirs that are none of ours.
"""

import ast
import contextlib
import io
import json
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, patch

import datasets
import trl  # noqa: F401 - before the placeholders

from benchmarks.foreign_prompts import Placeholders, chat, ours, tokenizer, unsloths
from trainkit.errors import RecipeError
from trainkit.recipe import load_recipe
from trainkit.recipe.translate.engine import translate
from trainkit.recipe.translate.read import cells

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
)
TEXTS = ("instruction", "input", "output", "text", "problem", "task", "expected_output", "title")
TEXTS += ("user_content", "tool_name", "snippet", "recommendation")
SPOKEN = {"user": "human", "assistant": "gpt", "system": "system"}


def rows(path: str, thinks: bool) -> list[dict[str, Any]]:
    """Sixty, with conversations in either form."""
    made = []
    for n in range(60):
        turns = chat(n)
        row: dict[str, Any] = {name: f"{name} {n}" for name in TEXTS}
        said = [{**t, "thinking": "hm" * (t["role"] == "assistant")} for t in turns * thinks]
        row |= {"messages": said or turns, "expected_answer": str(n), "tools": None}
        row["tool_arguments"] = json.dumps({"query": f"<{n}>"})
        row["generated_solution"] = f"<think>\nwhy {n}\n</think>\n\nso {n}"
        row["conversations"] = [
            {"from": SPOKEN[turn["role"]], "value": turn["content"]} for turn in turns
        ]
        if "OpenMath" in path:  # has no rows in Alpaca's form
            row = {key: value for key, value in row.items() if key not in TEXTS[:3]}
        made.append(row)
    return made


class Reached(BaseException):
    """The trainer is made."""


def standardized(given: Any, *_: Any, **__: Any) -> Any:
    """Turns of `from` and `value` by their roles; others as they are."""
    back = {spoken: role for role, spoken in SPOKEN.items()}

    def plain(row: dict[str, Any]) -> dict[str, Any]:
        turns = row["conversations"]
        return {"conversations": [{"role": back[t["from"]], "content": t["value"]} for t in turns]}

    return given.map(plain) if "from" in given[0]["conversations"][0] else given


def texts_of(file: Path, templates: dict[str, str], template: str | None) -> tuple[Any, list[str]]:
    """The tokenizer and the texts that reach the trainer; the code is run up to it."""
    code = file.read_text(encoding="utf-8")
    code = cells(file, code) if file.suffix == ".ipynb" else code
    tok = tokenizer("<|im_end|>")
    tok.chat_template = TEMPLATE
    caught: dict[str, Any] = {}

    def trainer(*_: Any, **words: Any) -> None:
        caught.update(words)
        raise Reached

    def templated(given: Any, chat_template: str = "chatml", **words: Any) -> Any:
        text = templates[chat_template]
        for name, other in (words.get("mapping") or {}).items():
            text = text.replace(f"'{name}'", f"'{other}'")
        given.chat_template = text
        return given

    def load(path: str, *_: Any, split: str = "", **__: Any) -> Any:
        made = datasets.Dataset.from_list(rows(path, "trl" in file.parts))
        return made if split else datasets.DatasetDict(train=made)

    import unsloth
    import unsloth.chat_templates as theirs

    for model in ("FastLanguageModel", "FastModel"):
        getattr(unsloth, model).from_pretrained = lambda *_, **__: (MagicMock(), tok)
    unsloth.UnslothTrainer = trainer
    theirs.get_chat_template = templated
    theirs.standardize_sharegpt = theirs.standardize_data_formats = standardized
    tok.tokenizer, names = tok, {"__name__": "__main__", "__file__": str(file)}
    with (
        patch("datasets.load_dataset", load),
        patch("datasets.Dataset.from_json", lambda path: load(path, split="train")),
        patch("trl.SFTTrainer", trainer),
        patch("trl.SFTConfig", dict),
        patch("transformers.TrainingArguments", dict),
        patch("datasets.Dataset.select", lambda self, *_, **__: self),
        patch("datasets.Dataset.train_test_split", lambda self, **_: {"train": self}),
        patch("transformers.AutoModelForCausalLM.from_pretrained", MagicMock()),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.suppress(Reached),
    ):
        for part in ast.parse(code).body:
            try:
                exec(compile(ast.Module([part], []), "notebook", "exec"), names)
            except Exception as error:  # a look at rows, or what only a GPU does
                caught["error"] = f"{type(error).__name__}: {error}"
    if "train_dataset" not in caught:
        raise ValueError(caught.get("error"))
    given = caught["train_dataset"]
    if "formatting_func" in caught:
        return tok, [text for row in given for text in caught["formatting_func"](row)]
    if "trl" in file.parts:  # which renders turns itself
        tok.chat_template = template or TEMPLATE
        said = [(r.get("prompt", []) + (r.get("completion") or r["messages"]), r) for r in given]
        return tok, [tok.apply_chat_template(t, r["tools"], tokenize=False) for t, r in said]
    return tok, list(given["text"])


def check(file: Path, templates: dict[str, str]) -> str:
    """What came of one notebook."""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "ours.yaml"
        target.write_text(translate(file).text, encoding="utf-8")
        data = load_recipe(target).recipe.data
    template = data.chat_template
    if template and template.endswith(".jinja"):
        template = (file.parents[1] / "scripts" / Path(template).name).read_text(encoding="utf-8")
    try:
        tok, wanted = texts_of(file, templates, template)
    except Exception as error:
        return f"not run: {type(error).__name__}: {str(error)[:120]}"
    found = set()
    given = {"chat_template": template} if template else {}
    for source in data.train:
        shape = {"format": source.format, "columns": source.columns}
        made = ours(tok, rows(source.path, "trl" in file.parts), shape, mask="none", **given)
        found |= {plain(tok, ids) for ids, _ in made}
    if "<start_of_turn>" in (data.chat_template or ""):  # Gemma's own, by another name there
        wanted = [text.replace("<|im_start|>", "<start_of_turn>") for text in wanted]
    wrong = [text for text in wanted if plain(tok, tok(text)["input_ids"]) not in found]
    return f"{len(wanted)} rows, {len(wrong)} are none of ours" + f": {wrong[:1]}" * bool(wrong)


def plain(tok: Any, ids: list[int]) -> str:
    """Text without what tokenizers add at either end."""
    text = "".join(tok.convert_ids_to_tokens(ids))
    return re.sub(r"^(<B>|<bos>)+|(<\|im_end\|>|<E>|Ċ)+$", "", text)


def main() -> None:
    """Print a line for each notebook that is translated."""
    clones, names = Path(sys.argv[1]).resolve(), sys.argv[2:]
    os.chdir(tempfile.mkdtemp())  # scripts save models where they stand
    sys.meta_path.append(Placeholders("unsloth", "unsloth_zoo", "google", "IPython", "trackio"))
    templates = unsloths(clones / "unsloth/unsloth/chat_templates.py")
    files = sorted((clones / "notebooks/python_scripts").glob("*.py"))
    files += [*(clones / "trl/examples/notebooks").glob("*.ipynb")]
    files += [*(clones / "trl/examples/scripts").glob("sft_*.py")]
    for file in files:
        copies = file.name.startswith(("AMD-", "Kaggle-", "HuggingFace Course-"))
        if copies or (names and not any(name in file.name for name in names)):
            continue
        try:
            print(file.name, check(file, templates), sep=": ", flush=True)
        except RecipeError:
            continue


if __name__ == "__main__":
    main()
