"""``trainkit compare``: intervals that hold what they promise, and sentences that say no more."""

import json
import math
import random
from pathlib import Path

import pytest

from trainkit.cli.app import main
from trainkit.compare.statistics import paired_difference, seeds_difference, sign_test
from trainkit.options.parallel import WORDS
from trainkit.run.directory import RunDirectory


def make_run(parent, name, *, seed=1, rate=1e-4, shift=0.0, answers=(), digest="a", right=None):
    run = RunDirectory.create(parent, name)
    metrics, noise = run.open_metrics(), random.Random(seed)
    offset = noise.gauss(0, 0.01)
    for step in range(1, 101):
        loss = 3 / math.sqrt(step) + shift + offset + noise.gauss(0, 0.02)
        metrics.append({"step": step, "loss": loss, "tokens_per_second": 1e4, "step_seconds": 0.1})
    metrics.append({"step": 100, "eval_loss": 0.3 + shift + offset})
    metrics.close()
    run.resolved.write_text(
        f"name: {name}\ntraining:\n  learning_rate: {rate}\n  seed: {seed}\n", encoding="utf-8"
    )
    run.data.write_text(json.dumps({"train": {"files": [{"sha256": digest}]}}))
    rows = [
        {
            "conversation": n,
            "turn": 1,
            "question": "<b>q</b>",
            "is_exact": right,
            "given": str(right),
        }
        for n, right in enumerate(answers)
    ]
    if rows:
        (run.root / "generation_eval.json").write_text(json.dumps({"rows": rows}))
    if right is not None:
        add_scores(run.root, right)
    return str(run.root)


def add_scores(run, right, prompts="p"):
    """A group of two tasks, each with half of the questions."""
    half = len(right) // 2
    parts = {"sums_one": right[:half], "sums_two": right[half:]}
    common = {"metric": "acc", "stderr": 0.1, "shots": 0, "version": "1", "num_all": None}
    common |= {"expected": {}, "is_main": False}
    rows = []
    for name, own in {"sums": right, **parts}.items():
        is_group = name == "sums"
        row = {"task": name, "is_part": not is_group, "parts": list(parts) if is_group else []}
        row |= {"value": sum(own) / len(own), "num_samples": len(own), "prompts": prompts}
        rows.append({**common, **row})
    directory = run / "eval" / "1"
    (directory / "samples").mkdir(parents=True)
    (directory / "results.json").write_text(json.dumps({"scores": rows}))
    for name, own in parts.items():
        lines = [
            {"doc_id": n, "doc_hash": name, "filter": "none", "acc": float(each)}
            for n, each in enumerate(own)
        ]
        (directory / "samples" / f"{name}.jsonl").write_text(
            "".join(json.dumps(line) + "\n" for line in lines)
        )


def compared(capsys, *words):
    assert main(["compare", *words, "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    return {row["quantity"]: row for row in rows if "quantity" in row}, rows


def test_seeds_that_agree_on_a_difference(tmp_path, capsys):
    first = [make_run(tmp_path, f"a{n}", seed=n) for n in range(3)]
    second = [make_run(tmp_path, f"b{n}", seed=n, rate=2e-4, shift=0.2) for n in range(3)]
    found, rows = compared(capsys, *first, *second)
    assert found["training loss"]["is_clear"]
    assert found["evaluation loss"]["difference"] == pytest.approx(0.2, abs=0.02)
    assert "3 and 3 seeds" in found["training loss"]["words"]
    assert {row["key"] for row in rows if "key" in row} == {
        "training.learning_rate",
        "training.seed",
    }


@pytest.mark.parametrize(
    ("short", "long"),
    [
        ("objective: dpo", "objective: dpo\npreference: {beta: 0.1, loss: sigmoid}"),
        ("objective: distill\ndistill: null", "objective: distill\ndistill: {temperature: 1.0}"),
        ("recompute: full", f"recompute: {json.dumps(WORDS['full'].model_dump())}"),
        ("model: {fp8: true}", "model: {fp8: {}}"),
        ("data: {streaming: true}", "data: {streaming: 4096}"),
        ("kernels: true", "kernels: {rope: true}"),
    ],
)
def test_seeds_of_one_recipe_in_two_spellings(short, long, tmp_path, capsys):
    runs = [make_run(tmp_path, f"a{n}", seed=n) for n in range(3)]
    for run, text in zip(runs, (short, long, short), strict=True):
        resolved = RunDirectory.open(run).resolved
        resolved.write_text(f"{resolved.read_text()}{text}\n")
    _, rows = compared(capsys, *runs)
    assert {row["key"] for row in rows if "key" in row} == {"training.seed"}


def test_seeds_that_do_not(tmp_path, capsys):
    first = [make_run(tmp_path, f"a{n}", seed=n) for n in range(3)]
    second = [make_run(tmp_path, f"b{n}", seed=n + 7, rate=2e-4) for n in range(3)]
    found, _ = compared(capsys, *first, *second)
    assert not found["training loss"]["is_clear"]
    assert "within the noise" in found["training loss"]["words"]


def test_the_same_seed_twice_is_one_seed(tmp_path, capsys):
    runs = [make_run(tmp_path / f"{n}", f"a{n}") for n in range(2)]
    runs += [make_run(tmp_path / f"{n}", f"b{n}", rate=2e-4, shift=0.01) for n in range(2)]
    found, _ = compared(capsys, *runs)
    assert not found["evaluation loss"]["is_clear"]
    for quantity in ("evaluation loss", "training loss"):
        assert "one seed" in found[quantity]["words"]
        assert len(found[quantity]["first"]) == len(found[quantity]["second"]) == 1


def test_seeds_that_change_nothing_prove_nothing(tmp_path, capsys):
    runs = [make_run(tmp_path, f"a{n}") for n in range(2)]
    runs += [make_run(tmp_path, f"b{n}", rate=2e-4, shift=0.01) for n in range(2)]
    for n, run in enumerate(runs):
        resolved = RunDirectory.open(run).resolved
        resolved.write_text(resolved.read_text().replace("seed: 1", f"seed: {n % 2}"))
    found, _ = compared(capsys, *runs)
    assert "exactly the same" in found["evaluation loss"]["words"]
    assert not found["evaluation loss"]["is_clear"]


def test_one_seed_promises_nothing_about_others(tmp_path, capsys):
    found, _ = compared(
        capsys, make_run(tmp_path, "a"), make_run(tmp_path, "b", rate=2e-4, shift=0.2)
    )
    assert "paired by step" in found["training loss"]["words"]
    assert "nothing of other seeds" in found["training loss"]["words"]
    assert found["evaluation loss"]["low"] is None
    assert "training.seed" in found["evaluation loss"]["words"]


def test_other_data_is_not_called_paired(tmp_path, capsys):
    found, _ = compared(
        capsys, make_run(tmp_path, "a"), make_run(tmp_path, "b", rate=2e-4, digest="b")
    )
    assert "other batches" in found["training loss"]["words"]


@pytest.mark.parametrize("global_rows", [None, 64])
def test_runs_on_other_numbers_of_ranks(tmp_path, capsys, global_rows):
    runs = [make_run(tmp_path, "one"), make_run(tmp_path, "two", shift=-0.5)]
    for path, ranks in zip(map(Path, runs), (1, 2), strict=True):
        added = "" if global_rows is None else f"global_batch_size: {global_rows}\n"
        recipe = path / "resolved.yaml"
        recipe.write_text(recipe.read_text() + added)
        variables = {"WORLD_SIZE": str(ranks)}
        (path / "environment.json").write_text(json.dumps({"variables": variables}))
    assert main(["compare", *runs]) == 0
    told = capsys.readouterr().out
    assert "num_ranks: 1 | 2" in told
    if global_rows is None:  # twice as many rows a step
        assert "means over steps 51 to 100" in told
        assert "other batches" in told
    else:  # the same rows a step: two runs of one recipe
        assert "against" not in told


def test_answers_question_by_question(tmp_path, capsys):
    first = make_run(tmp_path, "a", answers=[False] * 10 + [True] * 10)
    second = make_run(tmp_path, "b", rate=2e-4, answers=[True] * 20)
    found, _ = compared(capsys, first, second)
    assert found["exact answers"]["p_value"] == pytest.approx(2 / 2**10)
    page = tmp_path / "page.html"
    assert main(["compare", first, second, "--html", str(page)]) == 0
    text = page.read_text()
    assert "10 of 20 answers differ" in text
    assert "<b>q</b>" not in text
    assert text.count("<figure") == text.count("<svg") >= 3  # each as wide as a phone


def outcomes(count, share, seed):
    draw = random.Random(seed)
    return [draw.random() < share for _ in range(count)]


def test_a_group_is_paired_by_the_questions_of_its_parts(tmp_path, capsys):
    first = make_run(tmp_path, "a", right=[False] * 12 + [True] * 8)
    second = make_run(tmp_path, "b", rate=2e-4, right=[True] * 20)
    found, _ = compared(capsys, first, second)
    assert found["sums/acc"]["p_value"] == pytest.approx(2 / 2**12)
    assert found["sums/acc"]["count"] == 20
    assert "nothing of other seeds" in found["sums/acc"]["words"]


@pytest.mark.parametrize(("share", "is_clear"), [(0.3, False), (0.8, True)])
def test_scores_of_several_seeds_are_held_against_their_spread(tmp_path, capsys, share, is_clear):
    first = [make_run(tmp_path, f"a{n}", seed=n, right=outcomes(80, 0.3, n)) for n in range(3)]
    second = [
        make_run(tmp_path, f"b{n}", seed=n, rate=2e-4, right=outcomes(80, share, n + 9))
        for n in range(3)
    ]
    found, rows = compared(capsys, *first, *second)
    assert found["sums/acc"]["is_clear"] is is_clear
    assert len(found["sums/acc"]["second"]) == 3
    assert "3 and 3 seeds" in found["sums/acc"]["words"]
    assert all(row["scores"]["sums/acc"] for row in rows if "scores" in row)
    assert main(["compare", *first, *second]) == 0
    table = capsys.readouterr().out
    assert "+-0.1" in next(line for line in table.splitlines() if line.startswith("sums/acc "))


def test_seeds_that_score_alike_on_few_questions_prove_nothing(tmp_path, capsys):
    first = [make_run(tmp_path, f"a{n}", seed=n, right=[0, 0, 1, 1]) for n in range(2)]
    second = [make_run(tmp_path, f"b{n}", seed=n, rate=2e-4, right=[0, 1, 1, 1]) for n in range(2)]
    found, _ = compared(capsys, *first, *second)
    assert found["sums/acc"]["difference"] == pytest.approx(0.25)
    assert not found["sums/acc"]["is_clear"]


def test_groups_that_were_asked_otherwise_are_not_compared(tmp_path, capsys):
    first, second = (tmp_path / name for name in "ab")
    for parent in (first, second):
        run = make_run(parent, parent.name, rate=1e-4 if parent == first else 2e-4)
        add_scores(RunDirectory.open(run).root, [1, 0], prompts=parent.name)
    runs = [str(next(parent.iterdir())) for parent in (first, second)]
    found, _ = compared(capsys, *runs)
    assert "not comparable" in found["sums/acc"]["words"]


def test_one_run_is_not_enough(tmp_path):
    assert main(["compare", make_run(tmp_path, "a")]) == 2


@pytest.mark.parametrize("counts", [(2, 2), (3, 4), (2, 10), (5, 5)])
def test_the_intervals_hold_the_truth_about_19_times_in_20(counts):
    random_numbers = random.Random(0)

    def seeds(mean, count):
        return [random_numbers.gauss(mean, 1.0) for _ in range(count)]

    hits = sum(
        interval.low <= 0.5 <= interval.high
        for interval in (
            seeds_difference(seeds(0, counts[0]), seeds(0.5, counts[1])) for _ in range(2000)
        )
    )
    # 95% of 2000 is 1900, one standard deviation 10; of two and two, Welch's holds it 99% of times.
    assert 1870 <= hits <= 1996


def test_steps_that_resemble_their_neighbours_are_not_counted_as_independent():
    random_numbers = random.Random(1)
    hits = 0
    for _ in range(400):
        gap, gaps = 0.0, []
        for _ in range(400):  # an autoregressive series, correlated over about five steps
            gap = 0.8 * gap + random_numbers.gauss(0, 1)
            gaps.append(gap)
        hits += not paired_difference([0.0] * 400, gaps).is_clear
    assert hits >= 0.92 * 400  # a naive interval holds it 50% of the time


def test_a_gap_that_drifts_is_not_called_clear():
    random_numbers = random.Random(2)
    hits = 0
    for _ in range(400):
        gap, gaps = random_numbers.gauss(0, 1) / math.sqrt(1 - 0.95**2), []
        for _ in range(100):  # correlated over twenty steps: ten blocks resemble each other
            gap = 0.95 * gap + random_numbers.gauss(0, 1)
            gaps.append(gap)
        hits += not paired_difference([0.0] * 100, gaps).is_clear
    assert hits >= 0.85 * 400  # 60% where blocks are taken for independent


def test_sign_test():
    assert sign_test(0, 0) == 1.0
    assert sign_test(5, 5) == 1.0
    assert sign_test(10, 0) == pytest.approx(2 / 2**10)
    assert sign_test(600, 500) == pytest.approx(0.0028, rel=0.1)
