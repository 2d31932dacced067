"""Rows with images, by the tools' own code and by ours: tokens, what trains, and pixels.

    python -m benchmarks.foreign_images CLONES

CLONES holds axolotl, LLaMA-Factory, ms-swift and the packages unsloth_zoo and qwen_vl_utils.
Tokenizers, image processors and configurations are the tests' small ones, of transformers' classes.
A line for each template: how many of ten rows have other tokens, others trained, or other pixels.
"""

import ast
import importlib.util
import json
import re
import sys
import tempfile
from collections.abc import Iterator
from copy import deepcopy
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch
import trl  # noqa: F401 - before the placeholders
from PIL import Image

from benchmarks.foreign_prompts import report, set_up
from trainkit.data import DataOptions, Ledger, Source, prepare
from trainkit.data.vision import Vision
from trainkit.options import ImageOptions
from trainkit.recipe.translate.draft import table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

import pictures

SIZES = [(40, 60), (30, 30), (90, 70), (33, 47), (64, 64), (50, 36), (80, 45), (44, 88), (36, 70)]
Row = list[dict[str, Any]]


def rows(folder: Path) -> list[Row]:
    """Ten conversations with one image or two, or none; parts have its path."""
    made = []
    for n in range(10):
        parts: Row = [{"type": "text", "text": f"Look {n}: "}]
        for k in range(0 if n == 4 else 1 + n % 2):
            file = folder / f"{n}-{k}.png"
            pictures.make_image(*SIZES[(n + 4 * k) % len(SIZES)], seed=n + 20 * k).save(file)
            parts.insert(n % 3, {"type": "image", "path": str(file)})
        turns: Row = [{"role": "user", "content": parts}]
        turns.append({"role": "assistant", "content": f"It is {n}."})
        if n % 3 == 0:
            turns.append({"role": "user", "content": "Sure?"})
            turns.append({"role": "assistant", "content": "Yes."})
        made.append(turns)
    return made


class Seeing:
    """A processor of transformers' parts, without what it wants for videos."""

    def __init__(self, vision: Vision) -> None:
        self.vision, self.tokenizer, self.image_processor = vision, vision.tokenizer, vision.images
        self.chat_template, self.image_token = vision.tokenizer.chat_template, vision.marker
        self.image_token_id = vision.token_id

    def __call__(self, images: Any = None, text: Any = None, **_: Any) -> Any:
        """As transformers' processors are called by the tools, with one row."""
        (words,), (seen,) = list(text), [list(each) for each in images or [[]]]
        ids = pictures.expanded_by_transformers(self.vision, words, seen)
        found = self.tokenizer.pad({"input_ids": [ids]}, return_tensors="pt")
        kept = [seen] if pictures.KINDS[self.vision.config.model_type] == "tiles" else seen
        return found | (dict(self.vision.images(images=kept, return_tensors="pt")) if seen else {})

    def apply_chat_template(self, conversation: Any, **given: Any) -> Any:
        """A text of each conversation, or its tokens with what is seen."""
        alone = isinstance(conversation[0], dict)
        rows = [conversation] if alone else conversation
        template = given.get("chat_template") or self.tokenizer.chat_template
        ask = bool(given.get("add_generation_prompt"))
        whole = [
            self.tokenizer.apply_chat_template(
                row, chat_template=template, tokenize=False, add_generation_prompt=ask
            )
            for row in rows
        ]
        if not given.get("tokenize"):
            return whole[0] if alone else whole
        return self(images=[[opened(p) for p in parts_of(row)] for row in rows], text=whole)


def parts_of(row: Row) -> Row:
    """Its images."""
    parts = [each for turn in row if isinstance(turn["content"], list) for each in turn["content"]]
    return [each for each in parts if each["type"] == "image"]


def opened(part: dict[str, Any]) -> Any:
    """An image of a part."""
    return part.get("image") or Image.open(part["path"]).convert("RGB")


def seeing(model_type: str, template: str | None, images: ImageOptions) -> Vision:
    """The tests' small model of a family, with a template by its name."""
    import tiny

    tokenizer = tiny.make_tokenizer()
    begins = ["<start_of_turn>", "<end_of_turn>", "<|turn>", "<turn|>", "<B>"]
    tokenizer.add_special_tokens({"additional_special_tokens": begins, "bos_token": "<B>"})
    tokenizer = pictures.make_tokenizer(pictures.KINDS[model_type], tokenizer)
    if template is not None:
        tokenizer.chat_template = template
    made = pictures.make_image_processor(model_type)
    config = pictures.make_config(model_type, tokenizer)
    return Vision(config, tokenizer, model_type, lambda: made, lambda: None, scaling=images)


def ours(vision: Vision, given: list[Any], folder: Path, **options: Any) -> list[Any]:
    """(ids, mask, pixels) of each row."""
    file = folder / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, given)), encoding="utf-8")
    source = (Source(path=str(file), format="messages"),)
    chosen = DataOptions(cache_dir=tempfile.mkdtemp(), images=vision.scaling, **options)
    data = prepare(source, vision.tokenizer, chosen, ledger=Ledger(), vision=vision)
    found = []
    for each in data:
        images = each.get("images", ())
        seen = vision.pixels(images)["pixel_values"] if images else None
        found.append((each["input_ids"].tolist(), (each["loss_mask"] > 0).tolist(), seen))
    return found


def of_batch(batch: Any) -> tuple[list[int], list[bool], Any]:
    """The same of a batch of one row."""
    ids, labels = batch["input_ids"][0].tolist(), batch["labels"][0].tolist()
    return ids, [label != -100 for label in labels], batch.get("pixel_values")


def of_llamafactory(given: list[Row], name: str, vision: Vision) -> Iterator[Any]:
    """By its plugin and its template."""
    from llamafactory.data.template import TEMPLATES

    template, limits = TEMPLATES[name], vision.scaling
    processor = SimpleNamespace(
        image_processor=vision.images,
        video_processor=MagicMock(),
        image_max_pixels=limits.max_pixels,
        image_min_pixels=limits.min_pixels,
        model_input_names=[],
    )
    for row in given:
        images = [part["path"] for part in parts_of(row)]
        turns = [{**turn, "content": flat(turn["content"])} for turn in row]
        plugin = template.mm_plugin
        filled = plugin.process_messages(turns, images, [], [], processor)
        pairs = template.encode_multiturn(vision.tokenizer, filled, None, None)
        ids = [token for pair in pairs for half in pair for token in half]
        mask = [bool(n) for pair in pairs for n in (0, 1) for _ in pair[n]]
        seen = plugin._get_mm_inputs(images, [], [], processor).get("pixel_values")
        yield ids, mask, seen


def flat(content: Any) -> str:
    """Parts as a text with placeholders."""
    if isinstance(content, str):
        return content
    return "".join("<image>" if part["type"] == "image" else part["text"] for part in content)


def of_axolotl(given: list[Row], strategy: str, vision: Vision) -> Iterator[Any]:
    """By its collator and the strategy of a template."""
    from axolotl import processing_strategies
    from axolotl.utils.collators.mm_chat import MultiModalChatDataCollator

    processor = Seeing(vision)
    kind = getattr(processing_strategies, strategy)(processor, vision.tokenizer.chat_template)
    collator = MultiModalChatDataCollator(vision.tokenizer, kind)
    for row in given:
        yield of_batch(collator([{"messages": row}]))


def of_trl(given: list[Row], vision: Vision, pairs: bool = True) -> Iterator[Any]:
    """By its collator, over prompts and completions, or whole conversations."""
    from trl.trainer.sft_trainer import DataCollatorForVisionLanguageModeling

    collator = DataCollatorForVisionLanguageModeling(Seeing(vision), completion_only_loss=pairs)
    for row in given:
        images = [opened(part) for part in parts_of(row)]
        turns = [{**turn, "content": bare(turn["content"])} for turn in row]
        told = {"prompt": turns[:-1], "completion": turns[-1:]} if pairs else {"messages": turns}
        yield of_batch(collator([{**told, "images": images}]))


def bare(content: Any) -> Any:
    """Parts without what they bring along."""
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    return [{k: v for k, v in part.items() if k != "path"} for part in parts]


def of_unsloth(given: list[Row], vision: Vision, package: Path) -> Iterator[Any]:
    """By its collator, whose package is not set up."""
    if "unsloth_zoo" not in sys.modules:
        parent = ModuleType("unsloth_zoo")
        parent.__path__ = [str(package)]
        sys.modules["unsloth_zoo"] = parent
    collate = importlib.import_module("unsloth_zoo.vision_utils").UnslothVisionDataCollator
    model = SimpleNamespace(
        config=vision.config,
        max_seq_length=4096,
        get_input_embeddings=lambda: SimpleNamespace(weight=torch.zeros(1)),
    )
    collator = collate(model, Seeing(vision), resize=vision.scaling.max_width or "max")
    for row in given:
        turns = [{**turn, "content": with_images(turn["content"])} for turn in row]
        yield of_batch(collator([{"messages": turns}]))


def qwen_vl_utils(package: Path) -> Any:
    """What it does with images, without torchvision, which its module wants for videos."""
    import base64
    import copy
    import io
    import math
    import typing

    module = ModuleType("qwen_vl_utils")
    module.__spec__ = ModuleSpec("qwen_vl_utils", None)
    module.__dict__.update(vars(typing), math=math, base64=base64, copy=copy, Image=Image)
    module.__dict__.update(BytesIO=io.BytesIO, fetch_video=None)
    for node in ast.parse((package / "vision_process.py").read_text(encoding="utf-8")).body:
        constant = isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        if constant or re.search("factor|smart_resize|to_rgb|fetch_im", getattr(node, "name", "")):
            exec(compile(ast.Module([node], []), "qwen_vl_utils", "exec"), module.__dict__)
    sys.modules["qwen_vl_utils"] = module
    return module


def of_swift(given: list[Row], kind: str, vision: Vision) -> Iterator[Any]:
    """By its template."""
    from swift.template import TEMPLATE_MAPPING

    processor: Any = Seeing(vision)
    known = {"task_type": "causal_lm", "max_model_len": 4096, "torch_dtype": None}
    processor.model_info = SimpleNamespace(config=vision.config, **known)
    processor.model_meta = SimpleNamespace(is_multimodal=True, model_arch=None)
    meta = deepcopy(TEMPLATE_MAPPING[kind])
    template = meta.template_cls(None, meta, None, 4096)
    template.image_token_id = vision.token_id
    template.init_processor(processor)
    template.set_mode("train")
    for row in given:
        turns = [{**turn, "content": flat(turn["content"])} for turn in row]
        images = [part["path"] for part in parts_of(row)]
        found = template.encode({"messages": turns, "images": images})
        mask = [label != -100 for label in found["labels"]]
        yield list(found["input_ids"]), mask, found.get("pixel_values")


def with_images(content: Any) -> Any:
    """Parts with images instead of their paths; a text as a part."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    return [{"type": "image", "image": opened(p)} if p["type"] == "image" else p for p in content]


def cases(clones: Path, folder: Path) -> Iterator[tuple[str, list[Any], list[Any]]]:
    """The tool and its template, theirs and ours."""
    given, texts = rows(folder), {name: each["text"] for name, each in table("templates").items()}
    plain = [{"messages": row} for row in given]
    limits = ImageOptions(max_pixels=2048, min_pixels=1024)
    names = {"qwen2_vl": "qwen2_vl", "qwen3_vl_nothink": "chatml_vl", "qwen3_vl": "chatml_thoughts"}
    for name, known in names.items():
        for model_type in ("qwen2_5_vl", "qwen3_vl"):
            vision = seeing(model_type, texts[known], limits)
            ends = {"end_texts": "line_break", "thinking": "empty"}
            mine = ours(vision, plain, folder, **ends)
            theirs = list(of_llamafactory(given, name, vision))
            yield f"LLaMA-Factory {name} {model_type}", theirs, mine
    jinja = clones / "axolotl/src/axolotl/utils/chat_templates/templates"
    for model_type, name, strategy in (
        ("qwen2_5_vl", "qwen2_vl", "Qwen2VLProcessingStrategy"),
        ("gemma4", "gemma4", "Gemma4ProcessingStrategy"),
        ("gemma3", "gemma3", "Gemma3ProcessingStrategy"),
        ("qwen3_5", "qwen3_5", "Qwen3_5ProcessingStrategy"),
    ):
        text = (jinja / f"{name}.jinja").read_text(encoding="utf-8")
        vision = seeing(model_type, text, ImageOptions())
        own = name == "qwen3_5" and {"chat_template": texts["qwen35_vl"]}
        mine = ours(vision, plain, folder, **dict(own or {}, thinking="empty"))
        yield f"axolotl {name}", list(of_axolotl(given, strategy, vision)), mine
    for model_type in ("qwen2_5_vl", "qwen3_vl", "gemma3", "idefics3", "smolvlm"):
        vision = seeing(model_type, None, ImageOptions(mask="none"))
        mine = ours(vision, plain, folder, mask="none")
        yield f"TRL conversations {model_type}", list(of_trl(given, vision, False)), mine
    one = [row[:2] for row in given if parts_of(row)]
    for model_type, known in (("qwen3_vl", "chatml_vl"), ("qwen2_5_vl", "qwen2_vl")):
        vision = seeing(model_type, texts[known], ImageOptions())
        ends = [{"messages": row} for row in one]
        mine = ours(vision, ends, folder, end_texts="line_break")
        yield f"TRL {model_type}", list(of_trl(one, vision)), mine
    utils = qwen_vl_utils(clones / "qwen_vl_utils")
    utils.IMAGE_MAX_TOKEN_NUM = 6
    for model_type, known, factor in (
        ("qwen2_5_vl", "qwen2_vl", 28),
        ("qwen3_vl", "chatml_vl", 32),
    ):
        vision = seeing(model_type, texts[known], ImageOptions())
        size = {"shortest_edge": 4 * factor**2, "longest_edge": 6 * factor**2}
        vision.images.size, vision.images.patch_size = size, factor // 2
        mine = ours(vision, plain, folder, end_texts="line_break")
        yield f"ms-swift {model_type}", list(of_swift(given, model_type, vision)), mine
    zoo = clones / "unsloth_zoo"
    for model_type, known in (("qwen3_vl", "chatml_vl"), ("qwen3_5", "chatml_vl")):
        vision = seeing(model_type, texts[known], ImageOptions(max_width=48, multiple_of=8))
        mine = ours(vision, plain, folder, mask="none")
        yield f"Unsloth {model_type}", list(of_unsloth(given, vision, zoo)), mine


def main() -> None:
    """Print a line for each."""
    clones, here = Path(sys.argv[1]).resolve(), tempfile.TemporaryDirectory()
    set_up(clones, here.name)
    report(cases(clones, Path(here.name)))


if __name__ == "__main__":
    main()
