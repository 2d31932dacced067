"""The tokenizer of a model, its configuration and where they are. No torch: data needs no more.

Errors say what is missing and what to do.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import huggingface_hub
from safetensors import SafetensorError
from tokenizers import AddedToken
from transformers import (
    AutoConfig,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
)

from trainkit.errors import ModelError, TrainkitError
from trainkit.hub import check_hub
from trainkit.models.files import (
    MOST,
    check_model_files,
    check_tokenizer_files,
    refuse_counts,
    with_sound_normalizer,
)
from trainkit.options.model import ModelOptions
from trainkit.places import local_path, refuse_file, regular, regular_files


def from_pretrained_arguments(source: ModelOptions) -> tuple[str, dict[str, Any]]:
    """The path or name and the keyword arguments that every ``from_pretrained`` takes.

    A directory is given as a full path: peft writes it into the adapter, which then finds its base
    from any working directory, and never takes a hub's model of the same name for it.
    """
    path = local_path(source.name_or_path) or Path(source.name_or_path)
    if path.is_dir():
        regular_files(path, ModelError)
    source_path = str(path.absolute()) if path.is_dir() else source.name_or_path
    options: dict[str, Any] = {
        "revision": source.revision or "main",
        "trust_remote_code": source.trust_remote_code,
    }
    if source.gguf_file is not None:
        return source_path, {**options, "gguf_file": source.gguf_file}
    if path.suffix == ".gguf":
        return str(path.parent.absolute()), {**options, "gguf_file": path.name}
    return source_path, options


def _refuse_cut(source: ModelOptions) -> None:
    """Name the damaged file, which libraries do not; a hub's name is looked up in its cache."""
    place = local_path(source.name_or_path)
    with contextlib.suppress(OSError, ValueError):
        place = place or Path(
            huggingface_hub.snapshot_download(
                source.name_or_path, revision=source.revision, local_files_only=True
            )
        )
    if place is not None and place.is_dir():
        check_model_files(place, with_weights=True)


def check_exists(source: ModelOptions, *, is_model: bool = True) -> None:
    """Refuse a path that looks local and is not there, before anything is imported or fetched.

    An adapter's directory serves where only the tokenizer is loaded.
    """
    path = local_path(source.name_or_path)
    if path is None:
        check_hub(
            source.name_or_path,
            ModelError,
            f"model.name_or_path: {source.name_or_path}",
            "check the spelling of the directory; without a network, download the model elsewhere "
            "(hf download NAME --local-dir DIR) and give DIR",
        )
        return
    if source.revision is not None and path.exists():
        raise ModelError(
            f"revision {source.revision!r} has no effect on what is on this disk",
            where=f"model.name_or_path: {path}",
            fix="leave it out; the hub's is meant where nothing here is called so",
        )
    if path.is_dir():
        if is_model and source.gguf_file is None:
            check_model_files(path, with_weights=source.init != "random")
        else:
            regular_files(path, ModelError)
        return
    if path.exists():
        if path.suffix.lower() != ".gguf":
            refuse_file(path, ModelError)
        regular(path, ModelError)
        return
    raise ModelError(
        f"there is no model at {path.absolute()}",
        where="model.name_or_path",
        fix="give a directory that save_pretrained wrote, a .gguf file, or a hub name",
    )


def load_tokenizer(
    source: ModelOptions, config: PreTrainedConfig | None = None
) -> PreTrainedTokenizerBase:
    """The tokenizer, with the recipe's tokens; `config` is the model's, where it is known."""
    source_path, options = from_pretrained_arguments(source)
    directory = with_sound_normalizer(Path(source_path))
    with explained(source, "tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(source_path, config=config, **options)
    if tokenizer is not None and directory.is_dir() and "gguf_file" not in options:
        check_tokenizer_files(directory, tokenizer)
    if tokenizer is None or not len(tokenizer):
        raise ModelError(
            "there is no tokenizer next to the model",
            where=source.name_or_path,
            fix="copy tokenizer.json and tokenizer_config.json there",
        )
    _check_template(tokenizer.chat_template, source)
    if source.adds_tokens:
        teach(tokenizer, source)
    for key, token in source.special_tokens.items():
        if token not in tokenizer.get_vocab():
            raise ModelError(
                f"the tokenizer has no token {token[:40]!r}",
                where=f"model.special_tokens.{key}",
                fix="add it with model.add_special_tokens, too",
            )
        tokenizer.add_special_tokens({key: AddedToken(token, normalized=False)})
    return tokenizer


def _check_template(template: object, source: ModelOptions) -> None:
    """One text, or several by name; transformers takes what the file has."""
    texts = list(template.values()) if isinstance(template, dict) else [template or ""]
    if not all(isinstance(text, str) for text in texts):
        raise ModelError(
            "the tokenizer's chat_template is neither a text nor texts by name",
            where=source.name_or_path,
            fix="correct chat_template in tokenizer_config.json, or remove it",
        )


@dataclass(frozen=True)
class NewTokens:
    """What a tokenizer has learnt."""

    pieces: Mapping[int, tuple[int, ...]]
    known: tuple[str, ...]
    size: int


def teach(tokenizer: PreTrainedTokenizerBase, source: ModelOptions) -> NewTokens:
    """Add the tokens of ``model.add_tokens`` and ``add_special_tokens``, in place."""
    ordinary, special = source.tokens()
    vocabulary = tokenizer.get_vocab()
    new = {
        token: tuple(tokenizer.encode(token, add_special_tokens=False))
        for token in (*ordinary, *special)
        if token not in vocabulary
    }
    for token in new:
        is_special = token in special
        # As it is written, wherever it stands: no normaliser, no blanks around it.
        added = AddedToken(token, normalized=False, special=is_special)
        tokenizer.add_tokens([added], special_tokens=is_special)
    ids = tokenizer.convert_tokens_to_ids(list(new))
    pieces = {int(number): new[token] for number, token in zip(ids, new, strict=True)}
    known = tuple(token for token in (*ordinary, *special) if token not in new)
    return NewTokens(pieces, known, len(tokenizer))


def new_tokens(source: ModelOptions) -> NewTokens:
    plain = source.replace(add_tokens=None, add_special_tokens=None, special_tokens={})
    return teach(load_tokenizer(plain), source)


_BOUNDS: Mapping[str, tuple[type[int] | type[float], float]] = {
    "repetition_penalty": (float, math.inf),
    "temperature": (float, math.inf),
    "top_k": (int, math.inf),
    "top_p": (float, 1.0),
    "min_p": (float, 1.0),
    "typical_p": (float, 1.0),
    "no_repeat_ngram_size": (int, math.inf),
}
"""The kind and the largest of settings above 0, as transformers takes them."""


def check_settings(settings: GenerationConfig, where: str) -> None:
    """Refuse settings that no answer can be written with; a 0 switches most of them off."""
    needed = {"repetition_penalty", *(["temperature"] if settings.do_sample else [])}
    for name, (kind, most) in _BOUNDS.items():
        value = getattr(settings, name)
        if value is None or value == 1 or (not value and name not in needed):
            continue
        if not isinstance(value, kind) or not 0 < value <= most:
            bound = "" if most == math.inf else f", up to {most:g}"
            raise unusable(f"{name}: {value!r} is no {kind.__name__} above 0{bound}", where)


def unusable(what: str, where: str) -> ModelError:
    return ModelError(
        f"the model's generation settings cannot be used: {what}"[:400],
        where=where,
        fix="correct generation_config.json, or remove it",
    )


def stop_token_ids(source: ModelOptions, config: PreTrainedConfig | None = None) -> tuple[int, ...]:
    """What the model's own generation settings stop at; empty where it has none."""
    source_path, options = from_pretrained_arguments(source)
    if "gguf_file" in options:
        return ()
    try:
        settings = GenerationConfig.from_pretrained(source_path, revision=options["revision"])
    except Exception as error:  # transformers looks at few of its values before it uses them
        path = Path(source_path) / "generation_config.json"
        if isinstance(error, OSError) and not path.is_file():
            return ()
        raise ModelError(
            f"the generation settings cannot be read: {type(error).__name__}: {error}"[:400],
            where=str(path),
            fix="correct that file, or remove it",
        ) from None
    check_settings(settings, source.name_or_path)
    stops = settings.eos_token_id
    found = () if stops is None else tuple(stops) if isinstance(stops, list) else (stops,)
    size = getattr((config or load_config(source)).get_text_config(), "vocab_size", None) or MOST
    for stop in found:
        if not isinstance(stop, int) or not 0 <= stop < size:
            raise ModelError(
                f"generation_config.json ends answers at the token {str(stop)[:20]}, and the "
                f"model's tokens are 0 to {size - 1}",
                where=source.name_or_path,
                fix="correct eos_token_id there, or remove it",
            )
    return found


def load_config(source: ModelOptions) -> PreTrainedConfig:
    source_path, options = from_pretrained_arguments(source)
    with explained(source, "configuration"):
        config = AutoConfig.from_pretrained(source_path, **options)
        text = config.get_text_config()  # of several text models it knows none
    refuse_counts(vars(text), source.name_or_path)
    return config


@contextlib.contextmanager
def explained(source: ModelOptions, part: str) -> Any:
    """Turn transformers' and the hub's errors into one sentence with a way out."""
    try:
        yield
    except (TrainkitError, ImportError, MemoryError):
        raise
    except Exception as error:  # tokenizers raises nothing narrower
        if type(error).__name__ == "OutOfMemoryError":  # torch's
            raise
        if isinstance(error, SafetensorError):
            _refuse_cut(source)
        first_line = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
        if not isinstance(error, (OSError, ValueError)):
            first_line = f"{type(error).__name__}: {first_line}"
        is_local = local_path(source.name_or_path) is not None
        if isinstance(error, ValueError) and "`trust_remote_code=True`" in str(error):
            raise ModelError(
                f"the {part} needs code that comes with it (auto_map)",
                where=f"model.name_or_path: {source.name_or_path}",
                fix="read that code; then a recipe lets it run with model.trust_remote_code: true, "
                "and a command on a trained model with --trust-remote-code",
            ) from None
        raise ModelError(
            f"the {part} cannot be loaded: {first_line}",
            where=f"model.name_or_path: {source.name_or_path}",
            fix=f"check that the directory holds a complete {part} as save_pretrained writes it"
            if is_local
            else "check the spelling; without a network, download the model elsewhere "
            "(hf download NAME --local-dir DIR) and give DIR",
        ) from error
