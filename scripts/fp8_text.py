"""What `fp8_accuracy.py` trains on, and the weights that its runs begin from."""

from __future__ import annotations

import ast
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Size:
    """How large everything is."""

    steps: int = 300
    length: int = 1024
    batch: int = 16
    pieces: int = 40000
    held_pieces: int = 110
    questions: int = 200
    scratch_layers: int = 10


TINY = Size(3, 640, 2, 30, 4, 4, 2)


_SHOWN = 48
"""Tokens of a piece that the model is given."""


def of_text(folder: Path, start: str, size: Size) -> None:
    """train.jsonl, held_out.jsonl and questions.jsonl (held out) of Python's standard library.

    Args:
        folder: where they go, and where `make_starts` has written.
        start: whose tokenizer cuts the files into pieces that fit.
        size: how long and how many they are.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder / start)
    piece = size.length * 7 // 8
    place = Path(os.__file__).parent
    files = [*sorted(place.glob("*.py")), *sorted(place.glob("*/*.py"))]
    found: dict[str, list[dict[str, Any]]] = {"train": [], "held_out": [], "questions": []}
    left = [file for file in files if "-packages" not in str(file) and "test" not in str(file)]
    for number, file in enumerate(left):
        if len(found["train"]) > size.pieces:
            break
        try:
            text = file.read_text("utf-8")
            asked = list(questions_of(text))
        except (UnicodeDecodeError, SyntaxError):
            continue
        name = file.relative_to(place).as_posix()
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        starts = range(0, len(ids) - 2 * _SHOWN, piece)
        texts = [[ids[at : at + _SHOWN], ids[at + _SHOWN : at + piece]] for at in starts]
        pieces = [
            said(f"Go on with {name}:\n{begin}", end)
            for begin, end in map(tokenizer.batch_decode, texts)
            if end.strip()
        ]
        if number % 12:
            found["train"] += [*pieces, *asked]
        else:
            found["held_out"] += pieces
            found["questions"] += asked
    step = max(len(found["held_out"]) // size.held_pieces, 1)
    found["held_out"] = found["held_out"][::step][: size.held_pieces]
    step = max(len(found["questions"]) // size.questions, 1)
    found["questions"] = found["questions"][::step][: size.questions]
    found["train"] = found["train"][: size.pieces]
    for name, rows in found.items():
        lines = [json.dumps({"messages": row}) + "\n" for row in rows]
        (folder / f"{name}.jsonl").write_text("".join(lines))


def said(question: str, answer: str) -> Any:
    """A conversation."""
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def questions_of(text: str) -> Iterator[Any]:
    """What the parameters of its short functions are."""
    lines = text.splitlines(keepends=True)
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.FunctionDef):
            continue
        source = "".join(lines[node.lineno - 1 : node.end_lineno])
        names = [each.arg for each in (*node.args.posonlyargs, *node.args.args)]
        if 2 <= len(names) <= 8 and len(source) < 600:
            asked = f"{source}\n\nWhich parameters does {node.name} take?"
            yield said(asked, ", ".join(names))


def make_starts(model: str, folder: Path, size: Size, wanted: set[str]) -> None:
    """The weights that runs begin from: a directory of each name that is wanted."""
    if all((folder / name).exists() for name in wanted):
        return
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = Path(model)
    gguf = {"gguf_file": source.name} if source.suffix == ".gguf" else {}
    place = source.parent if gguf else source
    tokenizer = AutoTokenizer.from_pretrained(place, **gguf)
    loaded = AutoModelForCausalLM.from_pretrained(place, dtype=torch.bfloat16, **gguf)
    if hasattr(loaded.config, "quantization_config"):
        del loaded.config.quantization_config
    weights = {name: each.clone() for name, each in loaded.state_dict().items()}

    def save(name: str, one: Any) -> None:
        if name in wanted and not (folder / name).exists():
            one.save_pretrained(folder / f"{name}.part")
            tokenizer.save_pretrained(folder / f"{name}.part")
            (folder / f"{name}.part").rename(folder / name)

    plain = type(loaded)(loaded.config).to(torch.bfloat16)
    plain.load_state_dict(weights)
    plain.generation_config = loaded.generation_config
    save("model", plain)
    for seed in (1, 2):
        if f"noise{seed}" not in wanted:
            continue
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, each in plain.named_parameters():
                shift = torch.randn(each.shape, generator=generator)
                each.copy_(weights[name].float() * (1 + 0.004 * shift))
        save(f"noise{seed}", plain)
    shape = loaded.config.to_dict() | {"num_hidden_layers": size.scratch_layers}
    if shape.get("layer_types"):
        shape["layer_types"] = shape["layer_types"][: size.scratch_layers]
    config = type(loaded.config).from_dict(shape)
    for seed, name in enumerate(("scratch", "scratch2")):
        if name not in wanted:
            continue
        torch.manual_seed(seed)
        save(name, type(loaded)(config).to(torch.bfloat16))
