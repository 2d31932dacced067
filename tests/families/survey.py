"""What the kernels make of every causal language model type of the installed transformers.

    python -m families.survey [TYPE ...] [--json FILE]      (from tests/, or through scripts/)

Each type is built tiny, patched, stepped and reverted in a process of its own.
"""

import argparse
import contextlib
import json
import logging
import os
import select
import signal
import sys
import time
import traceback
import warnings
from pathlib import Path

import torch
from tiny_classes import _EXTRA, classes, make_tiny

from trainkit.auto_class import FAILURES
from trainkit.errors import TrainkitError
from trainkit.estimate.peak import peak
from trainkit.estimate.plan import ALL_OPS, Plan
from trainkit.estimate.shape import from_config
from trainkit.models.patch import patch_kernels
from trainkit.models.proof.replica import make_replica
from trainkit.options.model import OPS
from trainkit.parallel.pipeline.chain import find_chain

MORE = {
    "bamba": {"attn_layer_indices": [1]},
    "jamba": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
    },
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    "minimax": {"layer_types": ["linear_attention", "full_attention"] * 2},
}
"""Layers of both kinds, where the default is one."""


def build(model_type):
    """The tiny model of a type, in training mode without dropout."""
    extra = {**_EXTRA.get(model_type, {}), **MORE.get(model_type, {})}
    model = make_tiny(*classes()[model_type], **MORE.get(model_type, {}) and extra)
    with contextlib.suppress(*FAILURES):
        model.set_attn_implementation("eager")
    with contextlib.suppress(*FAILURES):
        model.set_experts_implementation("eager")
    return model.eval()


def batch():
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, 100, (2, 12), generator=generator)
    labels = ids.clone()
    labels[0, :4] = -100
    return {"input_ids": ids, "labels": labels}


def step(model):
    model.zero_grad(set_to_none=True)
    outputs = model(**batch())
    outputs.loss.backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return {"loss": outputs.loss.detach(), **gradients}


def distance(found, wanted):
    """The largest difference of a loss or gradient to the largest gradient of all."""
    top = max(each.abs().max().item() for each in wanted.values())
    assert found.keys() == wanted.keys()
    return max(
        (found[name] - each).abs().max().item() / max(each.abs().max().item(), 1e-3 * top)
        for name, each in wanted.items()
    )


def why_no_estimate(model):
    """None where `trainkit estimate` answers for a step of the model, with kernels and without."""
    config = {**json.loads(model.config.to_json_string(use_diff=False))}
    config["model_type"] = model.config.model_type
    try:
        for ops in (frozenset(), ALL_OPS):
            plan = Plan(from_config(config, "tiny"), 2, 32, ops=ops)
            assert peak(plan).gib > 0
    except (TrainkitError, *FAILURES) as error:
        return f"{type(error).__name__}: {error}"[:150]
    return plan.recorded.plain and f"without kernels: {plan.recorded.plain}"


def why_no_pipeline(model):
    """None where the model is a chain of layers that a pipeline can cut."""
    try:
        find_chain(model.config, lambda _: make_replica(model, 4096, least_layers=2))
    except TrainkitError as error:
        return error.what.partition("can be cut: ")[2]
    return None


def survey(model_type, estimates=False):
    """One type's row, and if ``estimates`` what an estimate says of it: half of the time."""
    start = time.time()
    try:
        model = build(model_type)
        plain = step(model)
    except FAILURES as error:
        return {"type": model_type, "built": False, "why": f"{type(error).__name__}: {error}"[:150]}
    no_pipeline = why_no_pipeline(model)
    report = patch_kernels(model)
    plan = report.plan
    row = {"type": model_type, "built": True, "seconds": round(plan.seconds, 2)}
    row["no_pipeline"] = no_pipeline
    row["whole_error"], row["dropped"] = plan.whole_error, plan.dropped
    row["ops"] = {each.op: [each.status, each.num_modules, each.reason] for each in report.rows}
    row["verdicts"] = {op: sorted({each.verdict for _, each in plan.findings(op)}) for op in OPS}
    row["fp32"] = distance(step(model), plain) if report.active else None
    report.revert()
    if estimates:
        row["no_estimate"] = why_no_estimate(model)
    row["reverted"] = all(torch.equal(each, plain[n]) for n, each in step(model).items())
    model.to(torch.bfloat16)
    with torch.no_grad(), contextlib.suppress(*FAILURES):
        text = {"input_ids": batch()["input_ids"]}
        logits = model(**text).logits
        report = patch_kernels(model, {"linear_cross_entropy": False})
        row["bf16_bits_differ"] = (model(**text).logits != logits).double().mean().item()
    row["total"] = round(time.time() - start, 1)
    return row


def alone(model_type, limit=120):
    """`survey` in a process of its own, which may crash or hang."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.close(reader)
        try:
            row = survey(model_type, estimates=True)
        except BaseException as error:
            where = traceback.format_exc()[-600:]
            row = {"type": model_type, "built": True, "crash": f"{error!r}"[:200], "where": where}
        with os.fdopen(writer, "w") as out:
            out.write(json.dumps(row))
        os._exit(0)
    os.close(writer)
    text, end = b"", time.time() + limit
    while True:
        ready, _, _ = select.select([reader], [], [], max(0, end - time.time()))
        if not ready:
            os.kill(child, signal.SIGKILL)
            text = json.dumps({"type": model_type, "built": True, "crash": "time"}).encode()
            break
        part = os.read(reader, 1 << 16)
        if not part:
            break
        text += part
    os.close(reader)
    os.waitpid(child, 0)
    return json.loads(text or json.dumps({"type": model_type, "built": True, "crash": "died"}))


def summary(rows):
    """The table of docs/guides/kernels.md, as lines."""
    built = [row for row in rows if row["built"] and "crash" not in row]
    lines = ["| op | on | no kernel yet | refused | does not apply |", "|---|---|---|---|---|"]
    for op in OPS:
        on = [row for row in built if row["ops"].get(op, ["off"])[0] == "on"]
        others = [row for row in built if row not in on]
        kinds = [row["verdicts"].get(op, []) for row in others]
        no_kernel = sum(each == ["no kernel"] for each in kinds)
        refused = sum(bool(set(each) - {"no kernel"}) for each in kinds)
        left = len(others) - no_kernel - refused
        lines.append(f"| `{op}` | {len(on)} | {no_kernel} | {refused} | {left} |")
    complete = sum(
        all(verdicts in ([], ["on"]) for verdicts in row["verdicts"].values())
        and not row["dropped"]
        for row in built
    )
    estimated = [row.get("no_estimate") or "" for row in built]
    answers = sum(not why or why.startswith("without kernels") for why in estimated)
    equal = sum(row.get("bf16_bits_differ") == 0 for row in built)
    lines.append("")
    lines.append(
        f"{len(rows)} types, of which {len(built)} build tiny and take a step; on {complete} of "
        f"them every op that applies is on; bf16 logits equal plain's bit for bit on {equal}; "
        f"`trainkit estimate` answers for {answers}, for {estimated.count('')} with kernels; a "
        f"pipeline cuts {sum(row.get('no_pipeline', '') is None for row in built)}."
    )
    return lines


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("types", nargs="*")
    parser.add_argument("--json")
    given = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    rows = []
    for model_type in given.types or sorted(classes()):
        row = alone(model_type)
        rows.append(row)
        on = [op for op, each in row.get("ops", {}).items() if each[0] == "on"]
        told = on or row.get("why") or row.get("crash")
        print(model_type, told, file=sys.stderr, flush=True)
        if given.json:
            with Path(given.json).open("a") as out:
                out.write(json.dumps(row) + "\n")
    print("\n".join(summary(rows)))


if __name__ == "__main__":
    main()
