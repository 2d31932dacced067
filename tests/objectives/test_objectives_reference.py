"""What is kept of the model before training."""

import numpy as np
from commands import trainkit
from objectives.test_objectives_pairs import RECIPE, start

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
