"""What a refusal to continue says about the data."""

from dataclasses import replace

import pytest

from trainkit.errors import ResumeRefusedError
from trainkit.recipe import default_of
from trainkit.train.checkpoints import ResumePoint
from trainkit.train.data import fingerprint_of
from trainkit.train.resume.changes import IN_USE, PARTS, Review, review, review_running

A, B = ("aa", 10, 100, "a.jsonl"), ("bb", 20, 200, "b.jsonl")
PARTS_BEFORE = {"files": [A, B], "mixture": [(None, None)], "template": "t", "max_length": 64}

CASES = {
    "a changed file": ({"files": [A, ("cc", 21, 210, "b.jsonl")]}, "b.jsonl was changed (20 "),
    "a file gone": ({"files": [A]}, "b.jsonl is missing"),
    "a file more": ({"files": [A, B, ("cc", 1, 9, "c.jsonl")]}, "c.jsonl is new"),
    "rows": ({"files": [A, ("bb", 19, 190, "b.jsonl")]}, "b.jsonl gives 19 samples and gave 20"),
    "another order": ({"files": [B, A]}, "the same files in another order"),
    "the template": ({"template": "u"}, 'template: "t" -> "u"'),
    "the length": ({"max_length": 32}, "max_length: 64 -> 32"),
}


def surroundings(parts):
    return {"data": fingerprint_of(parts), PARTS: parts}


@pytest.mark.parametrize("case", CASES)
def test_a_refusal_says_what_of_the_data_differs(case, tmp_path):
    change, told = CASES[case]
    point = ResumePoint(tmp_path, tmp_path / "checkpoint-2", 2, surroundings(PARTS_BEFORE))
    with pytest.raises(ResumeRefusedError) as refused:
        review(point, {}, surroundings({**PARTS_BEFORE, **change}))
    assert told in str(refused.value)
    assert "--allow-changed data" in str(refused.value)
    assert PARTS not in str(refused.value)


def test_data_that_only_moved_is_the_same(tmp_path):
    point = ResumePoint(tmp_path, tmp_path / "checkpoint-2", 2, surroundings(PARTS_BEFORE))
    moved = {"files": [(*row[:3], f"elsewhere/{row[3]}") for row in (A, B)]}
    assert not review(point, {}, surroundings({**PARTS_BEFORE, **moved})).accepted


BEFORE = {"model.dtype": "bfloat16", "lora.r": 4, "parallel.shard": "none"}


def test_a_key_that_an_older_version_did_not_have_counts_as_its_default(tmp_path):
    point = ResumePoint(tmp_path, tmp_path / "checkpoint-2", 2, {"data": "same"}, BEFORE)
    today = BEFORE | {"objective": "sft", "lora.use_dora": False}
    assert review(point, today, {"data": "same"}) == Review()
    for key, value in {"objective": "other", "lora.use_dora": True}.items():
        with pytest.raises(ResumeRefusedError, match=key):
            review(point, today | {key: value}, {"data": "same"})
    # A section that was absent is not one with defaults.
    with pytest.raises(ResumeRefusedError, match="lora"):
        review(replace(point, settings={"lora": None}), today, {"data": "same"})


@pytest.mark.parametrize(
    ("key", "other"),
    [("preference.beta", "preference.loss"), ("distill.temperature", "distill.divergence")],
)
def test_a_section_of_the_objective_that_was_absent_had_its_defaults(key, other, tmp_path):
    """Nothing but the key that an override now gives differs."""
    before, now = {key.partition(".")[0]: None}, {key: 0.5, other: default_of(other)}
    point = ResumePoint(tmp_path, tmp_path / "checkpoint-2", 2, {}, before)
    assert [change.key for change in review(point, now, {}, [key]).accepted] == [key]


@pytest.mark.parametrize("kind", ["cosine_with_min_lr", "reduce_lr_on_plateau"])
def test_arguments_of_a_schedule_with_a_state_of_its_own_are_refused(kind, tmp_path):
    before = {"training.lr_scheduler_type": kind, "training.lr_scheduler_kwargs": {}}
    point = ResumePoint(tmp_path, tmp_path / "checkpoint-2", 2, {}, before)
    now = {**before, "training.lr_scheduler_kwargs": {"min_lr": 1e-6}}
    if kind == "cosine_with_min_lr":
        (change,) = review(point, now, {}).changes
        assert change.key == "training.lr_scheduler_kwargs"
    else:
        with pytest.raises(ResumeRefusedError, match="the saved state of reduce_lr_on_plateau"):
            review(point, now, {})


def test_a_checkpoint_without_its_optimizer_is_not_continued(tmp_path):
    """The rest of the run would begin with an empty one, and say nothing."""
    before = {"training.save_only_model": True}
    point = ResumePoint(tmp_path, tmp_path / "checkpoint-2", 2, {}, before)
    for now in (before, {"training.save_only_model": False}):
        with pytest.raises(ResumeRefusedError, match=r"the model only .*without the optimizer"):
            review(point, now, {})


AROUND = {
    "num_ranks": 2,
    "rows_per_step": 8,
    "device": "cuda",
    "gpu": "NVIDIA H100",
    "code": "0123456789ab",
    "versions": {"torch": "2.12.0", "trainkit": "0.1.0"},
}
OTHER = {
    "num_ranks": (1, "--allow-changed num_ranks"),
    "rows_per_step": (4, "--allow-changed rows_per_step"),
    "device": ("cpu", "--allow-changed device"),
    "gpu": ("NVIDIA H200", "--allow-changed gpu"),
    "code": ("ba9876543210", "--allow-changed code"),
    "versions": ({"torch": "2.13.0", "trainkit": "0.1.0"}, "--allow-changed versions"),
}


@pytest.mark.parametrize("key", OTHER)
def test_each_thing_around_a_recipe_is_shown_refused_and_accepted_by_its_name(key, tmp_path):
    point = ResumePoint(tmp_path, tmp_path / "checkpoint-2", 2, AROUND, BEFORE)
    value, consent = OTHER[key]
    with pytest.raises(ResumeRefusedError) as refused:
        review(point, BEFORE, AROUND | {key: value})
    assert refused.value.fix.endswith(consent)
    name = consent.split()[1]
    (accepted,) = review(point, BEFORE, AROUND | {key: value}, [name]).accepted
    assert accepted.key.startswith(key)
    # Asked for once is enough.
    assert review(point, BEFORE, AROUND | {key: value}, [], [accepted.to_dict()]).accepted


def test_all_that_differs_is_in_one_table(tmp_path):
    """What acts, what needs consent and what cannot be: nobody learns of it one by one."""
    before = BEFORE | {"training.seed": 1, "training.learning_rate": 1e-3, "lora.targets": ["q"]}
    point = ResumePoint(tmp_path, tmp_path / "checkpoint-2", 2, AROUND, before)
    now = before | {"training.seed": 2, "training.learning_rate": 2e-3, "lora.targets": ["q", "k"]}
    with pytest.raises(ResumeRefusedError) as refused:
        review(point, now, AROUND | {"num_ranks": 4, "code": "x"}, ["code"], sharded=True)
    lines = [" ".join(line.split()) for line in refused.value.what.splitlines()[1:]]
    assert lines == [
        "num_ranks: 2 -> 4 cannot change: the saved shards fit the number of processes that "
        "wrote them",
        'code: "0123456789ab" -> "x" accepted',
        "training.seed: 1 -> 2 needs --allow-changed training.seed",
        "training.learning_rate: 0.001 -> 0.002 acts from here on",
        'lora.targets: ["q"] -> ["q", "k"] cannot change: the saved state of the optimizer and '
        "the adapters does not fit another one",
    ]
    assert "trainkit merge" in refused.value.fix
    assert refused.value.fix.endswith("is accepted with --allow-changed training.seed")


def test_other_kernels_and_another_attention_are_refused_though_nobody_asked(tmp_path):
    then = {"attention": "trainkit", "rms_norm": "on"}
    point = ResumePoint(tmp_path, tmp_path / "checkpoint-2", 2, {IN_USE: then})
    now = {"attention": "eager", "rms_norm": "on"}
    with pytest.raises(ResumeRefusedError, match=r"in_use\.attention: \"trainkit\" -> \"eager\""):
        review_running(point, now)
    (accepted,) = review_running(point, now, ["in_use"])
    assert review_running(point, then) == ()
    assert review_running(point, now, [], [accepted.to_dict()]) == (accepted,)


def test_a_key_that_nothing_has_is_not_accepted(tmp_path):
    """A slip of the pen would let a script go on that meant something else."""
    point = ResumePoint(tmp_path, tmp_path / "checkpoint-2", 2, {"data": "same"}, BEFORE)
    for word in ("all", "data", "gpu", "lora", "lora.r", "r", "versions.torch", "in_use.attention"):
        assert review(point, BEFORE, {"data": "same"}, [word]) == Review()
    with pytest.raises(ResumeRefusedError, match="nothing of that name") as refused:
        review(point, BEFORE, {"data": "same"}, ["paralel.shard"])
    assert refused.value.fix == "did you mean parallel.shard?"
