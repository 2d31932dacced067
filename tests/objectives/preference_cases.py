"""Runs of the preference objective through the real data path and Trainer."""

import contextlib
import json
import operator
import os
from pathlib import Path
from unittest import mock

import torch
from objectives import preference
from objectives.preference import BETA, PREFERENCE

from trainkit.data import fields, formats
from trainkit.objectives.table import OBJECTIVES
from trainkit.options.data import ROW_FORMATS
from trainkit.options.training import OBJECTIVE_FORMATS, OBJECTIVE_NAMES

NUM_PAIRS = 12


def register(patch_item):
    """Everything that trainkit has to be told of the objective and its format."""
    patch_item(OBJECTIVES, "preference", "objectives.preference:PREFERENCE")
    patch_item(OBJECTIVE_NAMES, "preference", "the odds of the better of two answers")
    patch_item(OBJECTIVE_FORMATS, "preference", "pairs")
    patch_item(formats.FORMATS, "pairs", preference.parse_pairs)
    patch_item(fields.READS, "pairs", preference.READS)
    patch_item(ROW_FORMATS, "pairs", "two answers to one prompt")


def command(cwd, argv):
    """``trainkit ARGV`` in a process that knows the objective."""
    from commands import run_command

    register(operator.setitem)
    return run_command(cwd, argv)


def pair(number, *, rejected=None):
    asked = [
        {"role": "user", "content": f"Count to {number}."},
        {"role": "assistant", "content": "Now?"},
        {"role": "user", "content": "Yes."},
    ]
    answers = " ".join(map(str, range(number))) or "none", rejected or "no" * (1 + number % 3)
    return {
        key: [*asked, {"role": "assistant", "content": answer}]
        for key, answer in zip(("chosen", "rejected"), answers, strict=True)
    }


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def make_data(root, rows, *, source_format="auto", objective=PREFERENCE, **options):
    """What a run prepares of these rows."""
    from tiny import make_tokenizer

    from trainkit.data.options import DataOptions
    from trainkit.options import Source
    from trainkit.train.data import prepare_run_data

    names = ("packing", "stream_buffer", "shares_prompts")
    feeding = {name: options.pop(name) for name in names if name in options}
    source = Source(path=write(Path(root) / "pairs.jsonl", rows), format=source_format)
    return prepare_run_data(
        [source],
        [source],
        make_tokenizer(),
        DataOptions(**{"max_length": 256, "cache_dir": str(Path(root) / "cache"), **options}),
        ledger=Path(root) / "dropped.jsonl",
        progress=None,
        objective=objective,
        **{"packing": False, **feeding},
    )


def return_means(model):
    """Make it one of the classes that are not told how many items a step has, as gemma4."""

    class Mean(type(model)):
        accepts_loss_kwargs = False

    model.__class__ = Mean


def make_trainer(root, *, patched=False, means=False, **options):
    from lab import Lab
    from tiny import make_tokenizer

    from trainkit.patching import patch

    mine = Path(root) / f"data-{os.environ.get('RANK', 0)}"  # ranks would overwrite each other's
    mine.mkdir()
    data = make_data(mine, [pair(number) for number in range(NUM_PAIRS)])
    trainer = Lab(make_tokenizer(), Path(root)).trainer(
        "run",
        prepare=return_means if means else patch if patched else None,
        given={"train_data": data.train, "eval_data": data.eval, "objective": PREFERENCE},
        **{"save_strategy": "no", "max_grad_norm": 1e9, **options},
    )
    return trainer, data


def mean_loss(model, pairs):
    """From full logits and softmax, written out."""
    losses = []
    for items in pairs:
        scores = []
        for sample in items:
            ids = torch.tensor(sample["input_ids"], dtype=torch.long)[None]
            log_p = model(input_ids=ids).logits[0, :-1].log_softmax(-1)
            taken = log_p.gather(1, ids[0, 1:, None])[:, 0]
            scores.append(taken[torch.tensor(sample["loss_mask"])[1:] > 0].sum())
        losses.append((1 + torch.exp(-BETA * (scores[0] - scores[1]))).log())
    return torch.stack(losses).mean()


def train(root, *, stage=0, **options):
    """What a rank logs, and the loss of the evaluation."""
    from distributed.zero_cases import zero_file

    shard = zero_file(root, stage) if stage else "none"
    tables = (OBJECTIVES, OBJECTIVE_FORMATS, formats.FORMATS, fields.READS, ROW_FORMATS)
    with contextlib.ExitStack() as stack:
        for table in tables:
            stack.enter_context(mock.patch.dict(table))
        register(operator.setitem)
        trainer, _ = make_trainer(root, shard=shard, **options)
        trainer.train()
        rows = [row for row in trainer.state.log_history if "loss" in row]
    keys = ("loss", "grad_norm", "margin", "num_trained_tokens")
    return [[row[key] for key in keys] for row in rows] + [trainer.evaluate()["eval_loss"]]
