"""What a model's files say of its data: where text ends, how it takes images. No torch."""

import contextlib
import hashlib
import json
import logging
import os
from collections.abc import Mapping
from functools import partial
from importlib.util import find_spec
from typing import Any

from transformers import PreTrainedConfig, PreTrainedTokenizerBase
from transformers.utils import cached_file

from trainkit.checkpoint.weights.companions import PROCESSORS
from trainkit.data.options import DataOptions
from trainkit.data.vision import NoVision, Vision
from trainkit.errors import ModelError
from trainkit.models.tokenizer import from_pretrained_arguments, load_config, stop_token_ids
from trainkit.options import ImageOptions, ModelOptions
from trainkit.options.data import SampleOptions
from trainkit.options.vision import VISION, why_unserved
from trainkit.recipe import Recipe

logger = logging.getLogger(__name__)


def data_options(
    recipe: Recipe, *, cache_dir: str | None, config: PreTrainedConfig | None = None
) -> DataOptions:
    """The recipe's data section with what no recipe says; ``cache_dir`` wins over its own."""
    data, training = recipe.data, recipe.training
    seed = training.get("data_seed")
    # A GGUF file is slow to read for its configuration, and brings the tokenizer it was made with.
    is_gguf = "gguf_file" in from_pretrained_arguments(recipe.model)[1]
    if config is None and not is_gguf:
        # A tokenizer alone is enough to look at data.
        with contextlib.suppress(ModelError):
            config = load_config(recipe.model)
    text = None if config is None or is_gguf else config.get_text_config()
    return DataOptions(
        **{key: getattr(data, key) for key in SampleOptions.model_fields},
        stop_token_ids=stop_token_ids(recipe.model, config),
        # Tokens that the recipe adds get rows.
        num_embeddings=None if recipe.model.adds_tokens else getattr(text, "vocab_size", None),
        num_workers=data.num_workers if data.num_workers is not None else os.cpu_count() or 1,
        cache_dir=cache_dir or data.cache_dir,
        seed=int(seed if seed is not None else training.get("seed", 42)),
    )


def vision_of(
    source: ModelOptions,
    tokenizer: PreTrainedTokenizerBase,
    images: ImageOptions,
    config: PreTrainedConfig | None = None,
) -> Vision | NoVision | None:
    """How a model takes images; why they are not read for it; None of a model of text."""
    try:
        config = config or load_config(source)
    except ModelError:
        return None  # a tokenizer alone
    if not hasattr(config, "vision_config"):
        return None
    model_type = str(config.model_type)
    why = why_unserved(model_type)
    if why is not None:
        return NoVision(model_type, why, "train it on text alone, or choose one of these")
    if model_type not in VISION or "gguf_file" in from_pretrained_arguments(source)[1]:
        return NoVision(model_type, "a gguf file has the text model alone", "give its directory")
    files = _processor_files(source)
    if not files:
        return NoVision(
            model_type,
            f"there is no image processor ({PROCESSORS[0]}) next to it",
            "copy the processor's files there",
        )
    backend = find_spec("torchvision") is not None
    more = json.dumps(images.scaling, sort_keys=True) if images.scaling else ""
    said = f"{model_type} {backend} {_sizes(config)} {more}"
    return Vision(
        config,
        tokenizer,
        hashlib.sha256(said.encode() + files).hexdigest()[:16],
        partial(_load_images, source, images.processor),
        partial(_load_processor, source, images.processor),
        scaling=images,
    )


def _sizes(config: PreTrainedConfig) -> str:
    """What of a configuration decides how many tokens an image takes."""
    names = ("patch_size", "image_size", "spatial_merge_size")
    found = [getattr(config.vision_config, name, None) for name in names]
    return f"{found} {getattr(config, 'scale_factor', getattr(config, 'downsample_ratio', None))}"


def _processor_files(source: ModelOptions) -> bytes:
    """The settings of the model's processors, end to end."""
    path, options = from_pretrained_arguments(source)
    found = b""
    for name in PROCESSORS:
        file = cached_file(
            path,
            name,
            revision=options["revision"],
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
            _raise_exceptions_for_gated_repo=False,
        )
        if file is not None:
            with open(file, "rb") as stream:  # noqa: PTH123 - a path of the hub's cache
                found += stream.read()
    return found


def _load_images(source: ModelOptions, settings: Mapping[str, Any]) -> Any:
    from transformers import AutoImageProcessor

    path, options = from_pretrained_arguments(source)
    try:
        made = AutoImageProcessor.from_pretrained(path, **options, **settings)
        known = made.to_dict()
        unknown = ", ".join(key for key in settings if key not in known)
        if not unknown:
            return made
    except (ImportError, OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(
            f"the model's image processor cannot be loaded: {error}"[:400],
            where=source.name_or_path,
            fix="put the model's own preprocessor_config.json back, or install what it names",
        ) from error
    raise ModelError(
        f"{type(made).__name__} has no {unknown}",
        where="data.images.processor",
        fix=f"its settings are {', '.join(sorted(known))}"[:400],
    )


def _load_processor(source: ModelOptions, settings: Mapping[str, Any]) -> Any:
    """The whole processor; None where a package is missing that it wants for videos."""
    from transformers import AutoProcessor

    path, options = from_pretrained_arguments(source)
    try:
        found = AutoProcessor.from_pretrained(path, **options)
        if settings:
            found.image_processor = _load_images(source, settings)
        return found
    except (ImportError, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        missing = [name for name in ("torchvision", "num2words") if not find_spec(name)]
        why = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
        if missing:
            why = f"{' and '.join(missing)} may be wanted, and not be installed"
        logger.warning(
            "the tokens of images are not held against the model's whole processor, which cannot "
            "be loaded: %s",
            why,
        )
        return None
