"""A run of Hugging Face's Trainer, with Liger or without, for `benchmarks.runs` to measure.

torchrun --nproc_per_node N -m benchmarks.peer '{"provider": "hf", "model": ..., ...}'
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any


def train_peer(settings: dict[str, Any]) -> None:
    """Hugging Face's Trainer, as its users write it; its log goes to ``metrics.jsonl``."""
    import torch
    from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

    run = Path(settings["run"])
    options: dict[str, Any] = {}
    if settings["shard"] == "fsdp2":
        options["fsdp"] = "full_shard auto_wrap"
        options["fsdp_config"] = {"version": 2, "fsdp_version": 2}
    else:
        presets = Path(__file__).resolve().parent.parent / "trainkit" / "configs" / "deepspeed"
        options["deepspeed"] = str(presets / f"{settings['shard']}.json")
    args = TrainingArguments(
        output_dir=str(run),
        per_device_train_batch_size=settings["micro_batch"],
        gradient_accumulation_steps=settings["accumulation"],
        gradient_checkpointing=settings["checkpointing"],
        max_steps=settings["steps"],
        learning_rate=1e-4,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        bf16=True,
        use_cpu=not torch.cuda.is_available(),
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_liger_kernel=settings["provider"] == "liger",
        **options,
    )
    model = AutoModelForCausalLM.from_pretrained(settings["model"], dtype=torch.bfloat16)
    model.config.use_cache = False
    with Path(settings["rows"]).open(encoding="utf-8") as file:
        # Tensors: millions of Python numbers would slow every collection of garbage in a step.
        rows = [torch.tensor(json.loads(line)["input_ids"]) for line in file]

    on_gpu = torch.cuda.is_available()
    synchronize = torch.cuda.synchronize if on_gpu else (lambda: None)

    class Clock(TrainerCallback):  # type: ignore[misc]
        """Seconds from the start of a step to its end on the device, and the logged loss."""

        begun = 0.0
        seconds = 0.0

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            synchronize()
            self.begun = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            synchronize()
            self.seconds = time.perf_counter() - self.begun

        def on_log(self, args: Any, state: Any, *_: Any, logs: Any = None, **__: Any) -> None:
            if "loss" not in (logs or {}) or not state.is_world_process_zero:
                return
            peak = torch.cuda.max_memory_allocated() / 2**30 if on_gpu else 0.0
            row = {"loss": float(logs["loss"]), "step_seconds": self.seconds}
            run.mkdir(parents=True, exist_ok=True)
            with (run / "metrics.jsonl").open("a") as file:
                file.write(json.dumps({**row, "peak_memory_gib": peak}) + "\n")

    def collate(samples: list[Any]) -> dict[str, Any]:
        ids = torch.stack([sample["input_ids"] for sample in samples])
        return {"input_ids": ids, "labels": ids.clone(), "attention_mask": torch.ones_like(ids)}

    data = [{"input_ids": ids} for ids in rows]
    Trainer(
        model=model, args=args, train_dataset=data, data_collator=collate, callbacks=[Clock()]
    ).train()


if __name__ == "__main__":
    train_peer(json.loads(sys.argv[1]))
