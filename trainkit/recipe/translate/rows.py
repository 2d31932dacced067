"""Rows that several tools share: names of the Hugging Face stack, and what they do here."""

import re
from collections.abc import Mapping
from typing import Any

from trainkit.recipe.translate.draft import Draft, Row, leave, part_of, rows_of, to, words

_NO_KEY = "trainkit has no such setting"
OWN_PLACE = "a run goes to train_model/NAME-STAMP and is never overwritten; --output-dir names it"


def dtype(draft: Draft, key: str, value: Any) -> None:
    """``bf16``, ``fp16`` and their like."""
    kinds = {"bf16": "bfloat16", "fp16": "float16", "bfloat16": "bfloat16", "float16": "float16"}
    if value in (False, "false", "no"):
        draft.seen.add(key)
        return
    draft.take(
        key,
        {"model.dtype": kinds[key]},
        "of the weights in memory; the optimizer keeps float32 copies of those that train",
    )


def torch_dtype(draft: Draft, key: str, value: Any) -> None:
    """``torch_dtype`` and ``dtype``: the name, with or without torch in front."""
    name = str(value).removeprefix("torch.")
    if name in ("bfloat16", "float16", "float32", "auto"):
        draft.take(key, {"model.dtype": name})
    else:
        draft.leave(key, "model.dtype is bfloat16, float16, float32 or auto")


def warmup_steps(draft: Draft, key: str, value: Any) -> None:
    """A number of steps; 0 leaves the choice to ``warmup_ratio``, as in transformers."""
    if float(value) == 0 and draft.get("warmup_ratio"):
        draft.seen.add(key)
    else:
        draft.take(key, {"training.warmup_steps": value})


def init_kwargs(draft: Draft, key: str, value: Any) -> None:
    """What ``from_pretrained`` is given."""
    known = {"dtype": "model.dtype", "torch_dtype": "model.dtype", "revision": "model.revision"}
    given = value if isinstance(value, dict) else {"": value}
    for name, each in given.items():
        if name in known:
            draft.take(f"{key}.{name}: {each}", {known[name]: str(each).removeprefix("torch.")})
        elif each not in (None, False):
            draft.leave(f"{key}.{name}: {each}", "the model is loaded as its files say")


def by_length(draft: Draft, key: str, value: Any) -> None:
    """Rows of about one length in a batch; packed rows all have one."""
    if not value or draft.get("packing") or draft.get("sample_packing"):
        draft.seen.add(key)
    else:
        draft.take(key, {"training.train_sampling_strategy": "group_by_length"})


def streaming(draft: Draft, key: str, value: Any) -> None:
    """Rows are read while training; in blocks that are shuffled."""
    size = draft.get("buffer_size") or draft.get("streaming_multipack_buffer_size")
    draft.take(key, {"data.streaming": int(size) if value and size else bool(value)})


def over_gpus(target: str) -> Row:
    """So many GPUs share a row or a product; 1 is what trainkit does, too."""

    def row(draft: Draft, key: str, value: Any) -> None:
        draft.take(key, {target: int(value)}) if int(value) > 1 else draft.seen.add(key)

    return row


def cut(choices: Mapping[str, str]) -> Row:
    """What becomes of rows that are too long."""

    def row(draft: Draft, key: str, value: Any) -> None:
        if value in choices:
            draft.take(key, {"data.truncation": choices[value]})
        else:
            draft.leave(key, "data.truncation is drop_turns, drop, error, right or left_turns")

    return row


def offloading(draft: Draft, key: str, value: Any) -> None:
    """Checkpointed activations in host memory; of adapters alone."""
    draft.take(key, {"lora.offload_activations": bool(value)})


def tracker(name: str) -> Row:
    """A switch of a tracker; other switches may be on as well."""

    def row(draft: Draft, key: str, value: Any) -> None:
        if not value:
            draft.seen.add(key)
            return
        others = [each for each in _trackers(draft) if each != name]
        draft.take(key, {"training.report_to": [*others, name] if others else name})

    return row


def warmup_ratio(draft: Draft, key: str, value: Any) -> None:
    """A share of all steps; ``warmup_steps`` wins over it, as in transformers."""
    if draft.get("warmup_steps"):
        draft.leave(key, "warmup_steps is set, too, and wins")
    else:
        draft.take(key, {"training.warmup_steps": value})


def deepspeed(draft: Draft, key: str, value: Any) -> None:
    """A DeepSpeed file: by its name, one of the presets."""
    if not isinstance(value, str):
        draft.leave(key, "write it into a file, and `deepspeed: FILE`")
        return
    stage = re.search(r"(?:zero|z|stage)_?([0-3])", value.rpartition("/")[2].lower())
    if stage is None:
        draft.take(key, {"parallel.shard": value})
        return
    shard = f"zero{stage[1]}" if stage[1] != "0" else "none"
    if "offload" in value.lower() and shard == "zero3":
        shard = "zero3_offload"
    draft.take(
        key,
        {"parallel.shard": shard},
        f"trainkit's own settings of that stage; `deepspeed: {value}` takes the file",
    )


def fsdp(draft: Draft, key: str, value: Any) -> None:
    """FSDP of either version is FSDP2 here."""
    if not value:
        draft.seen.add(key)
        return
    note = "FSDP2, a unit for each decoder layer" if key == "fsdp" else ""
    offloads = "offload" in str(value) or (draft.get("fsdp_config") or {}).get(
        "fsdp_offload_params"
    )
    if offloads:
        note = "FSDP2 without offload to host memory; zero3_offload has it"
    draft.take(key, {"parallel.shard": "fsdp2"}, note)


def checkpointing(draft: Draft, key: str, value: Any) -> None:
    """``true``, or a word for a way of offloading."""
    if isinstance(value, str) and value.lower() in ("false", "none", "no"):
        value = False
    is_word = isinstance(value, str) and value.lower() not in ("true",)
    note = "lora.offload_activations decides about host memory" if is_word else ""
    draft.take(key, {"training.gradient_checkpointing": bool(value)}, note)


def report_to(draft: Draft, key: str, value: Any) -> None:
    """Names of trackers."""
    names = words(value)
    if names == ["none"]:
        draft.seen.add(key)
        return
    names += [name for name in _trackers(draft) if name not in names]
    draft.take(key, {"training.report_to": names if len(names) > 1 else names[0]})


def _trackers(draft: Draft) -> list[str]:
    return words(draft.values.get("training.report_to", []))


def four_bit(draft: Draft, key: str, value: Any) -> None:
    """A 4-bit base is QLoRA."""
    if value in (False, 0):
        draft.seen.add(key)
    elif draft.get("adapter", "qlora") not in ("qlora", "lora"):
        draft.leave(key, "only a base under adapters is kept in 4 bits")
    else:
        draft.take(key, {"lora.quantize": "nf4"})


def eight_bit(draft: Draft, key: str, value: Any) -> None:
    """There is no int8 base."""
    if value in (False, 0):
        draft.seen.add(key)
    else:
        draft.leave(
            key,
            "the base stays in 16 bits and takes twice the memory; `lora: {quantize: fp8}` keeps "
            "it in 8 on a GPU with fp8, `nf4` in 4",
        )


def target_modules(draft: Draft, key: str, value: Any) -> None:
    """``all`` and a full list of linear layers are ``all-linear``; a text may be an expression."""
    if isinstance(value, str) and re.search(r"[\\\[\]()|*+?^$]", value):
        draft.take(key, {"lora.target_modules": value})
        return
    names = words(value)
    linear = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    if names in (["all"], ["all-linear"]) or set(names) == linear:
        draft.take(key, {"lora.target_modules": "all-linear"})
    else:
        draft.take(key, {"lora.target_modules": names})


def fp8(draft: Draft, key: str, value: Any) -> None:
    """Products in fp8 as weights train; of a frozen base, its layers."""
    if not value:
        draft.seen.add(key)
    elif "lora.r" in draft.values:
        draft.leave(key, "under adapters `lora: {quantize: fp8}` keeps the base in fp8")
    else:
        draft.take(
            key, {"model.fp8": True}, "as far as the loss bears it; `all` takes every product"
        )


def other_loss(*plain: str) -> Row:
    """A switch of another loss, or its name, unless that is one of the plain ones."""

    def row(draft: Draft, key: str, value: Any) -> None:
        if not value or value in plain:
            draft.seen.add(key)
        else:
            draft.leave(key, "it changes the loss: here the plain mean of token losses is trained")

    return row


def pairs(value: Any) -> Any:
    """``optim_args`` are text here, as in transformers."""
    if isinstance(value, dict):
        return ",".join(f"{name}={each}" for name, each in value.items())
    return value


def share_for_eval(draft: Draft, key: str, value: Any) -> None:
    """A part of the training data that is held out."""
    if not value:
        draft.seen.add(key)
    else:
        draft.take(key, {"data.eval": value if value < 1 else int(value)})


def kernels(draft: Draft, key: str, value: Any) -> None:
    """Somebody else's kernels."""
    if value:
        draft.take(key, {"kernels": True}, "trainkit's own, each checked against plain torch")
    else:
        draft.seen.add(key)


def remote_code(draft: Draft, key: str, value: Any) -> None:
    """Python code that comes with a model runs only where somebody asks for it here, too."""
    if value:
        draft.leave(
            key, "write `model: {trust_remote_code: true}` if the model needs its own Python code"
        )
    else:
        draft.seen.add(key)


def ignored_when_off(why: str = _NO_KEY) -> Row:
    """A switch that has to be off here."""

    def row(draft: Draft, key: str, value: Any) -> None:
        if value in (False, "none", "", [], {}, 0):
            draft.seen.add(key)
        else:
            draft.leave(key, why)

    return row


COMMON: Mapping[str, Row] = {
    **rows_of(
        {
            "model_name_or_path": "model.name_or_path",
            "model_revision": "model.revision",
            "lora_r": "lora.r",
            "lora_alpha": "lora.alpha",
            "lora_dropout": "lora.dropout",
            "use_rslora": "lora.use_rslora",
            "use_dora": "lora.use_dora",
            "loraplus_lr_ratio": "lora.lora_plus_ratio",
            "init_lora_weights": "lora.init_lora_weights",
            "lora_target_parameters": "lora.target_parameters",
            "target_parameters": "lora.target_parameters",
            "max_length": "data.max_length",
            "max_seq_length": "data.max_length",
            "packing": "data.packing",
            "dataset_num_proc": "data.num_workers",
            "preprocessing_num_workers": "data.num_workers",
        }
    ),
    "lora_target_modules": target_modules,
    "lora_target": target_modules,
    "target_modules": target_modules,
    "lora_modules_to_save": to("lora.modules_to_save", words),
    "modules_to_save": to("lora.modules_to_save", words),
    "bf16": dtype,
    "fp16": dtype,
    "bfloat16": dtype,
    "float16": dtype,
    "torch_dtype": torch_dtype,
    "dtype": torch_dtype,
    "warmup_ratio": warmup_ratio,
    "warmup_steps": warmup_steps,
    "model_init_kwargs": init_kwargs,
    "model_kwargs": init_kwargs,
    "streaming": streaming,
    "dataset_streaming": streaming,
    "buffer_size": part_of("streaming"),
    "activation_offloading": offloading,
    "sequence_parallel_degree": over_gpus("parallel.sequence"),
    "sequence_parallel_size": over_gpus("parallel.sequence"),
    "context_parallel_size": over_gpus("parallel.sequence"),
    "tensor_parallel_size": over_gpus("parallel.tensor"),
    "optim_args": to("training.optim_args", pairs),
    "use_swanlab": tracker("swanlab"),
    "use_tensorboard": tracker("tensorboard"),
    "use_mlflow": tracker("mlflow"),
    "use_wandb": tracker("wandb"),
    "default_system": leave("`data: {system_policy: TEXT}` gives all conversations one"),
    "deepspeed": deepspeed,
    "fsdp": fsdp,
    "fsdp_config": leave("FSDP2 is set up by trainkit: a unit for each decoder layer"),
    "gradient_checkpointing": checkpointing,
    "use_gradient_checkpointing": checkpointing,
    "report_to": report_to,
    "load_in_4bit": four_bit,
    "load_in_8bit": eight_bit,
    "attn_implementation": leave("the fastest that isolates packed samples is found by itself"),
    "trust_remote_code": remote_code,
    "output_dir": leave(OWN_PLACE),
    "overwrite_output_dir": leave("a run is never overwritten"),
    "resume_from_checkpoint": leave("`trainkit sft --resume RUN` continues a run"),
    "local_rank": leave("the launcher sets it"),
    "use_liger_kernel": kernels,
    "liger_kernel_config": leave("`kernels: {rms_norm: false}` and the like choose trainkit's own"),
    "use_kernels": kernels,
    "kernel_name": part_of("use_kernels"),
    "fp8": fp8,
    "fp8_backend": part_of("fp8"),
    "fp8_enable_fsdp_float8_all_gather": part_of("fp8"),
    "loss_type": other_loss("nll", "chunked_nll"),
    **dict.fromkeys(
        ("use_dft", "use_dft_loss", "use_eaft", "use_eaft_loss", "use_asft_loss"), other_loss()
    ),
    "evaluation_strategy": to("training.eval_strategy"),
    "group_by_length": by_length,
    "do_train": lambda draft, key, value: draft.seen.add(key),
    "do_eval": ignored_when_off("files in data.eval turn evaluation on"),
    "do_predict": ignored_when_off("a generation_eval section answers held-out conversations"),
    "hub_token": leave("log in with `hf auth login`"),
    "seed": to("training.seed"),
    "random_state": to("training.seed"),
}
"""A tool's own rows win over these."""
