"""Preparing conversations for training: trainkit against TRL, on the same file and cores.

Both read a JSON lines file, render it with the same chat template, tokenise, mask everything but
the assistants' words, and pack. Imports are not counted.
"""

import json
import os
import pydoc_data.topics
import random
import resource
import tempfile
import threading
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from trainkit.bench.cells import Cell

PROVIDERS = ("trainkit", "trl")
LENGTH = 2048
TEMPLATE = "qwen2_5"
"""A template for which TRL brings a patched twin; it refuses masks for any it does not know."""


def write_conversations(path: Path, num_rows: int, *, seed: int = 0) -> None:
    """Write conversations of one to four exchanges, with lengths as in real chat data.

    The words are runs of Python's own reference manual, so any tokenizer meets real English.
    """
    words = " ".join(pydoc_data.topics.topics.values()).split()
    draw = random.Random(seed)
    with path.open("w", encoding="utf-8") as file:
        for _ in range(num_rows):
            messages = []
            if draw.random() < 0.3:
                messages.append({"role": "system", "content": "You are a helpful assistant."})
            for _ in range(draw.choice((1, 1, 1, 2, 2, 3, 4))):
                for role, mean in (("user", 3.3), ("assistant", 4.6)):
                    count = min(max(1, int(draw.lognormvariate(mean, 0.8))), 1500)
                    start = draw.randrange(len(words) - 2000)
                    text = " ".join(words[start : start + count])
                    messages.append({"role": role, "content": text})
            file.write(json.dumps({"messages": messages}, ensure_ascii=False) + "\n")


class MemoryWatch:
    """Watches the memory of this process and its children: proportional set size, its peak."""

    def __init__(self) -> None:
        self.peak_bytes = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "MemoryWatch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(0.25):
            now = sum(map(_proportional_bytes, _family(os.getpid())))
            self.peak_bytes = max(self.peak_bytes, now)


def _family(root: int) -> list[int]:
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue  # it has just ended
            parents.setdefault(int(fields[1]), []).append(int(entry.name))
    found, todo = [], [root]
    while todo:
        process = todo.pop()
        found.append(process)
        todo += parents.get(process, [])
    return found


def _proportional_bytes(process: int) -> int:
    try:
        text = Path(f"/proc/{process}/smaps_rollup").read_text()
    except OSError:
        return 0
    line = next((line for line in text.splitlines() if line.startswith("Pss:")), "Pss: 0")
    return int(line.split()[1]) * 1024


def _tokenizer(model: str) -> Any:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    spec = find_spec("trl")
    if spec is not None and spec.submodule_search_locations:
        folder = Path(next(iter(spec.submodule_search_locations))) / "chat_templates"
        tokenizer.chat_template = (folder / f"{TEMPLATE}.jinja").read_text(encoding="utf-8")
    return tokenizer


def _with_trainkit(job: Cell, scratch: str) -> Callable[[], dict[str, Any]]:
    from trainkit.data import DataOptions, Ledger, PackedDataset, Source, prepare

    tokenizer = _tokenizer(job.model)
    options = DataOptions(
        max_length=LENGTH, num_workers=job.settings["num_workers"], cache_dir=f"{scratch}/cache"
    )

    def work() -> dict[str, Any]:
        data = prepare([Source(path=job.settings["path"])], tokenizer, options, ledger=Ledger())
        facts = {"rows": data.summary["totals"]["rows"], "tokens": int(data.lengths.sum())}
        rows = len(PackedDataset(data, LENGTH))
        facts["packing_fill"] = facts["tokens"] / (rows * LENGTH)
        return facts

    return work


def _with_trl(job: Cell, scratch: str) -> Callable[[], dict[str, Any]]:
    import datasets
    from transformers import Qwen2Config, Qwen2ForCausalLM
    from trl import SFTConfig, SFTTrainer

    datasets.disable_progress_bars()
    tokenizer = _tokenizer(job.model)
    sizes = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 1}
    config = Qwen2Config(hidden_size=16, intermediate_size=16, vocab_size=len(tokenizer), **sizes)
    model = Qwen2ForCausalLM(config)
    args = SFTConfig(
        output_dir=f"{scratch}/out",
        assistant_only_loss=True,
        packing=True,
        max_length=LENGTH,
        dataset_num_proc=job.settings["num_workers"],
        use_cpu=True,
        bf16=False,
        report_to=[],
    )

    def work() -> dict[str, Any]:
        rows = datasets.load_dataset(
            "json", data_files=job.settings["path"], split="train", cache_dir=f"{scratch}/cache"
        )
        trainer = SFTTrainer(model=model, args=args, train_dataset=rows, processing_class=tokenizer)
        return {"rows": len(rows), "samples": len(trainer.train_dataset)}

    return work


def measure(job: Cell, device: torch.device) -> dict[str, Any]:
    """Do one job in this process."""
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["HF_HOME"] = scratch
        prepare = (_with_trainkit if job.provider == "trainkit" else _with_trl)(job, scratch)
        before = _cpu_seconds()
        started = time.perf_counter()
        with MemoryWatch() as memory:
            facts = prepare()
        seconds = time.perf_counter() - started
        result = {
            **facts,
            "seconds": seconds,
            "cpu_seconds": _cpu_seconds() - before,
            "rows_per_second": facts["rows"] / seconds,
            "peak_memory_gib": memory.peak_bytes / 2**30,
        }
        if job.provider == "trainkit":
            started = time.perf_counter()
            prepare()
            result["cached_start_seconds"] = time.perf_counter() - started
    return result


def _cpu_seconds() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)
