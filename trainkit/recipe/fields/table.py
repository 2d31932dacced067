"""THE TABLE of TrainingArguments: what each field does here, one row a field.

A field acts (a row of ``ACTS``), has one value here (a row of ``FIXED``, with the reason), or is
set another way (a row of ``foreign.REFUSED``, with the way). A test holds the three together
against the fields of every transformers that is supported, so a new field needs a row; until it
has one, a recipe that sets it is refused.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trainkit.options.optimizers import OPTIMIZERS, SERVED

LARGEST_COUNT = 2**31 - 1
_LARGEST_SEED = 2**32 - 1  # numpy takes no more
_LARGEST_FLOAT = 3.4028234663852886e38  # of fp32, in which optimizers compute


@dataclass(frozen=True)
class Acts:
    """A field that does what transformers says, and what of its values makes sense.

    Attributes:
        at_least: the smallest number.
        above: what a number must be greater than.
        below: what a number must be less than.
        at_most: the largest number; by default what a count can be.
        whole_above_one: a share of all steps below 1, a number of steps from there on.
        off: one more number, which means "not used".
        choices: the words it takes, where transformers' own type does not list them.
        without: words that its type lists and that do nothing here, each with what to do instead.
        keys: the keys that a mapping may have.
        needs: the condition under which it acts, where that is another field.
        derived: what decides the value where nobody does.
    """

    at_least: float | None = None
    above: float | None = None
    below: float | None = None
    at_most: float | None = None
    whole_above_one: bool = False
    off: float | None = None
    choices: tuple[str, ...] = ()
    without: Mapping[str, str] | None = None
    keys: tuple[str, ...] = ()
    needs: str = ""
    derived: str = ""

    def broken_rule(self, value: float) -> str | None:
        """What a number must be and is not; None where it is right."""
        if value == self.off:
            return None
        unless = "" if self.off is None else f", or {self.off}"
        if self.at_least is not None and not value >= self.at_least:  # nan is not
            words = "0 or more" if self.at_least == 0 else f"at least {self.at_least}"
            return f"{words}{unless}"
        if self.above is not None and not value > self.above:
            return f"above {self.above}{unless}"
        if value != value or value in (float("inf"), float("-inf")):
            return "finite"
        if self.below is not None and not value < self.below:
            return f"below {self.below}"
        if not value <= (LARGEST_COUNT if self.at_most is None else self.at_most):
            return f"at most {LARGEST_COUNT if self.at_most is None else self.at_most}"
        if self.whole_above_one and value > 1 and value != int(value):
            return "a share of all steps below 1, or a whole number of steps"
        return None


_LOG_LEVELS = ("detail", "debug", "info", "warning", "error", "critical", "passive")
_CHECKPOINT_OPTIONS = (  # what torch.utils.checkpoint takes, except functions
    "use_reentrant",
    "preserve_rng_state",
    "determinism_check",
    "debug",
    "early_stop",
)
CHECKPOINTING = (
    "activation_checkpointing",
    "gradient_checkpointing",
    "activation_checkpointing_kwargs",
    "gradient_checkpointing_kwargs",
)
"""The fields that ``recompute`` sets; the first two are names of one, the new one first."""

_COUNT = Acts(at_least=1)
_SIZE = Acts(at_least=0)
_RATE = Acts(at_least=0, at_most=_LARGEST_FLOAT)
_SEED = Acts(at_least=0, at_most=_LARGEST_SEED)
_BETA = Acts(at_least=0, below=1)
_SWITCH = Acts()
_HUB = Acts(needs="training.push_to_hub")
_TRACKIO = Acts(needs="training.report_to trackio")
_RANKS = Acts(needs="several processes without DeepSpeed")
_WORKERS = "training.dataloader_num_workers of 1 or more"

ACTS: Mapping[str, Acts] = {
    "output_dir": Acts(derived="a new directory in train_model"),
    # steps and rows
    "per_device_train_batch_size": _COUNT,
    "num_train_epochs": Acts(above=0),
    "auto_find_batch_size": _SWITCH,
    "max_steps": Acts(at_least=1, off=-1),
    "gradient_accumulation_steps": Acts(at_least=1, derived="from global_batch_size"),
    "train_sampling_strategy": Acts(
        choices=("random", "sequential", "group_by_length"),
        without={
            "batch_rebalance": "it is not served here: write group_by_length, or `packing: true` "
            "in data, which fills rows evenly"
        },
    ),
    "seed": _SEED,
    "data_seed": Acts(at_least=0, at_most=_LARGEST_SEED, derived="from training.seed"),
    "full_determinism": _SWITCH,
    # optimizer
    "learning_rate": _RATE,
    "lr_scheduler_type": _SWITCH,
    "lr_scheduler_kwargs": Acts(needs="a schedule that takes arguments"),
    "warmup_steps": Acts(
        at_least=0, whole_above_one=True, needs="a schedule with a warm-up (constant_with_warmup)"
    ),
    "optim": Acts(
        choices=SERVED,
        without={name: row.instead for name, row in OPTIMIZERS.items() if row.instead},
    ),
    "optim_args": _SWITCH,
    "optim_target_modules": Acts(needs="training.optim galore_* or apollo_*"),
    "weight_decay": _RATE,
    "adam_beta1": _BETA,
    "adam_beta2": _BETA,
    "adam_epsilon": Acts(above=0, at_most=_LARGEST_FLOAT),
    "max_grad_norm": _RATE,
    "average_tokens_across_devices": _RANKS,
    "label_smoothing_factor": _BETA,
    "neftune_noise_alpha": _RATE,
    # precision, memory, speed
    "bf16": Acts(derived="from model.dtype with lora or deepspeed"),
    "fp16": Acts(derived="from model.dtype with lora or deepspeed"),
    "tf32": Acts(needs="an Ampere GPU or newer"),
    "activation_checkpointing": Acts(derived="from recompute"),
    "activation_checkpointing_kwargs": Acts(
        keys=_CHECKPOINT_OPTIONS, derived="{use_reentrant: false}"
    ),
    "gradient_checkpointing": Acts(derived="from recompute"),
    "gradient_checkpointing_kwargs": Acts(
        keys=_CHECKPOINT_OPTIONS, derived="{use_reentrant: false}"
    ),
    "torch_compile": Acts(derived="from training.torch_compile_backend and torch_compile_mode"),
    "torch_compile_backend": Acts(
        choices=(
            "inductor",
            "eager",
            "aot_eager",
            "cudagraphs",
            "aot_ts_nvfuser",
            "nvprims_nvfuser",
            "ofi",
            "onnxrt",
            "ipex",
            "tvm",
            "hpu_backend",
        )
    ),
    "torch_compile_mode": Acts(
        choices=("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
    ),
    "use_liger_kernel": Acts(needs="kernels: false"),
    "liger_kernel_config": Acts(needs="training.use_liger_kernel"),
    "torch_empty_cache_steps": _COUNT,
    "use_cpu": Acts(derived="a machine without a GPU"),
    "debug": Acts(
        choices=("underflow_overflow",),
        without={"tpu_metrics_debug": "remove it: trainkit does not train on TPUs"},
    ),
    # logs
    "logging_strategy": _SWITCH,
    "logging_steps": Acts(above=0, whole_above_one=True, needs="logging_strategy steps"),
    "logging_first_step": _SWITCH,
    "include_num_input_tokens_seen": Acts(choices=("all", "non_padding", "no")),
    "log_level": Acts(choices=_LOG_LEVELS),
    "log_level_replica": Acts(choices=_LOG_LEVELS),
    "log_on_each_node": Acts(needs="several hosts; it chooses who takes log_level"),
    "report_to": _SWITCH,
    "run_name": Acts(needs="a tracker in training.report_to"),
    "project": _TRACKIO,
    "trackio_space_id": _TRACKIO,
    "trackio_bucket_id": _TRACKIO,
    "trackio_static_space_id": _TRACKIO,
    # evaluation
    "eval_strategy": Acts(needs="files in data.eval", derived="from data.eval"),
    "eval_steps": Acts(
        above=0, whole_above_one=True, needs="eval_strategy steps", derived="logging_steps"
    ),
    "eval_delay": _SIZE,
    "eval_on_start": Acts(needs="files in data.eval"),
    "per_device_eval_batch_size": _COUNT,
    # checkpoints
    "save_strategy": _SWITCH,
    "save_steps": Acts(above=0, whole_above_one=True, needs="save_strategy steps"),
    "save_total_limit": _COUNT,
    "save_only_model": _SWITCH,
    "load_best_model_at_end": _SWITCH,
    "metric_for_best_model": Acts(derived="loss"),
    "greater_is_better": Acts(derived="from training.metric_for_best_model"),
    "ignore_data_skip": Acts(needs="--resume"),
    # the hub
    "push_to_hub": _SWITCH,
    "hub_token": _HUB,
    "hub_private_repo": _HUB,
    "hub_model_id": _HUB,
    "hub_strategy": _HUB,
    "hub_always_push": _HUB,
    "hub_revision": _HUB,
    # loading
    "accelerator_config": Acts(keys=("gradient_accumulation_kwargs",)),
    "dataloader_drop_last": Acts(needs="data that is not streamed"),
    "dataloader_num_workers": Acts(at_least=0, at_most=1024),
    "dataloader_pin_memory": Acts(needs="a GPU"),
    "dataloader_prefetch_factor": Acts(at_least=1, needs=_WORKERS),
    # several processes
    "ddp_find_unused_parameters": Acts(
        needs="several processes without DeepSpeed", derived="from the model"
    ),
    "ddp_bucket_cap_mb": Acts(at_least=1, needs="several processes without DeepSpeed"),
    "ddp_broadcast_buffers": _RANKS,
    "ddp_static_graph": _RANKS,
    "ddp_backend": Acts(needs="several processes"),
    "ddp_timeout": Acts(at_least=1, needs="several processes"),
}
"""The fields that act."""

_NO_PREDICTIONS = "evaluation measures the loss and keeps no predictions to gather or to judge"

FIXED: Mapping[str, tuple[Any, str]] = {
    "remove_unused_columns": (False, "trainkit hands the model exactly what it takes"),
    "label_names": (None, "the labels of a causal language model are always called labels"),
    "length_column_name": ("length", "group_by_length knows how long each sample is"),
    "use_cache": (
        False,
        "training needs no cache of keys and values, and with one the samples of a packed row "
        "would see each other",
    ),
    "logging_nan_inf_filter": (
        False,
        "a loss that is NaN or infinite must be seen, not filtered out",
    ),
    "disable_tqdm": (True, "trainkit shows the progress itself"),
    "bf16_full_eval": (False, "evaluation computes as training does; see model.dtype"),
    "fp16_full_eval": (False, "evaluation computes as training does; see model.dtype"),
    "prediction_loss_only": (False, _NO_PREDICTIONS),
    "eval_do_concat_batches": (True, _NO_PREDICTIONS),
    "eval_use_gather_object": (False, _NO_PREDICTIONS),
    "eval_accumulation_steps": (None, _NO_PREDICTIONS),
    "include_for_metrics": ([], _NO_PREDICTIONS),
    "batch_eval_metrics": (False, _NO_PREDICTIONS),
    "save_on_each_node": (False, "all hosts write one run directory together"),
    "skip_memory_metrics": (True, "the peak of each step's memory is in metrics.jsonl anyway"),
    "enable_jit_checkpoint": (False, "trainkit itself saves when a signal asks it to stop"),
    "restore_callback_states_from_checkpoint": (
        False,
        "no callback here keeps a state, and transformers' own would stop a continued run at once",
    ),
    "parallelism_config": (None, "the model is spread over GPUs by `deepspeed: zero3`"),
    "dataloader_persistent_workers": (
        False,
        "loading processes are started again for each epoch, so that they see its order",
    ),
    "dataloader_multiprocessing_context": (
        None,
        "loading processes are started as the system does by default",
    ),
    "dataloader_in_order": (True, "a resumed run counts the batches, so they come in order"),
}
"""Fields that have one value here, and why."""
