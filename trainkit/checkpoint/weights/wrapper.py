"""Models whose files hold more than is loaded: a vision tower, a draft head.

transformers saves what it has loaded, and of some files that is the text part alone. What was
trained goes back to the rest, byte for byte, so that a server finds the model that it knows.
"""

from pathlib import Path

from safetensors.torch import save_file

from trainkit.checkpoint.weights.companions import stored_at
from trainkit.checkpoint.weights.export import write_config
from trainkit.checkpoint.weights.plain_files import read_config, write_json
from trainkit.checkpoint.weights.reader import WeightsReader

_TRAINED, _REST = "model-trained.safetensors", "model-rest-of-base.safetensors"
_INDEX = "model.safetensors.index.json"
_OF_A_MODEL = frozenset({"architectures", "transformers_version"})


def restore_wrapper(directory: Path, base: Path) -> str | None:
    """Complete a saved text model with what its base's files hold besides."""
    base = stored_at(base)
    if not (base / "config.json").is_file():
        return None
    whole, text = read_config(base), read_config(directory)
    inner = whole.get("text_config")
    if not isinstance(inner, dict):
        return None
    is_whole = whole.get("model_type") == text.get("model_type")
    with WeightsReader(base) as of_base, WeightsReader(directory) as saved:
        tied = {"lm_head.weight"}
        if unknown := sorted(saved.tensors.keys() - of_base.tensors.keys() - tied):
            why = f"the model is that of text alone: {unknown[0]} is not in the base's files"
            return None if is_whole else f"{why}, whose other parts are not with it"
        rest = sorted(of_base.tensors.keys() - saved.tensors.keys() - tied)
        homes = {**dict.fromkeys(saved.tensors, _TRAINED), **saved.files}
        homes.pop("", None)
        size = sum(info.num_bytes for info in saved.tensors.values())
        size += sum(of_base.tensors[name].num_bytes for name in rest)
        tensors = {name: of_base.load(name) for name in rest}
    if not rest:
        return None
    save_file(tensors, directory / _REST, metadata={"format": "pt"})
    if (directory / "model.safetensors").is_file():
        (directory / "model.safetensors").rename(directory / _TRAINED)
    homes |= dict.fromkeys(rest, _REST)
    index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(homes.items()))}
    write_json(directory / _INDEX, index)
    if not is_whole:
        whole["text_config"] = {key: text[key] for key in text.keys() - _OF_A_MODEL}
        whole.pop("torch_dtype", None)
        whole["dtype"] = text.get("dtype")
        write_config(directory, whole, None)
    return f"{len(rest)} tensors that text does not reach are the base's, as {rest[0]}"
