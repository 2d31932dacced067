"""DeepSpeed: ZeRO-1, 2 and 3."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainkit.checkpoint.weights.contents import taking_up
from trainkit.errors import CheckpointError, RecipeError
from trainkit.parallel.engine import Engine, Saving, Training, tensors_of
from trainkit.parallel.launch import free_port
from trainkit.parallel.part_files import (
    WITHOUT,
    by_name,
    innermost,
    refuse_other,
    refuse_steps,
    refuse_unfit_state,
)
from trainkit.parallel.process import ProcessRank
from trainkit.parallel.zero.lint import RECIPES_KEYS, lint_file, refuse_contradictions

if TYPE_CHECKING:
    import torch
    from torch import nn


_GATHERS = "stage3_gather_16bit_weights_on_model_save"
_PARTS = (
    ("single_partition_of_fp32_groups", "base_optimizer_state"),
    ("fp32_flat_groups", "optimizer_state_dict"),
)
"""Where a shard of ZeRO-1 and 2, and one of ZeRO-3, has masters and the optimizer's states."""
_GATHERED_AT_ONCE = 500_000_000
"""Numbers of a layer at most; experts may have more."""


class DeepSpeed(Engine):
    """Trains as a DeepSpeed configuration file says."""

    keeps_masters = True
    shards_optimizer = True
    packages = ("deepspeed",)

    def __init__(self, path: Path) -> None:
        self.config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        self._path = path
        lint_file(self.config, path)
        # Where nothing is said the recipe decides, and not DeepSpeed, which clips at 1.0, computes
        # in fp32 and wants rows to be counted.
        for key in RECIPES_KEYS:
            self.config.setdefault(key, "auto")
        for section in ("bf16", "fp16"):
            self.config[section] = {"enabled": "auto", **self.config.get(section, {})}

    def refuse_contradictions(self, training: Mapping[str, Any], *, world_size: int) -> None:
        """Numbers that the file and the recipe both give must be the same."""
        refuse_contradictions(self.config, self._path, training, world_size)

    @property
    def shards_weights(self) -> bool:
        """ZeRO-3: no rank holds a full weight except while it is used."""
        zero = self.config.get("zero_optimization")
        return isinstance(zero, dict) and zero.get("stage") == 3

    @property
    def holds_whole_model(self) -> bool:  # type: ignore[override]
        """Not under ZeRO-3."""
        return not self.shards_weights

    def prepare(self, process: ProcessRank, *, on_cpu: bool) -> None:
        """Make DeepSpeed start cleanly.

        A single process started without torchrun gets the variables DeepSpeed would otherwise look
        for through MPI. On a CPU the shared-memory all-reduce is switched off: it would compile C++
        for a minute at the first start, and gloo gives the same sums. Locks that a killed build
        left behind are removed, because every later build waits for them for ever. And its shards
        are opened by a reader that runs no code.
        """
        process.announce(free_port())
        if process.local_rank == 0:
            _remove_stale_build_locks()
        from trainkit.parallel.zero.shard_files import use_shard_files

        use_shard_files()
        if on_cpu:
            import deepspeed

            deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

    def training_arguments(self, *, num_micro_batches: int) -> dict[str, Any]:
        """The configuration, which transformers hands on.

        The gradients of several micro-batches are summed in fp32 unless the file says otherwise: in
        bf16 the sum of 64 is off by a percent. Bytes per trained weight: 4 instead of 2, on the
        rank that keeps the part (ZeRO-2 and 3); 4 more on every rank for ZeRO-1, which keeps whole
        gradients.
        """
        config = dict(self.config)
        if num_micro_batches > 1:
            config["data_types"] = {"grad_accum_dtype": "fp32", **config.get("data_types", {})}
        return {"deepspeed": config}

    def start(self, *, on_cpu: bool) -> None:
        """Tell DeepSpeed of the process group; on a CPU accelerate does not."""
        from deepspeed import comm

        comm.init_distributed("gloo" if on_cpu else "nccl", verbose=False)

    def receive(self, model: nn.Module, args: Any) -> None:
        """DeepSpeed moves it when it gets it."""
        if args.save_only_model and args.load_best_model_at_end:
            raise RecipeError(
                "the best model under DeepSpeed is loaded from its own files, which "
                "save_only_model leaves out",
                where="training.save_only_model",
                fix="remove it, or load_best_model_at_end",
            )
        self.model, self.wrapped, self.args = model, model, args

    def set_up(self, training: Training) -> nn.Module:
        """DeepSpeed's engine, which casts, clips and steps."""
        import deepspeed
        from accelerate.utils import map_pytorch_optim_to_deepspeed

        self._hold(training)
        args, known, self.scaler = self.args, self.args.hf_deepspeed_config, None
        deepspeed.utils.logger.setLevel(args.get_process_log_level())
        known.trainer_config_finalize(args, self.model, training.num_steps)  # the rest of "auto"
        config = {**known.config, "zero_allow_untested_optimizer": True}
        zero = config["zero_optimization"]
        if zero.get(_GATHERS) == "auto":
            zero[_GATHERS] = True
        is_offloaded = (zero.get("offload_optimizer") or {}).get("device", "none") != "none"
        if is_offloaded and config.get("zero_force_ds_cpu_optimizer", True):
            self._optimizer = map_pytorch_optim_to_deepspeed(self._optimizer)
        self.wrapped, _, _, _ = deepspeed.initialize(
            model=self.model, optimizer=self._optimizer, config=config
        )
        if args.torch_compile:
            mode = args.torch_compile_mode or "default"
            backend = args.torch_compile_backend
            self.wrapped.compile(backend=backend, compile_kwargs={"mode": mode})
        return self.wrapped

    def _apart(self) -> AbstractContextManager[Any]:
        """It is told with each backward pass."""
        return nullcontext()

    def _backward(self, loss: torch.Tensor, *, is_last: bool) -> None:
        self.wrapped.set_gradient_accumulation_boundary(is_last)
        self.wrapped.backward(loss, scale_wrt_gas=False)

    def update(
        self,
        max_norm: float,
        judge: Callable[[torch.Tensor | float | None, Any], None],
        before: Callable[[], None],
    ) -> tuple[torch.Tensor | float | None, bool]:
        """It clips, steps and clears, and takes no step whose gradients are not finite.

        Behind such a step the schedule goes on by the plan, but that of a loss scaler's.
        """
        before()
        self.wrapped.step()
        norm = self.wrapped.get_global_grad_norm()
        norm = norm.item() if hasattr(norm, "item") else norm
        judge(norm, None)
        return norm, not (self.args.fp16 and self.wrapped.optimizer.overflow)

    def clear(self) -> None:
        """The engine has."""

    def save_weights(self, save: Saving, write: Callable[[Mapping[str, Any]], None]) -> None:
        """Under ZeRO-3 gathered by DeepSpeed, in a copy."""
        if not self.shards_weights:
            super().save_weights(save, write)
            return
        whole = self.wrapped._zero3_consolidated_16bit_state_dict()
        if self.args.should_save:
            save.defer(None, partial(write, whole))

    def save_state(self, save: Saving) -> None:
        """DeepSpeed's own files, but its script that unpickles them.

        It writes ``latest`` before the other ranks are done; here it is a file like the others.
        """
        from peft import PeftModel

        from trainkit.parallel.zero.shard_files import ShardFiles

        engine, latest = self.wrapped, save.directory / "latest"
        tag = f"global_step{engine.global_steps}"
        engine._copy_recovery_script = lambda *_: None
        only_trained = isinstance(self.model, PeftModel)
        options = {"exclude_frozen_parameters": True} if only_trained else {}
        with ShardFiles.deferring(save.defer):
            engine.save_checkpoint(str(save.directory), tag=tag, save_latest=False, **options)
        if engine.global_rank == 0:
            save.defer(latest, partial(latest.write_text, tag, encoding="utf-8"))

    def copied_by_a_save(self) -> list[torch.Tensor]:
        """Whole weights twice: as they are, and in a file of DeepSpeed's."""
        copied: list[torch.Tensor] = []
        if self.args.should_save and not self.shards_weights:
            copied += 2 * tensors_of(self._saved_weights())
        # The keys are the weights in full precision, which it trains.
        state = self._optimizer.state
        return [*copied, *tensors_of([list(state), list(state.values())])]

    def load_weights(self, model: nn.Module, read: Callable[[], None]) -> None:
        """With the state."""

    def load_state(self, folder: Path, step: int) -> None:
        """From DeepSpeed's own files, weights and all."""
        from peft import PeftModel

        from trainkit.parallel.zero.shard_files import ShardFiles

        strict = not isinstance(self.model, PeftModel)
        refuse = partial(self._refuse_unfit, step=step)
        with taking_up(folder), ShardFiles.judging(refuse):
            read, _ = self.wrapped.load_checkpoint(str(folder), load_module_strict=strict)
        if read is None:
            raise CheckpointError(
                "there is nothing of DeepSpeed in this checkpoint",
                where=str(folder),
                fix="continue it with the parallel.shard that the run had",
            )

    def _refuse_unfit(self, path: Path, saved: Any, step: int) -> None:
        """Hold a file of DeepSpeed's against the run, before it is copied over what is there."""
        if "module" in saved:
            only_trained = not set(saved["module"]) >= set(self.wrapped.module_state_dict())
            own = self.wrapped.module_state_dict(exclude_frozen_parameters=only_trained)
            refuse_other(path, saved["module"], own, "module")
            for key in ("global_steps", "skipped_steps"):
                refuse_steps(path, saved[key], step, key)
            return
        zero, held = self.wrapped.optimizer, saved["optimizer_state_dict"]
        own = zero.state_dict()
        weights, states = next(each for each in _PARTS if each[0] in own)
        refuse_other(path, held[weights], own[weights], weights)
        # ZeRO-3's optimizer has its parameters while it steps, that of the others at all times.
        is_bare = hasattr(zero, "_set_fp32_optimizer_param_groups")
        if is_bare:
            zero._set_fp32_optimizer_param_groups()
        base = innermost(zero)
        named = by_name(self.model, base, held[states], path)
        if step > 0 and not self.args.fp16:  # whose first steps may all be skipped
            named[WITHOUT] = {"": []}
        refuse_unfit_state(self.model, base, named, path, step)
        if is_bare:
            zero._clear_fp32_optimizer_param_groups()
        scale = getattr(held.get("loss_scaler"), "cur_scale", 1.0)
        refuse_other(path, scale, 1.0, "loss_scaler: cur_scale")

    def load_best(self, folder: Path, read: Callable[[], None]) -> None:
        self.load_state(folder, self.wrapped.global_steps)

    def place(self, model: nn.Module, device: torch.device) -> None:
        """Under ZeRO-3 a layer is gathered at once, not matrix by matrix.

        What DeepSpeed does on the host for each module is slower than a GPU's own work otherwise.
        A layer whose input has no gradient (the first one with adapters, the one behind frozen
        ones) DeepSpeed 0.19 would release before its backward pass: those models stay as they were.
        """
        del device
        if not self.shards_weights or not all(each.requires_grad for each in model.parameters()):
            return
        from deepspeed.utils import set_z3_leaf_module
        from transformers.modeling_layers import GradientCheckpointingLayer

        for layer in model.modules():
            if isinstance(layer, GradientCheckpointingLayer):
                numbers = sum(getattr(each, "ds_numel", 0) for each in layer.parameters())
                set_z3_leaf_module(layer, numbers <= _GATHERED_AT_ONCE)

    def loading_device(self, device: torch.device) -> torch.device | None:
        """ZeRO-3 shards weights while they are loaded, and puts them where they belong."""
        return None if self.shards_weights else device

    @contextmanager
    def gathering(self, model: nn.Module) -> Iterator[None]:
        """Under ZeRO-3 the layers of a stack are gathered one by one, what is outside for long.

        The engine's own hooks exist only once it has the model.
        """
        if not self.shards_weights:
            yield
            return
        from deepspeed import zero
        from torch import nn

        stacks = [each for each in model.modules() if isinstance(each, nn.ModuleList)]
        layers = [layer for stack in stacks for layer in stack]
        inside = {id(weight) for layer in layers for weight in layer.parameters()}
        outside = [weight for weight in model.parameters() if id(weight) not in inside]
        with ExitStack() as hooks:
            for layer in layers:
                gathered = zero.GatheredParameters(list(layer.parameters()))
                before, after = _entering(gathered), _leaving(gathered)
                hooks.enter_context(layer.register_forward_pre_hook(before))
                hooks.enter_context(layer.register_forward_hook(after, always_call=True))
            hooks.enter_context(zero.GatheredParameters(outside))
            yield

    def whole_model(self, model: nn.Module, reload: Callable[[], nn.Module]) -> nn.Module:
        """Under ZeRO-3 the saved model, loaded again without sharding."""
        if not self.shards_weights:
            return model
        from transformers.integrations.deepspeed import unset_hf_deepspeed_config

        unset_hf_deepspeed_config()
        return reload()


def _entering(gathered: Any) -> Callable[..., None]:
    def hook(*_: Any) -> None:
        gathered.__enter__()

    return hook


def _leaving(gathered: Any) -> Callable[..., None]:
    def hook(*_: Any) -> None:
        gathered.__exit__(None, None, None)

    return hook


def _remove_stale_build_locks() -> None:
    """Delete the lock files of extension builds that no compiler is working on any more."""
    root = os.environ.get("TORCH_EXTENSIONS_DIR")
    directory = Path(root) if root else Path.home() / ".cache" / "torch_extensions"
    if not directory.is_dir() or shutil.which("pgrep") is None:
        return
    building = subprocess.run(["pgrep", "-x", "ninja"], capture_output=True, check=False)
    if building.returncode == 0:
        return
    for lock in directory.glob("**/lock"):
        lock.unlink(missing_ok=True)
