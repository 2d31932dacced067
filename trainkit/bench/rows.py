"""What the tools of ``trainkit bench command`` train on: random weights, and made rows."""

from __future__ import annotations

import json
import math
import random
import string
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging

from trainkit.bench.lora import save_base, save_tokenizer
from trainkit.bench.providers import Shape

_FIRST_ID, _LAST_ID = 2, 250
"""Ids of rows: the byte-level tokenizer next to the base has as many."""

PAIRS: Mapping[str, tuple[float, float] | None] = {
    "dpo": None,
    "dpo_ultrafeedback": (0.09, 0.21),
    "dpo_helpsteer": (0.38, 0.06),
}
"""DPO: medians of the tokens of a prompt and of an answer, as shares of the longest row, as the
data sets of these names have them; None: all rows are as long as they may be, half of it prompt."""

PACKED = (*PAIRS, "images")
"""With rows of their own, which trainkit packs where lengths differ: pairs; an image a row."""

MODES = ("lora", "qlora", *PACKED)
"""Supervised, and the same over 4 bits with each layer recomputed; then `PACKED`."""

_SPREAD = 0.6
"""Of the logarithm of a length of `PAIRS`."""

_IMAGE_TOKENS = (16, 32)
"""Of an image's side, at least and at most: 256 to 1024 tokens an image."""


def folder_of(mode: str) -> str:
    """Where the rows of a mode are."""
    return mode if mode in PACKED else "rows"


def base_of(mode: str) -> str:
    """Where the base of a mode is."""
    return "base_that_sees" if mode == "images" else "base"


def prepare(folder: Path, shape: Shape, steps: int, modes: Collection[str]) -> None:
    """Write bases, and rows for all steps; those of supervised modes are as long as they may be."""
    logging.disable_progress_bar()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    count = steps * shape.batch_size
    for name in {base_of(mode) for mode in modes}:
        save = save_base if name == "base" else _save_base_that_sees
        save(shape, folder / name, device)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    for mode in {folder_of(mode): mode for mode in modes}.values():
        rows = folder / folder_of(mode)
        rows.mkdir()
        if mode in PAIRS:
            _write(rows / "rows.jsonl", [_pair(PAIRS[mode], shape.length) for _ in range(count)])
        elif mode == "images":
            _draw(rows, count)
        else:
            generator = torch.Generator().manual_seed(0)
            size = (count, shape.length)
            ids = torch.randint(_FIRST_ID, _LAST_ID, size, generator=generator).tolist()
            _write(rows / "rows.jsonl", [{"input_ids": row} for row in ids])


def _write(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def _letters(number: int) -> str:
    return "".join(random.choices(string.ascii_letters, k=number))


def _pair(medians: tuple[float, float] | None, length: int) -> dict[str, str]:
    if medians is None:
        prompt, answers = length // 2, [length - 1 - length // 2] * 2
    else:
        drawn = [m * length * math.exp(random.gauss(0, _SPREAD)) for m in (*medians, medians[1])]
        prompt = min(int(drawn[0]) + 1, length - 16)
        answers = [min(int(n) + 1, length - 1 - prompt) for n in drawn[1:]]
    sizes = zip(("prompt", "chosen", "rejected"), (prompt, *answers), strict=True)
    return {key: _letters(number) for key, number in sizes}


def mean_tokens(folder: Path, mode: str) -> float:
    """Of a row of pairs, its prompt counted for both answers, or with an image."""
    if mode == "images":
        return (sum(_IMAGE_TOKENS) / 2) ** 2 + 170
    with (folder / "rows.jsonl").open(encoding="utf-8") as file:
        pairs = [json.loads(line) for line in file]
    tokens = (2 * len(p["prompt"]) + len(p["chosen"]) + len(p["rejected"]) + 2 for p in pairs)
    return sum(tokens) / len(pairs)


# -- images ------------------------------------------------------------------------------------

_SPECIAL = ("vision_start", "vision_end", "image_pad", "video_pad")
_VISION = {
    "depth": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_heads": 16,
    "deepstack_visual_indexes": [8, 16, 24],
}
"""The tower of Qwen3-VL-8B, with patches of 16 pixels."""
_TEMPLATE = """{% for m in messages %}<|im_start|>{{ m['role'] }}
{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for c in m['content'] -%}
{% if c['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ c['text'] }}\
{% endif %}{% endfor %}{% endif -%}
<|im_end|>
{% endfor %}"""


def _save_base_that_sees(shape: Shape, folder: Path, device: torch.device) -> None:
    """A Qwen3-VL with a text model of this shape, and its processor."""
    from transformers import AutoConfig, AutoModelForImageTextToText
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    tokenizer = save_tokenizer(folder, [f"<|{name}|>" for name in _SPECIAL], _TEMPLATE)
    rope = {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [24, 20, 20]}
    config = AutoConfig.for_model(
        "qwen3_vl",
        text_config=shape.config | {"rope_parameters": rope | {"mrope_interleaved": True}},
        vision_config=_VISION | {"out_hidden_size": shape.config["hidden_size"]},
        **{
            f"{name.removesuffix('_pad')}_token_id": tokenizer.convert_tokens_to_ids(f"<|{name}|>")
            for name in _SPECIAL
        },
    )
    torch.manual_seed(0)
    with device:
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    size = {"shortest_edge": 64 * 64, "longest_edge": 2048 * 2048}
    mean = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    Qwen2VLImageProcessorPil(patch_size=16, merge_size=2, size=size, **mean).save_pretrained(folder)
    settings = {"processor_class": "Qwen3VLProcessor"}
    (folder / "processor_config.json").write_text(json.dumps(settings), encoding="utf-8")


def _draw(folder: Path, count: int) -> None:
    """JPEG files with a question and an answer each, as `datasets` reads a folder of images."""
    from PIL import Image

    rows, generator = [], torch.Generator().manual_seed(0)
    for number in range(count):
        sides = torch.randint(_IMAGE_TOKENS[0], _IMAGE_TOKENS[1] + 1, (2,), generator=generator)
        size = [32 * int(side) for side in sides]
        coarse = torch.randint(0, 256, (size[0] // 8, size[1] // 8, 3), generator=generator)
        image = Image.fromarray(coarse.to(torch.uint8).numpy())
        image.resize((size[1], size[0])).save(folder / f"{number}.jpg", quality=90)
        words = {"user": _letters(30), "assistant": _letters(120)}
        turns = [{"role": role, "content": said} for role, said in words.items()]
        rows.append({"image": f"{number}.jpg", "messages": turns})
    _write(folder / "rows.jsonl", rows)
    names = [{"file_name": row["image"], "messages": row["messages"]} for row in rows]
    _write(folder / "metadata.jsonl", names)
