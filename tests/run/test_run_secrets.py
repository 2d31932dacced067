import logging
import subprocess

import pytest
import yaml

from trainkit.run import (
    capture_environment,
    command_script,
    redact,
    redact_text,
    start_rank_log,
    stop_rank_log,
)
from trainkit.run.redact import is_secret_name, redact_argv

CANARY = "canary-5e1f09"


@pytest.mark.parametrize(
    "name",
    [
        "HF_TOKEN",
        "WANDB_API_KEY",
        "hub_token",
        "token",
        "--hub-token",
        "DB_PASSWORD",
        "MY_KEY",
        "aws_secret_access_key",
        "training.push_to_hub_token",
        "client-secret",
        "api_key",
    ],
)
def test_secret_names(name):
    assert is_secret_name(name)


@pytest.mark.parametrize(
    "name",
    [
        "eos_token",
        "pad_token",
        "num_tokens",
        "eot_token_ids",
        "PWD",
        "OLDPWD",
        "sort_key",
        "tokens_per_second",
        "tokenizer",
        "text_key",
        "key",
        "learning_rate",
        "SSH_AUTH_SOCK",
    ],
)
def test_innocent_names(name):
    assert not is_secret_name(name)


@pytest.mark.parametrize(
    "text",
    [
        f"hub_token: {CANARY}  # mine",
        f"  'token': '{CANARY}'",
        f'{{"api_key": "{CANARY}", "num_tokens": 5}}',
        f"https://user:{CANARY}@host/repo.git",
        f"https://{CANARY}@github.com/x",
        f"curl http://x/?access_token={CANARY}&page=1",
        f"trainkit sft --hub-token {CANARY}",
        f"export WANDB_API_KEY={CANARY}",
        f"Authorization: Bearer {CANARY}0000000000",
    ],
)
def test_text_is_redacted(text):
    assert CANARY not in redact_text(text, {})


@pytest.mark.parametrize(
    "text",
    [
        "the end-of-turn token: <|im_end|>",
        "eos_token: </s>",
        "cd /home/me/project",
        "hub_token: null  # default",
        "12.3k tokens/s, step 5: loss 1.2",
        "https://huggingface.co/Qwen/Qwen2.5-0.5B",
    ],
)
def test_innocent_text_is_left_alone(text):
    assert redact_text(text, {"PWD": "/home/me/project"}) == text


def test_values_of_secret_variables_go_wherever_they_turn_up():
    assert redact_text(f"failed with {CANARY}!", {"HF_TOKEN": CANARY}) == "failed with <redacted>!"
    # A short value would blank out innocent text.
    assert redact_text("step 1", {"SOME_TOKEN": "1"}) == "step 1"


def test_nested_values_and_command_lines():
    values = {"training": {"hub_token": CANARY, "eos_token": "</s>"}, "n": [1, None]}
    assert redact(values, {}) == {
        "training": {"hub_token": "<redacted>", "eos_token": "</s>"},
        "n": [1, None],
    }
    argv = ["trainkit", "--hub-token", CANARY, f"training.hub_token={CANARY}", "a=b"]
    hidden = ["trainkit", "--hub-token", "<redacted>", "training.hub_token=<redacted>", "a=b"]
    assert redact_argv(argv, {}) == hidden


def test_no_file_of_a_run_holds_the_canary(run, monkeypatch, tmp_path):
    monkeypatch.setenv("WANDB_API_KEY", CANARY)
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    remote = f"https://me:{CANARY}@example.org/x.git"
    subprocess.run(["git", "remote", "add", "origin", remote], cwd=tmp_path, check=True)
    run.write_json(run.environment, capture_environment(tmp_path), private=True)
    run.write_text(run.command, command_script(["python", "x", f"training.hub_token={CANARY}"]))
    run.write_text(run.recipe, f"training:\n  hub_token: {CANARY}\n")
    handler = start_rank_log(run.rank_log(0), 0)
    logging.getLogger("transformers").warning("sending %s", CANARY)
    try:
        raise ValueError(CANARY)
    except ValueError:
        logging.getLogger("mine").exception("it failed")
    stop_rank_log(handler)
    with pytest.raises(RuntimeError), run.recording_status():
        raise RuntimeError(f"401 for {CANARY}")
    files = [path for path in run.root.rglob("*") if path.is_file()]
    assert len(files) >= 6
    assert [path.name for path in files if CANARY in path.read_text()] == []
    assert run.rank_log(0).read_text().count("it failed") == 1
    assert run.rank_log(0).stat().st_mode & 0o077 == 0


def test_a_record_is_logged_once_and_the_console_stays_as_quiet_as_it_was(run, monkeypatch):
    # Another test of this process may have made transformers quieter.
    monkeypatch.setattr(logging.getLogger("transformers"), "level", logging.WARNING)
    quiet = logging.StreamHandler()
    root, before = logging.getLogger(), logging.getLogger().level
    root.addHandler(quiet)
    root.setLevel(logging.WARNING)
    handler = start_rank_log(run.rank_log(3), 3)
    try:
        logging.getLogger("transformers.trainer").warning("once")
        logging.getLogger("elsewhere").info("kept")
        assert quiet.level == logging.WARNING
    finally:
        stop_rank_log(handler)
        root.removeHandler(quiet)
        root.setLevel(before)
    lines = run.rank_log(3).read_text().splitlines()
    assert [line.split("rank3 ")[1] for line in lines] == [
        "WARNING transformers.trainer: once",
        "INFO elsewhere: kept",
    ]


def test_a_redacted_recipe_is_still_a_recipe():
    text = "training:\n  hub_token: hf_abcdefghij  # mine\n  seed: 1\n"
    read = yaml.safe_load(redact_text(text))
    assert read["training"]["seed"] == 1
    assert "abcdefghij" not in str(read)
