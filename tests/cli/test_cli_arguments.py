"""What people type, before click reads it."""

import pytest

from trainkit.cli.app import main, normalize


@pytest.mark.parametrize(
    ("typed", "read"),
    [
        # an optional value: bare, given, or followed by something else
        ("sft --deepspeed", "sft --deepspeed=zero2"),
        ("sft --deepspeed zero3", "sft --deepspeed=zero3"),
        ("sft --deepspeed=zero3", "sft --deepspeed=zero3"),
        ("sft --deepspeed ds.json", "sft --deepspeed=ds.json"),
        ("sft --deepspeed dir/a=b.json", "sft --deepspeed=dir/a=b.json"),
        ("sft --deepspeed lora.r=4", "sft --deepspeed=zero2 lora.r=4"),
        ("sft --deepspeed lora=null", "sft --deepspeed=zero2 lora=null"),
        ("sft --deepspeed --replace_kernel", "sft --deepspeed=zero2 --replace-kernel"),
        ("sft --deepspeed -c f.yaml", "sft --deepspeed=zero2 -c f.yaml"),
        ("sft --resume", "sft --resume=auto"),
        ("sft --resume auto", "sft --resume=auto"),
        ("sft --resume train_model/run-1", "sft --resume=train_model/run-1"),
        ("sft --resume --deepspeed", "sft --resume=auto --deepspeed=zero2"),
        ("sft --deepspeed --resume x y.z=1", "sft --deepspeed=zero2 --resume=x y.z=1"),
        # underscores in names, not in values
        ("sft --output_dir my_dir", "sft --output-dir my_dir"),
        ("sft --output_dir=my_dir", "sft --output-dir=my_dir"),
        ("sft --no_replace_kernel --dry_run", "sft --no-replace-kernel --dry-run"),
        ("config show f_g.yaml --diff_defaults", "config show f_g.yaml --diff-defaults"),
        ("sft data.max_length=3", "sft data.max_length=3"),
        # overrides written as options
        ("sft --training.max_steps=5", "sft training.max_steps=5"),
        ("sft --training.max_steps 5 --pretrain", "sft training.max_steps=5 --pretrain"),
        ("sft --lora.alpha=a=b", "sft lora.alpha=a=b"),
        # what old launchers add
        ("sft --local_rank=0 --config f", "sft --config f"),
        ("sft --local-rank 3 --config f", "sft --config f"),
        ("sft --local_rank --config f", "sft --config f"),
        # other commands are left alone
        ("chat --deepspeed x", "chat --deepspeed x"),
        ("plot a b", "plot a b"),
        ("--version", "--version"),
        ("", ""),
        # nothing is rewritten after --
        ("sft --config f -- --deepspeed a_b", "sft --config f -- --deepspeed a_b"),
    ],
)
def test_normalize(typed, read):
    assert normalize(typed.split()) == read.split()


def test_spaces_and_quotes_come_through():
    typed = [
        "sft",
        "--config",
        "a dir/it's.yaml",
        'data.train=["a b.jsonl"]',
        "--output_dir",
        "$x;",
    ]
    assert normalize(typed) == [*typed[:4], "--output-dir", "$x;"]


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("sft --config a.yaml -c b.yaml", "--config=b.yaml contradicts --config=a.yaml"),
        ("sft a.yaml --output_dir x --output-dir=y", "--output-dir=y contradicts --output-dir=x"),
        ("sft a.yaml --deepspeed --deepspeed zero3", "=zero3 contradicts --deepspeed=zero2"),
        ("generate m --verify --no-verify p", "--no-verify contradicts --verify"),
        ("sft a.yaml lora.r=4 --lora.r 8", "lora.r=8 replaces lora.r=4, which stands before"),
        ("config show a.yaml lora.r=4 lora.r=8", "lora.r=8 replaces lora.r=4"),
        ("launch --nnodes 2 --nnodes 3 a.yaml", "--nnodes=3 contradicts --nnodes=2"),
        ("config show a.yaml --json --json lora.r=4 lora.r=4", "a.yaml"),
        ("new --model m --data a --data b --gpus 1 --gpus 2", "--gpus=2 contradicts --gpus=1"),
    ],
)
def test_an_option_of_one_value_is_given_one(typed, said, capsys):
    """The last one won without a word; overrides say so, the same twice says nothing new."""
    assert main(typed.split()) == 2
    assert said in capsys.readouterr().err
