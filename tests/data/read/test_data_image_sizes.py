"""Images are scaled before a model's processor sees them, and its settings are a recipe's."""

import json
import math

import numpy as np
import pytest
from pictures import make_image, make_model_directory
from PIL import Image as Pil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from trainkit.data import DataOptions, Ledger, Source, prepare
from trainkit.data.images import decode
from trainkit.errors import ModelError, RecipeError
from trainkit.models.tokenizer import load_tokenizer
from trainkit.options import ImageOptions, ModelOptions
from trainkit.train.images import vision_of


def by_pixels(image, most=1024, least=200):
    """As LLaMA-Factory's plugins do."""
    for limit, sign in ((most, 1), (least, -1)):
        if sign * image.width * image.height > sign * limit:
            factor = math.sqrt(limit / (image.width * image.height))
            image = image.resize((int(image.width * factor), int(image.height * factor)))
    return image


def by_width(image, most=24):
    """As Unsloth's collator does."""
    width, height = image.size
    if width <= most:
        return image
    size = ((width * most + width // 2) // width, max(1, (height * most + width // 2) // width))
    return image.resize(size, Pil.Resampling.LANCZOS)


def by_multiple(image):
    """As qwen_vl_utils does, and then Unsloth's collator."""
    limits = {"min_pixels": 4 * 28**2, "max_pixels": 16384 * 28**2}
    tall, wide = smart_resize(image.height, image.width, 8, **limits)
    return by_width(image.resize((wide, tall)))


SETTINGS = {"processor": {"size": {"shortest_edge": 64, "longest_edge": 512}}}
SIZES = [(20, 30), (70, 40), (40, 70), (9, 9), (61, 59)]


@pytest.mark.parametrize(
    ("given", "by_hand"),
    [
        ({"max_pixels": 1024, "min_pixels": 200}, by_pixels),
        ({"max_width": 24}, by_width),
        ({"multiple_of": 8, "max_width": 24}, by_multiple),
        (SETTINGS, lambda image: image),
    ],
    ids=["pixels", "width", "multiple", "processor"],
)
def test_tokens_and_pixels_are_those_of_scaled_images(tmp_path, given, by_hand):
    source = ModelOptions(str(make_model_directory("qwen2_5_vl", tmp_path)))
    options, tokenizer = ImageOptions(**given), load_tokenizer(source)
    vision = vision_of(source, tokenizer, options)
    whole = vision_of(source, tokenizer, ImageOptions())
    assert vision.digest != whole.digest
    rows = ""
    for number, size in enumerate(SIZES):
        make_image(*size, seed=number).save(tmp_path / f"{number}.png")
        turns = [{"role": "user", "content": "<image>?"}, {"role": "assistant", "content": "!"}]
        rows += json.dumps({"messages": turns, "images": [f"{number}.png"]}) + "\n"
    (tmp_path / "rows.jsonl").write_text(rows)
    chosen = DataOptions(cache_dir=str(tmp_path), images=options)
    given_rows = [Source(path=str(tmp_path / "rows.jsonl"))]
    data = prepare(given_rows, tokenizer, chosen, ledger=Ledger(), vision=vision)
    for number in range(len(SIZES)):
        (image,) = data[number]["images"]
        seen = by_hand(decode(image.read()))
        found = vision.pixels([image])["pixel_values"]
        wanted = vision.images(images=[seen], return_tensors="pt")["pixel_values"]
        assert np.array_equal(found, wanted)
        assert len(found) == 4 * image.num_tokens
        if given == SETTINGS:
            assert image.num_tokens <= min(8, sum(whole.expansion(*SIZES[number]).runs))


def test_what_cannot_be_is_refused(tmp_path):
    source = ModelOptions(str(make_model_directory("qwen2_5_vl", tmp_path)))
    options = ImageOptions(processor={"max_patches": 4})
    with pytest.raises(ModelError, match="has no max_patches") as error:
        _ = vision_of(source, load_tokenizer(source), options).images
    assert "size" in error.value.fix
    for both in ({"max_width": 99, "max_pixels": 4096}, {"max_pixels": 2048, "min_pixels": 4096}):
        with pytest.raises(RecipeError):
            ImageOptions(**both)
