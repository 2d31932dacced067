"""Merges an adapter into plain weights, tensor by tensor, and records what that did."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from trainkit.auto_class import whole_model
from trainkit.checkpoint.merge.merged_weights import (
    THROUGH,
    Base,
    MergedWeights,
    ModuleChange,
    Packing,
    change_of,
    quantized_names,
)
from trainkit.checkpoint.merge.parity import Parity, compare_with_adapter, refuse_strangers
from trainkit.checkpoint.weights.adapter import (
    Adapter,
    is_of_text_alone,
    needs_peft,
    read_by_peft,
    vocabulary_rows,
)
from trainkit.checkpoint.weights.base_fingerprint import check_fingerprint
from trainkit.checkpoint.weights.companions import copy_companions
from trainkit.checkpoint.weights.export import (
    DTYPES,
    TensorSource,
    cast,
    dtype_named,
    write_config,
    write_weights,
)
from trainkit.checkpoint.weights.plain_files import read_config, write_json
from trainkit.checkpoint.weights.reader import TensorInfo, WeightsReader
from trainkit.checkpoint.whole.atomic import free_space_check, staged_directory
from trainkit.errors import CheckpointError
from trainkit.options import LoraOptions
from trainkit.patterns import refuse_endless

logger = logging.getLogger(__name__)

RECORD_NAME = "merge.json"
_OTHER: Mapping[Base, Base] = {"original": "dequantized", "dequantized": "original"}


def own_base(quantize: str | None) -> Base:
    """The base that an adapter is used on, and merged into by default."""
    return "dequantized" if quantize in ("nf4", "int8") else "original"


@dataclass(frozen=True)
class MergeOptions:
    """How to merge.

    Attributes:
        quantize: ``nf4``, ``int8`` or ``fp8`` if the adapter was trained over such a base; None if
            over plain weights.
        lora: the adapter's options, and with them what of the base was kept so.
        compute_dtype: with ``quantize``, what training loaded the base in and unpacked it to; None
            takes what config.json says, else bfloat16.
        base: with ``quantize``, what the adapter is merged into: ``dequantized`` (the weights
            that training saw) or ``original`` (the weights before they were packed).
        dtype: of the result; None keeps each tensor's own.
        verify: compare the result with base and adapter on a few prompts; loads both models.
        any_base: merge into a base of the same shapes even if the adapter was trained over others.
        trust_remote_code: run code that comes with the model, and keep it with the result.
    """

    quantize: str | None = None
    lora: LoraOptions = field(default_factory=LoraOptions)
    compute_dtype: str | None = None
    base: Base = "original"
    dtype: str | None = None
    max_shard_bytes: int = 5 * 10**9
    verify: bool = True
    any_base: bool = False
    trust_remote_code: bool = False


@dataclass(frozen=True)
class Merge:
    """A finished merge."""

    target: Path
    changes: tuple[ModuleChange, ...]
    parity: Parity | None


def merge_adapter(
    adapter: Adapter,
    base: Path,
    target: Path,
    options: MergeOptions,
    progress: Callable[[str], None] = logger.info,
    *,
    origin: Path | None = None,
    stored: Path | None = None,
) -> Merge:
    """Write base and adapter as one plain model.

    ``stored`` is the base that the run named, where ``base`` was unpacked from it; ``origin`` is
    what the record names as the adapter.
    """
    stored, trusted = stored or base, options.trust_remote_code
    config = read_config(base)
    if config.get("quantization_config"):
        raise CheckpointError(
            "the base is stored quantised; an adapter merges into plain weights",
            where=str(base),
            fix="give the base model before it was quantised",
        )
    source = origin or adapter.directory  # one that was put together from shards has no proof
    unproved = "as asked for" if options.any_base else check_fingerprint(source, stored)
    if unproved is not None:
        progress(f"the base was compared by its shapes only: {unproved}")
    metadata = {"kind": "merge", "base": str(stored), "adapter": str(source)}
    with WeightsReader(base) as reader:
        packing = _packing(base, config, options)
        dtype = dtype_named(options.dtype)
        by_peft = needs_the_model(adapter, reader.tensors)
        if packing is not None and packing.base == "dequantized":  # files hold experts one by one
            by_peft |= not packing.names <= reader.tensors.keys()
        merged: MergedWeights | PeftWeights
        if by_peft:
            progress("loading the base: its files split or rename weights that change")
            alone = is_of_text_alone(adapter.directory)
            loaded = whole_model(base, trust_remote_code=trusted, alone=alone, dtype=torch.float32)
            merged = PeftWeights(reader, loaded, adapter, dtype=dtype, packing=packing)
        else:
            merged = MergedWeights(reader, adapter, config, dtype=dtype, packing=packing)
        free_space_check(target, sum(info.num_bytes for info in merged.tensors.values()))
        with staged_directory(target, metadata=metadata) as staging:
            progress(f"merging {len(adapter.modules) or ''} adapted modules".replace("  ", " "))
            write_weights(merged, staging, max_shard_bytes=options.max_shard_bytes)
            changes = tuple(merged.changes)
            _refuse_no_op(changes, adapter)
            write_config(staging, _config_of(merged, config), options.dtype)
            copy_companions((adapter.directory, base), staging, with_code=trusted)
            parity = other = None
            if options.verify:
                progress("comparing with base and adapter on a few prompts")
                if packing is not None and not by_peft:
                    turned = replace(packing, base=_OTHER[packing.base])
                    other = MergedWeights(reader, adapter, config, dtype=dtype, packing=turned)
                # Over fp8 an adapter is used on the plain base. bitsandbytes loads nf4; its int8
                # products would round what they multiply, too.
                is_seen = packing is not None and own_base(packing.quantize) == "dequantized"
                lora = options.lora
                by_names = by_peft or options.quantize == "int8"
                by_names |= lora.quantize_head or bool(lora.quantize_skip)
                parity = compare_with_adapter(
                    base,
                    adapter.directory,
                    staging,
                    packed_from=packing.compute_dtype if packing and is_seen else None,
                    packed=packing.names if packing and by_names else (),
                    through=THROUGH.get(str(options.quantize)),
                    other=other,
                    trusted=trusted,
                )
                if packing is None or packing.base == own_base(packing.quantize):
                    parity.check()  # merged into the other base, it is off by the packing itself
            record = {**_record(stored, adapter, options, changes, parity), "adapter": str(source)}
            record["is_base_of_training"] = True if unproved is None else None  # not known
            write_json(staging / RECORD_NAME, record)
    return Merge(target, changes, parity)


def _config_of(merged: MergedWeights | PeftWeights, config: Mapping[str, Any]) -> dict[str, Any]:
    changed = dict(config)
    if merged.is_untied:
        changed["tie_word_embeddings"] = False
    if merged.vocab_size is not None and "vocab_size" in config:
        changed["vocab_size"] = merged.vocab_size  # resized before training, perhaps
    return changed


def _packing(base: Path, config: Mapping[str, Any], options: MergeOptions) -> Packing | None:
    if options.quantize is None:
        return None
    if options.quantize not in THROUGH:
        known = " and ".join(THROUGH)
        raise CheckpointError(f"quantisation {options.quantize!r} is not known; {known} are")
    own = str(config.get("torch_dtype", config.get("dtype")))
    dtype = dtype_named(options.compute_dtype) or DTYPES.get(own, torch.bfloat16)
    names = quantized_names(
        base,
        options.lora,
        trust_remote_code=options.trust_remote_code,
    )
    return Packing(options.quantize, names, dtype, options.base)


def _refuse_no_op(changes: tuple[ModuleChange, ...], adapter: Adapter) -> None:
    if not changes:
        raise CheckpointError("the adapter holds no weights", where=str(adapter.directory))
    if all(change.relative_update == 0.0 for change in changes):
        raise CheckpointError(
            "the adapter changes nothing: every update is zero, as before the first step",
            where=str(adapter.directory),
            fix="was this the adapter of a finished run?",
        )
    if all(change.changed_fraction == 0.0 for change in changes):
        raise CheckpointError(
            "the adapter's updates are all below the resolution of the weights' dtype, so merging "
            "would lose them",
            where=str(adapter.directory),
            fix="merge with --dtype float32",
        )


def _record(
    base: Path,
    adapter: Adapter,
    options: MergeOptions,
    changes: tuple[ModuleChange, ...],
    parity: Parity | None,
) -> dict[str, Any]:
    return {
        "schema_version": 1,
        "base": str(base),
        "base_named_by_adapter": adapter.base_name,
        "quantize": options.quantize,
        "merged_into": options.base,
        "dtype": options.dtype or "as in the base",
        "parity": None if parity is None else asdict(parity),
        "changes": [asdict(change) for change in changes],
    }


# Merged weights where an adapter's parts are not those of the files: peft merges the whole model.
#
# Experts are stored one by one and adapted as one parameter; models that also take images are
# stored under other names than their modules have. transformers knows the way there and back, so
# the base is loaded (in float32: each update is rounded once, into the result's dtype), merged, and
# named as its files name it.


def needs_the_model(adapter: Adapter, names: Mapping[str, TensorInfo]) -> bool:
    """Whether an adapter changes weights that the base's files hold otherwise, or elsewhere."""
    if needs_peft(adapter.config):
        return True
    for module, part in adapter.modules.items():
        info, shape = names.get(f"{module}.weight"), part.delta_shape
        if info is not None and info.shape != shape and info.shape == shape[::-1]:
            return True  # GPT-2's layers, whose adapter over a packed base is not transposed
    layers = [f"{module}.weight" for module in adapter.modules if ".layers." in module]
    # Where some are there the base is another one; where none is, they may have other names there.
    return bool(layers) and not any(name in names for name in layers)


class PeftWeights:
    """A source of merged tensors under the names of the base's files."""

    is_untied = False

    def __init__(
        self,
        files: TensorSource,
        model: PreTrainedModel,
        adapter: Adapter,
        *,
        dtype: torch.dtype | None = None,
        packing: Packing | None = None,
    ) -> None:
        """Merge, in the machine's own memory: four bytes a weight.

        Args:
            files: the base's weights.
            model: the base, in float32.
            adapter: what to put into them.
            dtype: of the result; None keeps each tensor's own.
            packing: for an adapter trained over a 4-bit base.
        """
        self._files, self._adapter = files, adapter
        rows = vocabulary_rows(adapter.directory)
        if rows not in (None, model.get_input_embeddings().weight.shape[0]):
            model.resize_token_embeddings(rows, mean_resizing=False)  # as before training
        if packing is not None and packing.base == "dequantized":
            for name, parameter in model.named_parameters():
                if name in packing.names:
                    through = THROUGH[packing.quantize]
                    parameter.data = through(parameter.data, packing.compute_dtype).float()
        self._merged = _merged(model, adapter)
        self.vocab_size = int(model.get_input_embeddings().weight.shape[0])
        tied = {"lm_head.weight"}
        lost = sorted(files.tensors.keys() - self._merged.keys() - tied)
        # Where every name of the model is one of the files', the others are of what this class does
        # not have (a vision tower, a draft head): they stay as they are.
        if lost and self._merged.keys() - files.tensors.keys() - tied:
            raise CheckpointError(
                f"transformers loads no {lost[0]} and cannot write it back",
                where=model.name_or_path,
            )
        self.changes: list[ModuleChange] = []
        self.tensors: Mapping[str, TensorInfo] = {
            name: TensorInfo(
                name,
                self._dtype(info, dtype),
                tuple(self._merged[name].shape) if name in self._merged else info.shape,
            )
            for name, info in files.tensors.items()
            if name in self._merged or name in lost
        }

    def load(self, name: str) -> Tensor:
        before, dtype = self._files.load(name), self.tensors[name].dtype
        if name not in self._merged:
            return cast(name, before, dtype)
        exact = self._merged[name]
        if torch.equal(before.to(exact.dtype), exact):
            return cast(name, before, dtype)
        result = cast(name, exact, dtype)
        self.changes.append(change_of(name, before.float(), exact, result))
        return result

    def _dtype(self, own: TensorInfo, wanted: torch.dtype | None) -> torch.dtype:
        return wanted if wanted is not None and own.dtype.is_floating_point else own.dtype


def _merged(model: PreTrainedModel, adapter: Adapter) -> dict[str, Tensor]:
    head = model.get_output_embeddings()
    is_tied = head is not None and head.weight is model.get_input_embeddings().weight
    names = (name for name, _ in model.named_modules())
    refuse_endless(adapter.config, names, adapter.directory)
    with read_by_peft(adapter.directory):
        wrapped = PeftModel.from_pretrained(model, str(adapter.directory))
        refuse_strangers(wrapped, adapter.directory)
        plain = wrapped.merge_and_unload()
    ends = (plain.get_output_embeddings(), plain.get_input_embeddings())
    if is_tied and not torch.equal(ends[0].weight, ends[1].weight):
        raise CheckpointError(
            "the adapter changes one end of a tied embedding, which is stored once",
            where=str(adapter.directory),
        )
    return dict(revert_weight_conversion(plain, plain.state_dict()))
