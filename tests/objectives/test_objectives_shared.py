"""Two answers that attend to one prompt, against the same answers with a prompt each."""

import json

import pytest
from commands import trainkit
from objectives import pair_cases
from objectives.pair_cases import pair, resumed_alike, same_when_cut, step_of
from tiny import attending


@pytest.mark.parametrize("given", [{}, {"objective": "orpo", "preference": {"sft_prompt": True}}])
def test_a_step_is_that_of_the_unshared_pairs(given, tmp_path):
    """In fp64: answers of every length, a reference that is asked live, and figures too."""
    rows, gradients = [], []
    for share in (False, True):
        _, _, (row,), found = step_of(
            tmp_path / str(share), packing=True, batch=12, max_steps=1, prepare=attending,
            **{**given, "preference": {**given.get("preference", {}), "share_prompts": share}},
        )  # fmt: skip
        rows.append(row)
        gradients.append(found)
    assert rows[1]["num_tokens"] < 0.8 * rows[0]["num_tokens"]
    for key in ("loss", "rewards/margins", "logps/chosen", "logps/rejected", "lengths/rejected"):
        assert rows[1][key] == pytest.approx(rows[0][key], rel=1e-9), key
    for name, gradient in gradients[0].items():
        assert (gradients[1][name] - gradient).norm() <= 1e-7 * gradient.norm(), name


def train(root, **options):
    options = {"objective": "orpo", "lora": False, "packing": True, **options, "patched": False}
    return pair_cases.train(root, prepare=attending, preference={"share_prompts": True}, **options)


def test_the_cut_into_micro_batches_and_ranks_changes_nothing(tmp_path):
    same_when_cut(train, tmp_path, abs=1e-6, max_steps=2, optim="sgd", learning_rate=0.1)


RECIPE = """\
objective: OBJECTIVE
preference: {share_prompts: true}
model: {name_or_path: MODEL, dtype: float32}
data: {train: [rows.jsonl], eval: [rows.jsonl], max_length: 128, cache_dir: cache}
kernels: true
training: {per_device_train_batch_size: 1, max_steps: 4, save_steps: 2, eval_steps: 2,
  eval_strategy: steps, eval_on_start: true, learning_rate: 1e-3}
"""
KEYS = {"dpo": "logps", "reward": "rewards"}


@pytest.mark.parametrize("objective", KEYS)
def test_a_run_goes_as_one_that_does_not_share(objective, tmp_path, tiny_qwen2):
    rows = "\n".join(json.dumps(pair(number)) for number in range(12))
    (tmp_path / "rows.jsonl").write_text(rows)
    text = RECIPE.replace("MODEL", str(tiny_qwen2)).replace("OBJECTIVE", objective)
    (tmp_path / "r.yaml").write_text(text)
    args = ["preference.share_prompts=false", "--output-dir", "apart"]
    said = trainkit(tmp_path, "sft", "r.yaml", *args, pictures=False)
    assert said.code == 0, said.err
    lines = (tmp_path / "apart/metrics.jsonl").read_text().splitlines()
    found = resumed_alike(tmp_path), [json.loads(line) for line in lines]
    key = f"eval_{KEYS[objective]}/rejected"
    values = [[row[key] for row in rows if key in row] for rows in found]
    assert values[0][0] == pytest.approx(values[1][0], rel=1e-6)  # before the first step
    assert len(values[0]) == 3
