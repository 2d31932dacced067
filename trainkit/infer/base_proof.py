"""Before an adapter is put over a base: the proof that it belongs there."""

from collections.abc import Callable
from pathlib import Path

from transformers import PreTrainedModel

from trainkit.auto_class import empty_model
from trainkit.checkpoint.weights.adapter import PREFIX, vocabulary_rows
from trainkit.checkpoint.weights.base_fingerprint import base_on_disk, check_fingerprint
from trainkit.checkpoint.weights.plain_files import plain_file
from trainkit.checkpoint.weights.reader import PickledFile, SafetensorsFile
from trainkit.errors import CheckpointError
from trainkit.models.loading import load_config
from trainkit.options import ModelOptions

_MAX_NAMED = 4
# What a part of an adapter says about the weight it changes: (its own axis, the weight's axis).
_AXES = {"lora_A.weight": (1, 1), "lora_B.weight": (0, 0)}
_EMBEDDING_AXES = {"lora_embedding_A": (1, 0), "lora_embedding_B": (0, 1)}


def prove_base(
    adapter: Path, source: ModelOptions, say: Callable[[str], None], *, any_base: bool
) -> None:
    """Compare shapes and every byte of the base; neither model is loaded.

    Args:
        adapter: directory.
        source: the weights to put it over.
        say: called with one line about what could not be compared.
        any_base: take other weights of the same shapes.

    Raises:
        CheckpointError: the adapter was trained over other weights, or does not fit these.
    """
    base = source.name_or_path
    config = load_config(source)
    wrong = _misfits(adapter, empty_model(config, trust_remote_code=source.trust_remote_code))
    if wrong:
        more = f" and {len(wrong) - _MAX_NAMED} more" if len(wrong) > _MAX_NAMED else ""
        raise CheckpointError(
            f"the adapter does not fit {base}: {'; '.join(wrong[:_MAX_NAMED])}{more}",
            where=str(adapter),
            fix="give the base that it was trained over with --base-model",
        )
    if any_base:
        return
    try:
        reason = check_fingerprint(adapter, base_on_disk(base, source.revision))
    except OSError:
        reason = "the base's weights are not on this disk"
    if reason is not None:
        say(f"{adapter}: the base {base} was compared by its shapes only: {reason}")


def _misfits(adapter: Path, model: PreTrainedModel) -> list[str]:
    """Every tensor of an adapter that has no place in a model, in words."""
    weights = {name: tuple(weight.shape) for name, weight in model.named_parameters()}
    weights |= {name: tuple(weight.shape) for name, weight in model.named_buffers()}
    modules = dict(model.named_modules())
    if model.get_output_embeddings() is not None:  # a tied one is not a separate parameter
        weights.setdefault("lm_head.weight", tuple(model.get_output_embeddings().weight.shape))
    rows, own_rows = vocabulary_rows(adapter), model.get_input_embeddings().weight.shape[0]
    wrong = []
    for key, shape in _shapes(adapter).items():
        name = key.removeprefix(PREFIX)
        part = next((each for each in (*_AXES, *_EMBEDDING_AXES) if name.endswith(each)), None)
        module = name if part is None else name.removesuffix(f".{part}")
        if part is None:
            if "lora_" not in name and ".original_module." not in name:
                plain = name.replace(".base_layer.", ".").replace(".modules_to_save.", ".")
                size = weights.get(plain)
                if size is None:
                    wrong.append(f"the base has no {plain}")
                elif size != shape and not (size[1:] == shape[1:] and shape[0] == rows):
                    wrong.append(f"{plain} is {list(size)} in the base, {list(shape)} here")
            continue
        if module.removesuffix(".base_layer") not in modules:
            wrong.append(f"the base has no {module}")
            continue
        own, axis = (_AXES | _EMBEDDING_AXES)[part]
        size = weights.get(f"{module}.weight")
        if size is None or len(size) != 2:
            continue  # experts in one parameter: peft folds their axes in its own way
        if size[axis] != shape[own] and (size[axis], shape[own]) != (own_rows, rows):
            wrong.append(f"{module} is {list(size)} in the base; {part} here is {list(shape)}")
    return wrong


def _shapes(adapter: Path) -> dict[str, tuple[int, ...]]:
    for name in ("adapter_model.safetensors", "adapter_model.bin"):
        if (adapter / name).exists():
            path = plain_file(adapter, name)
            file = SafetensorsFile(path) if name.endswith("safetensors") else PickledFile(path)
            try:
                return {key: info.shape for key, info in file.tensors.items()}
            finally:
                file.close()
    raise CheckpointError("adapter_model.safetensors is missing", where=str(adapter))
