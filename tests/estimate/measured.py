"""The rows of docs/benchmarks that the estimate is held against, each with its plan."""

import json
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from trainkit.bench.memory_points import Point, plan_of
from trainkit.estimate.gpus import GPUS
from trainkit.estimate.plan import Adapters, Plan
from trainkit.estimate.shape import find_shape

FOLDER = Path(__file__).parents[2] / "docs" / "benchmarks"
PLAIN: frozenset[str] = frozenset()
BARE: dict[str, Any] = {"trainer": False, "optimizer": None}


class Measured(NamedTuple):
    """A row: its name, GiB and tokens per second (of a GPU), and what ran."""

    name: str
    peak_gib: float | None
    tokens_per_second: float | None
    plan: Plan


def _rows(file: str) -> Iterator[tuple[dict[str, Any], dict[str, float]]]:
    """Rows that differ in metric and value only, put together."""
    found: dict[str, tuple[dict[str, Any], dict[str, float]]] = {}
    for line in (FOLDER / file).read_text().splitlines():
        row = json.loads(line)
        of_metric = ("metric", "value", "unit", "versions", "commit", "attention", "last_loss")
        facts = {key: value for key, value in row.items() if key not in of_metric}
        values = found.setdefault(json.dumps(facts, sort_keys=True), (facts, {}))[1]
        values[row["metric"].removesuffix("_per_gpu")] = row["value"]
    yield from found.values()


def _measured(name: str, values: dict[str, float], plan: Plan) -> Measured:
    return Measured(name, values.get("peak_memory_gib"), values.get("tokens_per_second"), plan)


def steps() -> Iterator[Measured]:
    """Bare steps; compiled models, Liger's and forced attention kernels are others'."""
    for file in ("step.jsonl", "step_9b.jsonl"):
        for row, values in _rows(file):
            provider = row["provider"]
            is_hf = provider.startswith("hf_")
            if not (is_hf or provider == "trainkit") or "peak_memory_gib" not in values:
                continue
            plan = Plan(find_shape(row["case"]), row["batch_size"], row["length"], **BARE)
            if is_hf:
                plan = _as_hf(plan)
            chunk = row["loss_chunk_tokens"]
            plan = _with(plan, chunk_tokens=chunk)
            # Small chunks are slow, and no recipe has them; nor does anybody choose slow attention.
            if chunk is not None or provider in ("hf_flash", "hf_efficient", "hf_math"):
                values = {"peak_memory_gib": values["peak_memory_gib"]}
            yield _measured(f"{file} {row['case']} {provider} {chunk}", values, plan)


def loras() -> Iterator[Measured]:
    """LoRA, QLoRA and an fp8 base, ours and peft's."""
    for file in ("lora.jsonl", "fp8.jsonl"):
        for row, values in _rows(file):
            if "peak_memory_gib" not in values or row["provider"] in ("unsloth", "frozen"):
                continue
            model, _, mode = row["case"].replace(",", "").partition(" ")
            mode, _, through = mode.partition(" ")
            offload = row.get("offload", row.get("offload_activations")) in (True, "auto")
            plan = Plan(
                find_shape(model),
                row["batch_size"],
                row["length"],
                adapters=Adapters(rank=row["lora_rank"], offload=offload),
                base="nf4" if mode.startswith("qlora") else "fp8" if "fp8" in mode else "bfloat16",
                recompute=int(mode.endswith("checkpointed")),
                trainer=bool(through),
                gpus=row.get("num_gpus", 1),
                stage=2 if "ZeRO-2" in row["provider"] else 0,
            )
            if row["provider"] == "peft":
                plan = _with(_as_hf(plan), upcast=mode.startswith("qlora"))
            name = f"{file} {row['case']} {row['provider']} {row['length']} {offload}"
            yield _measured(f"{name} run {row.get('run', 1)}", values, plan)


def trainers() -> Iterator[Measured]:
    """Whole steps through a Trainer, on one and on four GPUs."""
    shape = find_shape("qwen2-0.5b")
    for row, values in _rows("trainer.jsonl"):
        yield _measured(f"trainer.jsonl {row['logging_steps']}", values, Plan(shape, 16, 2048))
    for row, values in _rows("multi_gpu.jsonl"):
        provider = row["provider"]
        if "peak_memory_gib" not in values or provider.startswith("Liger"):
            continue
        if "pipeline" in row["case"]:  # the estimate knows no stages yet
            continue
        if "fp8 base" in row["case"]:  # the row does not say which layers ran in fp8
            continue
        if "beside" in row:  # something else slowed it
            values = {"peak_memory_gib": values["peak_memory_gib"]}
        model, *_, sharding, total = row["case"].split(", ")
        batch = int(provider.partition("micro-batch ")[2].partition(",")[0])
        if "global batch" in provider:  # a comparison that the case does not name
            total = provider
        gpus, total_rows = row["num_gpus"], int(total.rpartition(" ")[2])
        plan = Plan(
            find_shape(model.split()[0].removesuffix(" shape")),
            batch,
            2048,
            accumulation=total_rows // (gpus * batch),
            adapters=Adapters(rank=16) if "LoRA" in row["case"] else None,
            recompute=int(provider.endswith("checkpointed")),
            gpus=gpus,
            gpu_gib=GPUS["h200"].memory_gib,
            stage={"ZeRO-2": 2, "ZeRO-3": 3, "FSDP2": 3}.get(sharding, 0),
            fsdp=sharding == "FSDP2",
        )
        if provider.startswith("HF"):  # whose FSDP2 gives every gathered layer back at once
            plan = _with(_as_hf(plan), gpu_gib=0.0)
        yield _measured(f"multi_gpu.jsonl {row['case']} {provider} {gpus}", values, plan)
    for row, values in _rows("packing.jsonl"):
        if row["provider"] == "trainkit" and row["case"].endswith("packed"):
            values = {"peak_memory_gib": values["peak_memory_gib"]}
            yield _measured("packing.jsonl packed", values, Plan(shape, 16, 2048, **BARE))
    for row, values in _rows("ladder.jsonl"):
        if "peak_memory_gib" in values and row["row"] in (1, 12):
            adapters = Adapters()
            plan = Plan(
                find_shape(row["model"]),
                row["batch_size"],
                row["length"],
                base="nf4",
                adapters=adapters,
                recompute=1,
                trainer=False,
            )
            plan = _with(_as_hf(plan), upcast=True) if row["row"] == 1 else plan
            values = {"peak_memory_gib": values["peak_memory_gib"]}
            yield _measured(f"ladder.jsonl {row['name']}", values, plan)


def memories() -> Iterator[Measured]:
    """The points of ``trainkit.bench.memory``; none of them calibrated anything."""
    for line in (FOLDER / "memory.jsonl").read_text().splitlines():
        row = json.loads(line)
        if "peak_memory_gib" not in row:
            continue
        known = {field.name: row[field.name] for field in fields(Point) if field.name in row}
        known["recompute"] = int(row["recompute"])
        plan = plan_of(Point(**known))
        yield _measured(f"memory.jsonl {row['case']}", row, plan)


def _as_hf(plan: Plan) -> Plan:
    return _with(plan, ops=PLAIN)


def _with(plan: Plan, **values: Any) -> Plan:
    return replace(plan, **values)


ROWS = [*steps(), *loras(), *trainers(), *memories()]
