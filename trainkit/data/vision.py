"""How one model takes images: the tokens that stand for one, its pixels, its positions.

The number of tokens follows from an image's size and the settings of the model's own image
processor. `Vision.check` holds it, and the ids, against the model's whole processor on real rows;
the pixels are always that processor's, so they are what plain transformers would train on.
"""

from __future__ import annotations

import functools
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from trainkit.data.encode import Encoded, Encoder
from trainkit.data.images import (
    DECODE_ERRORS,
    Expansion,
    Image,
    ImageError,
    decode_scaled,
    digest_of,
    find,
    probe,
    scaled,
)
from trainkit.data.messages import Conversation, RowError
from trainkit.errors import DataError, ModelError
from trainkit.options import ImageOptions
from trainkit.options.vision import VISION, VisionFamily, tile_tokens

# -- the processors, by their kind -----------------------------------------------------------------


def _patches(vision: Vision, height: int, width: int) -> Expansion:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

    images = vision.images
    patch, merge, size = images.patch_size, images.merge_size, images.size
    low, high = size["shortest_edge"], size["longest_edge"]
    tall, wide = smart_resize(height, width, patch * merge, min_pixels=low, max_pixels=high)
    rows, columns = tall // patch, wide // patch
    return Expansion(vision.marker, (rows * columns // merge**2,), (1, rows, columns))


def _tiles(vision: Vision, height: int, width: int) -> Expansion:
    rows = columns = 0
    if vision.images.do_image_splitting:
        rows, columns = _tiling(vision.images, height, width)
    text, around = vision.marker, "<fake_token_around_image>"
    parts = [
        "".join(f"{around}<row_{row + 1}_col_{column + 1}>{text}" for column in range(columns))
        + "\n"
        for row in range(rows)
    ]
    parts.append("\n" if rows else "")
    whole = f"{''.join(parts)}{around}<global-img>{text}{around}"
    return Expansion(
        whole, (tile_tokens(vision.config),) * (rows * columns + 1), (1, rows, columns)
    )


def _tiling(images: Any, height: int, width: int) -> tuple[int, int]:
    """Rows and columns of tiles, as the processor resizes in two steps; none for one tile."""
    from transformers.models.idefics3 import image_processing_pil_idefics3 as idefics

    tile = images.max_image_size["longest_edge"]
    blank = np.broadcast_to(np.uint8(0), (3, height, width))
    height, width = idefics.get_resize_output_image_size(blank, images.size["longest_edge"])
    ratio = width / height
    if width >= height:
        width = -(-width // tile) * tile
        height = -(-int(width / ratio) // tile) * tile
    else:
        height = -(-height // tile) * tile
        width = -(-int(height * ratio) // tile) * tile
    if height <= tile and width <= tile:
        return 0, 0
    return height // tile, width // tile


def _rows(vision: Vision, height: int, width: int) -> Expansion:
    side, longest = vision.side, vision.images.size["longest_edge"]
    ratio = max(height / longest, width / longest)
    if ratio > 1:
        height, width = math.floor(height / ratio), math.floor(width / ratio)
    if not height or not width:
        raise ValueError(f"scaled to {longest} pixels, one side has none")
    rows, columns = (height - 1) // side + 1, (width - 1) // side + 1
    row = f"{vision.marker}[IMG_BREAK]"
    text = row * (rows - 1) + f"{vision.marker}[IMG_END]"
    return Expansion(text, (columns,) * rows, (1, rows, columns))


def _fixed(vision: Vision, height: int, width: int) -> Expansion:
    begin, end = vision.tokenizer.convert_ids_to_tokens(
        [vision.config.boi_token_index, vision.config.eoi_token_index]
    )
    seen = vision.tokenizer.convert_ids_to_tokens(vision.token_id)
    count = int(vision.config.mm_tokens_per_image)
    return Expansion(f"\n\n{begin}{seen}{end}\n\n", (count,), (1, 1, 1))


def _pooled(vision: Vision, height: int, width: int) -> Expansion:
    from transformers.models.gemma4 import image_processing_pil_gemma4 as gemma

    images = vision.images
    patch, pool = images.patch_size, images.pooling_kernel_size
    most = images.max_soft_tokens * pool**2
    tall, wide = gemma.get_aspect_ratio_preserving_size(height, width, patch, most, pool)
    rows, columns = tall // (patch * pool), wide // (patch * pool)
    ids = [vision.config.boi_token_id, vision.config.eoi_token_id]
    begin, end = vision.tokenizer.convert_ids_to_tokens(ids)
    return Expansion(f"{begin}{vision.marker}{end}", (rows * columns,), (1, rows, columns))


def _crops(vision: Vision, height: int, width: int) -> Expansion:
    tiles = vision.images.get_number_of_image_patches(height, width, dict(_CUTS["crops"]))
    begin, end = vision.tokenizer.start_image_token, vision.tokenizer.end_image_token
    return Expansion(
        f"{begin}{vision.marker}{end}", (tile_tokens(vision.config) * tiles,), (1, 1, tiles)
    )


_EXPAND: Mapping[str, Callable[[Vision, int, int], Expansion]] = {
    "patches": _patches,
    "tiles": _tiles,
    "crops": _crops,
    "rows": _rows,
    "pooled": _pooled,
    "fixed": _fixed,
}
_KINDS = {"fixed": "token_type_ids"} | dict.fromkeys(("patches", "pooled"), "mm_token_type_ids")
_CUTS: Mapping[str, Mapping[str, Any]] = {
    "tiles": {"return_row_col_info": True},
    "crops": {"crop_to_patches": True},
}
"""What whole processors ask of their image processors, whatever their files say."""


# -- one model's images ----------------------------------------------------------------------------


@dataclass
class Vision:
    """How a model takes images.

    Args:
        config: of the model, of a type in `VISION`.
        tokenizer: of the model.
        digest: of all that decides the tokens and the pixels of an image.
        load_images: loads its image processor.
        load_processor: loads its whole processor, to be held against; None where it cannot be.
        scaling: how large images are.
    """

    config: PreTrainedConfig
    tokenizer: PreTrainedTokenizerBase
    digest: str
    load_images: Callable[[], Any]
    load_processor: Callable[[], Any]
    num_checked: int = 0
    scaling: ImageOptions = field(default_factory=ImageOptions)

    @functools.cached_property
    def images(self) -> Any:
        return self.load_images()

    @functools.cached_property
    def processor(self) -> Any:
        return self.load_processor()

    @property
    def family(self) -> VisionFamily:
        return VISION[self.config.model_type]

    @functools.cached_property
    def token_id(self) -> int:
        """The placeholder, once for each embedding of an image."""
        found = getattr(self.config, "image_token_id", None)
        return int(self.config.image_token_index if found is None else found)

    @functools.cached_property
    def marker(self) -> str:
        """What the chat template prints for an image."""
        index = getattr(self.config, self.family.marker) if self.family.marker else self.token_id
        token: str = self.tokenizer.convert_ids_to_tokens(index)
        if token is None or token not in self.tokenizer.get_added_vocab():
            raise ModelError(
                f"the model's images are at the token {index}, and the tokenizer has no "
                "such special token",
                where="model.name_or_path",
                fix="use the model's own tokenizer",
            )
        return token

    @functools.cached_property
    def frame(self) -> np.ndarray:
        """Tokens that only ever stand for images or around them: they are never trained."""
        places = (self.config, self.tokenizer)
        ids: list[int | None] = [self.token_id]
        ids += [getattr(place, key, None) for place in places for key in self.family.frame]
        known = self.tokenizer.get_added_vocab()
        shape = re.compile(r"<row_\d+_col_\d+>|<fake_token_around_image>|<global-img>|\[IMG_\w+\]")
        ids += [index for token, index in known.items() if shape.fullmatch(token)]
        return np.array(sorted({each for each in ids if each is not None}))

    @functools.cached_property
    def words(self) -> frozenset[str]:
        """The same as texts, which messages may not hold as such."""
        known = self.tokenizer.convert_ids_to_tokens(self.frame.tolist())
        return frozenset(str(each) for each in known if each is not None)

    @property
    def side(self) -> int:
        """Pixels a token covers along a side (Pixtral)."""
        merge = getattr(self.config, "spatial_merge_size", 1)
        return int(self.config.vision_config.patch_size * merge)

    # -- rows --------------------------------------------------------------------------------------

    def load_all(
        self, conversation: Conversation, folder: Path, options: ImageOptions
    ) -> tuple[Conversation, Counter[str]]:
        """A conversation with what was read of its images, and how many were repaired."""
        folders = (folder,) if options.folder is None else (folder, Path(options.folder))
        repairs: Counter[str] = Counter()
        messages = []
        for turn, message in enumerate(conversation.messages, 1):
            images = []
            for source in message.images:
                try:
                    image, repaired = self.load(source, folders, options)
                except RowError as error:
                    what = f"turn {turn} ({message.role}): {error.detail}"
                    paths = getattr(error, "paths", ())
                    raise ImageError(error.reason, what, paths) from error
                images.append(image)
                repairs.update(repaired)
            messages.append(replace(message, images=tuple(images)) if images else message)
        return replace(conversation, messages=tuple(messages)), repairs

    def load(
        self, source: str | bytes, folders: tuple[Path, ...], options: ImageOptions
    ) -> tuple[Image, tuple[str, ...]]:
        """An image of a row, and its repairs."""
        path, data = find(source, folders, options.fetch)
        name = path or "an image of the row"
        try:
            seen = probe(data, name, options)
            expansion = self.expansion(*scaled(seen.height, seen.width, self.scaling))
        except ValueError as error:
            raise RowError("image_too_thin", f"{name}: {error}") from error
        except RowError as error:
            raise ImageError(error.reason, error.detail, (path,) if path else ()) from error
        size, tokens = len(data), sum(expansion.runs)
        kept = None if path else data
        found = Image(path, 0, size, digest_of(data), expansion.grid, tokens, expansion, kept)
        return found, seen.repairs

    def expansion(self, height: int, width: int) -> Expansion:
        """What stands for an image of a size."""
        if getattr(self.images, "do_pan_and_scan", False):
            raise ModelError(
                "the image processor adds crops to images (do_pan_and_scan), which was never "
                "proved",
                where="preprocessor_config.json",
                fix="set do_pan_and_scan: false there",
            )
        return _EXPAND[self.family.processor](self, height, width)

    def refuse_unprinted(self, text: str, wanted: int) -> None:
        """Refuse a rendering with other markers than images."""
        printed = text.count(self.marker)
        if printed != wanted:
            what = f"the chat template prints {printed} times {self.marker} for {wanted} images"
            raise RowError("image_placeholder", what)

    def refuse_loose(self, ids: np.ndarray, images: Sequence[Image]) -> None:
        """Refuse placeholders that no image belongs to."""
        if int(np.count_nonzero(ids == self.token_id)) != sum(each.num_tokens for each in images):
            raise RowError("image_placeholder", LOOSE)

    def encode(
        self, encoder: Encoder, text: str, spans: Sequence[tuple[int, int]], images: Sequence[Image]
    ) -> Encoded:
        """Tokenise a rendering whose markers stand for images; its spans count without them.

        One placeholder of each run is tokenised and then repeated: the text around it decides how
        it is cut, the number of placeholders does not.
        """
        expansions = [each.expansion for each in images if each.expansion is not None]
        pieces, places, moves, last, length = [], [], [(0, 0)], 0, 0
        for match, each in zip(re.finditer(re.escape(self.marker), text), expansions, strict=True):
            before = text[last : match.start()]
            pieces += [before, each.text]
            start = length + len(before)
            length = start + len(each.text)
            last = match.end()
            places.append((start, length))
            moves.append((last, length - last))
        moved = [(_moved(start, moves), _moved(end, moves)) for start, end in spans]
        pieces.append(text[last:])
        edges = sorted({edge for pair in (*moved, *places) for edge in pair})
        (found,) = encoder.encode(["".join(pieces)], [list(pairwise(edges))])
        counts = np.ones(len(found.input_ids), dtype=np.int64)
        is_image = found.input_ids == self.token_id
        runs = [run for each in expansions for run in each.runs]
        if int(is_image.sum()) != len(runs):
            raise RowError("image_placeholder", LOOSE)
        counts[is_image] = runs
        total = np.concatenate([[0], np.cumsum(counts)]).tolist()
        number = {edge: place for place, edge in enumerate(edges)}
        begins = [*(first for first, _ in found.ranges), found.ranges[-1][1]]
        ends = [found.ranges[0][0], *(last for _, last in found.ranges)]

        def tokens(pair: tuple[int, int]) -> tuple[int, int]:
            first = begins[number[pair[0]]]
            return total[first], total[max(first, ends[number[pair[1]]])]

        return Encoded(
            np.repeat(found.input_ids, counts),
            tuple(map(tokens, moved)),
            found.num_straddling,
            tuple(map(tokens, places)),
        )

    def check(self, rendering: str, images: Sequence[Image], ids: np.ndarray) -> None:
        """Hold the ids of a row, and the cuts of its images, against the model's processor."""
        if self.num_checked >= NUM_CHECKED or self.processor is None:
            return
        self.num_checked += 1
        try:
            pixels = [decode_scaled(image.read(), self.scaling) for image in images]
        except DECODE_ERRORS:
            return  # said of the file by its name, when it is trained on
        found = self.processor(text=[rendering], images=[pixels], add_special_tokens=False)
        expected = np.asarray(found["input_ids"][0])
        if not np.array_equal(expected, ids):
            raise DataError(
                f"the tokens of a row with images are not those of the model's own processor: "
                f"{len(ids)} instead of {len(expected)}",
                where=f"{type(self.processor).__name__} of {self.config.model_type}",
                fix="report it with the model's preprocessor_config.json; without images the model "
                "can be trained",
            )

    # -- batches -----------------------------------------------------------------------------------

    def pixels(self, images: Sequence[Image]) -> dict[str, Any]:
        """What the model takes of images, as arrays.

        Raises:
            DataError: a file has changed since it was prepared, or its pixels are damaged.
        """
        decoded = []
        for image in images:
            where = image.path or "an image that the rows hold"
            try:
                decoded.append(decode_scaled(image.read(), self.scaling))
            except RowError as error:
                raise DataError(
                    error.detail, where=where, fix="put it back, or start another run"
                ) from error
            except DECODE_ERRORS as error:
                raise DataError(
                    f"the image is damaged: {error}",
                    where=where,
                    fix="replace it, or remove its row, and start another run",
                ) from error
        more = dict(_CUTS.get(self.family.processor, {}))
        if self.family.processor == "rows":
            more["patch_size"] = {"height": self.side, "width": self.side}
        nested = [decoded] if self.family.processor == "tiles" else decoded
        found = dict(self.images(images=nested, return_tensors="pt", **more))
        self._refuse_other_grids(images, found)
        return {name: value for name, value in found.items() if name not in _OF_CUTS}

    def _refuse_other_grids(self, images: Sequence[Image], found: Mapping[str, Any]) -> None:
        kind = self.family.processor
        if kind == "patches":
            grids = [tuple(each) for each in found["image_grid_thw"].tolist()]
        elif kind == "tiles":
            grids = [(1, a, b) for a, b in zip(found["rows"][0], found["cols"][0], strict=True)]
        elif kind == "fixed":
            grids = [(1, 1, 1 + int(crops)) for crops in found["num_crops"]]
        elif kind == "crops":
            grids = [(1, 1, int(tiles)) for tiles in found["num_patches"]]
        elif kind == "pooled":
            pool = self.images.pooling_kernel_size
            last = np.asarray(found["image_position_ids"]).max(1)
            grids = [(1, (row + 1) // pool, (column + 1) // pool) for column, row in last.tolist()]
        else:
            sizes = np.asarray(found["image_sizes"]).tolist()
            grids = [(1, tall // self.side, wide // self.side) for tall, wide in sizes]
        for image, grid in zip(images, grids, strict=True):
            if image.grid != grid:
                raise DataError(
                    f"the image processor cuts an image into {grid}, and {image.grid} was prepared",
                    where=image.path or "an image that the rows hold",
                    fix="keep the processor's settings as they were, or start another run",
                )

    @property
    def kinds(self) -> str | None:
        """What says, for each token, whether it stands for an image, where a model generates."""
        return _KINDS.get(self.family.processor)

    def positions(self, ids: np.ndarray, images: Sequence[Image]) -> np.ndarray:
        """(4, S) of one sample: the place of each token, then its time, row and column.

        A token of text has one place in all of them; an image's tokens share a time, and have a row
        and a column each, and what follows goes on behind its longer side.
        """
        merge = self.images.merge_size
        place = np.arange(len(ids))
        is_image = ids == self.token_id
        found = np.empty((4, len(ids)), dtype=np.int64)
        found[0] = place
        starts = np.flatnonzero(is_image & ~np.concatenate([[False], is_image[:-1]]))
        at, last = 0, 0
        queue = iter(images)
        for start in starts.tolist():
            begin = start
            found[1:, last:begin] = np.arange(begin - last) + at
            at += begin - last
            while begin < len(ids) and is_image[begin]:  # images may touch
                _, rows, columns = next(queue).grid
                rows, columns = rows // merge, columns // merge
                end = begin + rows * columns
                found[1, begin:end] = at
                found[2, begin:end] = at + np.repeat(np.arange(rows), columns)
                found[3, begin:end] = at + np.tile(np.arange(columns), rows)
                at += max(rows, columns)
                begin = end
            last = begin
        found[1:, last:] = np.arange(len(ids) - last) + at
        return found


@dataclass(frozen=True)
class NoVision:
    """A model that takes images, and ones that are not read for it."""

    model_type: str
    why: str
    fix: str

    def error(self, where: str) -> ModelError:
        what = f"images of rows are not read for a model of type {self.model_type}: {self.why}"
        return ModelError(what, where=where, fix=self.fix)


def unstreamed(vision: Vision | NoVision | None) -> NoVision | None:
    """Of a stream, whose samples have no images."""
    if not isinstance(vision, Vision):
        return vision
    why, fix = "streamed samples have none", "set data.streaming: false"
    return NoVision(vision.config.model_type, why, fix)


_OF_CUTS = ("rows", "cols", "num_crops", "num_patches", "num_soft_tokens_per_image")
"""What processors say of their cuts, and models do not take."""

LOOSE = "a text has the token that stands for an image, and no image there"

NUM_CHECKED = 4
"""Rows with images that a process holds against the processor."""


def _moved(place: int, moves: Sequence[tuple[int, int]]) -> int:
    """A character's place, when all before it has grown."""
    return place + next(shift for start, shift in reversed(moves) if start <= place)
