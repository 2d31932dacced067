"""Packed rows under DeepSpeed, and the leak test in a run that a user starts."""

import json

import pytest
from ranks import run_ranks

RECIPE = """\
model: {{name_or_path: "{model}", dtype: float32}}
data: {{train: [rows.jsonl], max_length: 64, packing: true, cache_dir: cache}}
training: {{per_device_train_batch_size: 2, max_steps: 1}}
"""


@pytest.mark.parametrize("stage", [2, 3])
def test_packed_rows_under_zero_train_like_documents_alone(stage):
    for result in run_ranks("models.packed_cases:zero", stage=stage):
        assert result["seen"] > 0
        # fp32, two steps of plain SGD; only orders of sums differ.
        assert result["parameters"] < 2e-6
        assert "packed documents leak" in result["broken"]


def test_a_run_whose_documents_leak_stops_before_its_first_step(tmp_path, tiny_qwen2):
    rows = [
        {"role": role, "content": f"{role} {number}"}
        for number in range(8)
        for role in ("user", "assistant")
    ]
    lines = [json.dumps({"messages": rows[start : start + 2]}) for start in range(0, 16, 2)]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    (tmp_path / "small.yaml").write_text(RECIPE.format(model=tiny_qwen2))
    ((code, out, err),) = run_ranks(
        "models.packed_cases:leaking_run", world_size=1, cwd=str(tmp_path)
    )
    assert code != 0
    assert "packed documents leak" in err + out
    assert not (tmp_path / "run" / "final").exists()
