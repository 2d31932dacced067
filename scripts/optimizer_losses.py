"""Train a small model with every optimizer and compare the losses with AdamW's with fp32 masters.

    python scripts/optimizer_losses.py ROWS.jsonl [--model DIR] [--against ROWS] [--together 6]

DIR holds a model in Hugging Face's format or one .gguf file; SmolLM2-135M is a good one. Without it
a small Llama is first trained from scratch, as long again, and all cases start from that. The text
is Python's own standard library, shuffled by file, in rows of ``--length`` tokens; each step has 8
rows, and 64 are held out. Every case starts from the same weights, sees the same rows, and goes
through the real Trainer with a cosine schedule and clipping, which steps in the backward pass do
without: ``adamw unclipped`` is theirs to be held against. ``adamw again`` is AdamW from weights
that are moved by less than bf16 resolves: what the difference of two runs is worth.

Some processes share one GPU and the cases, so that times mean nothing. A JSON row each, written as
soon as the case is done: the losses of all steps, the mean of the last 50, the held-out loss, and
both less AdamW's. Where the time ends sooner, the row has the steps so far and is held against
AdamW's same steps. AdamW need not run again where ``--against`` names rows that have it, of the
same model and text: its first loss, before any step, has to be the same.
"""

import argparse
import contextlib
import gc
import importlib.util
import math
import multiprocessing
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from optimizer_losses_rows import Table
from transformers import TrainerCallback

from trainkit.bench.memory import imports
from trainkit.bench.providers import Shape
from trainkit.bench.through_trainer import Cell, make_trainer
from trainkit.train.optimizer.make import OptimizerPlan

BATCH, HELD_OUT = 8, 64
TO_BEGIN, TO_END = 12, 4
"""Seconds before the end in which no case begins, and in which all write what they have."""
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SMALL = {
    "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8,
    "num_attention_heads": 8, "num_key_value_heads": 4, "tie_word_embeddings": True,
}  # fmt: skip
WORDS = 8192
"""Of the tokenizer that is made where no model brings one."""


@dataclass(frozen=True)
class Case:
    """One run.

    Args:
        name: in the rows.
        optim: a name of ``training.optim``.
        rate: of the learning rate that AdamW has.
        decay: weight decay.
        optim_args: ``training.optim_args``.
        keeps_masters: half-precision weights have fp32 copies.
        in_backward: weights step in the backward pass.
        clips: to a norm of 1.
        is_moved: weights start moved by less than bf16 resolves.
    """

    name: str
    optim: str = "adamw_torch_fused"
    rate: float = 1.0
    decay: float = 0.0
    optim_args: str | None = None
    keeps_masters: bool = True
    in_backward: bool = False
    clips: bool = True
    is_moved: bool = False


_LOW_RANK = "rank=128,update_proj_gap=50"
CASES = (
    Case("adamw"),
    Case(
        "paged_adamw_8bit without masters in backward",
        "paged_adamw_8bit",
        keeps_masters=False,
        in_backward=True,
        clips=False,
    ),
    Case("adamw unclipped", clips=False),
    Case("adamw_torch_8bit", "adamw_torch_8bit"),  # early: it is compiled, and launches the most
    Case("muon", "muon"),
    Case("lion_8bit", "lion_8bit", rate=0.2),
    Case("apollo_adamw", "apollo_adamw", optim_args=f"{_LOW_RANK},scale=1.0"),
    Case("adamw_8bit", "adamw_8bit"),
    Case("lion_32bit", "lion_32bit", rate=0.2),
    Case("ademamix_8bit", "ademamix_8bit"),
    Case("stable_adamw", "stable_adamw"),
    Case("adamw_torch_4bit", "adamw_torch_4bit"),
    Case("rmsprop", "rmsprop", rate=0.3),
    Case("flat_adamw", "flat_adamw"),
    Case("adamw again", is_moved=True),
    Case("adamw without masters", keeps_masters=False),
    Case("adamw_8bit without masters", "adamw_8bit", keeps_masters=False),
    Case("adafactor", "adafactor"),
    Case("adafactor without masters", "adafactor", keeps_masters=False),
    Case("ademamix", "ademamix"),
    Case("adagrad", "adagrad", rate=10.0),
    Case("sgd", "sgd", rate=1000.0, optim_args="momentum=0.9"),
    Case("galore_adafactor", "galore_adafactor", optim_args=f"{_LOW_RANK},scale=1.0"),
    Case("galore_adamw", "galore_adamw", optim_args=f"{_LOW_RANK},scale=1.0"),  # many SVDs
)
"""What is worth most comes first, in case that time ends."""


# ---------------------------------------------------------------------------------- the text
def text() -> list[str]:
    """Files of Python's standard library, shuffled."""
    place = Path(os.__file__).parent
    files = [*sorted(place.glob("*.py")), *sorted(place.glob("*/*.py"))]
    files = [f for f in files if "site-packages" not in str(f) and "test" not in str(f)]
    random.Random(0).shuffle(files)
    found = []
    for file in files:
        with contextlib.suppress(UnicodeDecodeError):
            found.append(file.read_text("utf-8"))
    return found


def rows_of(tokenizer: Any, number: int, length: int) -> np.ndarray:
    """(number, length) tokens; the text begins anew where it ends."""
    ids: list[int] = []
    for each in text():
        ids += [*tokenizer(each)["input_ids"], tokenizer.eos_token_id]
        if len(ids) > number * length:
            break
    rows = np.array(ids[: len(ids) // length * length], dtype=np.int32).reshape(-1, length)
    rows = np.random.default_rng(1).permutation(rows)
    return np.concatenate([rows] * -(-number // len(rows)))[:number]


class Rows:
    """Rows of real text, in their own order."""

    def __init__(self, tokens: np.ndarray) -> None:
        self._tokens = tokens
        self.lengths = np.full(len(tokens), tokens.shape[1])

    def set_epoch(self, epoch: int) -> None:
        """There is one order."""

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, index: int) -> dict[str, Any]:
        tokens = self._tokens[index]
        return {"input_ids": tokens, "loss_mask": np.ones(len(tokens), np.uint8), "source": 0}


# ---------------------------------------------------------------------------------- the model
def prepare(given: Path | None, folder: Path, steps: int, length: int, tiny: bool) -> None:
    """Write the model that every case starts from, and the rows."""
    if given is None:
        from_scratch(folder, steps, length, tiny)
        return
    from transformers import AutoModelForCausalLM, AutoTokenizer

    files = list(given.glob("*.gguf"))
    more = {"gguf_file": files[0].name} if files else {}
    tokenizer = AutoTokenizer.from_pretrained(given, **more)
    source = AutoModelForCausalLM.from_pretrained(given, dtype=torch.bfloat16, **more)
    config = source.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = type(source)(config).to(torch.bfloat16)
    model.load_state_dict(source.state_dict())
    model.save_pretrained(folder)
    np.save(folder / "rows.npy", rows_of(tokenizer, steps * BATCH + HELD_OUT, length))


def from_scratch(folder: Path, steps: int, length: int, tiny: bool) -> None:
    """A tokenizer of the text, and a small Llama trained on it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=WORDS if not tiny else 512,
        special_tokens=["<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(text()[: 400 if not tiny else 20], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>", pad_token="<eos>")
    np.save(folder / "rows.npy", rows_of(tokenizer, 2 * steps * BATCH + HELD_OUT, length))
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=core.get_vocab_size(), use_cache=False, **SMALL)
    if tiny:
        config.update({"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2})
    model: Any = LlamaForCausalLM(config).to(torch.bfloat16)
    first = np.load(folder / "rows.npy")[HELD_OUT + steps * BATCH :]
    trained(Case("adamw"), model, first, 1e-3)
    model.cpu().save_pretrained(folder)


# ---------------------------------------------------------------------------------- a run
class UntilTheEnd(TrainerCallback):
    """Ends a run when the time ends."""

    def __init__(self, end: float) -> None:
        self._end = end

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Look at the clock."""
        del args, state
        control.should_training_stop |= time.monotonic() > self._end


def trained(
    case: Case, model: Any, rows: np.ndarray, rate: float, end: float = math.inf
) -> list[float]:
    """Train on all rows, once, or until the time ends; the loss of each step."""
    import trainkit

    model.to(DEVICE).train()
    trainkit.patch(model)
    shape = Shape("llama", {"vocab_size": model.config.vocab_size}, BATCH, rows.shape[1])
    steps = len(rows) // BATCH
    with tempfile.TemporaryDirectory() as directory:
        trainer = make_trainer(
            Cell("", steps=steps, num_workers=0), shape, model, DEVICE, Path(directory),
            samples=Rows(rows), optim=case.optim, optim_args=case.optim_args,
            optimizer_plan=OptimizerPlan(
                in_backward=case.in_backward, keeps_masters=case.keeps_masters
            ),
            learning_rate=rate * case.rate, weight_decay=case.decay,
            max_grad_norm=1.0 if case.clips else 0.0,
            lr_scheduler_type="cosine", warmup_steps=max(steps // 10, 1),
        )  # fmt: skip
        trainer.add_callback(UntilTheEnd(end))
        trainer.train()
    return [row["loss"] for row in trainer.state.log_history if "step_seconds" in row]


def run(case: Case, folder: str, rate: float, steps: int, end: float) -> dict[str, Any]:
    """A case's losses."""
    from transformers import AutoModelForCausalLM

    begun = time.monotonic()
    if DEVICE.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    model.config.use_cache = False
    if case.is_moved:
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for each in model.parameters():
                each.mul_(1 + 0.002 * torch.randn(each.shape, generator=generator).to(each.dtype))
    rows = np.load(Path(folder) / "rows.npy")
    held_out, rows = rows[:HELD_OUT], rows[HELD_OUT : HELD_OUT + steps * BATCH]
    losses = trained(case, model, rows, rate, end)
    last = losses[-50:]
    found = {"losses": losses, "last_50": sum(last) / len(last)}
    model.eval()
    total = 0.0
    with torch.no_grad():
        for batch in torch.from_numpy(held_out).long().to(DEVICE).split(BATCH):
            logits = model(input_ids=batch).logits[:, :-1].float().flatten(0, 1)
            total += float(torch.nn.functional.cross_entropy(logits, batch[:, 1:].flatten()))
    found["held_out"] = total / (HELD_OUT // BATCH)
    if DEVICE.type == "cuda":
        found["peak_memory_gib"] = torch.cuda.max_memory_allocated() / 2**30
    return {**found, "seconds": time.monotonic() - begun}


def answer(work: tuple[Case, str, float, int, float]) -> tuple[Case, dict[str, Any]]:
    """A case and its losses, or its error, in a process that has had others before."""
    left = work[-1] - time.monotonic()
    try:
        found = (
            run(*work) if left > TO_BEGIN else {"error": f"not begun, {left:.0f} s before the end"}
        )
    except Exception as error:  # the other cases go on
        found = {"error": f"{type(error).__name__}: {error}"[:800]}
    gc.collect()
    if DEVICE.type == "cuda":
        torch.cuda.empty_cache()
    return work[0], found


def answers(pool: Any, work: Iterable[Any], end: float) -> Iterator[tuple[Case, dict[str, Any]]]:
    """What comes before the time ends, as it comes."""
    waiting = pool.imap_unordered(answer, work)
    while True:
        try:
            yield waiting.next(timeout=max(end - time.monotonic(), 0.0))
        except StopIteration:
            return
        except multiprocessing.TimeoutError:
            sys.stdout.write("the time has ended\n")
            return


def arguments() -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("rows", type=Path)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--against", type=Path, help="rows that have AdamW's losses")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rate", type=float, default=1e-4, help="AdamW's")
    parser.add_argument("--length", type=int, default=512, help="tokens of a row")
    parser.add_argument("--together", type=int, default=6, help="processes")
    parser.add_argument("--only", nargs="*", help="names of cases")
    parser.add_argument("--seconds", type=float, default=3600.0, help="after these all ends")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to check the script")
    given = parser.parse_args()
    if given.model is not None and not given.model.is_dir():
        parser.error(f"--model: there is no directory {given.model}")
    known = {case.name for case in CASES}
    if not set(given.only or ()) <= known:
        parser.error(f"--only: {sorted(set(given.only) - known)} are not among {sorted(known)}")
    is_packed = given.model is not None and any(given.model.glob("*.gguf"))
    if is_packed and importlib.util.find_spec("gguf") is None:
        parser.error("--model: a .gguf file is read by the package gguf: pip install gguf")
    return given


def main() -> None:
    """Write the rows."""
    given = arguments()
    end = time.monotonic() + given.seconds
    cases = [case for case in CASES if not given.only or case.name in given.only]
    about = {
        "bench": "losses",
        "model": given.model.name if given.model else "from scratch",
        "length": given.length,
        "learning_rate": given.rate,
    }
    table = Table(given.rows, about, [case.name for case in cases])
    if given.against is not None:
        table.hold_against(given.against, given.steps)
    context = multiprocessing.get_context("spawn")
    number = min(given.together, len(cases))
    with context.Pool(number, imports) as pool, tempfile.TemporaryDirectory() as folder:
        # while the others import
        prepare(given.model, Path(folder), given.steps, given.length, given.tiny)
        work = [(case, folder, given.rate, given.steps, end - TO_END) for case in cases]
        for case, values in answers(pool, work, end):
            table.add(case, values)
        table.write_held()


if __name__ == "__main__":
    main()
