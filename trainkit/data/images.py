"""Files of images: what is wrong with one, its size from its header, its pixels.

Nothing is decoded to learn how many tokens an image takes. What a header cannot tell (a damaged
middle) is found when the pixels are read.
"""

import base64
import binascii
import io
import math
import os
import stat
import struct
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote

import numpy as np
import xxhash
from PIL import Image as Pil
from PIL import ImageOps, UnidentifiedImageError

from trainkit.data.messages import RowError
from trainkit.data.remote import SCHEMES, fetched, shown
from trainkit.options.data import ImageOptions

IMAGE = "\ufdd0"
"""Stands for an image in the text of a message: a code point that no text may hold."""

REPAIRS: Mapping[str, str] = {
    "image_turned": "turned as their EXIF says",
    "image_transparent": "what is transparent is white",
    "image_16_bits": "16 bits a color, divided by 257",
    "image_first_frame": "animated, and the first frame is seen",
}
"""What is done to images as they are read."""

MAX_BYTES = 1 << 29
"""Of a file; more is none of an image that a model sees."""

MAX_RATIO = 200
"""Of an image's sides: Qwen's processors refuse more, and others make a line of it."""

ORIENTATION = 274
_TURNED = (5, 6, 7, 8)
_DAMAGED = (OSError, SyntaxError, ValueError, struct.error, EOFError, KeyError, IndexError)
"""What Pillow raises on files that are cut or altered."""
_BEGINNINGS = (b"\xff\xd8\xff", b"\x89PNG", b"GIF8", b"BM", b"II*", b"MM", b"RIFF")


@dataclass(frozen=True)
class Probe:
    """What the header of an image says.

    Attributes:
        height, width: in pixels, as it is looked at: turned where its EXIF says so.
        repairs: what becomes of it when it is read, as codes for the ledger.
    """

    height: int
    width: int
    repairs: tuple[str, ...] = ()


class ImageError(RowError):
    """An image of a row cannot be read."""

    def __init__(self, reason: str, detail: str, paths: tuple[str, ...]) -> None:
        super().__init__(reason, detail)
        self.paths = paths


class Expansion(NamedTuple):
    """What stands for one image in a text.

    Attributes:
        text: takes the marker's place, with one placeholder for each run of them.
        runs: how long each run is.
        grid: what the image is cut into: (1, rows, columns) of patches, tiles or tokens.
    """

    text: str
    runs: tuple[int, ...]
    grid: tuple[int, int, int]


class Image(NamedTuple):
    """One image of a sample.

    Attributes:
        path: of its file; empty where its bytes are kept with the samples.
        start, size: where its bytes are in there.
        digest: of the bytes, 63 bits.
        grid: what the processor cuts it into.
        num_tokens: placeholders that it takes.
        expansion: what stands for it, while its row becomes a sample.
        data: its bytes, as long as they are nowhere else.
    """

    path: str
    start: int
    size: int
    digest: int
    grid: tuple[int, int, int]
    num_tokens: int
    expansion: Expansion | None = None
    data: bytes | None = None

    def read(self) -> bytes:
        if self.data is not None:
            return self.data
        try:
            with Path(self.path).open("rb") as stream:
                stream.seek(self.start)
                data = stream.read(self.size)
        except OSError as error:
            raise RowError("image_changed", f"{self.path}: {error.strerror}") from error
        if digest_of(data) != self.digest:
            raise RowError("image_changed", f"{self.path} is not what it was when it was prepared")
        return data


def digest_of(data: bytes) -> int:
    """63 bits that tell one image from another."""
    return int(xxhash.xxh3_64_intdigest(data)) >> 1


def find(
    source: str | bytes, folders: tuple[Path, ...], fetch: str | None = None
) -> tuple[str, bytes]:
    """The path of an image, or an empty one where the row has its bytes; and the bytes.

    ``fetch`` is the folder for what is on the web; without it such an image is refused.
    """
    if isinstance(source, bytes):
        return "", _not_empty(source, "an image of the row")
    if source.startswith("data:"):
        return "", _not_empty(_from_uri(source), "an image of the row")
    if fetch is not None and source.startswith(SCHEMES):
        source = str(fetched(source, Path(fetch).expanduser(), MAX_BYTES))
    if source.startswith((*SCHEMES, "s3://", "gs://", "hf://")):
        raise RowError(
            "image_remote",
            f"{shown(source)} is on a network, and training reads files: data.images.fetch: FOLDER "
            "fetches from http and https; else fetch it, and write its path there",
        )
    name = unquote(source[7:]) if source.startswith("file://") else source
    path = Path(name).expanduser()
    places = (path,) if path.is_absolute() else tuple(folder / path for folder in folders)
    found = next((place for place in places if _exists(place)), None)
    if found is None:
        tried = tuple(str(place.absolute()) for place in places)
        raise ImageError("image_missing", f"there is no image {' or '.join(tried)}"[:400], tried)
    try:
        status = found.stat()
        if not stat.S_ISREG(status.st_mode):
            raise RowError("image_unreadable", f"{found} is not a file")
        if status.st_size > MAX_BYTES:
            raise RowError("image_too_large", f"{found} has {status.st_size / 2**20:.0f} MiB")
        return str(found.absolute()), _not_empty(found.read_bytes(), str(found))
    except OSError as error:
        raise RowError("image_unreadable", f"{found}: {error.strerror}") from error


def _exists(path: Path) -> bool:
    try:
        return os.path.lexists(path)
    except ValueError:  # a NUL in its name
        return False


def _not_empty(data: bytes, what: str) -> bytes:
    if not data:
        raise RowError("image_empty", f"{what} is empty")
    return data


def _from_uri(uri: str) -> bytes:
    head, comma, body = uri.partition(",")
    if not comma or not head.endswith(";base64"):
        raise RowError("image_unreadable", f"{head[:60]}: a data URI in base64 is read")
    try:
        return base64.b64decode("".join(body.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise RowError("image_unreadable", f"a data URI that is not base64: {error}") from error


def probe(data: bytes, name: str, options: ImageOptions) -> Probe:
    """The size of an image as it will be seen, from its header alone."""
    if data.startswith(b"version https://git-lfs"):
        raise RowError("image_lfs_pointer", f"{name} is a git-lfs pointer: git lfs pull fetches it")
    if data[:512].lstrip()[:1] == b"<":
        what = "an SVG, which has no pixels" if b"<svg" in data[:2048] else "a page of text"
        raise RowError("image_none", f"{name} is {what}, not an image")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            image = Pil.open(io.BytesIO(data))
        except Pil.DecompressionBombError as error:
            raise _too_large(name, options) from error
        except (UnidentifiedImageError, *_DAMAGED) as error:
            if data.startswith(_BEGINNINGS):
                raise RowError("image_truncated", f"{name} ends within its header") from error
            what = f"no format of images begins with {data[:8]!r}"
            raise RowError("image_none", f"{name} is not an image: {what}") from error
        with image:
            return _probed(image, data, name, options)


def _too_large(name: str, options: ImageOptions, size: str = "far more pixels than") -> RowError:
    most = options.max_file_pixels
    return RowError("image_too_large", f"{name}: {size} data.images.max_file_pixels: {most}")


def _probed(image: Pil.Image, data: bytes, name: str, options: ImageOptions) -> Probe:
    width, height = image.size
    if width * height > options.max_file_pixels:
        raise _too_large(name, options, f"{width} x {height} is above")
    if max(width, height) > MAX_RATIO * min(width, height):
        what = f"{name}: {width} x {height}, one side is more than {MAX_RATIO} times the other"
        raise RowError("image_too_thin", what)
    if image.mode in ("F", "I"):
        what = f"{name}: its numbers (mode {image.mode}) have no range; save it with 8 bits a color"
        raise RowError("image_depth", what)
    repairs = ["image_16_bits"] if image.mode.startswith("I;16") else []
    repairs += ["image_transparent"] if _is_transparent(image) else []
    if getattr(image, "is_animated", False) and image.format != "MPO":  # a photo, its thumbnails
        repairs.append("image_first_frame")
    try:
        orientation = _orientation(image, data, name)
    except _DAMAGED as error:
        raise RowError("image_truncated", f"{name} is damaged: {error}") from error
    repairs += ["image_turned"] if orientation in range(2, 9) else []
    if orientation in _TURNED:
        width, height = height, width
    return Probe(height, width, tuple(repairs))


def _orientation(image: Pil.Image, data: bytes, name: str) -> int:
    """What EXIF says, and whether the file is whole; formats that do not tell are decoded."""
    if image.format == "PNG":
        return _walk_png(data, name)
    if image.format in ("JPEG", "MPO"):
        is_whole = b"\xff\xd9" in data[-64:]
    elif image.format == "WEBP":
        is_whole = int.from_bytes(data[4:8], "little") + 8 <= len(data)
    else:
        is_whole = False
    orientation = image.getexif().get(ORIENTATION)
    if not is_whole:  # or something hangs behind its end
        image.load()
    return orientation if isinstance(orientation, int) else 1


def _walk_png(data: bytes, name: str) -> int:
    """Pillow would decode a whole PNG to look for EXIF; its chunks tell."""
    place, orientation = 8, 1
    while place + 8 <= len(data):
        size, kind = struct.unpack_from(">I4s", data, place)
        if kind == b"eXIf":
            exif = Pil.Exif()
            exif.load(b"Exif\0\0" + data[place + 8 : place + 8 + size])
            orientation = exif.get(ORIENTATION, 1)
        if kind == b"IEND":
            return orientation
        place += size + 12
    raise RowError("image_truncated", f"{name} ends before its last chunk")


def _is_transparent(image: Pil.Image) -> bool:
    return image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info


def _steps(height: int, width: int, options: ImageOptions) -> Iterator[tuple[int, int, Any]]:
    """The sizes that an image is brought to, one after the other, and by which filter."""
    most, least, wide = options.max_pixels, options.min_pixels, options.max_width
    if options.multiple_of is not None:
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

        pixels = {"min_pixels": 4 * 28**2, "max_pixels": 16384 * 28**2}
        height, width = smart_resize(height, width, options.multiple_of, **pixels)
        yield height, width, Pil.Resampling.BICUBIC
    found = width * height
    limit = most if most and found > most else least if least and found < least else found
    if limit != found:
        factor = math.sqrt(limit / found)
        yield int(height * factor), int(width * factor), Pil.Resampling.BICUBIC
    if wide is not None and width > wide:
        yield max(1, (height * wide + width // 2) // width), wide, Pil.Resampling.LANCZOS


def scaled(height: int, width: int, options: ImageOptions) -> tuple[int, int]:
    """The size that an image is brought to before the model's processor sees it."""
    *_, (height, width, _) = [(height, width, None), *_steps(height, width, options)]
    return height, width


def decode_scaled(data: bytes, options: ImageOptions) -> Pil.Image:
    """The pixels at the size that a recipe wants."""
    image = decode(data)
    for height, width, way in _steps(image.height, image.width, options):
        image = image.resize((width, height), way)
    return image


def decode(data: bytes) -> Pil.Image:
    """The pixels, upright, in RGB, what is transparent on white: as `probe` has said."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with Pil.open(io.BytesIO(data)) as opened:
            opened.seek(0)
            image: Pil.Image = ImageOps.exif_transpose(opened)
    if image.mode.startswith("I;16"):
        levels = np.asarray(image).astype(np.uint32) // 257
        return Pil.fromarray(levels.astype(np.uint8)).convert("RGB")
    if _is_transparent(image):
        image = image.convert("RGBA")
        white = Pil.new("RGBA", image.size, (255, 255, 255, 255))
        white.alpha_composite(image)
        image = white
    return image.convert("RGB")


DECODE_ERRORS = (*_DAMAGED, Pil.DecompressionBombError, MemoryError)
"""What `decode` raises."""
