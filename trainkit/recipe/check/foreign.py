"""Names that other tools, older transformers and trainkit's own command line use for our keys.

Somebody who brings a recipe from elsewhere sees what each of its keys is called here. Every
target is a key of the schema, or None where there is nothing to set; a test holds the table to it.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class ForeignName:
    """What a key of another tool is here.

    Attributes:
        owner: the tools that use the name.
        target: our dotted key, or None.
        note: how to say it here, where copying the value is not enough.
    """

    owner: str
    target: str | None
    note: str | None = None


_LF = "LLaMA-Factory's"
_AX = "axolotl's"
_TRL = "TRL's"
_SWIFT = "ms-swift's"
_TUNE = "torchtune's"
_UNSLOTH = "Unsloth's"
_DS = "DeepSpeed's"
_PEFT = "peft's"

_LORA_ON = "a `lora:` section turns adapters on; without one, all weights are trained"
_NF4 = "4-bit loading is `lora: {quantize: nf4}`"
_KERNELS = "`kernels: true` switches trainkit's kernels on"
_OWN_TEMPLATE = "the tokenizer's own chat template is used, or data.chat_template"
_EARLY_STOP = "`early_stopping: {patience: N}` counts evaluations that bring nothing"
_FROZEN = "`frozen: ['*', '!last-8']` under model trains the last eight layers alone"

FOREIGN: Mapping[str, ForeignName] = {
    # model
    "model_name_or_path": ForeignName(f"{_LF} and {_TRL}", "model.name_or_path"),
    "base_model": ForeignName(_AX, "model.name_or_path"),
    "model_name": ForeignName(_UNSLOTH, "model.name_or_path"),
    "model_path": ForeignName("mdy_triton's", "model.name_or_path"),
    "torch_dtype": ForeignName("the old transformers", "model.dtype"),
    "model_revision": ForeignName(_TRL, "model.revision"),
    "attn_impl": ForeignName(_SWIFT, "model.attn_implementation"),
    "flash_attn": ForeignName(_LF, "model.attn_implementation", "auto picks the fastest"),
    "flash_attention": ForeignName(_AX, "model.attn_implementation", "auto picks the fastest"),
    "sdp_attention": ForeignName(_AX, "model.attn_implementation", "auto picks the fastest"),
    # data
    "cutoff_len": ForeignName(_LF, "data.max_length"),
    "sequence_len": ForeignName(_AX, "data.max_length"),
    "max_seq_length": ForeignName(f"{_UNSLOTH} and the old TRL's", "data.max_length"),
    "max_seq_len": ForeignName(f"{_TUNE} and mdy_triton's", "data.max_length"),
    "model_max_length": ForeignName("FastChat's", "data.max_length"),
    "sample_packing": ForeignName(_AX, "data.packing"),
    "neat_packing": ForeignName(_LF, "data.packing"),
    "packed": ForeignName(_TUNE, "data.packing"),
    "dataset": ForeignName(f"{_LF} and {_SWIFT}", "data.train", "give a list of files"),
    "datasets": ForeignName(_AX, "data.train", "give a list of files"),
    "dataset_name": ForeignName(_TRL, "data.train", "give a list of files"),
    "data_path": ForeignName("FastChat's", "data.train", "give a list of files"),
    "data_paths": ForeignName("mdy_triton's", "data.train", "give a list of files"),
    "train_file": ForeignName("the old transformers examples'", "data.train"),
    "dataset_dir": ForeignName(_LF, "data.train", "give full paths"),
    "eval_dataset": ForeignName(_LF, "data.eval", "give a list of files"),
    "val_dataset": ForeignName(_SWIFT, "data.eval", "give a list of files"),
    "test_datasets": ForeignName(_AX, "data.eval", "give a list of files"),
    "val_size": ForeignName(_LF, "data.eval"),
    "val_set_size": ForeignName(_AX, "data.eval"),
    "train_on_prompt": ForeignName(_LF, "data.mask", "`mask: none` trains every token"),
    "train_on_inputs": ForeignName(_AX, "data.mask", "`mask: none` trains every token"),
    "train_on_input": ForeignName(_TUNE, "data.mask", "`mask: none` trains every token"),
    "mask_history": ForeignName(_LF, "data.mask", "`mask: last_assistant` trains the last turn"),
    "assistant_only_loss": ForeignName(_TRL, "data.mask", "`mask: assistant` is the default"),
    "completion_only_loss": ForeignName(_TRL, "data.mask", "`mask: last_assistant` does it"),
    "train_on_responses_only": ForeignName(_UNSLOTH, "data.mask", "`mask: assistant` does it"),
    "roles_to_train": ForeignName(_AX, "data.mask", "`mask: assistant` trains assistant turns"),
    "pretrain": ForeignName("the command line's", "data.mask", "`mask: none` is pretraining"),
    "preprocessing_num_workers": ForeignName(_LF, "data.num_workers"),
    "dataset_num_proc": ForeignName(_TRL, "data.num_workers"),
    "dataset_processes": ForeignName(_AX, "data.num_workers"),
    "tokenized_path": ForeignName(_LF, "data.cache_dir"),
    "dataset_prepared_path": ForeignName(_AX, "data.cache_dir"),
    "max_samples": ForeignName(_LF, "data.train", "write `- {path: FILE, max_samples: N}`"),
    "truncation_side": ForeignName("the tokenizer's", "data.truncation"),
    "truncation_mode": ForeignName(_TRL, "data.truncation"),
    "truncation_strategy": ForeignName(_SWIFT, "data.truncation"),
    "template": ForeignName(_LF, None, _OWN_TEMPLATE),
    "pad_to_sequence_len": ForeignName(_AX, None, "packed batches are padded to one length"),
    # lora
    "lora_rank": ForeignName(f"{_LF} and {_SWIFT}", "lora.r"),
    "lora_r": ForeignName(f"{_AX} and {_TRL}", "lora.r"),
    "rank": ForeignName(_TUNE, "lora.r"),
    "lora_alpha": ForeignName(f"{_LF}, {_AX}, {_TRL} and {_PEFT}", "lora.alpha"),
    "lora_dropout": ForeignName(f"{_LF}, {_AX}, {_TRL} and {_PEFT}", "lora.dropout"),
    "lora_target": ForeignName(
        _LF, "lora.target_modules", "give a list of names; its `all` is `all-linear`, the default"
    ),
    "lora_target_modules": ForeignName(f"{_AX} and {_TRL}", "lora.target_modules"),
    "lora_target_linear": ForeignName(_AX, "lora.target_modules", "`all-linear` is the default"),
    "lora_modules_to_save": ForeignName(_AX, "lora.modules_to_save"),
    "additional_target": ForeignName(_LF, "lora.modules_to_save"),
    "peft_use_dora": ForeignName(_AX, "lora.use_dora"),
    "peft_use_rslora": ForeignName(_AX, "lora.use_rslora"),
    "loraplus_lr_ratio": ForeignName(f"{_LF} and {_AX}", "lora.lora_plus_ratio"),
    "finetuning_type": ForeignName(_LF, "lora", _LORA_ON),
    "adapter": ForeignName(_AX, "lora", _LORA_ON),
    "tuner_type": ForeignName(_SWIFT, "lora", _LORA_ON),
    "train_type": ForeignName(f"the old {_SWIFT}", "lora", _LORA_ON),
    "use_peft": ForeignName(_TRL, "lora", _LORA_ON),
    "load_in_4bit": ForeignName(f"{_AX}, {_TRL} and {_UNSLOTH}", "lora.quantize", _NF4),
    "quantization_bit": ForeignName(_LF, "lora.quantize", _NF4),
    "quant_bits": ForeignName(_SWIFT, "lora.quantize", _NF4),
    # kernels
    "use_liger_kernel": ForeignName("transformers'", "kernels", _KERNELS),
    "enable_liger_kernel": ForeignName(_LF, "kernels", _KERNELS),
    "use_unsloth": ForeignName(_LF, "kernels", _KERNELS),
    "replace_kernel": ForeignName("the command line's", "kernels", _KERNELS),
    # training
    "micro_batch_size": ForeignName(
        f"{_AX} and mdy_triton's", "training.per_device_train_batch_size"
    ),
    "batch_size": ForeignName(_TUNE, "training.per_device_train_batch_size"),
    "train_micro_batch_size_per_gpu": ForeignName(_DS, "training.per_device_train_batch_size"),
    "eval_batch_size": ForeignName(_AX, "training.per_device_eval_batch_size"),
    "train_batch_size": ForeignName(_DS, "global_batch_size"),
    "num_epochs": ForeignName(_AX, "training.num_train_epochs"),
    "epochs": ForeignName(_TUNE, "training.num_train_epochs"),
    "lr": ForeignName("torch's", "training.learning_rate"),
    "optimizer": ForeignName(_AX, "training.optim"),
    "lr_scheduler": ForeignName(_AX, "training.lr_scheduler_type"),
    "gradient_clipping": ForeignName(_DS, "training.max_grad_norm"),
    "num_warmup_steps": ForeignName("transformers' schedulers'", "training.warmup_steps"),
    "disable_gradient_checkpointing": ForeignName(
        _LF, "training.gradient_checkpointing", "`gradient_checkpointing: true` turns it on"
    ),
    "enable_activation_checkpointing": ForeignName(_TUNE, "training.gradient_checkpointing"),
    "use_gradient_checkpointing": ForeignName(_UNSLOTH, "training.gradient_checkpointing"),
    "pure_bf16": ForeignName(_LF, "model.dtype", "`dtype: bfloat16` is the default"),
    "evals_per_epoch": ForeignName(
        _AX, "training.eval_strategy", "write `eval_strategy: epoch`, or `steps` with eval_steps"
    ),
    "saves_per_epoch": ForeignName(
        _AX, "training.save_strategy", "write `save_strategy: epoch`, or `steps` with save_steps"
    ),
    "early_stopping_patience": ForeignName(_AX, "early_stopping.patience", _EARLY_STOP),
    "early_stopping_steps": ForeignName(_LF, "early_stopping.patience", _EARLY_STOP),
    "unfrozen_parameters": ForeignName(_AX, "model.frozen", _FROZEN),
    "freeze_trainable_layers": ForeignName(_LF, "model.frozen", _FROZEN),
    "freeze_trainable_modules": ForeignName(_LF, "model.frozen", _FROZEN),
    "tokens": ForeignName(_AX, "model.add_tokens"),
    "special_tokens": ForeignName(
        _AX, None, "the tokenizer's own bos, eos and pad are used; model.add_special_tokens adds"
    ),
    "new_special_tokens": ForeignName(_LF, "model.add_special_tokens", "give a list"),
    "resize_vocab": ForeignName(_LF, None, "model.add_tokens resizes what it has to"),
    "rl": ForeignName(_AX, None, "trainkit does supervised fine-tuning and pretraining"),
    "plot_loss": ForeignName(_LF, None, "the curves are always drawn"),
    "wandb_project": ForeignName(_AX, None, "set WANDB_PROJECT and `report_to: wandb`"),
    "stage": ForeignName(_LF, None, "trainkit does supervised fine-tuning and pretraining"),
    "adapter_name_or_path": ForeignName(_LF, None, "continue a run with `trainkit sft --resume`"),
}

REMOVED: Mapping[str, str] = {
    "warmup_ratio": "write warmup_steps: {value}; below 1 it is a share of all steps",
    "logging_dir": "remove it: logs are in the run directory; TENSORBOARD_LOGGING_DIR moves "
    "tensorboard's",
    "overwrite_output_dir": "remove it: trainkit never overwrites a run; give a new output_dir",
    "group_by_length": "write train_sampling_strategy: group_by_length, or `packing: true` in data",
    "evaluation_strategy": "write eval_strategy: {value}",
    "no_cuda": "write use_cpu: {value}",
    "save_safetensors": "remove it: checkpoints are always safetensors",
    "per_gpu_train_batch_size": "write per_device_train_batch_size: {value}",
    "per_gpu_eval_batch_size": "write per_device_eval_batch_size: {value}",
    "push_to_hub_model_id": "write hub_model_id: {value}",
    "push_to_hub_organization": "write hub_model_id: ORGANIZATION/NAME",
    "push_to_hub_token": "log in with `hf auth login`",
    "adafactor": "write optim: adafactor",
    "include_inputs_for_metrics": "remove it: evaluation measures the loss alone",
    "include_tokens_per_second": "remove it: metrics.jsonl always has tokens_per_second",
    "dispatch_batches": "remove it: each process reads its own rows",
    "split_batches": "remove it: per_device_train_batch_size is of one process; "
    "global_batch_size counts the rows of all",
    "torchdynamo": "write torch_compile_backend: {value}",
    "xpu_backend": "write ddp_backend: {value}",
    "tpu_metrics_debug": "remove it: trainkit does not train on TPUs",
    "fsdp_min_num_params": "write `parallel: {{shard: fsdp2}}` at the left margin",
    "fsdp_transformer_layer_cls_to_wrap": "write `parallel: {{shard: fsdp2}}` at the left margin",
    "half_precision_backend": "remove it: autocast is the only one",
    "fp16_backend": "remove it: autocast is the only one",
    "fp16_opt_level": "remove it: apex is gone",
    "use_mps_device": "remove it: the device is found by itself",
    "use_ipex": "remove it",
    "jit_mode_eval": "remove it; torch_compile is its successor",
    "ray_scope": "remove it: it belongs to hyper-parameter search",
    "tpu_num_cores": "remove it",
    "past_index": "remove it",
    "mp_parameters": "remove it",
}
"""Fields that TrainingArguments once had; ``{value}`` stands for what was given."""

REFUSED: Mapping[str, str] = {
    "deepspeed": "write `deepspeed: {value}` at the left margin, not under training",
    "fsdp": "write `parallel: {{shard: fsdp2}}` at the left margin: that shards the weights here",
    "fsdp_config": "write `parallel: {{shard: fsdp2}}` at the left margin, without more",
    "resume_from_checkpoint": "give --resume on the command line",
    "local_rank": "remove it: the launcher sets it for each process",
    "do_train": "remove it: `trainkit sft` trains",
    "do_eval": "remove it: files in data.eval turn evaluation on",
    "do_predict": "remove it: a generation_eval section answers held-out conversations",
}
"""Fields of TrainingArguments that are set another way here."""
