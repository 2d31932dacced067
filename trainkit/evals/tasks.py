"""Tasks of lm-evaluation-harness by name: the seven sets also from files, offline.

The harness reads the definitions of all its tasks before it finds one, which takes ten seconds; of
the seven sets only the folder of the set is read.
"""

import functools
import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lm_eval.api.task
import lm_eval.tasks
from lm_eval.tasks import TaskManager
from lm_eval.tasks._index import Entry, Kind
from lm_eval.tasks._yaml_loader import load_yaml

from trainkit.data.files import is_data
from trainkit.errors import DataError, RecipeError, TrainkitError
from trainkit.evals import readers, sandbox
from trainkit.options.section import ask, nearest
from trainkit.options.training import METRICS, TaskChoice

# -- THE TABLE of benchmark sets that need no network: one row a set. No torch, no harness
# Any other task of lm-evaluation-harness is known to it by name.


@dataclass(frozen=True)
class BenchmarkSet:
    """A row.

    Attributes:
        name: on the command line, and of its directory.
        group: the harness's name of all of it.
        folder: of its tasks, under the harness's ``tasks``.
        read: its published files.
        shots: examples before a question, where the harness's task leaves that open.
    """

    name: str
    title: str
    group: str
    folder: str
    read: readers.Reader
    shots: int = 0

    @property
    def metric(self) -> str:
        """The figure that stands for the set: the first that is measured."""
        return METRICS[self.name][0]

    @property
    def expected(self) -> Mapping[str, float]:
        """What has been published for a model, to hold a score against."""
        return {model: own[self.name] for model, own in _PUBLISHED.items() if self.name in own}


SETS: Mapping[str, BenchmarkSet] = {
    row.name: row
    for row in (
        BenchmarkSet("boolq", "BoolQ", "boolq", "super_glue/boolq", readers.read_boolq),
        BenchmarkSet("mmlu", "MMLU", "mmlu", "mmlu/default", readers.read_mmlu, 5),
        BenchmarkSet("gsm8k", "GSM8K", "gsm8k", "gsm8k", readers.read_gsm8k, 5),
        BenchmarkSet("humaneval", "HumanEval", "humaneval", "humaneval", readers.read_humaneval),
        BenchmarkSet("agieval", "AGIEval", "agieval", "agieval", readers.read_agieval),
        BenchmarkSet("bbh", "BIG-Bench Hard", "bbh", "bbh", readers.read_bbh, 3),
        BenchmarkSet("ceval", "C-Eval", "ceval-valid", "ceval", readers.read_ceval, 5),
    )
}
_PUBLISHED = {  # by AscendSpeed, and by MindSpeed-LLM: see the guide
    "LLaMA-7B": {
        "boolq": 0.742, "mmlu": 0.333, "gsm8k": 0.102, "humaneval": 0.128, "agieval": 0.210,
        "bbh": 0.334, "ceval": 0.408,
    },
    "Llama-2-7B": {
        "boolq": 0.754, "mmlu": 0.457, "humaneval": 0.128, "agieval": 0.206, "bbh": 0.344,
        "ceval": 0.339,
    },
}  # fmt: skip


FEWSHOT_SEED = 1234
"""The harness's own: it chooses the same examples as its command line does."""

_SHIPPED = Path(lm_eval.tasks.__file__).parent


@dataclass(frozen=True)
class LoadedTasks:
    """Tasks with their questions.

    Attributes:
        loaded: as the harness's ``TaskManager.load`` returns them.
        names: every task or group that was asked for, in the harness's words, by the name given.
    """

    loaded: Mapping[str, Any]
    names: Mapping[str, str] = field(default_factory=dict)

    @property
    def tasks(self) -> Mapping[str, Any]:
        tasks: Mapping[str, Any] = self.loaded["tasks"]
        return tasks


def load_tasks(choice: TaskChoice) -> LoadedTasks:
    """Find tasks and read their questions.

    Raises:
        RecipeError: a name is not known, or a task cannot be run as asked.
        DataError: a file is missing or malformed, or the hub cannot be reached.
    """
    managers: dict[str, TaskManager] = {}
    everything: TaskManager | None = None
    built: list[Any] = []
    names: dict[str, str] = {}
    for name in dict.fromkeys(choice.tasks):
        if is_data(Path(name)):
            raise RecipeError(
                f"{name} is a file of rows, which generation_eval asks while a model trains",
                where="eval_tasks.tasks",
                fix=f"generation_eval: {{data: [{name}]}}",
            )
        found = _own(name, managers)
        if found is None:
            if not Path(name).is_file():
                _check_is_written(name)
            everything = everything or TaskManager()
            if name not in everything.task_index and not Path(name).is_file():
                raise _unknown(name, everything.all_tasks)
            names[name] = name
            built += _built(everything, name, _FROM_THE_HUB)
            continue
        benchmark, spec = found
        manager = managers[benchmark.name]
        _serve(manager, spec, benchmark, choice)
        names[name] = spec
        built += _built(manager, spec, _FROM_FILES)
    try:
        # One more manager without tasks of its own makes the harness's own mapping of all.
        loaded = TaskManager(include_defaults=False).load(built)
    except ValueError as error:
        raise RecipeError(str(error), where="--tasks", fix="name each task once") from None
    for task_name, task in loaded["tasks"].items():
        _check_code(task_name, task, choice)
        _set_shots(task_name, task, choice)
    return LoadedTasks(loaded, names)


def set_of(task: str) -> BenchmarkSet | None:
    """The set of which a task, or a group, is all; None for a part of one, and for others."""
    return next((row for row in SETS.values() if task in (row.name, row.group)), None)


def _own(name: str, managers: dict[str, TaskManager]) -> tuple[BenchmarkSet, str] | None:
    """The set whose folder knows a name, and the harness's word for it."""
    for row in SETS.values():
        if not name.startswith(row.name):
            continue
        spec = row.group if name == row.name else name
        manager = managers.get(row.name)
        if manager is None:
            manager = managers[row.name] = TaskManager(
                include_defaults=False, include_path=_SHIPPED / row.folder
            )
        if spec in manager.task_index:
            return row, spec
    return None


_NAMED = re.compile(r"""^["']?(?:task|group|tag)["']?:\s*["']?([\w.-]+)["']?\s*$""", re.MULTILINE)


def _check_is_written(name: str) -> None:
    """Refuse a name that is in none of the harness's definitions.

    Reading them as definitions takes ten seconds, and as text a tenth of that.
    """
    files = (
        each for each in _SHIPPED.rglob("*") if each.suffix in (".yaml", "") and each.is_file()
    )
    text = "\n".join(each.read_text("utf-8", "replace") for each in files)
    if re.search(rf"(?<![\w.-]){re.escape(name)}(?![\w.-])", text) is None:
        raise _unknown(name, _NAMED.findall(text))


def _unknown(name: str, others: Iterable[str]) -> RecipeError:
    known = list(dict.fromkeys([*SETS, *others]))
    return RecipeError(
        f"there is no task {name!r}",
        where="--tasks",
        fix=f"{ask(nearest(name, known)) or ''} The sets are {', '.join(SETS)}; `lm_eval ls tasks` "
        "lists all others".strip(),
    )


_FROM_FILES = (
    "without a network, put the set's files into a directory and give it with --data (the guide on "
    "evaluating says how)"
)
_FROM_THE_HUB = (
    "this task is read from the hub or its cache: load it once where there is a network, and take "
    "HF_HOME along"
)


def _built(manager: TaskManager, spec: str, fix: str) -> list[Any]:
    try:
        with quiet_harness():
            found = manager._load_spec(spec)
    except TrainkitError:
        raise
    except Exception as error:  # the hub's client and `datasets` raise nothing narrower
        first = str(error).strip().partition("\n")[0] or repr(error)
        raise DataError(
            f"its questions cannot be loaded: {type(error).__name__}: {first}",
            where=f"task {spec}",
            fix=fix,
        ) from error
    return found if isinstance(found, list) else [found]


# -- the seven sets ---------------------------------------------------------------------------


def _serve(manager: TaskManager, spec: str, row: BenchmarkSet, choice: TaskChoice) -> None:
    """Have the tasks below a name read the set's files, and code run in the sandbox."""
    if choice.data is None and row.name != "humaneval":
        return
    index = manager.task_index
    for name in _leaves(spec, index):
        entry = index[name]
        if entry.yaml_path is None:
            continue  # served for another name
        config = load_yaml(entry.yaml_path, resolve_func=row.name != "humaneval")
        if row.name == "humaneval":
            config = sandbox.with_sandbox(config)
        if choice.data is not None:
            config = _from_files(config, row, choice)
        entry.cfg, entry.yaml_path = config, None


def _leaves(name: str, index: Mapping[str, Entry]) -> Iterator[str]:
    """The single tasks of a group or a tag."""
    entry = index[name]
    if entry.kind is Kind.TAG:
        yield from sorted(entry.tags)
    elif entry.kind is Kind.GROUP:
        for each in (entry.cfg or {}).get("task", ()):
            yield from _leaves(each if isinstance(each, str) else each["task"], index)
    else:
        yield name


def _from_files(config: Mapping[str, Any], row: BenchmarkSet, choice: TaskChoice) -> dict[str, Any]:
    """A task's definition with its rows; the files are read now, so what is wrong is said now."""
    assert choice.data is not None
    subset = str(config.get("dataset_name") or config["dataset_path"]).rpartition("/")[2]
    directory = Path(choice.data).expanduser() / row.name
    if not directory.is_dir():
        raise DataError(
            f"there is no directory for {row.title}",
            where=str(directory),
            fix="the guide on evaluating says which file goes where",
        )
    splits = row.read(directory, subset.removeprefix(f"{row.name}-"))
    changed = dict(config)
    for key in ("training_split", "fewshot_split"):
        if changed.get(key) is not None and changed[key] not in splits:
            changed[key] = None  # examples are asked for by `_set_shots`
    changed.pop("dataset_kwargs", None)
    return {**changed, "custom_dataset": _Rows(splits)}


class _Rows:
    """What the harness calls for a task's data."""

    def __init__(self, splits: Mapping[str, list[dict[str, Any]]]) -> None:
        self._splits = splits

    def __call__(self, **_: Any) -> dict[str, Any]:
        return {name: _Split(rows) for name, rows in self._splits.items()}

    def __deepcopy__(self, memo: Any) -> "_Rows":
        return self


class _Split(list[dict[str, Any]]):
    """Rows of a split where the harness expects a table of `datasets`.

    It goes over all rows several times, and a table builds each again from its columns, which takes
    as long as everything else but the model. What only a table can do is left to one.
    """

    @property
    def features(self) -> dict[str, Any]:
        """The columns by name."""
        return dict(self[0])

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return map(dict, super().__iter__())  # a row that is changed stays as it is here

    def __getitem__(self, key: Any) -> Any:
        return dict(super().__getitem__(key)) if isinstance(key, int) else self._table[key]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._table, name)

    @functools.cached_property
    def _table(self) -> Any:
        from datasets import Dataset

        return Dataset.from_list(list(self))


# -- shots and code ---------------------------------------------------------------------------


def _set_shots(name: str, task: Any, choice: TaskChoice) -> None:
    """Give a task its examples, or say why there are none."""
    row = next((each for each in SETS.values() if name.startswith(each.name)), None)
    own = task.get_config("num_fewshot")
    shots = choice.shots
    if shots is None:
        shots = own if own is not None else row.shots if row is not None else 0
    elif own == 0 and shots:
        raise RecipeError(
            f"{name} is defined without examples", where="--shots", fix="leave it out"
        )
    available = _num_examples(task)
    if shots and available < shots:
        raise RecipeError(
            f"{name} has {available} examples to put before a question, and {shots} are wanted"
            + ("" if available or row is None else _WITHOUT_EXAMPLES.get(row.name, "")),
            where="--shots" if choice.shots is not None else f"task {name}",
            fix=f"--shots {available}",
        )
    task.set_config(key="num_fewshot", value=shots)
    task.set_fewshot_seed(seed=FEWSHOT_SEED)


_WITHOUT_EXAMPLES = {
    "boolq": " (they are in train.jsonl)",
    "gsm8k": " (they are in train.jsonl)",
    "agieval": " (the set's zero-shot setting has none)",
}
"""Where examples would be, or why there are none."""


def _num_examples(task: Any) -> int:
    config = task.config
    samples = getattr(task.fewshot_cfg, "samples", None)
    splits = (task.fewshot_cfg.split, config.training_split)
    apart = any(split is not None and split != config.test_split for split in splits)
    if not apart and not samples:
        return 0
    sampler = getattr(task, "sampler", None)
    return len(sampler.df) if sampler is not None else 0


def _check_code(name: str, task: Any, choice: TaskChoice) -> None:
    if not getattr(task, "UNSAFE_CODE", False):
        return
    if not sandbox.is_sandboxed(task):
        raise RecipeError(
            f"{name} runs programs that the model writes, and the harness runs them unguarded",
            where="--tasks",
            fix="leave it out; humaneval runs them in a sandbox",
        )
    if not choice.allow_code:
        raise RecipeError(
            f"{name} runs programs that the model writes",
            where="--tasks",
            fix="add --allow-code: they run in a process of their own with limits and without a "
            "network, but as your user",
        )


@contextmanager
def quiet_harness() -> Iterator[None]:
    """Keep the harness's notes and bars off the terminal; its errors are raised."""
    logger, bar = logging.getLogger("lm_eval"), lm_eval.api.task.tqdm
    level = logger.level
    logger.setLevel(logging.ERROR)
    lm_eval.api.task.tqdm = lambda rows, **_: rows
    try:
        yield
    finally:
        logger.setLevel(level)
        lm_eval.api.task.tqdm = bar
