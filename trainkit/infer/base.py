"""The base under an adapter: the proof that it belongs there, packed as in training, or plain."""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from trainkit.auto_class import empty_model, refuse_scalar_head, text_alone
from trainkit.checkpoint.weights.adapter import OWN_PART, PREFIX, is_of_text_alone, vocabulary_rows
from trainkit.checkpoint.weights.base_fingerprint import base_on_disk, check_fingerprint
from trainkit.checkpoint.weights.plain_files import read_config
from trainkit.checkpoint.weights.reader import adapter_file
from trainkit.checkpoint.whole.atomic import discard, stage
from trainkit.errors import CheckpointError
from trainkit.models.linears import packed_kind
from trainkit.models.loading import UNPACKED_METHODS, load_model
from trainkit.models.tokenizer import load_config, load_tokenizer
from trainkit.options import LoraOptions, ModelOptions
from trainkit.run.directory import RunDirectory
from trainkit.run.files import read_json

_MAX_NAMED = 4
# What a part of an adapter says about the weight it changes: (its own axis, the weight's axis).
_AXES = {"lora_A.weight": (1, 1), "lora_B.weight": (0, 0)}
_EMBEDDING_AXES = {"lora_embedding_A": (1, 0), "lora_embedding_B": (0, 1)}


def prove_base(
    adapter: Path, source: ModelOptions, say: Callable[[str], None], *, any_base: bool
) -> None:
    """Compare shapes and every byte of the base; neither model is loaded."""
    base = source.name_or_path
    config = text_alone(load_config(source), is_of_text_alone(adapter))
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
            if found := OWN_PART.search(name):  # VeRA's first two are of no layer
                layer = name[: found.start()]
                if found[1] != "lora" and key.startswith(PREFIX) and layer not in modules:
                    wrong.append(f"the base has no {layer}")
            elif ".original_module." not in name:
                plain = name.replace(".base_layer.", ".").replace(".modules_to_save.", ".")
                size = weights.get(plain)
                if plain == "score.weight":
                    refuse_scalar_head(["SEQ_CLS"], str(adapter))
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
        if isinstance(modules.get(module), Conv1D):  # GPT-2's layers, stored transposed
            size = size and size[::-1]
        if size is None or len(size) != 2:
            continue  # experts in one parameter: peft folds their axes in its own way
        if size[axis] != shape[own] and (size[axis], shape[own]) != (own_rows, rows):
            wrong.append(f"{module} is {list(size)} in the base; {part} here is {list(shape)}")
    return wrong


def _shapes(adapter: Path) -> dict[str, tuple[int, ...]]:
    with adapter_file(adapter) as file:
        return {key: info.shape for key, info in file.tensors.items()}


# -- A base in fp8: the layers that its run had in fp8 --------------------------------------------


def pack(model: Any, lora: LoraOptions, device: torch.device, run: Path | None) -> Any:
    """A loaded model on the device, its linear layers kept as a run kept them.

    Without ``run`` every layer that fits is packed.
    """
    from trainkit.lora.quant import refuse_unfit_device  # only here: most models are not packed
    from trainkit.models.packed_experts import pack_experts, quantize_with_experts

    quantize = str(lora.quantize)
    refuse_unfit_device(quantize, device)
    convert = packed_kind(quantize).convert
    if convert is None:  # its experts are packed with the rest
        quantize_with_experts(model, device, lora)
        return model.to(device)
    routers = pack_experts(model, quantize, device)
    convert(model, device, [*_left_in_16_bits(model, run), *routers])
    return model.to(device)


def _left_in_16_bits(model: nn.Module, run: Path | None) -> Collection[str]:
    kernels: Any = None if run is None else read_json(RunDirectory(run).kernels)
    record = (kernels or {}).get("fp8") or {}
    if "groups" not in record:
        return ()
    from trainkit.models.fp8.choice import Fp8Choice

    chosen = Fp8Choice.of(record).directions
    return [name for name, _ in model.named_modules() if name and not all(chosen.get(name, (0,)))]


# -- A base that is stored in no plain weights ----------------------------------------------------


@contextmanager
def plain_base(
    source: ModelOptions, base: Path, dtype: str | None, near: Path, say: Callable[[str], None]
) -> Iterator[Path]:
    """The base itself, or for a while a directory with the weights that its run computed with.

    The copy is made next to ``near``, where the next command that writes there clears away what a
    killed one has left.
    """
    if is_plain(base):
        yield base
        return
    say(f"unpacking {base}, as its run did")
    options = source.replace(name_or_path=str(base), dtype=dtype or "auto")
    directory = stage(near.absolute().parent / "base", replace=True)
    try:
        load_model(options, attention=None).save_pretrained(directory)
        load_tokenizer(options).save_pretrained(directory)
        yield directory
    finally:
        discard(directory)


def is_plain(base: Path) -> bool:
    """Whether it is a directory, and its weights are not always unpacked as they are loaded."""
    if base.is_file():
        return False
    settings = read_config(base).get("quantization_config")
    return not (isinstance(settings, dict) and settings.get("quant_method") in UNPACKED_METHODS)
