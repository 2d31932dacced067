"""Images of rows: files good and bad, the ways rows name them, the tokens that stand for them."""

import base64
import json
import random
import struct
import threading
import zlib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from pictures import (
    KINDS,
    encoded,
    expanded_by_transformers,
    make_config,
    make_image,
    make_image_processor,
    make_tokenizer,
)
from PIL import Image as Pil

from trainkit.data import DataOptions, Ledger, Source, images, prepare, remote
from trainkit.data.formats import read_row
from trainkit.data.images import REPAIRS, Image, decode, digest_of, probe
from trainkit.data.messages import RowError
from trainkit.data.vision import NoVision, Vision
from trainkit.errors import DataError, ModelError
from trainkit.options import ImageOptions

OPTIONS = ImageOptions()
GREEN = make_image(48, 64)


def bomb(width, height):
    """A PNG of some bytes that says it has as many pixels."""

    def chunk(kind, data):
        check = zlib.crc32(kind + data)
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", check)

    head = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    body = chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


def turned(kind, orientation=6):
    exif = Pil.Exif()
    exif[274] = orientation
    return encoded(GREEN, kind, exif=exif)


def half_transparent():
    levels = np.dstack([np.asarray(GREEN), np.full((48, 64), 255, np.uint8)])
    levels[:, :32] = 0
    return Pil.fromarray(levels)


GRAY16 = Pil.fromarray(np.linspace(0, 65535, 48 * 64).reshape(48, 64).astype(np.uint16))

GOOD = {
    "jpeg": (encoded(GREEN, "JPEG"), 64, ()),
    "jpeg turned": (turned("JPEG"), 48, ("image_turned",)),
    "jpeg with a tail": (encoded(GREEN, "JPEG") + b"SEFT" * 99, 64, ()),
    "png": (encoded(GREEN), 64, ()),
    "png turned": (turned("PNG"), 48, ("image_turned",)),
    "webp": (encoded(GREEN, "WEBP", lossless=True), 64, ()),
    "bmp": (encoded(GREEN, "BMP"), 64, ()),
    "cmyk": (encoded(GREEN.convert("CMYK"), "JPEG"), 64, ()),
    "palette": (encoded(GREEN.convert("P"), "PNG"), 64, ()),
    "one bit": (encoded(GREEN.convert("1"), "PNG"), 64, ()),
    "16 bits": (encoded(GRAY16), 64, ("image_16_bits",)),
    "transparent": (encoded(half_transparent()), 64, ("image_transparent",)),
    "animated": (
        encoded(GREEN, "GIF", save_all=True, append_images=[Pil.new("RGB", (64, 48))]),
        64,
        ("image_first_frame",),
    ),
}


@pytest.mark.parametrize("name", GOOD)
def test_the_header_tells_what_is_seen(name):
    data, width, repairs = GOOD[name]
    found, pixels = probe(data, name, OPTIONS), decode(data)
    assert (found.width, found.height) == pixels.size == (width, 112 - width)
    assert found.repairs == repairs
    assert pixels.mode == "RGB"


def test_pixels_are_what_a_person_sees():
    upright = np.asarray(decode(turned("PNG")))
    assert np.array_equal(upright, np.asarray(GREEN.rotate(-90, expand=True)))
    assert np.asarray(decode(GOOD["transparent"][0]))[:, :32].min() == 255
    assert abs(np.asarray(decode(GOOD["16 bits"][0])).mean() - 127) < 2
    first = np.asarray(decode(GOOD["animated"][0]))
    assert first.mean() > 60  # and not the black frame


JPEG, PNG = encoded(GREEN, "JPEG"), encoded(GREEN)
FLOATS = Pil.fromarray(np.ones((8, 8), np.float32))
BAD = [
    ("image_none", b"<html>404 not found</html>"),
    ("image_none", b'<svg xmlns="http://www.w3.org/2000/svg"/>'),
    ("image_none", b"just words"),
    ("image_lfs_pointer", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n"),
    ("image_truncated", JPEG[: len(JPEG) * 2 // 3]),
    ("image_truncated", PNG[:-60]),
    ("image_truncated", encoded(GREEN, "WEBP", lossless=True)[:-99]),
    ("image_truncated", encoded(GREEN, "BMP")[:-99]),
    ("image_truncated", b"\x89PNG\r\n\x1a\n"),
    ("image_too_large", bomb(30_000, 30_000)),
    ("image_too_large", bomb(12_000, 12_000)),
    ("image_too_thin", encoded(Pil.new("RGB", (5000, 20)))),
    ("image_depth", encoded(FLOATS, "TIFF")),
]


@pytest.mark.parametrize(("code", "data"), BAD, ids=lambda value: str(value)[:24])
def test_each_damage_has_its_code(code, data):
    with pytest.raises(RowError) as error:
        probe(data, "a.jpg", OPTIONS)
    assert error.value.reason == code
    assert "a.jpg" in error.value.detail


# -- rows ------------------------------------------------------------------------------------------


def vision_for(model_type, processor=None):
    tokenizer = make_tokenizer(KINDS[model_type])
    config = make_config(model_type, tokenizer)
    images = make_image_processor(model_type)
    return Vision(config, tokenizer, model_type, lambda: images, lambda: processor)


@pytest.fixture(scope="module")
def qwen():
    return vision_for("qwen2_5_vl")


@pytest.fixture
def folder(tmp_path):
    make_image(20, 30).save(tmp_path / "a.png")
    make_image(30, 20, seed=1).save(tmp_path / "b.jpg")
    return tmp_path


def prepared(folder, rows, vision, *, name="rows.jsonl", **options):
    """What became of rows: the samples, and the dropped ones."""
    file = folder / name
    if not file.exists():
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    ledger = folder / "dropped.jsonl"
    ledger.unlink(missing_ok=True)
    chosen = DataOptions(cache_dir=str(folder / "cache"), max_dropped=1.0, **options)
    book = Ledger(ledger)
    data = prepare([Source(path=str(file))], vision.tokenizer, chosen, ledger=book, vision=vision)
    book.close()
    lines = ledger.read_text().splitlines() if ledger.exists() else []
    return data, [json.loads(line) for line in lines]


def names(sample):
    return [Path(image.path).name for image in sample.get("images", ())]


ANSWER = {"role": "assistant", "content": "Yes."}


def ask(content, **more):
    return {"messages": [{"role": "user", "content": content}, ANSWER], **more}


def part(kind, **given):
    return {"type": kind, **given}


TEXT = part("text", text="Alike?")
URI = "data:image/png;base64," + base64.b64encode(PNG).decode()
WAYS = {
    "openai": ask([part("image_url", image_url={"url": "a.png"}), TEXT]),
    "openai, plain": ask([part("image_url", image_url="a.png"), TEXT]),
    "axolotl path": ask([part("image", path="a.png"), TEXT]),
    "axolotl base64": ask([part("image", base64=URI.partition(",")[2]), TEXT]),
    "anthropic base64": ask(
        [part("image", source={"type": "base64", "data": URI.partition(",")[2]}), TEXT]
    ),
    "qwen": ask([{"image": "a.png"}, TEXT]),
    "data uri": ask([part("image_url", image_url={"url": URI}), TEXT]),
    "trl": ask([part("image"), TEXT], images=["a.png"]),
    "trl, one": ask([part("image"), TEXT], image="a.png"),
    "trl, plain text": ask("Alike?", images=["a.png"]),
    "placeholder": ask("<image>Alike?", images=["a.png"]),
    "hf": ask("<image>Alike?", images=[{"path": "a.png"}]),
    "llava": {
        "image": "a.png",
        "conversations": [
            {"from": "human", "value": "<image>Alike?"},
            {"from": "gpt", "value": "Yes."},
        ],
    },
    "alpaca": {"instruction": "<image>Alike?", "input": "", "output": "Yes.", "images": ["a.png"]},
    "swift": {"query": "<image>Alike?", "response": "Yes.", "images": ["a.png"]},
    "trl prompt": {
        "prompt": [{"role": "user", "content": [part("image"), TEXT]}],
        "completion": [ANSWER],
        "images": ["a.png"],
    },
}


def test_every_way_to_say_it_is_the_same_sample(folder, qwen):
    data, dropped = prepared(folder, WAYS.values(), qwen)
    assert dropped == []
    assert len(data) == len(WAYS)
    for way, index in zip(WAYS, range(len(data)), strict=True):
        sample = data[index]
        size = (48, 64) if way.endswith((" base64", "uri")) else (20, 30)
        (image,) = sample["images"]
        assert probe(image.read(), "", OPTIONS).height == size[0], way
        marker = "<|vision_start|>" + "<|image_pad|>" * image.num_tokens + "<|vision_end|>"
        text = (
            f"<|im_start|>user\n{marker}Alike?<|im_end|>\n<|im_start|>assistant\nYes.<|im_end|>\n"
        )
        assert qwen.tokenizer.decode(sample["input_ids"]) == text, way
        trained = sample["input_ids"][sample["loss_mask"] > 0]
        assert qwen.tokenizer.decode(trained) == "Yes.<|im_end|>", way


def test_parquet_cells_and_folders(folder, qwen):
    import pyarrow
    import pyarrow.parquet

    (folder / "elsewhere").mkdir()
    make_image(9, 90).save(folder / "elsewhere/c.png")
    turns = ask("<image>Alike<image>?")["messages"]
    cells = [{"bytes": PNG, "path": None}, {"bytes": None, "path": "c.png"}]
    table = pyarrow.Table.from_pylist([{"messages": turns, "images": cells}])
    pyarrow.parquet.write_table(table, folder / "rows.parquet")
    images = ImageOptions(folder=str(folder / "elsewhere"))
    data, dropped = prepared(folder, (), qwen, name="rows.parquet", images=images)
    assert dropped == []
    assert [each.read() for each in data[0]["images"]] == [
        PNG,
        (folder / "elsewhere/c.png").read_bytes(),
    ]


def test_placeholders_and_images_in_order(folder, qwen):
    rows = [
        ask("<image> and <image>", images=["a.png", "b.jpg"]),
        ask([part("image", path="b.jpg"), "or <image>?"], images=["a.png"]),
        ask("`<image>` is a tag, and <image> is one", images=["b.jpg"]),
        ask("`<image>` is a tag"),
        ask("<image> is a tag", images=[]),
        ask("No image"),
    ]
    data, dropped = prepared(folder, rows, qwen)
    assert dropped == []
    expected = [["a.png", "b.jpg"], ["b.jpg", "a.png"], ["b.jpg"], [], [], []]
    assert [names(data[index]) for index in range(len(data))] == expected


REFUSED = {
    "image_count": ask("<image> <image>", images=["a.png"]),
    "image_count ": ask("<image>"),
    "image_count  ": ask([part("image")], images=["a.png", "b.jpg"]),
    "image_count   ": ask([part("image", image="a.png", path="b.jpg"), TEXT]),
    "image_size": ask([part("image", path="a.png", resized_height=28), TEXT]),
    "image_missing": ask([part("image", path="no.png"), TEXT]),
    "image_empty": ask([part("image", path="empty.png"), TEXT]),
    "image_none": ask([part("image", path="page.png"), TEXT]),
    "image_remote": ask([part("image", url="https://example.org/a.png"), TEXT]),
    "image_unreadable": ask([part("image", url="data:image/png,abc"), TEXT]),
    "image_unreadable ": ask([part("image", path="."), TEXT]),
    "image_unreadable  ": ask([part("image", image=7), TEXT]),
    "image_in_answer": {
        "messages": [
            {"role": "user", "content": "Draw"},
            {"role": "assistant", "content": [part("image", path="a.png")]},
        ]
    },
    "image_without_turns": {"text": "a text", "image": "a.png"},
    "image_placeholder": {"text": "a text with <|image_pad|> in it"},
    "media_placeholder": {"text": "a text with [IMG] in it"},
    "not_text": ask([part("video", video="a.mp4"), TEXT]),
    "private_use": ask("a \ufdd0 <image>", images=["a.png"]),
}


def test_what_cannot_be_read_is_in_the_ledger_by_its_line(folder, qwen):
    (folder / "empty.png").touch()
    (folder / "page.png").write_text("<html>")
    data, dropped = prepared(folder, [*REFUSED.values(), ask("Alike?")], qwen)
    assert len(data) == 1
    dropped.sort(key=lambda row: row["line"])
    assert [row["reason"] for row in dropped] == [code.strip() for code in REFUSED]
    assert [row["line"] for row in dropped] == list(range(1, len(REFUSED) + 1))
    assert all(row["file"] == str(folder / "rows.jsonl") for row in dropped)


def test_repairs_are_counted(folder, qwen):
    for name, (data, _, repairs) in GOOD.items():
        if repairs:
            (folder / f"{name}.img").write_bytes(data)
    rows = [ask([part("image", path=path.name), TEXT]) for path in sorted(folder.glob("*.img"))]
    data, dropped = prepared(folder, rows, qwen)
    assert not dropped
    assert data.summary["totals"]["repaired"] == len(rows)
    counts = {name: data.summary["counts"][name] for name in REPAIRS}
    assert counts == {**dict.fromkeys(REPAIRS, 1), "image_turned": 2}


def test_words_of_a_message_are_no_images(folder, qwen):
    """A token written out in an answer or a question stands for nothing."""
    said = {"role": "assistant", "content": "It prints <|image_pad|>."}
    rows = [
        {"messages": [{"role": "user", "content": "<|image_pad|>?"}, said]},
        {"messages": [ask("<image>What?")["messages"][0], said], "images": ["a.png"]},
    ]
    data, dropped = prepared(folder, rows, qwen)
    assert not dropped
    for index in (0, 1):
        sample = data[index]
        wanted = sum(image.num_tokens for image in sample.get("images", ()))
        assert int((sample["input_ids"] == qwen.token_id).sum()) == wanted


def test_a_template_that_prints_no_image_is_refused(folder):
    vision = vision_for("qwen2_5_vl")
    template = vision.tokenizer.chat_template
    vision.tokenizer.chat_template = template.replace("<|image_pad|>", "")
    data, dropped = prepared(folder, [WAYS["openai"], ask("Alike?")], vision)
    assert [row["reason"] for row in dropped] == ["image_placeholder"]
    assert len(data) == 1


def test_other_models_refuse_images_by_name(folder, qwen):
    refusal = NoVision("another", "its tokens see one another", "train it on text")
    file = folder / "rows.jsonl"
    file.write_text(json.dumps(WAYS["openai"]) + "\n" + json.dumps(ask("Alike?")) + "\n")
    options = DataOptions(cache_dir=str(folder / "cache"))
    source = [Source(path=str(file))]
    with pytest.raises(ModelError, match="another: its tokens see one another"):
        prepare(source, qwen.tokenizer, options, ledger=Ledger(), vision=refusal)
    with pytest.raises(RowError, match="only text is trained"):
        read_row(WAYS["trl"], "auto")


# -- tokens ----------------------------------------------------------------------------------------


SIZES = [(1, 1), (1, 7), (16, 16), (16, 32), (17, 15), (199, 1), (1, 199), (40, 40), (64, 16)]


@pytest.mark.parametrize("model_type", KINDS)
def test_tokens_follow_from_an_images_size(model_type):
    """The cut of 120 sizes is what the model's image processor makes of their pixels."""
    vision, draw = vision_for(model_type), random.Random(1)
    sizes = SIZES + [(draw.randint(1, 90), draw.randint(1, 90)) for _ in range(110)]
    for height, width in sizes:
        pixels = Pil.new("RGB", (width, height), (9, 99, 199))
        data = encoded(pixels)
        if KINDS[model_type] == "rows" and min(height, width) * 32 < max(height, width):
            with pytest.raises(ValueError, match="one side has none"):
                vision.expansion(height, width)
            with pytest.raises(ValueError, match="width"):
                vision.images(images=[pixels], patch_size=8)
            continue
        expansion = vision.expansion(height, width)
        image = Image("", 0, len(data), 0, expansion.grid, sum(expansion.runs), None, data)
        pixels = vision.pixels([image])  # raises where the cut is another one
        if KINDS[model_type] == "patches":
            assert len(pixels["pixel_values"]) == 4 * image.num_tokens
        elif KINDS[model_type] == "tiles":
            assert pixels["pixel_values"].shape[1] * 4 == image.num_tokens
        elif KINDS[model_type] == "crops":
            assert len(pixels["pixel_values"]) * 4 == image.num_tokens


WORDS = ["What is this?", "\n", "\n\n", " ", "Compare:\n\n\n", "a", "é你好", "\n \n"]


@pytest.mark.parametrize("model_type", ["qwen2_5_vl", "idefics3", "gemma3", "gemma4", "internvl"])
def test_ids_are_the_processors_and_answers_alone_are_trained(model_type, tmp_path):
    vision, draw = vision_for(model_type), random.Random(3)
    rows, answers = [], []
    for number in range(40):
        turns = []
        for turn in range(draw.randint(1, 3)):
            parts = []
            for place in range(draw.randint(1, 4)):
                if draw.random() < 0.45:
                    name = f"{number}-{turn}-{place}.png"
                    make_image(draw.randint(9, 60), draw.randint(9, 60)).save(tmp_path / name)
                    parts.append(part("image", path=name))
                else:
                    parts.append(part("text", text="".join(draw.choices(WORDS, k=2)) + "."))
            said = f"Answer {number}" + draw.choice(WORDS) + "."
            turns += [{"role": "user", "content": parts}, {"role": "assistant", "content": said}]
        rows.append({"messages": turns})
        answers.append("".join(t["content"] + "<|im_end|>" for t in turns if t["role"] != "user"))
    data, dropped = prepared(tmp_path, rows, vision)
    assert not dropped
    template = vision.tokenizer
    for index, (row, answer) in enumerate(zip(rows, answers, strict=True)):
        sample = data[index]
        images = [decode(image.read()) for image in sample.get("images", ())]
        text = template.apply_chat_template(row["messages"], tokenize=False)
        expected = expanded_by_transformers(vision, text, images)
        assert sample["input_ids"].tolist() == list(expected)
        trained = sample["input_ids"][sample["loss_mask"] > 0]
        assert template.decode(trained) == answer
        assert not np.isin(trained, vision.frame).any()


@pytest.mark.parametrize("spared", ["placeholders", "none"])
@pytest.mark.parametrize("model_type", ["qwen2_5_vl", "idefics3", "gemma3"])
def test_tokens_of_images_train_where_the_recipe_says_so(folder, model_type, spared):
    vision = vision_for(model_type)
    row = {"messages": [{"role": "user", "content": "A<image>"}, ANSWER], "images": ["a.png"]}
    data, _ = prepared(folder, [row], vision, mask="none", images=ImageOptions(mask=spared))
    ids, trained = data[0]["input_ids"], data[0]["loss_mask"] > 0
    assert np.array_equal(trained, (ids != vision.token_id) | (spared == "none"))
    data, _ = prepared(folder, [row], vision, images=ImageOptions(mask=spared))
    assert vision.tokenizer.decode(ids[data[0]["loss_mask"] > 0]) == "Yes.<|im_end|>"


@pytest.mark.parametrize("mask", ["assistant", "none"])
@pytest.mark.parametrize(
    "model_type", ["qwen2_5_vl", "idefics3", "mistral3", "gemma3", "gemma4", "internvl"]
)
def test_no_token_of_an_image_is_trained(folder, model_type, mask):
    """Nor those around it, in a turn that is trained itself, and where everything is."""
    vision = vision_for(model_type)
    first = {"role": "user", "content": "A<image>B<image>", "train": True}
    row = {"messages": [first, ANSWER], "images": ["a.png", "b.jpg"]}
    data, dropped = prepared(folder, [row], vision, mask=mask)
    assert not dropped
    sample = data[0]
    trained = sample["input_ids"][sample["loss_mask"] > 0]
    assert not np.isin(trained, vision.frame).any()
    text = vision.tokenizer.decode(trained)
    assert "AB<|im_end|>" in text.replace("<|im_start|>user\n", "")
    assert "Yes.<|im_end|>" in text


def test_nothing_is_cut_inside_an_image(folder, qwen):
    turns = [*ask("<image>Alike?")["messages"], *ask("And <image>?")["messages"]]
    row = {"messages": turns, "images": ["a.png", "b.jpg"]}
    whole, _ = prepared(folder, [row], qwen)
    ids = whole[0]["input_ids"]
    places = np.flatnonzero(ids == qwen.token_id)
    second = int(places[whole[0]["images"][0].num_tokens])
    for limit in range(second - 3, len(ids) + 1, 3):
        for policy in ("right", "drop_turns", "left_turns"):
            data, _ = prepared(folder, [row], qwen, max_length=limit, truncation=policy)
            if not len(data):
                continue
            sample = data[0]
            tokens = sum(image.num_tokens for image in sample.get("images", ()))
            assert len(sample["input_ids"]) <= limit
            assert int((sample["input_ids"] == qwen.token_id).sum()) == tokens
    assert names(whole[0]) == ["a.png", "b.jpg"]


def test_places_of_tokens_are_the_models_own():
    """Against transformers' rope index, over texts with images at their ends and next to them."""
    import torch
    from transformers import AutoModelForImageTextToText

    vision, draw = vision_for("qwen2_5_vl"), random.Random(5)
    model = AutoModelForImageTextToText.from_config(vision.config).model
    for _ in range(30):
        ids, images = [], []
        for _ in range(draw.randint(1, 4)):
            ids += [1] * draw.randint(1, 5)
            rows, columns = draw.randint(1, 4), draw.randint(1, 4)
            ids += [vision.token_id] * (rows * columns)
            images.append(Image("", 0, 0, 0, (1, 2 * rows, 2 * columns), rows * columns))
        ids += [1] * draw.randint(0, 3)
        tokens = torch.tensor([ids])
        grids = torch.tensor([image.grid for image in images])
        kinds = (tokens == vision.token_id).int()
        expected, _ = model.get_rope_index(tokens, kinds, grids)
        found = vision.positions(np.array(ids), images)
        assert np.array_equal(found[1:], expected[:, 0].numpy())
        assert np.array_equal(found[0], np.arange(len(ids)))


# -- what is kept ----------------------------------------------------------------------------------


def test_prepared_images_are_made_anew_when_their_files_change(folder, qwen):
    rows = [ask("<image>?", images=["a.png"]), ask([part("image", path="late.png"), TEXT])]
    _, dropped = prepared(folder, rows, qwen)
    assert [row["reason"] for row in dropped] == ["image_missing"]
    again, _ = prepared(folder, rows, qwen)
    assert again.summary["sources"][0]["cached"]
    make_image(30, 30).save(folder / "late.png")
    whole, dropped = prepared(folder, rows, qwen)
    assert not dropped
    assert len(whole) == 2
    make_image(60, 9, seed=4).save(folder / "a.png")
    with pytest.raises(DataError, match="not what it was"):
        qwen.pixels(whole[0]["images"])
    anew, _ = prepared(folder, rows, qwen)
    assert anew[0]["images"][0].grid != whole[0]["images"][0].grid
    assert digest_of((folder / "a.png").read_bytes()) == anew[0]["images"][0].digest


def test_rows_of_text_are_stored_as_ever(folder, qwen):
    data, _ = prepared(folder, [ask("Alike?")], qwen)
    kept = data.parts[0].store.directory
    assert not [path.name for path in kept.iterdir() if "image" in path.name]
    assert "images" not in data[0]
    assert data.num_images == 0


def test_damaged_pixels_are_said_by_the_name_of_their_file(folder, qwen):
    """A header cannot tell them: they are met when the file is trained on."""
    data = bytearray(encoded(make_image(40, 40)))
    data[200:260] = bytes(60)
    (folder / "c.png").write_bytes(bytes(data))
    found, dropped = prepared(folder, [ask([part("image", path="c.png"), TEXT])], qwen)
    assert not dropped
    with pytest.raises(DataError, match=r"c\.png"):
        qwen.pixels(found[0]["images"])


def test_images_decide_which_rows_are_alike(folder, qwen):
    from trainkit.data.preview import measure

    rows = [ask("<image>?", images=[name]) for name in ("a.png", "a.png", "c.png")]
    make_image(20, 30, seed=9).save(folder / "c.png")
    data, _ = prepared(folder, rows, qwen)
    figures = measure(data)
    assert figures.duplicates == 1
    assert figures.images == 3


# -- templates as models bring them ----------------------------------------------------------------


SMOL = (
    "{% for message in messages %}{{ message['role'] | capitalize }}"
    "{% if message['content'][0]['type'] == 'image' %}{{ ':' }}{% else %}{{ ': ' }}{% endif %}"
    "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{ line['text'] }}"
    "{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
GEMMA = (
    "{%- for message in messages -%}"
    "{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}"
    "{{ raise_exception('roles must alternate') }}{%- endif -%}"
    "{%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}"
    "{{ '<|im_start|>' + role + '\n' }}"
    "{%- if message['content'] is string -%}{{ message['content'] | trim }}"
    "{%- else -%}{%- for item in message['content'] -%}"
    "{%- if item['type'] == 'image' -%}{{ '<start_of_image>' }}"
    "{%- elif item['type'] == 'text' -%}{{ item['text'] | trim }}{%- endif -%}{%- endfor -%}"
    "{%- endif -%}{{ '<|im_end|>\n' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>model\n' }}{%- endif -%}"
)
QWEN = (
    "{% set image_count = namespace(value=0) %}{% for message in messages %}"
    "{% if loop.first and message['role'] != 'system' %}<|im_start|>system\n"
    "You are a helpful assistant.<|im_end|>\n{% endif %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}<|im_end|>\n"
    "{% else %}{% for content in message['content'] %}"
    "{% if content['type'] == 'image' or 'image' in content or 'image_url' in content %}"
    "{% set image_count.value = image_count.value + 1 %}"
    "{% if add_vision_id %}Picture {{ image_count.value }}: {% endif %}"
    "<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif 'text' in content %}{{ content['text'] }}{% endif %}{% endfor %}<|im_end|>\n"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PIXTRAL = (
    "{{- '<|im_start|>' }}{%- for message in messages %}{%- if message['role'] == 'user' %}"
    "{{- '[INST]' }}{%- if message['content'] is not string %}"
    "{%- for chunk in message['content'] %}{%- if chunk['type'] == 'text' %}"
    "{{- chunk['text'] }}{%- elif chunk['type'] == 'image' %}{{- '[IMG]' }}{%- endif %}"
    "{%- endfor %}{%- else %}{{- message['content'] }}{%- endif %}{{- '[/INST]' }}"
    "{%- elif message['role'] == 'assistant' %}"
    "{%- if message['content'] is string %}{{- message['content'] }}"
    "{%- else %}{{- message['content'][0]['text'] }}{%- endif %}{{- '<|im_end|>' }}"
    "{%- endif %}{%- endfor %}"
)
INTERN = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n'}}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for content in message['content'] %}{% if content['type'] == 'image' %}"
    "{{ '<IMG_CONTEXT>\n' }}{% elif content['type'] == 'text' %}{{ content['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{{'<|im_end|>\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{'<|im_start|>assistant\n' }}{% endif %}"
)
PUBLISHED = {"idefics3": SMOL, "gemma3": GEMMA, "qwen2_5_vl": QWEN, "mistral3": PIXTRAL}
PUBLISHED |= {"gemma4": GEMMA.replace("<start_of_image>", "<|image|>"), "internvl": INTERN}


@pytest.mark.parametrize("model_type", PUBLISHED)
def test_answers_are_found_in_published_templates(model_type, folder):
    """With images before, between and behind words, alone in a turn, and with blanks around."""
    vision = vision_for(model_type)
    vision.tokenizer.chat_template = PUBLISHED[model_type]
    image = part("image", path="a.png")
    asked = [
        [image, part("text", text="\nWhat is it? ")],
        [part("text", text="What is "), image, part("text", text=" this?")],
        [part("text", text="Look: "), image],
        [image, image],
        [image],
        "No image",
    ]
    rows = [
        {"messages": [*ask(one)["messages"], *ask(two)["messages"]]}
        for one in asked
        for two in asked
    ]
    data, dropped = prepared(folder, rows, vision)
    assert dropped == []
    for index, row in enumerate(rows):
        sample = data[index]
        turns = [turn["content"] for turn in row["messages"] if turn["role"] == "user"]
        wanted = sum(one is image for turn in turns for one in turn)
        assert names(sample) == ["a.png"] * wanted
        trained = vision.tokenizer.decode(sample["input_ids"][sample["loss_mask"] > 0])
        assert trained.replace(" ", "").replace("\n", "") == "Yes.<|im_end|>" * 2


@pytest.fixture
def web(monkeypatch):
    """A server; the answers of each path in turn, the last one again and again; what came in."""
    answers, asked = {}, []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            given = answers[self.path]
            status, body, size = given.pop(0) if len(given) > 1 else given[0]
            self.send_response(status)
            self.send_header("Content-Length", str(size or len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    monkeypatch.setattr(remote.time, "sleep", lambda _: None)
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", answers, asked
        server.shutdown()


def test_images_of_the_web_are_fetched_once_where_a_folder_is_named(web, folder, qwen, monkeypatch):
    monkeypatch.setattr(images, "MAX_BYTES", 10_000)
    site, answers, asked = web
    answers |= {
        "/a.png": [(503, b"", 0), (200, PNG[:9], len(PNG)), (200, PNG, 0)],  # it fails, it is cut
        "/gone.png?key=secret": [(404, b"", 0)],
        "/large.png": [(200, bytes(20_000), 0)],
        "/page.png": [(200, b"<html>", 0)],
    }
    urls = [site + path for path in ["/a.png", *answers]]
    answers |= {"/b%20%C3%A9.png": [(200, PNG, 0)]}
    urls += [f"{site}/b \u00e9.png", "http://[no/a.png"]
    rows = [ask([part("image", url=url), TEXT]) for url in urls]
    assert len(prepared(folder, [*rows, ask("Alike?")], qwen)[1]) == len(rows)
    assert asked == []
    fetching = {"images": ImageOptions(fetch=str(folder / "web"))}
    data, dropped = prepared(folder, (), qwen, **fetching)
    assert [each.read() for sample in data for each in sample.get("images", ())] == [PNG] * 3
    reasons = ["image_remote", "image_too_large", "image_none", "image_remote"]
    assert [row["reason"] for row in dropped] == reasons
    assert "404" in dropped[0]["detail"]
    assert "secret" not in dropped[0]["detail"]
    assert sorted(asked) == ["/a.png"] * 3 + sorted([*answers][1:])
    prepared(folder, (), qwen, max_length=1024, **fetching)
    assert asked.count("/a.png") == 3  # it is there


def test_a_server_that_is_down_stops_and_drops_nothing(web, folder, qwen):
    site, answers, _ = web
    answers["/a.png"] = [(500, b"", 0)]
    rows, fetching = [ask([part("image", url=f"{site}/a.png"), TEXT])], str(folder / "web")
    with pytest.raises(DataError, match="cannot be fetched: HTTP Error 500") as caught:
        prepared(folder, rows, qwen, images=ImageOptions(fetch=fetching))
    assert caught.value.where == "data.images.fetch"
