"""Merged weights where an adapter's parts are not those of the files: peft merges the whole model.

Experts are stored one by one and adapted as one parameter; models that also take images are stored
under other names than their modules have. transformers knows the way there and back, so the base is
loaded (in float32: each update is rounded once, into the result's dtype), merged, and named as its
files name it.
"""

from collections.abc import Collection, Mapping

import torch
from peft import PeftModel, get_peft_model_state_dict
from peft.utils.save_and_load import load_peft_weights
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from trainkit.checkpoint.merge.merged_weights import ModuleChange, Packing, change_of, through_nf4
from trainkit.checkpoint.weights.adapter import Adapter, vocabulary_rows
from trainkit.checkpoint.weights.export import TensorSource, cast
from trainkit.checkpoint.weights.reader import TensorInfo
from trainkit.errors import CheckpointError
from trainkit.patterns import refuse_endless


def needs_the_model(adapter: Adapter, names: Collection[str]) -> bool:
    """Whether an adapter changes weights that the base's files do not hold under those names.

    Args:
        adapter: as ``read_adapter`` read it.
        names: of the tensors in the base's files.
    """
    if adapter.config.get("target_parameters"):
        return True
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

        Raises:
            CheckpointError: the adapter belongs to another model, or treats the two ends of a tied
                embedding differently.
        """
        self._files, self._adapter = files, adapter
        rows = vocabulary_rows(adapter.directory)
        if rows not in (None, model.get_input_embeddings().weight.shape[0]):
            model.resize_token_embeddings(rows, mean_resizing=False)  # as before training
        if packing is not None and packing.base == "dequantized":
            for name, parameter in model.named_parameters():
                if name in packing.names:
                    parameter.data = through_nf4(parameter.data, packing.compute_dtype).float()
        self._merged = _merged(model, adapter)
        self.vocab_size = int(model.get_input_embeddings().weight.shape[0])
        if lost := sorted(files.tensors.keys() - self._merged.keys() - {"lm_head.weight"}):
            raise CheckpointError(
                f"transformers loads no {lost[0]} and cannot write it back",
                where=model.name_or_path,
            )
        self.changes: list[ModuleChange] = []
        self.tensors: Mapping[str, TensorInfo] = {
            name: TensorInfo(name, self._dtype(info, dtype), tuple(self._merged[name].shape))
            for name, info in files.tensors.items()
            if name in self._merged
        }

    def load(self, name: str) -> Tensor:
        """One tensor, rounded once."""
        before, exact = self._files.load(name), self._merged[name]
        dtype = self.tensors[name].dtype
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
    try:
        wrapped = PeftModel.from_pretrained(model, str(adapter.directory))
        _refuse_strangers(wrapped, adapter)
        plain = wrapped.merge_and_unload()
    except (RuntimeError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"peft cannot put the adapter over this base: {str(error).partition(chr(10))[0]}",
            where=str(adapter.directory),
            fix="the adapter belongs to another model",
        ) from error
    ends = (plain.get_output_embeddings(), plain.get_input_embeddings())
    if is_tied and not torch.equal(ends[0].weight, ends[1].weight):
        raise CheckpointError(
            "the adapter changes one end of a tied embedding, which is stored once",
            where=str(adapter.directory),
        )
    return dict(revert_weight_conversion(plain, plain.state_dict()))


def _refuse_strangers(wrapped: PeftModel, adapter: Adapter) -> None:
    """Peft leaves out what finds no place, and says so in a warning at most."""
    held = load_peft_weights(str(adapter.directory), device="cpu").keys()
    placed = get_peft_model_state_dict(wrapped, save_embedding_layers=False).keys()
    wanted = {name for name in held if "lora_" in name}
    if strangers := sorted(wanted ^ {name for name in placed if "lora_" in name}):
        raise CheckpointError(
            f"the base and the adapter do not agree on {strangers[0]} ({len(strangers)} like this)",
            where=str(adapter.directory),
            fix=f"the adapter names {adapter.base_name!r} as its base",
        )
