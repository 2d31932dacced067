"""Compares a merged model with its base and adapter: logits and greedy continuations.

All three run in float32 with the weights as stored, so what is seen is the merge, not the
arithmetic of a dtype.
"""

import gc
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainkit.checkpoint.weights.adapter import (
    OWN_PART,
    is_of_text_alone,
    read_adapter_config,
    read_by_peft,
)
from trainkit.checkpoint.weights.export import TensorSource
from trainkit.checkpoint.weights.plain_files import read_config
from trainkit.errors import CheckpointError
from trainkit.patterns import refuse_endless

PROMPTS = (
    "The capital of France is",
    "Write one sentence about the sea.",
    "def add(a, b):",
    "1 2 3 4 5 6 7",
)
_NEW_TOKENS = 16
# In nats a token. Rounding merged weights to bfloat16 costs about 1e-4 on trained models.
_LARGEST_DIVERGENCE = 1e-2


@dataclass(frozen=True)
class PromptParity:
    """One prompt.

    Attributes:
        divergence: mean KL(adapter || merged) a token, nats.
        effect: mean KL(adapter || base) a token, nats: what the adapter does at all.
        other_divergence: the same as ``divergence`` for the base that was not chosen, where there
            are two (a 4-bit base unpacked, and the original).
    """

    prompt: str
    adapter: str
    merged: str
    max_logit_error: float
    divergence: float
    effect: float
    other_divergence: float | None = None


@dataclass(frozen=True)
class Parity:
    """The whole comparison."""

    prompts: tuple[PromptParity, ...]

    @property
    def divergence(self) -> float:
        """Mean over the prompts, nats a token."""
        return sum(prompt.divergence for prompt in self.prompts) / len(self.prompts)

    @property
    def effect(self) -> float:
        """Mean over the prompts, nats a token."""
        return sum(prompt.effect for prompt in self.prompts) / len(self.prompts)

    @property
    def other_divergence(self) -> float | None:
        """Mean over the prompts for the base that was not chosen; None where there is one base."""
        values = [p.other_divergence for p in self.prompts if p.other_divergence is not None]
        return sum(values) / len(values) if values else None

    @property
    def num_same(self) -> int:
        """Prompts whose greedy continuations agree."""
        return sum(prompt.adapter == prompt.merged for prompt in self.prompts)

    def check(self) -> None:
        """Refuse a merge that is far from the adapter, measured by what the adapter does."""
        if not self.divergence <= max(_LARGEST_DIVERGENCE, self.effect / 2):
            raise CheckpointError(
                f"the merged model is {self.divergence:.2e} nats a token from base and adapter, "
                f"while the adapter itself is {self.effect:.2e} from the base"
            )


def compare_with_adapter(
    base: Path,
    adapter: Path,
    merged: Path,
    *,
    packed_from: torch.dtype | None = None,
    packed: Collection[str] = (),
    through: Callable[[Tensor, torch.dtype], Tensor] | None = None,
    other: TensorSource | None = None,
    trusted: bool = False,
) -> Parity:
    """Run base with adapter, base alone, and the merged model on a few prompts.

    Args:
        base: model directory.
        adapter: adapter directory.
        merged: model directory with the tokenizer.
        packed_from: for a base that was trained in 4 or 8 bits: the dtype that it was packed from
            and is unpacked to.
        packed: then, the weights that were packed, where bitsandbytes cannot load them so: they
            are taken through it.
        through: takes a weight through it.
        other: the weights of the merge that was not chosen, to show its error too.
        trusted: run code that comes with the model.
    """
    from peft import PeftModel

    encoded = _encode(merged, trusted)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    of_text = is_of_text_alone(adapter)
    with _loaded(base, device, None if packed else packed_from, trusted, of_text) as plain:
        for name, parameter in plain.named_parameters():
            if packed_from is not None and through is not None and name in packed:
                parameter.data = through(parameter.data, packed_from).float()
        _match_vocabulary(plain, merged)
        names = (name for name, _ in plain.named_modules())
        refuse_endless(read_adapter_config(adapter, with_peft=True), names, adapter)
        with read_by_peft(adapter):
            model = PeftModel.from_pretrained(plain, str(adapter)).eval()
        refuse_strangers(model, adapter)
        sequences = [_continue(model, ids.to(device)) for ids in encoded.ids]
        theirs = [_logits(model, sequence) for sequence in sequences]
        with model.disable_adapter():
            alone = [_logits(model, sequence) for sequence in sequences]
        del model
    with _loaded(merged, device, None, trusted) as model:
        ours = [_logits(model, sequence) for sequence in sequences]
        continued = [_continue(model, ids.to(device)) for ids in encoded.ids]
        others = _logits_with(model, other, sequences) if other is not None else None
    return Parity(
        tuple(
            PromptParity(
                prompt=text,
                adapter=encoded.decode(sequences[i], len(encoded.ids[i][0])),
                merged=encoded.decode(continued[i], len(encoded.ids[i][0])),
                max_logit_error=(theirs[i] - ours[i]).abs().max().item(),
                divergence=_divergence(theirs[i], ours[i]),
                effect=_divergence(theirs[i], alone[i]),
                other_divergence=_divergence(theirs[i], others[i]) if others else None,
            )
            for i, text in enumerate(PROMPTS)
        )
    )


def refuse_strangers(wrapped: Any, adapter: Path) -> None:
    """Peft leaves out what finds no place, and says so in a warning at most."""
    from peft import get_peft_model_state_dict
    from peft.utils import load_peft_weights
    from peft.utils import transformers_weight_conversion as conversion

    weights = load_peft_weights(str(adapter), device="cpu")
    # Adapters of each expert by itself become one of the stack that transformers has.
    held = conversion.convert_peft_adapter_state_dict_for_transformers(
        wrapped, wrapped.peft_config["default"], weights
    )
    placed = get_peft_model_state_dict(wrapped, save_embedding_layers=False).keys()
    ours, theirs = ({each for each in names if OWN_PART.search(each)} for names in (held, placed))
    if strangers := sorted(ours ^ theirs):
        raise CheckpointError(
            f"the base and the adapter do not agree on {strangers[0]} ({len(strangers)} like this)",
            where=str(adapter),
            fix="take adapter_config.json and adapter_model.safetensors of the same adapter, "
            f"whole, over its base ({wrapped.peft_config['default'].base_model_name_or_path})",
        )


def _match_vocabulary(model: Any, merged: Path) -> None:
    """Resize the base as it was before training; the adapter brings the values."""
    vocab_size = read_config(merged).get("vocab_size")
    if vocab_size != model.config.get_text_config().vocab_size and vocab_size is not None:
        model.resize_token_embeddings(vocab_size, mean_resizing=False)


@dataclass(frozen=True)
class _Encoded:
    ids: list[Tensor]
    tokenizer: Any | None

    def decode(self, sequence: Tensor, start: int) -> str:
        new = sequence[0, start:].tolist()
        return str(new) if self.tokenizer is None else str(self.tokenizer.decode(new))


def _encode(directory: Path, trusted: bool) -> _Encoded:
    """Of texts; without a tokenizer next to the model, of fixed token ids."""
    if not (directory / "tokenizer_config.json").exists():
        return _Encoded([torch.arange(1, 9)[None] + 3 * i for i in range(len(PROMPTS))], None)
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=trusted)
    return _Encoded([tokenizer(text, return_tensors="pt").input_ids for text in PROMPTS], tokenizer)


@contextmanager
def _loaded(
    directory: Path,
    device: str,
    packed_from: torch.dtype | None,
    trusted: bool,
    alone: bool = False,
) -> Iterator[Any]:
    from transformers import BitsAndBytesConfig

    from trainkit.auto_class import whole_model

    packing = None
    if packed_from is not None:
        packing = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.float32,
        )
    model = whole_model(
        directory,
        trust_remote_code=trusted,
        alone=alone,
        dtype=packed_from or torch.float32,
        device_map=device,
        quantization_config=packing,
    )
    for parameter in model.parameters():
        if parameter.is_floating_point():  # packed weights are bytes
            parameter.data = parameter.data.float()
    try:
        yield model.eval()
    finally:
        del model
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


@torch.inference_mode()
def _logits(model: Any, sequence: Tensor) -> Tensor:
    return model(input_ids=sequence).logits[0].float().cpu()


@torch.no_grad()
def _logits_with(model: Any, weights: TensorSource, sequences: Sequence[Tensor]) -> list[Tensor]:
    parameters = dict(model.named_parameters())
    for name in weights.tensors:
        if name in parameters:
            parameters[name].copy_(weights.load(name))
    return [_logits(model, sequence) for sequence in sequences]


@torch.inference_mode()
def _continue(model: Any, ids: Tensor) -> Tensor:
    """Greedy, without cache or stop tokens: a few tokens need neither."""
    for _ in range(_NEW_TOKENS):
        best = model(input_ids=ids).logits[:, -1].argmax(-1, keepdim=True)
        ids = torch.cat((ids, best), dim=1)
    return ids


def _divergence(p: Tensor, q: Tensor) -> float:
    p, q = p.double().log_softmax(-1), q.double().log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1).mean().item()
