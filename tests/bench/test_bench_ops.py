"""What is made of the measured ops: the table and the picture. Measuring itself needs a GPU."""

import pytest
import torch

from trainkit.bench import op_cases, op_picture, ops

GPU = torch.cuda.is_available()


def record(op, size, direction, provider, clock, metric, value):
    return {
        "metric": metric,
        "value": value,
        "op": op,
        "size": size,
        "pass": direction,
        "clock": clock,
        "provider": provider,
        "gpu": "a GPU",
    }


def measured(op, size, direction, provider, clock, microseconds, share):
    place = op, size, direction, provider, clock
    yield record(*place, "microseconds", microseconds)
    yield record(*place, "share_of_copy", share)


@pytest.fixture
def records():
    return [
        *measured("rms_norm", "H=896", "forward", "trainkit", "kernel", 16.25, 0.85),
        *measured("rms_norm", "H=896", "forward", "trainkit", "autograd", 20.4, 0.68),
        *measured("rms_norm", "H=896", "forward", "copy", "kernel", 15.9, 0.87),
        *measured("rms_norm", "H=896", "forward", "liger", "autograd", 31.6, 0.44),
        *measured("cross_entropy", "V=9", "both", "liger", "autograd", 3578.0, 0.33),
        record("rms_norm", "H=896", "forward", "trainkit", "host", "microseconds", 17.5),
        {"metric": "gb_per_second", "value": 4000.0},
    ]


def test_the_table_has_a_line_for_each_op_size_and_pass(records):
    head, rule, *lines = ops.table(records).splitlines()
    assert head.count("|") == rule.count("|") == lines[0].count("|")
    assert lines == [
        "| rms_norm | H=896 | forward | 16.2 (85%) | 15.9 | 20 |  |  | 32 |  |",
        "| cross_entropy | V=9 | both |  |  |  |  |  | 3578 |  |",
    ]


def test_the_picture_holds_every_op(records, tmp_path):
    path = tmp_path / "ops.png"
    op_picture.draw_ops(records, path)
    assert path.stat().st_size > 10000


def test_only_a_peer_may_fail(monkeypatch):
    def failing(provider, op):
        raise RuntimeError("out of order")

    monkeypatch.setattr(ops, "function_of", failing)
    monkeypatch.setattr(ops, "_copy_rows", lambda cell, copy: ())
    for row in ops.run(["rms_norm"], ["liger"], 4000.0):
        assert "out of order" in row["error"]
    with pytest.raises(RuntimeError, match="out of order"):
        list(ops.run(["rms_norm"], ["trainkit"], 4000.0))


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a CUDA device")
def test_every_clock_of_an_op(monkeypatch):
    monkeypatch.setattr(op_cases, "HIDDEN", (256,))
    rows = list(ops.run(["rms_norm"], ["trainkit", "eager"], 4000.0))
    assert not [row for row in rows if "error" in row]
    clocks = {(row["provider"], row["clock"], row["pass"]) for row in rows}
    passes = [(clock, way) for clock in ("autograd", "kernel") for way in ("forward", "backward")]
    for provider in ("trainkit", "eager", "copy"):
        assert {(provider, *each) for each in passes} <= clocks
    assert ("trainkit", "host", "forward") in clocks
