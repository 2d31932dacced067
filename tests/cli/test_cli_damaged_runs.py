"""Every record of a run x every damage x the commands that read it: named, and no traceback."""

import shutil
from itertools import product

import pytest
from commands import trainkit_each
from project import make_project, sft

DAMAGES = {
    "cut": lambda content: content[: len(content) // 2],
    "emptied": lambda content: b"",
    "no text": lambda content: content[:40] + b"\xff\xfe\0" + content[40:],
    "of another type": lambda content: b"[3]\n",
}
COMMANDS = {
    "show": "show RUN",
    "runs": "runs RUN",
    "watch": "watch RUN",
    "plot": "plot RUN -o RUN.png",
    "compare": "compare RUN whole",
    "verify": "checkpoint verify RUN",
    "generate": "generate RUN --prompts q.txt -o RUN.jsonl --max-new-tokens 2 --greedy",
    "resume": "sft --resume RUN",
    "longer": "sft --resume RUN training.max_steps=5",
}
READERS = {
    "status.json": "show runs watch compare resume",
    "metrics.jsonl": "show runs watch plot compare longer",
    "data.json": "compare generate longer",
    "environment.json": "compare",
    "resolved.yaml": "compare generate",
    "changes.jsonl": "resume",
    "recipe.yaml": "resume",
    "start.json": "show",
    "samples.json": "longer",
    "final/manifest.json": "verify generate",
    "checkpoint-4/manifest.json": "verify longer",
}
WORDS = ("damaged", "error:", "does not hold", "as the run left it")


@pytest.fixture(scope="module")
def whole(tmp_path_factory, tiny_llama):
    """The folder of a finished run of four steps."""
    project = make_project(tmp_path_factory.mktemp("whole"), tiny_llama)
    (project.root / "q.txt").write_text("Say 3.\n")
    sft(project.root, "r.yaml", "-o", "whole", "training.max_steps=4", "training.eval_steps=4")
    return project.root


@pytest.mark.sample("*-0")
@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize("record", READERS)
def test_a_damaged_record_is_named_by_every_command_that_reads_it(record, part, whole):
    """A part has a damage for every command, each with another one."""
    readers = READERS[record].split()
    every = enumerate(product(readers, DAMAGES))
    cases = [case for n, case in every if len(readers) == 1 or (n + n // 4) % 4 == part]
    typed = []
    for reader, damage in cases:
        run = f"{list(READERS).index(record)}-{reader}-{list(DAMAGES).index(damage)}-{part}"
        shutil.copytree(whole / "whole", whole / run)
        content = (whole / "whole" / record).read_bytes()
        (whole / run / record).write_bytes(DAMAGES[damage](content))
        typed.append(COMMANDS[reader].replace("RUN", run).split())
    file, wrong = record.rpartition("/")[2], {}
    for case, said in zip(cases, trainkit_each(whole, typed), strict=True):
        lines = [line for line in (said.out + said.err).splitlines() if file in line]
        named = any(word in each for each in lines for word in WORDS)
        is_helped = said.code == 0 or case[0] in ("verify", "watch") or "fix: " in said.err
        if said.code not in (0, 1, 2) or "Traceback" in said.err or not (named and is_helped):
            wrong[case] = said
    assert not wrong
