"""The trained model as one plain directory: an adapter merged, weights copied, nothing to run."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from trainkit.auto_class import empty_model
from trainkit.checkpoint.merge.merge import MergeOptions, merge_adapter, needs_the_model, own_base
from trainkit.checkpoint.merge.merged_weights import MergedWeights
from trainkit.checkpoint.weights.adapter import read_adapter
from trainkit.checkpoint.weights.companions import copy_companions
from trainkit.checkpoint.weights.export import CastWeights, dtype_named, write_config, write_weights
from trainkit.checkpoint.weights.plain_files import (
    is_plain_name,
    read_config,
    read_object,
    write_json,
)
from trainkit.checkpoint.weights.reader import WeightsReader
from trainkit.checkpoint.weights.writer import INDEX_NAME
from trainkit.checkpoint.whole.manifest import MANIFEST_NAME
from trainkit.errors import ModelError
from trainkit.export.source import Job, Source
from trainkit.infer.locate import ModelPaths, base_directory
from trainkit.models.tokenizer import load_config
from trainkit.options import ModelOptions
from trainkit.places import NAMED_TEMPLATES

MAX_SHARD_BYTES = 5 * 10**9


def stored_bytes(paths: ModelPaths) -> int:
    """Bytes of the weights as they are on the disk; only headers are read."""
    with WeightsReader(weights_directory(paths)) as reader:
        return sum(info.num_bytes for info in reader.tensors.values())


def weights_directory(paths: ModelPaths) -> Path:
    if paths.adapter is not None:
        return base_directory(paths.source)
    directory = Path(paths.model).expanduser()
    if not directory.is_dir():
        raise ModelError(
            "only a model in a directory can be exported",
            where=paths.model,
            fix="serve this file as it is: vllm serve, llama-server -m, or an Ollama Modelfile"
            if directory.is_file()
            else "fetch it first: hf download",
        )
    return directory


def refuse_unmergeable(paths: ModelPaths) -> None:
    """Hold an adapter against its base's files, before anything is loaded."""
    if paths.adapter is None:
        return
    adapter, directory = read_adapter(paths.adapter, with_peft=True), weights_directory(paths)
    with WeightsReader(directory) as reader:
        if not needs_the_model(adapter, reader.tensors):
            MergedWeights(reader, adapter, read_config(directory))


def write_plain(source: Source, target: Path, job: Job) -> None:
    """Write a directory, which must not exist, that ``from_pretrained`` and servers load."""
    adapter, dtype = source.paths.adapter, job.dtype
    directory = weights_directory(source.paths)
    if adapter is not None:
        options = MergeOptions(
            quantize=source.quantize,
            lora=source.lora,
            compute_dtype=source.compute_dtype,
            base=own_base(source.quantize),
            dtype=dtype,
            max_shard_bytes=MAX_SHARD_BYTES,
            verify=False,  # the certificate asks more
            any_base=job.any_base,
            trust_remote_code=source.paths.source.trust_remote_code,
        )
        taken = read_adapter(adapter, with_peft=True)
        merge_adapter(taken, directory, target, options, job.say, stored=source.paths.stored)
        (target / MANIFEST_NAME).unlink()  # the export writes one over all
    else:
        target.mkdir()
        with WeightsReader(directory) as reader:
            cast = CastWeights(reader, dtype_named(dtype))
            write_weights(cast, target, max_shard_bytes=MAX_SHARD_BYTES)
        write_config(target, read_config(directory), dtype)
        copy_companions(
            (Path(source.paths.tokenizer), directory),
            target,
            with_code=source.paths.source.trust_remote_code,
        )
    make_servable(target, source)


def make_servable(directory: Path, source: Source) -> None:
    """Put the trained template and stop tokens into a directory, and take out what names code.

    Code that was allowed stays: without it nothing could read the weights.
    """
    for name in ("config.json", "tokenizer_config.json"):
        if (directory / name).exists():
            settings = read_object(directory, name)
            if not source.paths.source.trust_remote_code:
                settings.pop("auto_map", None)
            settings.pop("chat_template", None)  # the file next to it counts
            write_json(directory / name, settings)
    if source.template is not None:
        (directory / "chat_template.jinja").write_text(source.template, encoding="utf-8")
    for name, text in source.named_templates.items():
        if not is_plain_name(name):
            raise ModelError(f"the chat template {name!r} has no plain name", where=str(directory))
        (directory / NAMED_TEMPLATES).mkdir(exist_ok=True)
        (directory / NAMED_TEMPLATES / f"{name}.jinja").write_text(text, encoding="utf-8")
    path = directory / "generation_config.json"
    settings = read_object(directory, path.name) if path.exists() else {}
    settings["eos_token_id"] = list(source.stop_ids)
    write_json(path, settings)


def take_the_rest(work: Path, staging: Path, quantization: Mapping[str, Any]) -> None:
    """All of a plain directory but its weights, with how they are quantised now."""
    for path in sorted(work.iterdir()):
        if path.is_dir():
            shutil.copytree(path, staging / path.name)
        elif path.suffix != ".safetensors" and path.name != INDEX_NAME:
            shutil.copyfile(path, staging / path.name)
    config = {**read_config(work), "quantization_config": dict(quantization)}
    write_json(staging / "config.json", config)


def linear_layers(source: ModelOptions, kind: str) -> tuple[set[str], list[str]]:
    """The names of the linear layers' weights, and the output layer's, which stays as it is."""
    model = empty_model(load_config(source), trust_remote_code=source.trust_remote_code)
    if any(parameter.dim() == 3 for parameter in model.parameters()):
        raise ModelError(
            f"experts cannot be exported to {kind} here",
            where=source.name_or_path,
            fix="trainkit export vllm, and vllm serve --quantization fp8; or llm-compressor",
        )
    head = model.get_output_embeddings()
    names = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    kept = [name for name, module in names.items() if module is head]
    return {f"{name}.weight" for name in names if name not in kept}, kept
