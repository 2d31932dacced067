"""Every row of docs/benchmarks that has a peak, with the plan that the estimate is asked for.

A file of rows has a reader. Of each row it makes a plan, or says why nobody could be told its peak
beforehand; `test_estimate_measured` sees to it that no file and no row is passed over.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from trainkit.estimate.gpus import GPUS
from trainkit.estimate.job import Adapters
from trainkit.estimate.peak import Peak, optimizer_bytes, peak, peak_of_rank, ranks_of
from trainkit.estimate.plan import ALL_OPS, Plan, within_budget
from trainkit.estimate.recipe import plan_of as plan_of_recipe
from trainkit.estimate.shape import find_shape
from trainkit.options import Fp8Options, LoraOptions
from trainkit.options.model import ALL
from trainkit.options.optimizers import optimizer_row
from trainkit.recipe import load_recipe
from trainkit.recipe.write import shipped_recipes

FOLDER = Path(__file__).parents[2] / "docs" / "benchmarks"
PLAIN: frozenset[str] = frozenset()
BARE: dict[str, Any] = {"trainer": False, "optimizer": None}
H200 = GPUS["h200"]


@dataclass(frozen=True)
class Point:
    """What is measured.

    Args:
        model: of the table of shapes.
        mode: "full", "full_fp8" (all products in fp8), "lora", "qlora" or "fp8".
        batch_size: sequences in a micro-batch.
        length: tokens in each.
        provider: "trainkit" through the Trainer, "bare" trainkit, or "hf".
        recompute: every so many layers are recomputed; 0 keeps all.
        selective: of these, matrix products and attention are kept.
        offload: inputs of recomputed layers wait on the host.
        lora_rank: of every adapter.
        accumulation: micro-batches in a step.
        optim: a name of ``training.optim``.
        optim_args: ``training.optim_args``, for a row's estimate.
        keeps_masters: half-precision weights have fp32 copies.
        in_backward: weights step in the backward pass.
        chunk_tokens: tokens whose logits exist at a time; None is the default.
    """

    model: str
    mode: str
    batch_size: int
    length: int = 2048
    provider: str = "trainkit"
    recompute: int = 0
    selective: bool = False
    offload: bool = False
    lora_rank: int = 16
    accumulation: int = 1
    optim: str = "adamw_torch_fused"
    optim_args: str | None = None
    keeps_masters: bool = True
    in_backward: bool = False
    chunk_tokens: int | None = None


def plan_of(point: Point) -> Plan:
    """What the estimate is asked for a point."""
    shape, is_full = find_shape(point.model), point.mode.startswith("full")
    row = optimizer_row(point.optim)
    state: float | None = optimizer_bytes(row, shape, full=is_full, args=point.optim_args)
    if is_full and point.provider != "trainkit":
        state = None
    plan = Plan(
        shape,
        point.batch_size,
        point.length,
        accumulation=point.accumulation,
        base={"qlora": "nf4", "fp8": "fp8"}.get(point.mode, "bfloat16"),
        adapters=None
        if is_full
        else Adapters.of(LoraOptions(r=point.lora_rank), offload=point.offload),
        fp8=1.0 if point.mode in ("full_fp8", "fp8") else None,
        recompute=point.recompute,
        selective=point.selective,
        offload=point.offload,
        trainer=point.provider == "trainkit",
        keeps_masters=point.keeps_masters,
        one_pass=row.one_pass,
        in_backward=point.in_backward,
        flat=point.optim == "flat_adamw",
        optimizer=state,
        slower=row.slower if state is not None else Plan.slower,
        stepping=(row.step_bytes, row.step_largest_bytes),
        chunk_tokens=point.chunk_tokens,
    )
    if point.provider == "hf":
        plan = replace(plan, ops=frozenset(), upcast=point.mode == "qlora")
    return plan


LEAST = Point(
    "llama-3.1-8b",
    "full",
    2,
    recompute=1,
    offload=True,
    optim="paged_adamw_8bit",
    keeps_masters=False,
    in_backward=True,
    chunk_tokens=512,
)
"""The shipped recipe for 18 GiB."""

Row = dict[str, Any]
Values = Mapping[str, float]


class Measured(NamedTuple):
    """A row: its name, GiB and tokens per second (of a GPU), and what ran.

    A run's log has the peak of its first rank; of a pipeline the estimate says the worst rank's.
    """

    name: str
    peak_gib: float
    tokens_per_second: float | None
    plan: Plan

    @property
    def estimated(self) -> Peak:
        """Of the rank that was measured."""
        if self.plan.stage_layers:
            return peak_of_rank(ranks_of(self.plan)[0])
        return peak(self.plan)


class LeftOut(NamedTuple):
    """A row without a plan, and why."""

    name: str
    why: str


OTHERS = "another library's step"
HOST = "memory of the host"
ALONE = "ops, and a stack of layers without a head"
EXPERTS = "mixtures of experts have no estimate"
CHOSEN = "the run measured and chose which products run in fp8"
OLDER = "measured before fp8 formed a block's product again in the backward pass"
UNCUT = "measured before projections let go of the decomposition that they are a slice of"
AGAIN = "the same step took less later, as lora.jsonl says"
ELSEWHERE = "how its layers were dealt out is in memory_gpus.jsonl"
COMPILED = "a compiler decides by itself what is kept"
REASONS = (OTHERS, HOST, ALONE, EXPERTS, CHOSEN, OLDER, UNCUT, AGAIN, ELSEWHERE, COMPILED)
_OF_METRIC = ("metric", "value", "unit", "versions", "attention", "last_loss")


def rows_of(file: Path) -> Iterator[tuple[Row, Values]]:
    """Rows with a peak; those that differ in metric and value only, put together."""
    found: dict[str, tuple[Row, dict[str, float]]] = {}
    for line in file.read_text().splitlines():
        row = json.loads(line)
        if "metric" in row:
            facts = {key: value for key, value in row.items() if key not in _OF_METRIC}
            metric, key = row["metric"].removesuffix("_per_gpu"), json.dumps(facts, sort_keys=True)
            while metric in found.setdefault(key, (facts, {}))[1]:  # measured again
                key += " again"
            found[key][1][metric] = row["value"]
        else:
            found[line] = (row, row)
    yield from ((facts, values) for facts, values in found.values() if "peak_memory_gib" in values)


def _step(row: Row) -> tuple[Plan | str, bool]:
    """Bare steps."""
    provider, chunk = row["provider"], row["loss_chunk_tokens"]
    if provider.endswith("_compile"):
        return COMPILED, False
    if provider != "trainkit" and not provider.startswith("hf_"):
        return OTHERS, False
    plan = Plan(find_shape(row["case"]), row["batch_size"], row["length"], **BARE)
    plan = replace(plan, chunk_tokens=chunk)
    # Small chunks are slow, and no recipe has them; nor does anybody choose slow attention.
    is_slow = chunk is not None or provider in ("hf_flash", "hf_efficient", "hf_math")
    return (_as_hf(plan) if provider.startswith("hf_") else plan), not is_slow


def _fp8(row: Row) -> tuple[Plan | str, bool]:
    """Bare steps; those of policies have a colon in their case."""
    name, _, policy = row["case"].partition(": ")
    if not policy:
        return _lora(row)
    model, _, kind = name.partition(" ")
    if row["provider"] != "trainkit":
        return OTHERS, False
    sizes = {"qwen2-7b": 4, "llama-3.2-1b": 16, "qwen2-0.5b": 16}
    _, is_budget, budget = policy.partition("budget ")
    if not (is_budget or policy in _POLICIES) or model not in sizes:
        return CHOSEN, False
    plan = Plan(find_shape(model), sizes[model], 2048, **BARE)
    if kind != "full":
        is_checkpointed = kind.endswith("checkpointed")
        adapters = Adapters.of(offload=is_checkpointed)
        base = "bfloat16" if policy == "bf16" else "fp8"
        plan = replace(plan, adapters=adapters, recompute=int(is_checkpointed), base=base)
        plan = replace(plan, optimizer=8.0)
    options = Fp8Options(loss_budget=float(budget)) if is_budget else _POLICIES[policy]
    return (plan if options is None else within_budget(plan, options)), False


_POLICIES = {
    "bf16": None,
    "all": Fp8Options(loss_budget=ALL),
    "all and head": Fp8Options(loss_budget=ALL, head="fp8"),
    "every product, gaining or not": Fp8Options(loss_budget=ALL, head="fp8"),
}


def _lora(row: Row) -> tuple[Plan | str, bool]:
    """LoRA, QLoRA and an fp8 base, ours and peft's."""
    if row["provider"] in ("unsloth", "frozen"):
        return OTHERS if row["provider"] == "unsloth" else "nothing is trained", False
    model, _, mode = row["case"].replace(",", "").partition(" ")
    mode, _, through = mode.partition(" ")
    offload = row.get("offload", row.get("offload_activations")) in (True, "auto")
    plan = Plan(
        find_shape(model),
        row["batch_size"],
        row["length"],
        adapters=Adapters.of(LoraOptions(r=row["lora_rank"]), offload=offload),
        base="nf4" if mode.startswith("qlora") else "fp8" if "fp8" in mode else "bfloat16",
        fp8=1.0 if "fp8" in mode else None,
        recompute=int(mode.endswith("checkpointed")),
        trainer=bool(through),
        gpus=row.get("num_gpus", 1),
        stage=2 if "ZeRO-2" in row["provider"] else 0,
    )
    if row["provider"] == "peft":
        plan = replace(_as_hf(plan), upcast=mode.startswith("qlora"))
    return plan, True


def _trainer(row: Row) -> tuple[Plan | str, bool]:
    return Plan(find_shape("qwen2-0.5b"), 16, 2048), True


_CUT = {
    "pipeline of 2 ranks, 1f1b": ((14,), (14,)),
    "pipeline of 2 ranks, interleaved": ((7, 7), (7, 7)),
    "pipeline of 4 ranks, interleaved": ((3, 4), (3, 4), (3, 4), (4, 3)),
}
"""How layers were dealt out when these ran: not yet with the head counted."""


def _multi_gpu(row: Row) -> tuple[Plan | str, bool]:
    """Whole runs on some GPUs of a host."""
    provider, case = row["provider"], row["case"]
    if provider.startswith("Liger"):
        return OTHERS, False
    model, *_, sharding, total = case.split(", ")
    batch = int(provider.partition("micro-batch ")[2].partition(",")[0])
    if "global batch" in provider:  # a comparison that the case does not name
        total = provider
    gpus, total_rows = row["num_gpus"], int(total.rpartition(" ")[2])
    stages = next((cut for words, cut in _CUT.items() if words in case), ())
    if "pipeline" in case and row["commit"] != "e431202":
        return ELSEWHERE, False
    data_ranks = gpus // max(len(stages), 1)
    over_fp8 = "fp8 base" in case
    plan = Plan(
        find_shape(model.split()[0].removesuffix(" shape")),
        batch,
        2048,
        accumulation=total_rows // (data_ranks * batch),
        adapters=Adapters.of(LoraOptions(r=16)) if "LoRA" in case else None,
        base="fp8" if over_fp8 else "bfloat16",
        fp8=0.74 if over_fp8 else None,  # 4.49 GiB of the base's 6.52 billion numbers
        recompute=int(provider.endswith("checkpointed")),
        gpus=data_ranks,
        stage_layers=stages,
        schedule=sharding if stages else "1f1b",
        gpu_gib=H200.memory_gib,
        stage={"ZeRO-2": 2, "ZeRO-3": 3, "FSDP2": 3}.get(sharding, 0),
        fsdp=sharding == "FSDP2",
    )
    if provider.startswith("HF"):  # whose FSDP2 gives every gathered layer back at once
        plan = replace(_as_hf(plan), gpu_gib=0.0)
    # Something else slowed it, or it gathered matrices where layers are gathered today.
    is_older = sharding == "ZeRO-3" and not provider.startswith("HF")
    # Hugging Face's FSDP2 sums over ranks in every micro-batch: 17% slower than estimated.
    is_slower = provider.startswith("HF") and plan.fsdp and plan.accumulation > 8
    if is_slower:
        return plan, False
    return plan, not ("beside" in row or (is_older and row["commit"] == "e431202"))


def _runs(row: Row) -> tuple[Plan | str, bool]:
    """Whole runs as recipes; none of them calibrated a peak."""
    name, *_, total = row["case"].split()
    model = re.sub(r",|-lora|-nf4|-fp8", "", name)
    changed = {
        "model.name_or_path": model,
        "parallel.shard": "none" if "pipeline" in row["shard"] else row["shard"].split("-")[0],
        "global_batch_size": int(total),
        "training.per_device_train_batch_size": row["micro_batch"],
        **row["overrides"],
    }
    recipe = RECIPE.overridden([f"{key}={json.dumps(value)}" for key, value in changed.items()])
    plan = replace(plan_of_recipe(recipe.recipe, row["num_gpus"]), gpu_gib=H200.memory_gib)
    return plan, plan.schedule != "zbv"  # which waits for the host


def _longest(row: Row) -> tuple[Plan | str, bool]:
    """Some of the layers, and beside them what the others hold."""
    if row["provider"] != "trainkit":
        return OTHERS, False
    model, mode = row["case"].split()
    plan = Plan(
        find_shape(model),
        1,
        row["longest"],
        base="nf4" if mode.startswith("qlora") else "bfloat16",
        adapters=Adapters.of(offload=True),
        recompute=1,
        offload=True,
        chunk_tokens=row["loss_chunk"],
        tile_tokens=row["mlp_chunk"],
        trainer=False,
    )
    return plan, False


def _packing(row: Row) -> tuple[Plan | str, bool]:
    if row["provider"] == "liger":
        return OTHERS, False
    if row["case"].endswith("batch"):
        return "the row does not say how long the longest of its batches is", False
    plan = Plan(find_shape("qwen2-0.5b"), 16, 2048, **BARE)
    return (plan if row["provider"] == "trainkit" else replace(_as_hf(plan), masked=True)), False


def _ladder(row: Row) -> tuple[Plan | str, bool]:
    """From plain Hugging Face's QLoRA to trainkit's, a step at a time."""
    if row["row"] == 12:
        return AGAIN, False
    plan = Plan(
        find_shape(row["model"]),
        row["batch_size"],
        row["length"],
        base="nf4",
        adapters=Adapters.of(),
        recompute=1,
        trainer=False,
        upcast=row["row"] == 1,
    )
    ops = {9: ["rms_norm"], 10: ["linear_cross_entropy"], 11: ["swiglu", "lora_mlp"], 12: ALL_OPS}
    return replace(plan, ops=frozenset(o for at in ops if at <= row["row"] for o in ops[at])), False


def _memory(row: Row) -> tuple[Plan | str, bool]:
    """Points that calibrated nothing."""
    if row["mode"] == "full_fp8" and row["commit"].startswith("98405e2"):
        return OLDER, False
    known = {field.name: row[field.name] for field in fields(Point) if field.name in row}
    plan = plan_of(Point(**{**known, "recompute": int(row["recompute"])}))
    return plan, "beside" not in row  # Python launches slower then


def _optimizers(row: Row) -> tuple[Plan | str, bool]:
    if "galore" in str(row) and row["commit"] in ("5db8c65", "936c728"):
        return UNCUT, False
    if row["bench"] == "losses":
        known = {key: row[key] for key in ("optim", "optim_args", "keeps_masters", "in_backward")}
        return plan_of(Point("smollm2-135m", "full", 8, row["length"], **known)), False
    if row["bench"] == "each":
        optim, *words = (*row["case"].partition("4x2048")[2].split(), Point.optim)
        known = {"keeps_masters": "masters" not in words, "in_backward": "backward" in words}
        return plan_of(Point("qwen2-0.5b", "full", 4, optim=optim, **known)), False
    if row["bench"] == "8b":
        return (plan_of(LEAST), False) if row["provider"] == "trainkit" else (OTHERS, False)
    if row["way"] != "trainkit":
        return "a second copy of the gradients, which no recipe has", False
    return plan_of(Point("qwen2-7b", "full", 1, 1024, recompute=1, optim="lion_32bit")), False


def _recompute(row: Row) -> tuple[Plan | str, bool]:
    model, mode, size = row["case"].removeprefix("trainkit ").split()
    batch, length = map(int, size.split("x"))
    plan = plan_of(Point(model, mode, batch, length, recompute=int(row["recompute"] == "full")))
    return replace(plan, recompute_first=row["recomputed"] or 0), True


def _fp8_accuracy(row: Row) -> tuple[Plan | str, bool]:
    """Bare steps of a whole model, by what of it runs in fp8."""
    model, of_products = row["case"].partition(" ")[0], row["case"].partition("full: ")[2]
    shares = {"bf16": None, "every product": 1.0, "backward products only": 0.0}
    part = re.search(r"(\d+)% of the forward", of_products)
    if not part and of_products not in shares:
        return "the row does not say what of it runs in fp8", False
    share = int(part[1]) / 100 if part else shares[of_products]
    if share is not None and row["commit"] == "c688120":
        return OLDER, False
    return Plan(find_shape(model), 4, 2048, fp8=share, **BARE), True


READERS: Mapping[str, Callable[[Row], tuple[Plan | str, bool]]] = {
    "step": _step,
    "step_9b": _step,
    "lora": _lora,
    "fp8": _fp8,
    "trainer": _trainer,
    "multi_gpu": _multi_gpu,
    "memory_gpus": _runs,
    "longest_row": _longest,
    "packing": _packing,
    "ladder": _ladder,
    "memory": _memory,
    "optimizers": _optimizers,
    "recompute": _recompute,
    "fp8_accuracy": _fp8_accuracy,
    "data": lambda _: (HOST, False),
    "experts": lambda _: (EXPERTS, False),
    "delta_rule": lambda _: (ALONE, False),
}
"""THE TABLE: for each file the plan of a row, or why there is none; and whether times count."""


RECIPE = load_recipe(shipped_recipes()["qwen2-0.5b-full"], ["data.max_length=2048"])
"""Has trainkit's kernels and AdamW; what else counts is set by each row."""


def _speed(values: Values, plan: Plan) -> float | None:
    for key in ("tokens_per_second", "tokens_per_second_per_gpu"):
        if key in values:
            return values[key]
    seconds = values.get("step_seconds") or values.get("ms", 0.0) / 1e3
    return plan.tokens * plan.accumulation / seconds if seconds else None


def _named(file: Path, row: Row) -> str:
    keys = ("case", "bench", "provider", "way", "num_gpus", "recompute", "length", "offload", "run")
    told = [row.get(key) for key in (*keys, "offload_activations", "loss_chunk_tokens")]
    return " ".join([file.name, *(str(each) for each in told if each is not None)])


def read() -> Iterator[Measured | LeftOut]:
    """All rows with a peak of all files.

    Raises:
        KeyError: a file has such rows and no reader.
    """
    for file in sorted(FOLDER.glob("*.jsonl")):
        for row, values in rows_of(file):
            plan, is_timed = READERS[file.stem](row)
            name = _named(file, row)
            if isinstance(plan, str):
                yield LeftOut(name, plan)
            else:
                speed = _speed(values, plan) if is_timed else None
                yield Measured(name, values["peak_memory_gib"], speed, plan)


def _as_hf(plan: Plan) -> Plan:
    return replace(plan, ops=PLAIN)


EVERY = list(read())
ROWS = [each for each in EVERY if isinstance(each, Measured)]
