"""What is kept of the model before training."""

import numpy as np
import pytest
from commands import trainkit
from objectives.pair_cases import rated, resumed_alike
from objectives.test_objectives_pairs import RECIPE, logged, start

from trainkit.train.reference import digest_of


def test_an_answer_is_known_by_its_tokens_and_by_what_of_it_is_scored():
    ids, mask = np.arange(5, dtype=np.int32), np.array([0, 0, 1, 1, 0], dtype=np.uint8)
    known = digest_of(ids, mask)
    assert digest_of(ids.astype(np.int64), mask.astype(bool)) == known
    assert digest_of(ids, mask[::-1]) != known
    assert digest_of(ids[::-1], mask) != known


def test_a_resumed_run_without_its_reference_is_refused(tmp_path, tiny_qwen2):
    start(tmp_path, tiny_qwen2, RECIPE.replace("lora: {r: 4}\n", ""))
    trainkit(tmp_path, "sft", "r.yaml", "--output-dir", "run", pictures=False, stop_at=2)
    (tmp_path / "run/reference.npz").unlink()
    said = trainkit(tmp_path, "sft", "--resume", "run", pictures=False)
    assert said.code != 0
    assert "24 answers have no log-probabilities of the model before training" in said.err


WHOLE = RECIPE.replace("lora: {r: 4}\n", "").replace("1e-2", "1e-3")
BY_ONE = "training.per_device_train_batch_size=1"
LIVE = "preference.precompute_reference=false"


@pytest.mark.parametrize("shard", [None, "zero3", "fsdp2"])
def test_a_second_model_says_what_the_first_one_said_ahead(shard, tmp_path, tiny_qwen2):
    """Whole weights, on one process and spread: the same losses, to what sums in another order do.

    The second model stays what it was: else the losses of later steps would be of another one.
    """
    start(tmp_path, tiny_qwen2, WHOLE)
    live = [LIVE] if shard is None else [LIVE, f"parallel.shard={shard}", BY_ONE]
    _hold(tmp_path, live, {} if shard is None else {"num_ranks": 2})


def test_a_second_model_is_asked_of_foreign_answers_too(tmp_path, tiny_qwen2):
    rows = [rated(number) for number in range(12)]
    start(tmp_path, tiny_qwen2, WHOLE.replace("objective: dpo", "objective: kto"), rows)
    _hold(tmp_path, [LIVE], {})


def _hold(root, live, spread):
    found = []
    for name, how, ranks in (("live", live, spread), ("ahead", [], {})):
        said = trainkit(root, "sft", "r.yaml", "--output-dir", name, *how, **ranks)
        assert said.code == 0, said.err
        found.append([row["loss"] for row in logged(root / name) if "loss" in row])
        assert (root / name / "reference.npz").exists() == (name == "ahead")
    assert abs(found[0][0] - found[0][-1]) > 1e-3  # it has moved
    assert found[0] == pytest.approx(found[1], abs=2e-6)


def test_a_resumed_run_compares_with_the_model_before_training(tmp_path, tiny_qwen2):
    start(tmp_path, tiny_qwen2, WHOLE.replace("0.2}", "0.2, precompute_reference: false}"))
    resumed_alike(tmp_path, lora=False)
