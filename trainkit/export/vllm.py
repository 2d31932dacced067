"""For vLLM: one merged model, or base and adapter with the command that serves both.

vLLM is not run here. What it takes is in the rules below, from its own checks of an adapter; what
it would pass over in silence (a scale of its own for some modules, modules that it has no adapters
for) is an error here.
"""

import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from trainkit.auto_class import empty_model
from trainkit.checkpoint.weights.adapter import (
    PREFIX,
    Adapter,
    adapter_from_tensors,
    read_adapter,
    read_adapter_config,
    scaling_of,
)
from trainkit.checkpoint.weights.companions import copy_companions
from trainkit.checkpoint.weights.plain_files import plain_file, read_json, write_json
from trainkit.checkpoint.weights.reader import adapter_file
from trainkit.errors import ModelError
from trainkit.export.certificate import TransformersServed, released
from trainkit.export.plain import make_servable, weights_directory, write_plain
from trainkit.export.source import Job, Source, Written
from trainkit.infer.base import is_plain
from trainkit.infer.locate import ModelPaths
from trainkit.models.linears import expert_parameters
from trainkit.models.tokenizer import load_config
from trainkit.options import ModelOptions

COPIES = 2.1
RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""What ``--max-lora-rank`` takes."""
_MODULES = (
    "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj qkv_proj gate_up_proj dense "
    "dense_h_to_4h dense_4h_to_h query_key_value c_fc c_proj fc1 fc2"
)
_FAMILIES = (
    "llama mistral qwen2 qwen3 gemma gemma2 gemma3_text glm glm4 phi3 granite olmo2 smollm3 "
    "starcoder2 cohere"
)
_SEEING = "qwen2_vl qwen2_5_vl qwen3_vl gemma3 mistral3"
"""Types that see, whose classes in vLLM know adapters by the names that transformers gives."""
_EXPERTS = "qwen2_moe qwen3_moe"
"""Types whose experts vLLM has adapters for, one by one: it asserts all three of each expert."""
_FILES = ("adapter_config.json", "adapter_model.safetensors")
# Keys of adapter_config.json that vLLM refuses, or does not read and so passes over.
_UNSERVED: Mapping[str, str] = {
    "use_dora": "vLLM has no DoRA",
    "modules_to_save": "vLLM takes no modules that were trained in full",
    "rank_pattern": "vLLM scales every module by the one r",
    "alpha_pattern": "vLLM scales every module by the one lora_alpha",
    "lora_bias": "vLLM takes no biases of an adapter (and a merge only over the base's own)",
    "target_parameters": "vLLM has no adapters for such parameters",
    "trainable_token_indices": "vLLM passes trained token rows over",
    "fan_in_fan_out": "vLLM does not transpose adapters",
    "use_qalora": "vLLM has no QA-LoRA",
    "alora_invocation_tokens": "vLLM would apply it to all tokens",
}
_MERGED = "leave out --as-adapter: the merged model has all of it"


def check(paths: ModelPaths, job: Job) -> None:
    """Refuse an adapter of which vLLM would serve nothing, or only a part."""
    if not job.as_adapter:
        return
    if paths.adapter is None:
        raise ModelError(
            "there is no adapter in it", where=paths.model, fix="leave out --as-adapter"
        )
    base = weights_directory(paths)
    adapter = served_adapter(paths.adapter, paths.at(base))
    if job.dtype is not None:
        raise ModelError("it is of merged weights", where="--dtype", fix="leave it out")
    problems = list(unserved(adapter, load_config(paths.at(base)).model_type))
    if not is_plain(base):
        problems.append(f"it goes over plain weights, and {base} has none")
    if problems:
        raise ModelError(
            f"vLLM would not serve this adapter as it was trained: {'; '.join(problems)}",
            where=str(paths.adapter),
            fix=_MERGED,
        )


def unserved(adapter: Adapter, model_type: str) -> Iterator[str]:
    """Why vLLM would refuse an adapter, or serve less than all of it."""
    if adapter.config["peft_type"] != "LORA":
        yield f"peft_type: vLLM has no adapters of the kind {adapter.config['peft_type']}"
    for key, reason in _UNSERVED.items():
        if adapter.config.get(key):
            yield f"{key}: {reason}"
    if adapter.config.get("bias", "none") != "none":
        yield "bias: vLLM takes no biases of an adapter"
    if model_type not in (*_FAMILIES.split(), *_SEEING.split(), *_EXPERTS.split()):
        yield f"adapters over {model_type} models are not known to be served"
    is_text = model_type not in _SEEING.split()
    text = {name for name in adapter.modules if is_text or ".language_model." in name}
    if seeing := sorted(adapter.modules.keys() - text):
        yield (
            f"{len(seeing)} adapters are of what sees ({seeing[0]}), which vLLM passes over unless "
            "it runs with --enable-tower-connector-lora, an experiment of its own"
        )
    if leaves := {name.rpartition(".")[2] for name in text} - {*_MODULES.split()}:
        yield f"vLLM has no adapters for {', '.join(sorted(leaves))}"
    experts = [name.rpartition(".")[2] for name in adapter.modules if ".experts." in name]
    if experts and model_type not in _EXPERTS.split():
        yield "vLLM has no adapters for experts of this kind"
    elif len({experts.count(leaf) for leaf in ("gate_proj", "up_proj", "down_proj")}) > 1:
        yield "vLLM wants an adapter on gate, up and down of every expert"
    if adapter.replaced and not adapter.config.get("modules_to_save"):
        yield f"vLLM passes over {', '.join(sorted(adapter.replaced)[:3])}, saved in full"
    largest = max((part.down.shape[0] for part in adapter.modules.values()), default=0)
    if largest > RANKS[-1]:
        yield f"rank {largest}: vLLM takes at most {RANKS[-1]}"
    if not adapter.modules:
        yield "it holds no modules that vLLM knows"


def served_adapter(directory: Path, base: ModelOptions) -> Adapter:
    """The adapter as vLLM and SGLang read it: that of each expert under the name of its weight.

    peft keeps those of a layer's experts together, A expert by expert and B rank by rank.
    """
    config = read_adapter_config(directory, with_peft=True)
    if not config.get("target_parameters") or load_config(base).model_type not in _EXPERTS.split():
        return read_adapter(directory, with_peft=True)
    stacks = expert_parameters(empty_model(load_config(base), trust_remote_code=False))
    with adapter_file(directory) as file:
        tensors = {key: file.load(key) for key in file.tensors}
    split: set[str] = set()
    for key in list(tensors):
        name = key.partition(".lora_A.")[0].removeprefix(PREFIX).replace(".base_layer", "")
        sizes = {leaf: stacks.get(f"{name}.{leaf}") for leaf in ("gate_up_proj", "down_proj")}
        if None in sizes.values():
            continue
        up = tensors[key.replace(".lora_A.", ".lora_B.")]
        shape = up.shape[0], tensors[key].shape[1]
        leaf, stack = next(
            (leaf, w) for leaf, w in sizes.items() if w is not None and w.shape[1:] == shape
        )
        number, down = len(stack), tensors.pop(key)
        del tensors[key.replace(".lora_A.", ".lora_B.")]
        downs, ups = down.view(number, -1, shape[1]), up.view(shape[0], -1, number).permute(2, 0, 1)
        leaves = ("gate_proj", "up_proj") if leaf == "gate_up_proj" else (leaf,)
        owns, parts = ups.chunk(len(leaves), 1), [downs] * 2
        if _is_split(f"{name}.{leaf}", downs, owns, config, directory):
            split.add(leaf)
            parts = [*downs.chunk(2, 1)]
            owns = owns[0].chunk(2, 2)[0], owns[1].chunk(2, 2)[1]
        for part, down, own in zip(leaves, parts, owns, strict=False):
            for expert in range(number):
                at = f"{PREFIX}{name}.{expert}.{part}"
                tensors[f"{at}.lora_A.weight"] = down[expert].clone()
                tensors[f"{at}.lora_B.weight"] = own[expert].contiguous()
    for pattern in ("rank_pattern", "alpha_pattern"):  # each half has the rank of all others
        held = (config.get(pattern) or {}).items()
        config[pattern] = {at: each for at, each in held if not any(leaf in at for leaf in split)}
    modules = {key.partition(".lora_")[0].rpartition(".")[2] for key in tensors}
    config |= {"target_parameters": None, "target_modules": sorted(modules)}
    return adapter_from_tensors(directory, config, tensors)


def _is_split(
    name: str, downs: Tensor, ups: Sequence[Tensor], config: Mapping[str, Any], directory: Path
) -> bool:
    """Whether gate and up have adapters of their own, of the rank and the scale of all others."""
    wanted = config["r"]
    if len(ups) != 2 or downs.shape[1] != 2 * wanted:
        return False
    if bool(ups[0][:, :, wanted:].any() or ups[1][:, :, :wanted].any()):
        return False
    plain = {**config, "rank_pattern": {}, "alpha_pattern": {}}
    own = scaling_of(name, 2 * wanted, config, directory)
    return math.isclose(own, scaling_of(name, wanted, plain, directory))


def write(source: Source, staging: Path, job: Job) -> Written:
    """Write the merged model, or the adapter with tokenizer and template."""
    if job.as_adapter:
        return _write_adapter(source, staging, job)
    work = staging / "merged"
    write_plain(source, work, job)
    for path in sorted(work.iterdir()):
        path.rename(staging / path.name)
    work.rmdir()
    job.say("asking the exported model")
    with released():
        certificate = job.certify(
            source,
            TransformersServed(source.paths.at(staging)),
            "vLLM itself was not run; transformers read its directory",
            is_quantized=source.quantize is not None,
        )
    return Written(certificate, serve_command(source, staging, job))


def serve_command(source: Source, staging: Path, job: Job) -> str:
    """The command that serves a whole model, also written to ``serve.sh``."""
    command = f"vllm serve {_quoted(job.out)} --served-model-name {shlex.quote(job.name)}"
    return _written_command(source, staging, command)


def _written_command(source: Source, staging: Path, command: str) -> str:
    if source.paths.source.trust_remote_code:
        command += " --trust-remote-code"
    (staging / "serve.sh").write_text(f"#!/bin/sh\nexec {command}\n", encoding="utf-8")
    return command


def _write_adapter(source: Source, staging: Path, job: Job) -> Written:
    adapter, base = source.paths.adapter, weights_directory(source.paths)
    assert adapter is not None
    for name in _FILES:
        (staging / name).write_bytes(plain_file(adapter, name).read_bytes())
    certified, found = staging, served_adapter(adapter, source.paths.at(base))
    if read_json(staging / _FILES[0]).get("target_parameters"):
        certified = adapter  # peft itself keeps experts together
        write_json(staging / _FILES[0], found.config)
        parts = [("lora_A", lambda one: one.down), ("lora_B", lambda one: one.up)]
        tensors = {
            f"{PREFIX}{name}.{part}.weight": of(one)
            for name, one in found.modules.items()
            for part, of in parts
        }
        save_file(tensors, staging / _FILES[1], metadata={"format": "pt"})
    trusted = source.paths.source.trust_remote_code
    copy_companions((Path(source.paths.tokenizer), base), staging, with_code=trusted)
    make_servable(staging, source)
    job.say("asking base and adapter as they will be served")
    notes = ["vLLM itself was not run; transformers and peft read base and adapter"]
    if certified is not staging:
        notes.append("experts' adapters were asked as peft keeps them together, and written apart")
    if source.quantize is not None:
        notes.append("trained over a quantised base; served over the base named in the command")
    at = source.paths.at
    with released():
        served = TransformersServed(at(certified), base=at(base))
        certificate = job.certify(source, served, *notes, is_quantized=source.quantize is not None)
        del served
    config = read_json(staging / _FILES[0])
    rank = next(rank for rank in RANKS if rank >= int(config["r"]))
    words = [
        f"vllm serve {_quoted(base)} --enable-lora --max-lora-rank {rank}",
        f"--lora-modules {shlex.quote(f'{job.name}={job.out.absolute()}')}",
        f"--tokenizer {_quoted(job.out)} --generation-config {_quoted(job.out)}",
    ]
    if source.template is not None and not source.named_templates:  # it would be taken for all
        words.append(f"--chat-template {_quoted(job.out / 'chat_template.jinja')}")
    command = _written_command(source, staging, " ".join(words))
    how = f"ask for the model {job.name!r}"
    reminder = f"{how}: requests for {base} are answered without the adapter"
    return Written(certificate, command, (reminder,))


def _quoted(path: Path) -> str:
    return shlex.quote(str(path.absolute()))
