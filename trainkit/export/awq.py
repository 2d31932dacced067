"""AWQ: weights in 4 bits, scales searched over the run's own conversations.

AutoRound searches the scales and packs; AutoAWQ ended in 2025, and llm-compressor pins its own
transformers. What it wrote is unpacked here by the published layout and asked what the trained
model was asked.
"""

import importlib.util
import logging
import shutil
import sys
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from trainkit.checkpoint.weights.export import CastWeights, write_weights
from trainkit.checkpoint.weights.reader import WeightsReader
from trainkit.data import DataOptions
from trainkit.data.prompt import PromptRenderer
from trainkit.errors import CheckpointError, DataError, ModelError
from trainkit.export.certificate import TransformersServed, answered, mean_divergence, released
from trainkit.export.conversations import trained_rows
from trainkit.export.plain import (
    MAX_SHARD_BYTES,
    LinearLayers,
    layers_to_quantize,
    linear_layers,
    take_the_rest,
    weights_directory,
    write_plain,
)
from trainkit.export.source import Job, Source, Written
from trainkit.export.vllm import serve_command
from trainkit.infer.locate import ModelPaths, training_options
from trainkit.models.loading import load_config, load_model, load_tokenizer
from trainkit.options import ModelOptions

COPIES = 5.0
"""Merged in the run's dtype, quantised with a float32 rest, and the result."""
BLOCK, NUM_BLOCKS = 512, 128
"""Tokens of a sequence that scales are searched on, and sequences at most, as AutoAWQ has it."""
_FEWEST_TOKENS = 256
_WORSE = 2.0
"""Scales that are folded wrongly make it far worse; those of few tokens, a little at most."""
_BITS, _PER_WORD = 4, 8
_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where in a 32-bit word each of eight neighbouring values is, counted in values of 4 bits."""
_PARTS = ("qweight", "qzeros", "scales")


def check(paths: ModelPaths, job: Job) -> None:
    """Refuse what the format does not hold, or what the search needs and is not there."""
    if importlib.util.find_spec("auto_round") is None:
        raise ModelError(
            "AutoRound, which searches the scales, is not installed",
            where="trainkit export awq",
            fix=(
                "pip install 'trainkit[awq]'"
                if sys.version_info >= (3, 11)
                else "AutoRound needs Python 3.11 or later: install trainkit[awq] with one"
            ),
        )
    config = load_config(paths.at(weights_directory(paths)))
    if config.get_text_config() is not config:
        raise ModelError(
            "a model with images or sound is not quantised here",
            where="trainkit export awq",
            fix="trainkit export vllm, and vllm serve --quantization fp8",
        )
    size = job.group_size
    for name, (rows, columns) in layers_to_quantize(paths, "AWQ").shapes.items():
        if columns % size or rows % _PER_WORD:
            fitting = [str(each) for each in (128, 64, 32) if columns % each == 0]
            raise ModelError(
                f"{name} is {rows} x {columns}: groups of {size} inputs and words of {_PER_WORD} "
                "outputs do not fill it",
                where="--group-size",
                fix=f"--group-size {fitting[0]}" if fitting else "trainkit export fp8",
            )


def write(source: Source, staging: Path, job: Job) -> Written:
    """Merge, search scales, pack, read back."""
    work, packed, size = staging / "merged", staging / "packed", job.group_size
    write_plain(source, work, job)
    sequences, notes = _sequences(source)
    job.say(f"searching scales over {sum(map(len, sequences))} tokens")
    plain = source.paths.at(work)
    with released():
        _quantize(plain, packed, sequences, size)
    layers = linear_layers(plain, "AWQ")
    (directory,) = (path.parent for path in packed.rglob("config.json"))
    with WeightsReader(directory) as reader:
        words = {f"{name.removesuffix('.weight')}.qweight" for name in layers.shapes}
        if missing := sorted(words - reader.tensors.keys()):
            raise ModelError(
                f"AutoRound left {', '.join(missing[:3])} unpacked",
                where="trainkit export awq",
                fix="trainkit export fp8, or gguf --type q4_k_m",
            )
        # The published form: what is not packed is in float16, as the kernels compute.
        half = CastWeights(reader, torch.float16)
        write_weights(half, staging, max_shard_bytes=MAX_SHARD_BYTES)
    settings = {
        "quant_method": "awq",
        "bits": _BITS,
        "group_size": size,
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": list(layers.kept) or None,
    }
    take_the_rest(work, staging, settings, dtype="float16")
    job.say("asking the exported model")
    with released():
        served = AwqServed(plain, staging)
        notes.append("vLLM itself was not run; its weights in 4 bits were unpacked to float32")
        certificate = job.certify(source, served, *notes, is_quantized=True)
        served.round_only(plain, layers, size)
        trained = [answer.logits for answer in source.reference.answers]
        rounded_only = mean_divergence(trained, answered(source.reference, served))
        del served
    searched = certificate["answers"]["divergence_nats"]
    certificate["answers"]["divergence_of_rounding_nats"] = rounded_only
    if searched > _WORSE * rounded_only:
        raise CheckpointError(
            f"with searched scales it is {searched:.2e} nats a token from the trained model, and "
            f"{rounded_only:.2e} when rounded without any: the scales do not fit this family",
            fix="trainkit export fp8, or gguf --type q4_k_m",
        )
    for folder in (work, packed):
        shutil.rmtree(folder)
    return Written(certificate, serve_command(source, staging, job))


def _sequences(source: Source) -> tuple[list[list[int]], list[str]]:
    """What scales are searched on, in sequences of one length, and what is to be said of it.

    Shorter sequences are passed over, so what is left at the end is left out.
    """
    tokens = list(islice(chain.from_iterable(_rows(source)), BLOCK * NUM_BLOCKS))
    notes = []
    if len(tokens) < _FEWEST_TOKENS:
        reference = source.reference
        for ids in (*(each.input_ids for each in reference.answers), *reference.prompt_ids):
            tokens += ids
        notes = ["scales were searched over the 20 prompts and their answers, not over data"]
    length = min(BLOCK, len(tokens))
    ends = range(length, len(tokens) + 1, length)
    return [tokens[end - length : end] for end in ends], notes


def _rows(source: Source) -> Iterator[list[int]]:
    """Token ids of the run's own rows with their answers."""
    tokenizer = load_tokenizer(source.paths.at(source.paths.tokenizer))
    renderer = PromptRenderer(tokenizer, DataOptions(**training_options(source.paths.run)))
    for row in trained_rows(source.paths.run):
        try:
            text = renderer.whole_text(row)
        except DataError:
            continue  # training dropped it, too
        yield list(tokenizer(text, add_special_tokens=source.template is None)["input_ids"])


def _quantize(
    plain: ModelOptions, packed: Path, sequences: Sequence[list[int]], group_size: int
) -> None:
    """Write ``packed``, in float32 where a tensor is not packed."""
    from auto_round import AutoRound
    from auto_round.algorithms.transforms.awq.config import AWQConfig

    logging.getLogger("autoround").setLevel(logging.ERROR)
    model = load_model(plain.replace(dtype="float32"), attention=None).eval()
    scheme = {"bits": _BITS, "group_size": group_size, "sym": False, "data_type": "int"}
    length = len(sequences[0])
    mask = torch.ones(length, dtype=torch.long)
    rows: Any = [{"input_ids": torch.tensor(ids), "attention_mask": mask} for ids in sequences]
    search = AutoRound(
        model,
        load_tokenizer(plain),
        scheme={**scheme, "act_bits": 16},
        alg_configs=[AWQConfig(awq_seqlen=length)],
        dataset=DataLoader(rows),
        seqlen=length,
        nsamples=len(sequences),
        batch_size=1,
        device_map=0 if torch.cuda.is_available() else "cpu",
        enable_torch_compile=False,
        amp=False,  # norms that took a scale keep all their digits
    )
    search.quantize_and_save(str(packed), format="auto_awq")


# -- reading back ---------------------------------------------------------------------------------


def unpack(words: Tensor) -> Tensor:
    """The values of packed words, by AutoAWQ's published layout.

    Args:
        words: int32 (rows, columns / 8).

    Returns:
        int32 (rows, columns), from 0 to 15.
    """
    shifts = torch.tensor(_PLACES, dtype=torch.int32, device=words.device) * _BITS
    values = (words[:, :, None] >> shifts) & (2**_BITS - 1)
    return values.reshape(words.shape[0], -1)


def dequantize(words: Tensor, zeros: Tensor, scales: Tensor) -> Tensor:
    """A weight in float32, (out, in).

    Args:
        words: int32 (in, out / 8).
        zeros: int32 (in / group, out / 8).
        scales: float16 (in / group, out).
    """
    group = words.shape[0] // scales.shape[0]
    zero = unpack(zeros).repeat_interleave(group, 0)
    scale = scales.float().repeat_interleave(group, 0)
    return ((unpack(words) - zero) * scale).t().contiguous()


def rounded(weight: Tensor, group_size: int) -> Tensor:
    """A weight (out, in) rounded to 16 evenly spaced values a group, zero among them."""
    groups = weight.reshape(weight.shape[0], -1, group_size)
    low, high = groups.amin(-1, keepdim=True).clamp(max=0), groups.amax(-1, keepdim=True)
    scale = ((high.clamp(min=0) - low) / (2**_BITS - 1)).clamp(min=1e-12)
    zero = (-low / scale).round()
    values = ((groups / scale).round() + zero).clamp(0, 2**_BITS - 1)
    return ((values - zero) * scale).reshape(weight.shape)


class AwqServed(TransformersServed):
    """The files as a server computes with them, in float32."""

    def __init__(self, plain: ModelOptions, exported: Path) -> None:
        """Load the plain model, and put all exported weights into it.

        Args:
            plain: the model before it was quantised.
            exported: the result.
        """
        super().__init__(plain)
        self.read_with += "; weights in 4 bits, unpacked"
        weights = self.model.state_dict()
        with WeightsReader(exported) as reader, torch.no_grad():
            for name in reader.tensors:
                stem, _, kind = name.rpartition(".")
                if kind == "qweight":
                    parts = (reader.load(f"{stem}.{part}") for part in _PARTS)
                    weights[f"{stem}.weight"].copy_(dequantize(*parts))
                elif kind not in _PARTS:
                    weights[name].copy_(reader.load(name))

    def round_only(self, plain: ModelOptions, layers: LinearLayers, group_size: int) -> None:
        """Hold the plain weights instead, rounded to 4 bits in groups without any search."""
        weights = self.model.state_dict()
        with WeightsReader(Path(plain.name_or_path)) as reader, torch.no_grad():
            for name in reader.tensors:
                value = reader.load(name).float()
                weights[name].copy_(rounded(value, group_size) if name in layers.shapes else value)
