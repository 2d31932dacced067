"""FP8 in the format of compressed-tensors, which vLLM, SGLang and transformers read.

Weights have one scale for each output channel, activations one for each token, found while serving,
so no data is needed. Embedding and output matrix stay as they are.
"""

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainkit.checkpoint.weights.plain_files import read_config
from trainkit.checkpoint.weights.reader import TensorInfo, WeightsReader
from trainkit.checkpoint.weights.writer import write_tensors
from trainkit.errors import ModelError
from trainkit.export.certificate import TransformersServed, released
from trainkit.export.plain import (
    MAX_SHARD_BYTES,
    linear_layers,
    take_the_rest,
    weights_directory,
    write_plain,
)
from trainkit.export.source import Job, Source, Written
from trainkit.export.vllm import serve_command
from trainkit.infer.locate import ModelPaths
from trainkit.options import ModelOptions

COPIES = 2.6
FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max
_EIGHT_BITS = {"num_bits": 8, "type": "float", "symmetric": True, "group_size": None}
QUANTIZATION_CONFIG: Mapping[str, Any] = {
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {**_EIGHT_BITS, "strategy": "channel", "dynamic": False},
            "input_activations": {**_EIGHT_BITS, "strategy": "token", "dynamic": True},
            "output_activations": None,
        }
    },
    "quant_method": "compressed-tensors",
    "kv_cache_scheme": None,
    "format": "float-quantized",
    "quantization_status": "compressed",
    "global_compression_ratio": None,
}
"""What the format calls FP8_DYNAMIC; ``ignore`` is added."""


def check(paths: ModelPaths, job: Job) -> None:
    """Refuse a model whose layers this format does not hold one by one."""
    directory = weights_directory(paths)
    if paths.adapter is None and read_config(directory).get("quantization_config"):
        raise ModelError("it is stored quantised already", where=str(directory))
    if not linear_layers(paths.at(directory), "FP8")[0]:
        raise ModelError("it has no linear layers", where=str(directory))


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Round a weight to FP8.

    Returns:
        FP8 (out, in), and the scale (out, 1) in the weight's own dtype: weight ~ fp8 * scale.
    """
    scale = _scale(weight.float()).to(weight.dtype)  # first, so that values fit it as stored
    scaled = (weight.float() / scale.float()).clamp(-LARGEST, LARGEST)
    return scaled.to(FP8), scale


def _scale(rows: Tensor) -> Tensor:
    largest = rows.abs().amax(dim=-1, keepdim=True)
    return torch.where(largest == 0, torch.ones_like(largest), largest / LARGEST)


def write(source: Source, staging: Path, job: Job) -> Written:
    work = staging / "merged"
    write_plain(source, work, job)
    linears, kept = linear_layers(source.paths.at(work), "FP8")
    job.say(f"quantising {len(linears)} layers")
    with WeightsReader(work) as reader:
        missing = sorted(linears - reader.tensors.keys())
        if missing:
            raise ModelError(
                f"its files do not name {', '.join(missing[:3])} as transformers does",
                where=source.paths.model,
                fix="load it and save it with save_pretrained first",
            )
        _write_weights(reader, linears, staging)
    take_the_rest(work, staging, {**QUANTIZATION_CONFIG, "ignore": kept})
    job.say("asking the exported model")
    with released():
        certificate = job.certify(
            source,
            Fp8Served(source.paths.at(work), staging, linears),
            "vLLM itself was not run; its products in FP8 were followed in float32",
            is_quantized=True,
        )
    shutil.rmtree(work)
    return Written(certificate, serve_command(source, staging, job))


def _write_weights(reader: WeightsReader, linears: set[str], staging: Path) -> None:
    plan = []
    for name, info in reader.tensors.items():
        if name in linears:
            plan.append(TensorInfo(name, FP8, info.shape))
            plan.append(TensorInfo(_scale_of(name), info.dtype, (info.shape[0], 1)))
        else:
            plan.append(info)
    tensors = _quantized(reader, linears)
    write_tensors(staging, plan, tensors, max_shard_bytes=MAX_SHARD_BYTES)


def _quantized(reader: WeightsReader, linears: set[str]) -> Iterator[tuple[str, Tensor]]:
    for name in reader.tensors:
        if name in linears:
            yield from zip((name, _scale_of(name)), quantize(reader.load(name)), strict=True)
        else:
            yield name, reader.load(name)


def _scale_of(name: str) -> str:
    return f"{name.removesuffix('.weight')}.weight_scale"


class Fp8Served(TransformersServed):
    """The files as a server computes with them: both sides of each product rounded to FP8."""

    def __init__(self, work: ModelOptions, exported: Path, linears: set[str]) -> None:
        super().__init__(work)
        self.read_with += "; FP8 weights, activations rounded to FP8 token by token"
        modules = dict(self.model.named_modules())
        with WeightsReader(exported) as reader, torch.no_grad():
            for name in sorted(linears):
                module = modules[name.removesuffix(".weight")]
                weight = reader.load(name).float() * reader.load(_scale_of(name)).float()
                module.weight.copy_(weight)
                module.register_forward_pre_hook(_round_input)


def _round_input(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    value, scale = inputs[0], _scale(inputs[0])
    return ((value / scale).clamp(-LARGEST, LARGEST).to(FP8).to(value.dtype) * scale, *inputs[1:])
