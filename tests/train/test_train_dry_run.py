"""``sft --dry-run`` is one step of the real run: it refuses what the run would refuse."""

import json
import re
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from trainkit.cli.app import main

RECIPE = """\
model: {{name_or_path: "{model}", dtype: float32}}
data: {{train: [rows.jsonl], eval: [rows.jsonl], max_length: 256, packing: false}}
kernels: true
training: {{learning_rate: 1e-2, per_device_train_batch_size: 2, num_train_epochs: 2,
  gradient_accumulation_steps: 3}}
"""


@pytest.fixture
def dry_run(tmp_path, tiny_qwen2, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    rows = [
        {"role": role, "content": text}
        for number in range(10)
        for role, text in (("user", f"Say {number}."), ("assistant", "It is" + " so" * number))
    ]
    lines = [json.dumps({"messages": rows[at : at + 2]}) for at in range(0, 20, 2)]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    (tmp_path / "r.yaml").write_text(RECIPE.format(model=tiny_qwen2))

    def run(*overrides):
        code = main(["sft", "--config", "r.yaml", "--dry-run", *overrides])
        said = capsys.readouterr()
        assert sorted(path.name for path in tmp_path.iterdir()) == ["r.yaml", "rows.jsonl"]
        assert "bug" not in said.err
        return code, said.err

    return run


def test_it_reports_a_whole_step_and_leaves_nothing(dry_run, tiny_qwen2):
    code, said = dry_run()
    assert code == 0, said
    figures = dict(
        re.findall(r"^  (\S+(?: \S+)?)  +(.*)$", said.partition("ready to train")[2], re.M)
    )
    longest = re.fullmatch(r"(\d+) tokens, (\d+) trained", figures["longest batch"])
    tokenizer = AutoTokenizer.from_pretrained(tiny_qwen2)
    rows = map(json.loads, Path("rows.jsonl").read_text().splitlines())
    lengths = [len(tokenizer.apply_chat_template(row["messages"])["input_ids"]) for row in rows]
    assert int(longest[1]) == sum(sorted(lengths)[-2:])
    assert int(longest[1]) > int(longest[2]) > 0
    assert float(figures["loss"]) > 0
    assert "longest batch" in figures["eval loss"]
    assert "3 micro-batches" in figures["one step"]
    # AdamW's two fp32 states of 89,152 parameters (0.68 MiB) and a counter for each tensor.
    assert figures["optimizer"] == "0.7 MiB of states"
    assert "written and thrown away" in figures["checkpoint"]
    assert figures["rows"] == "10, 6 a step"
    assert figures["steps"] == "4 (2 an epoch)"


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["training.parallelism_config={}"], "parallelism_config cannot be changed"),
        (["kernels=false", "training.use_liger_kernel=true"], "liger"),
        (["training.optim=galore_adamw", "training.optim_target_modules=all-linear"], "galore"),
        (["training.optim=lomo"], "lomo"),
        (["training.push_to_hub=true"], "training.push_to_hub"),
        (["training.report_to=wandb"], "wandb is not installed"),
        (["training.lr_scheduler_type=cosine_with_min_lr"], "min_lr"),
        (["training.lr_scheduler_kwargs={foo: 1}"], "foo"),
        (["training.optim=sgd", "training.optim_args=momentum=fast"], "momentum must be a number"),
        (["training.tf32=true"], "tf32"),
    ],
)
def test_it_refuses_what_the_run_refuses(dry_run, overrides, said):
    code, error = dry_run(*overrides)
    assert code == 2, error
    assert said in error.splitlines()[-1] + error.splitlines()[-2]


IDLE = {
    "eval_strategy: 'no'": ["eval_steps: 3", "eval_delay: 2", "metric_for_best_model: loss"],
    "logging_strategy: epoch": ["logging_steps: 3"],
    "save_strategy: epoch": ["save_steps: 3"],
    "push_to_hub: false": ["hub_model_id: me/x", "hub_strategy: end", "hub_private_repo: true"],
    "max_steps: 3": ["num_train_epochs: 2.5"],
    "report_to: none": ["run_name: x", "project: x", "trackio_space_id: x"],
    "gradient_checkpointing: false": ["gradient_checkpointing_kwargs: {use_reentrant: true}"],
}
"""Next to a setting, those that it leaves nothing to do."""


def test_it_says_once_what_does_nothing_next_to_the_rest(dry_run):
    given = ["data.streaming=true", "training.max_steps=3", "training.dataloader_drop_last=true"]
    given += ["early_stopping={patience: 2}", "training.eval_strategy=no"]
    said = re.findall("(.*) does nothing with (.*)", dry_run(*given)[1])
    drop = ("training.dataloader_drop_last: true (override)", "data.streaming: true")
    assert said[1:] == [drop, ("early_stopping", "training.eval_strategy: 'no'")]
    written = [
        f"training.{each}".replace(": ", "=", 1) for key in IDLE for each in [key, *IDLE[key]]
    ]
    code, said = dry_run(*written)
    assert code == 0, said
    for other, keys in IDLE.items():
        for key in keys:
            assert (
                said.count(f"training.{key} (override) does nothing with training.{other}\n") == 1
            )
    sharded = ("parallel.shard=zero2", "training.ddp_bucket_cap_mb=9", "training.logging_steps=9")
    said = dry_run(*sharded, "training.eval_strategy=steps", "training.logging_strategy=epoch")[1]
    assert re.findall("training.(.*) does nothing", said) == ["ddp_bucket_cap_mb: 9 (override)"]


def test_trackers_are_built_and_hear_nothing(dry_run, monkeypatch):
    from transformers.integrations import integration_utils

    heard = []

    class Tracker(integration_utils.TrainerCallback):
        def __init__(self):
            heard.append("built")

        def on_train_begin(self, *_, **__):
            heard.append("told")

    monkeypatch.setitem(integration_utils.INTEGRATION_TO_CALLBACK, "dagshub", Tracker)
    assert dry_run("training.report_to=dagshub")[0] == 0
    assert heard == ["built"]


def test_a_loss_that_is_no_number_stops_it(dry_run):
    code, said = dry_run("training.learning_rate=1e38", "training.max_grad_norm=0")
    assert code != 0
    assert "ready to train" not in said
