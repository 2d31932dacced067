"""What no structure tells of models that take images: one row a family, read by data and models."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class VisionFamily:
    """How a family of models takes images.

    Attributes:
        processor: how its image processor cuts an image, and what stands for it in a text:
            ``patches`` (Qwen), ``tiles`` (Idefics 3), ``crops`` (InternVL), ``rows`` (Pixtral),
            ``pooled`` (Gemma 4) or ``fixed`` (Gemma 3).
        tower: the module that sees pixels, under the model without its head.
        projector: the modules that turn what it sees into embeddings of text; they may be inside.
        positions: ``mrope`` has a row, a column and a time for each token; ``flat`` counts on.
        sees_ahead: kinds of layers where the tokens of an image see one another, the later ones as
            well.
        frame: keys of the configuration, or the tokenizer, with tokens that stand around images,
            never trained.
        marker: key of the token that a chat template prints for an image, where it is not the one
            that is repeated.
    """

    processor: Literal["patches", "tiles", "crops", "rows", "pooled", "fixed"]
    tower: str
    projector: tuple[str, ...]
    positions: Literal["mrope", "flat"] = "flat"
    sees_ahead: tuple[str, ...] = ()
    frame: tuple[str, ...] = ()
    marker: str = ""


_QWEN_FRAME = ("vision_start_token_id", "vision_end_token_id", "video_token_id")
_QWEN = VisionFamily("patches", "visual", ("visual.merger",), "mrope", frame=_QWEN_FRAME)
_QWEN3 = VisionFamily(
    "patches",
    "visual",
    ("visual.merger", "visual.deepstack_merger_list"),
    "mrope",
    frame=_QWEN_FRAME,
)
_IDEFICS = VisionFamily("tiles", "vision_model", ("connector",))

VISION: Mapping[str, VisionFamily] = {
    "qwen2_vl": _QWEN,
    "qwen2_5_vl": _QWEN,
    "qwen3_vl": _QWEN3,
    "qwen3_5": _QWEN,
    "qwen3_5_moe": _QWEN,
    "idefics3": _IDEFICS,
    "smolvlm": _IDEFICS,
    "mistral3": VisionFamily("rows", "vision_tower", ("multi_modal_projector",)),
    "gemma3": VisionFamily(
        "fixed",
        "vision_tower",
        ("multi_modal_projector",),
        sees_ahead=("full_attention", "sliding_attention"),
        frame=("boi_token_index", "eoi_token_index"),
        marker="boi_token_index",
    ),
    "gemma4": VisionFamily(
        "pooled",
        "vision_tower",
        ("embed_vision",),
        sees_ahead=("sliding_attention",),
        frame=("boi_token_id", "eoi_token_id", "video_token_id", "audio_token_id"),
    ),
    "internvl": VisionFamily(
        "crops",
        "vision_tower",
        ("multi_modal_projector",),
        frame=("start_image_token_id", "end_image_token_id"),
    ),
}
"""By ``model_type``."""


def tile_tokens(config: Any) -> int:
    """Placeholders of a tile: its patches, as many as the projector makes one of taken as one."""
    vision = config.vision_config
    sizes = (vision.image_size, vision.patch_size)
    sides, patch = (each if isinstance(each, list | tuple) else (each, each) for each in sizes)
    ratio = getattr(config, "downsample_ratio", None)
    joined = config.scale_factor if ratio is None else 1 / ratio
    return int(sides[0] // patch[0] * (sides[1] // patch[1]) / joined**2)


UNSERVED: Mapping[str, str] = {
    "qwen3_vl_moe": "its experts were never proved with the positions of images"
}
"""Families that have been looked at, and why their images are not read."""


def why_unserved(model_type: str) -> str | None:
    """Why images do not go into a model of this type; None where they do."""
    if model_type in VISION:
        return None
    known = ", ".join(VISION)
    return UNSERVED.get(model_type) or f"its images were never proved; those of {known} are"
