"""Make pictures, questions about them and a tiny model that sees: seeded, offline, in seconds.

Writes ``model`` (an Idefics 3 with random weights, its tokenizer and how it takes images),
``train.jsonl`` and ``held_out.jsonl`` with folders of pictures of these names. A picture is of one
thing: a shape in a color at a place. One in eight combinations is kept for the held-out split, so a
model that learned pictures by heart fails.
"""

from __future__ import annotations

import hashlib
import json
import random
import sys
from pathlib import Path
from typing import Any

from trainkit.quickstart import HELD_OUT_SHARE, SETTINGS, VOCAB_SIZE, Message, train_tokenizer

NUM_TRAIN, NUM_HELD_OUT = 4000, 50
SIDE = 64
"""Of a picture, in pixels: four places, each of which the model takes as one token."""
COLORS = {
    "red": (214, 48, 49), "green": (39, 156, 80), "blue": (52, 103, 235),
    "black": (30, 30, 30), "yellow": (240, 200, 40), "pink": (240, 120, 190),
}  # fmt: skip
SHAPES = ("circle", "square", "triangle")
PLACES = ("top left", "top right", "bottom left", "bottom right")
QUESTIONS = {
    "What is in the picture?": "A {color} {shape} at the {place}.",
    "Which color does it have?": "It is {color}.",
    "Which shape does it have?": "It is a {shape}.",
    "Where is it?": "At the {place}.",
}
IMAGE_TOKENS = ("<image>", "<fake_token_around_image>", "<global-img>")


def draw_thing(chance: random.Random, *, held_out: bool) -> dict[str, str]:
    """Draw until what is seen belongs to this split."""
    while True:
        drawn = (chance.choice(list(COLORS)), chance.choice(SHAPES), chance.choice(PLACES))
        digest = hashlib.sha256("|".join(drawn).encode()).digest()
        if (digest[0] % HELD_OUT_SHARE == 0) == held_out:
            return dict(zip(("color", "shape", "place"), drawn, strict=True))


def draw_picture(thing: dict[str, str], chance: random.Random) -> Any:
    """A picture of it, of its own size and a little aside of its place, on a light ground."""
    from PIL import Image, ImageDraw

    picture = Image.new("RGB", (SIDE, SIDE), tuple(chance.randint(225, 255) for _ in range(3)))
    pen, cell, place = ImageDraw.Draw(picture), SIDE // 2, PLACES.index(thing["place"])
    size, color = chance.randint(24, 29), COLORS[thing["color"]]
    left, top = (at * cell + chance.randint(1, cell - size - 1) for at in (place % 2, place // 2))
    box = (left, top, left + size, top + size)
    if thing["shape"] == "circle":
        pen.ellipse(box, fill=color)
    elif thing["shape"] == "square":
        pen.rectangle(box, fill=color)
    else:
        pen.polygon([box[:2], (left + size, top), (left + size / 2, top + size)], fill=color)
    return picture


def write_split(folder: Path, name: str, count: int, seed: int) -> list[list[Message]]:
    """So many pictures of a split, and conversations of one question about them.

    Of one picture there is one to train on, since an answer may tell the next; held out are all.
    """
    chance = random.Random(f"images-{seed}-{name}")
    (folder / name).mkdir(parents=True, exist_ok=True)
    conversations, lines = [], []
    for number in range(count):
        thing = draw_thing(chance, held_out=name == "held_out")
        draw_picture(thing, chance).save(folder / name / f"{number}.png")
        questions = list(QUESTIONS) if name == "held_out" else [chance.choice(list(QUESTIONS))]
        for question in questions:
            answer = QUESTIONS[question].format(**thing)
            turns = [
                {"role": "user", "content": question},
                {"role": "assistant", "content": answer},
            ]
            conversations.append(turns)
            row = {"messages": turns, "images": [f"{name}/{number}.png"]}
            lines.append(json.dumps(row) + "\n")
    (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    return conversations


def make_tokenizer(conversations: list[list[Message]]) -> Any:
    """The quickstart's, whose template prints an image as its marker."""
    from transformers import AddedToken

    tokenizer = train_tokenizer(conversations, VOCAB_SIZE)
    images = [AddedToken(each, special=True) for each in IMAGE_TOKENS]
    tokenizer.add_tokens(images, special_tokens=True)
    parts = (
        "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
        "{% for part in message['content'] %}{% if part['type'] == 'image' %}<image>"
        "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
    )
    plain = "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>'"
    begun = "{{ '<|im_start|>' + message['role'] + '\\n' }}" + parts + "{{ '<|im_end|>'"
    tokenizer.chat_template = tokenizer.chat_template.replace(plain, begun)
    return tokenizer


def make_model(tokenizer: Any, seed: int) -> Any:
    """A random Idefics 3: two layers that see, and a Llama of two layers that answers."""
    import torch
    from transformers import Idefics3Config, Idefics3ForConditionalGeneration

    torch.manual_seed(seed)
    config = Idefics3Config(
        text_config={
            **SETTINGS,
            "model_type": "llama",
            "vocab_size": len(tokenizer),
            "max_position_embeddings": 512,
            "pad_token_id": tokenizer.pad_token_id,
            "eos_token_id": tokenizer.eos_token_id,
        },
        vision_config={
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": SIDE,
            "patch_size": SIDE // 4,
            "initializer_range": SETTINGS["initializer_range"],
        },
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        scale_factor=2,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Idefics3ForConditionalGeneration(config)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    return model


PROCESSORS = {
    "preprocessor_config.json": {
        "image_processor_type": "Idefics3ImageProcessor",
        "do_image_splitting": False,
        "size": {"longest_edge": SIDE},
        "max_image_size": {"longest_edge": SIDE},
        "image_mean": [0.9] * 3,  # the light ground becomes about zero
        "image_std": [0.5] * 3,
    },
    "processor_config.json": {"processor_class": "Idefics3Processor", "image_seq_len": len(PLACES)},
}


def make_assets(output: Path, seed: int = 0) -> None:
    """Write the pictures, the questions and the model into ``output``, replacing what is there."""
    train = write_split(output, "train", NUM_TRAIN, seed)
    write_split(output, "held_out", NUM_HELD_OUT, seed)
    tokenizer = make_tokenizer(train)
    model = make_model(tokenizer, seed)
    tokenizer.save_pretrained(output / "model")
    model.save_pretrained(output / "model")
    for name, content in PROCESSORS.items():
        (output / "model" / name).write_text(json.dumps(content, indent=1), encoding="utf-8")
    sys.stderr.write(
        f"{output}: {NUM_TRAIN} pictures with a question each to train on, {NUM_HELD_OUT} with "
        f"{len(QUESTIONS)} held out, a model of {model.num_parameters():,} parameters\n"
    )
