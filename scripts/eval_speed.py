"""BoolQ on a 0.5B model: trainkit against the harness's own model class at batch auto.

    python scripts/eval_speed.py ROWS.jsonl [--model DIR] [--data DIR] [--smoke]

Without a model, one of Qwen2.5-0.5B's shape with random weights is taken; without data, 3270
questions of about BoolQ's lengths. Both come with a tokenizer trained on the spot: nothing is
fetched. Writes these rows, each as soon as it is known, what decides most first:

- ``equal``: both in float32, where rounding cannot decide: the largest difference between two
  log-likelihoods, and how many of the questions get the same choice.
- ``in process``: seconds of an evaluation of the loaded model in bfloat16, from the task's name to
  its samples, of the harness's class and of ours, and where ours goes.
- ``command``: seconds of ``python -m lm_eval`` and ``trainkit eval``, start and loading included,
  and how many of them ours spends on questions; Python's modules are compiled before.
- the first two again with kernels, and with the harness told to take its softmax in float32: in
  bfloat16 it rounds log-probabilities to steps of 1/16 otherwise. What was found in bfloat16 is
  held against what the harness found in float32.

About 170 seconds on an H100 or H200; ``--smoke`` takes two layers and 40 questions on a CPU.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from lm_eval.evaluator import evaluate
from lm_eval.models.huggingface import HFLM
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from trainkit.evals.model import TrainedModel
from trainkit.evals.prompts import PromptStyle
from trainkit.evals.run import evaluate_model
from trainkit.evals.tasks import TaskChoice, load_tasks, quiet_harness
from trainkit.models.patch import patch_kernels

HARNESS = "lm-eval HFLM"
WIDE = "lm-eval HFLM, softmax in float32"
KERNELS = "trainkit, kernels"
TIMES = {HARNESS: 2, WIDE: 1, "trainkit": 3, KERNELS: 3}
"""How often each evaluates in bfloat16; the first time compiles and warms up."""

Keep = Callable[[dict[str, Any]], None]
SIZES = {
    False: {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24},
    True: {"hidden_size": 112, "intermediate_size": 64, "num_hidden_layers": 2},
}


def words(draw: random.Random, count: int = 20_000) -> list[str]:
    """Words of one to four syllables."""
    syllables = [a + b for a in "bcdfghklmnprstvwz" for b in ("a", "e", "i", "o", "u", "an", "er")]
    return ["".join(draw.choices(syllables, k=draw.randint(1, 4))) for _ in range(count)]


def write_boolq(directory: Path, count: int) -> None:
    """Questions with passages of 35 to 250 words, in the format of BoolQ's makers."""
    draw = random.Random(0)
    (directory / "boolq").mkdir(parents=True)
    known = words(draw)
    rows = [
        {
            "question": " ".join(draw.choices(known, k=9)),
            "passage": " ".join(
                draw.choices(known, k=min(35 + int(draw.expovariate(1 / 75)), 250))
            ),
            "answer": draw.random() < 0.62,
        }
        for _ in range(count)
    ]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (directory / "boolq" / "dev.jsonl").write_text(text)


def make_model(directory: Path, data: Path, *, small: bool) -> None:
    """A model with random weights in bfloat16, and a byte-level BPE trained on the questions."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    texts = [" yes", " no", *(data / "boolq" / "dev.jsonl").read_text().split("\n")]
    core.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=8000,
            special_tokens=["<eos>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    core.add_tokens(["yes", "no"])
    PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<eos>", pad_token="<eos>"
    ).save_pretrained(directory)
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=8192 if small else 151_936,
        num_attention_heads=14,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        max_position_embeddings=32_768,
        eos_token_id=0,
        bos_token_id=None,
        **SIZES[small],
    )
    Qwen2ForCausalLM(config).to(torch.bfloat16).save_pretrained(directory)


def synchronise() -> None:
    """Wait for the GPU, where there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def asked(lm: Any, data: Path) -> tuple[float, dict[int, list[float]]]:
    """Seconds of an evaluation, and each question's log-likelihoods."""
    synchronise()
    started = time.perf_counter()
    tasks = load_tasks(TaskChoice(["boolq"], data=str(data)))
    if isinstance(lm, TrainedModel):
        found = evaluate_model(lm, tasks, limit=None, chat=False, settings={})
        assert found is not None
        rows = found.samples["boolq"]
    else:
        with quiet_harness():
            rows = evaluate(lm, dict(tasks.loaded))["samples"]["boolq"]
    synchronise()
    seconds = time.perf_counter() - started
    return seconds, {row["doc_id"]: [each[0][0] for each in row["resps"]] for row in rows}


def asker(name: str, model: Any, tokenizer: Any) -> Any:
    """The model as the harness's class or as ours."""
    if name in (HARNESS, WIDE):
        wide = {"softmax_dtype": "float32"} if name == WIDE else {}
        return HFLM(pretrained=model, tokenizer=tokenizer, batch_size="auto", **wide)
    return TrainedModel(
        model,
        PromptStyle(tokenizer),
        stop_ids=[tokenizer.eos_token_id],
        max_length=model.config.max_position_embeddings,
    )


class InProcess:
    """Evaluations of a model that is loaded, as the harness's class has it and as ours.

    Args:
        directory: of the model.
        data: of the questions.
        device: cpu or cuda.
        keep: takes rows.
    """

    def __init__(self, directory: Path, data: Path, device: str, keep: Keep) -> None:
        self._directory, self._data, self._device, self._keep = directory, data, device, keep
        self._tokenizer = AutoTokenizer.from_pretrained(directory)
        self._truth: dict[int, list[float]] = {}

    def ask(self, names: Sequence[str], dtype: str) -> None:
        """Rows of these, with one copy of the model."""
        model = AutoModelForCausalLM.from_pretrained(self._directory, dtype=getattr(torch, dtype))
        model.to(self._device).eval()
        for name in names:
            if name == KERNELS:
                patch_kernels(model)
            times = []
            for _ in range(TIMES[name] if dtype == "bfloat16" else 1):
                lm = asker(name, model, self._tokenizer)
                with phases(lm) as spent:
                    seconds, found = asked(lm, self._data)
                times.append(round(seconds, 3))
            row = {"row": "in process", "model": name, "dtype": dtype, "seconds": times}
            self._keep({**row, "phases_of_the_last": spent, "questions": len(found)})
            if not self._truth:
                self._truth = found  # the harness's own, in float32
            else:
                against = agreement(self._truth, found)
                self._keep({"row": "equal", "model": name, "dtype": dtype, **against})


@contextmanager
def phases(lm: Any) -> Iterator[dict[str, float]]:
    """Seconds of reading tokens and of the model, filled when an evaluation of ours ends."""
    spent: dict[str, float] = {}
    if not isinstance(lm, TrainedModel):
        yield spent
        return

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            synchronise()
            started = time.perf_counter()
            result = function(*given, **named)
            synchronise()
            spent[name] = round(spent.get(name, 0.0) + time.perf_counter() - started, 3)
            return result

        return call

    for name, method in (("tokenising", "encode_pairs"), ("model", "_loglikelihood_tokens")):
        setattr(lm, method, timed(name, getattr(lm, method)))
    yield spent


def agreement(truth: dict[int, list[float]], found: dict[int, list[float]]) -> dict[str, Any]:
    """How far log-likelihoods are from others, and how many choices are the same."""
    gaps = [abs(a - b) for doc in truth for a, b in zip(truth[doc], found[doc], strict=True)]
    same = sum(
        (found[doc][0] >= found[doc][1]) == (first >= second)
        for doc, (first, second) in truth.items()
    )
    closest = min(abs(first - second) for first, second in truth.values())
    return {
        "max_difference": max(gaps),
        "mean_difference": sum(gaps) / len(gaps),
        "same_choice": same,
        "questions": len(truth),
        "closest_choice": closest,
    }


TASK = """task: boolq_here
dataset_path: json
dataset_kwargs: {data_files: {validation: FILE}}
output_type: multiple_choice
validation_split: validation
doc_to_text: "{{passage}}\\nQuestion: {{question}}?\\nAnswer:"
doc_to_target: "{{answer|int}}"
doc_to_choice: ["no", "yes"]
metric_list: [{metric: acc}]
metadata: {version: 2.0}
"""
"""The harness's own definition, from a file: its command line needs the hub for others."""


def compile_modules(environment: dict[str, str], target: Path) -> float:
    """Have both commands find their modules compiled, as on a machine where they ran before.

    Without this a machine that keeps no bytecode compiles thousands of modules at every start.

    Returns:
        Seconds that it took.
    """
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    environment["PYTHONPYCACHEPREFIX"] = str(target)
    started = time.perf_counter()
    places = dict.fromkeys(str(Path(place).resolve()) for place in sys.path if Path(place).is_dir())
    with suppress(subprocess.TimeoutExpired):
        subprocess.run(
            [sys.executable, "-m", "compileall", "-q", "-j", "0", *places],
            env=environment,
            capture_output=True,  # of files for another Python, which nobody imports
            check=False,
            timeout=30,
        )
    return round(time.perf_counter() - started, 1)


def commands(directory: Path, data: Path, folder: Path, keep: Keep) -> None:
    """Rows ``command``: each in a process of its own, as people start them."""
    (folder / "tasks").mkdir()
    file = (data / "boolq" / "dev.jsonl").absolute()
    (folder / "tasks" / "boolq_here.yaml").write_text(TASK.replace("FILE", str(file)))
    calls = {
        "python -m lm_eval": (
            f"-m lm_eval --model hf --model_args pretrained={directory} --tasks boolq_here "
            f"--include_path {folder / 'tasks'} --batch_size auto --log_samples "
            f"--output_path {folder / 'theirs'}"
        ).split(),
        "trainkit eval": (
            f"-m trainkit eval {directory} --tasks boolq --data {data} -o {folder / 'ours'} --json"
        ).split(),
        "trainkit eval --no-kernels": (
            f"-m trainkit eval {directory} --tasks boolq --data {data} -o {folder / 'plain'} --json"
            " --no-kernels"
        ).split(),
    }
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "hub")}
    keep({"row": "compiled", "seconds": compile_modules(environment, folder / "bytecode")})
    for name, arguments in calls.items():
        started = time.perf_counter()
        done = subprocess.run(
            [sys.executable, *arguments],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        seconds = round(time.perf_counter() - started, 2)
        row: dict[str, Any] = {"row": "command", "model": name, "seconds": seconds}
        if done.returncode:
            row["error"] = done.stderr[-2000:]
        keep({**row, **_found(folder / FOLDERS[name])})


FOLDERS = {
    "python -m lm_eval": "theirs",
    "trainkit eval": "ours",
    "trainkit eval --no-kernels": "plain",
}
"""Where each command writes."""


def _found(folder: Path) -> dict[str, float]:
    """What a command has written."""
    for path in folder.rglob("results*.json"):
        results = json.loads(path.read_text())
        if "results" in results:
            return {"acc": results["results"]["boolq_here"]["acc,none"]}
        acc = next(each["value"] for each in results["scores"] if each["metric"] == "acc")
        return {"acc": acc, "questions_seconds": results["seconds"]}
    return {}


def main() -> None:
    """Time both, and compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", type=Path)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--smoke", action="store_true")
    given = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    about = {"device": name, "cores": len(os.sched_getaffinity(0))}
    started = time.perf_counter()

    def keep(row: dict[str, Any]) -> None:
        line = json.dumps({**row, **about, "at": round(time.perf_counter() - started, 1)})
        with given.rows.open("a") as rows:
            rows.write(line + "\n")
        print(line, flush=True)

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = given.data or folder / "data"
        if given.data is None:
            write_boolq(data, 40 if given.smoke else 3270)
        directory = given.model or folder / "model"
        if given.model is None:
            make_model(directory, data, small=given.smoke)
        inside = InProcess(directory, data, device, keep)
        inside.ask([HARNESS, "trainkit"], "float32")
        inside.ask([HARNESS, "trainkit"], "bfloat16")
        commands(directory, data, folder, keep)
        if device == "cuda":
            inside.ask([KERNELS], "bfloat16")
            inside.ask([KERNELS], "float32")
        inside.ask([WIDE], "bfloat16")


if __name__ == "__main__":
    main()
