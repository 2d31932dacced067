"""What the parts of a step divide by, and what an answer and a weight are cut to."""

from types import SimpleNamespace

import pytest
import torch

from trainkit.estimate.peak import MATRIX_BYTES
from trainkit.evals.answers import _first_stop, after_thinking
from trainkit.objectives.objective import Step
from trainkit.options.parallel import ParallelOptions
from trainkit.parallel.layout import Layout
from trainkit.parallel.process import ProcessRank
from trainkit.parallel.strategies import strategy_for


def test_a_step_in_which_nothing_counts_has_a_loss_of_zero():
    step = Step(0, 4, 2, trainer_divides=False, trainer_loss=None)
    weight = torch.ones(3, requires_grad=True)
    loss = step.share((weight * 0).sum())
    loss.backward()
    assert loss.item() == 0.0
    assert weight.grad.tolist() == [0.0, 0.0, 0.0]


def test_parts_of_a_row_each_have_a_part_of_the_loss():
    options = ParallelOptions(sequence=2)
    layout = Layout(strategy_for("none"), ProcessRank(1, 1, 8), None, options)
    assert (layout.data_size, layout.loss_ranks) == (4, 8)


def test_each_stage_of_a_pipeline_has_its_part_of_the_optimizer():
    for keeps_masters, shards in ((False, 2), (True, 8)):
        engine = SimpleNamespace(keeps_masters=keeps_masters)
        options = ParallelOptions(pipeline=2)
        layout = Layout(strategy_for("none"), ProcessRank(1, 1, 8), engine, options)
        assert (layout.data_size, layout.optimizer_shards) == (4, shards)


def test_the_first_stop_ends_an_answer_and_the_last_thought_begins_it():
    assert _first_stop("a END b STOP c END", ["STOP", "END", ""]) == 2
    assert _first_stop("a STOP b END", ["STOP", "END"]) == 2
    assert _first_stop("a", ["STOP"]) is None
    text = "<think>is it </think> a word?</think>\n4"
    assert after_thinking(text, thinks=False) == (False, "4")


def test_a_weight_in_four_bits_has_its_share_of_the_scales():
    """64 weights share a scale of 8 bits, 256 scales one of 32."""
    weights = 64 * 256
    num_bits = 4 * weights + 8 * (weights / 64) + 32
    assert MATRIX_BYTES["nf4"] == pytest.approx(num_bits / 8 / weights, rel=1e-12)
