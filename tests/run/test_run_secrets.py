import json
import logging
import random
import string
import subprocess
import time
from html import escape
from pathlib import Path

import pytest
import yaml

from trainkit.redact import is_secret_name, redact_argv
from trainkit.run import (
    capture_environment,
    command_script,
    redact,
    redact_text,
    start_rank_log,
    stop_rank_log,
)

CANARY = "canary-5e1f09"

WORDS = json.loads(Path(__file__).with_name("secret_words.json").read_text())
"""Names of secrets and others; texts with a secret where {} is, and without; places of one."""


@pytest.mark.parametrize("name", WORDS["secret_names"])
def test_secret_names(name):
    assert is_secret_name(name)


@pytest.mark.parametrize("name", WORDS["innocent_names"])
def test_innocent_names(name):
    assert not is_secret_name(name)


LETTERS = string.ascii_letters + string.digits
# Every line of a key that is one: without the words, no scanner of this repository finds one here.
KEY = "-----BEGIN {0}PRIVATE KEY-----\n{1}\n{1}\n-----END {0}PRIVATE KEY-----".format
KEYS = [KEY("RSA ", "{}"), KEY("", "+{}"), KEY("OPENSSH ", " {}")]


@pytest.mark.parametrize("text", WORDS["secret_texts"])
def test_text_is_redacted(text):
    text = text.replace("{}", CANARY).replace(r"\n", "\n")
    for written in (text, f"+{text}", f"  run: {text}", json.dumps({"cmd": text})):
        assert CANARY not in redact_text(written, {}), written


@pytest.mark.parametrize("line", [*WORDS["assigned"], *KEYS])
def test_secrets_that_are_assigned_go_in_every_file(line):
    value = "kq7" + "".join(random.Random(line).choices(LETTERS, k=37))
    text = f"before\n{line.replace('{}', value)}\nafter"
    for shown in (text, json.dumps(text), escape(text), text.replace("\n", "\r\n")):
        found = redact_text(shown, {})
        assert value not in found
        assert "before" in found
        assert "after" in found
        assert redact_text(found, {}) == found
    assert value not in str(redact({"a": [{"b": text}]}, {}))


@pytest.mark.parametrize("text", WORDS["innocent_texts"])
def test_innocent_text_is_left_alone(text):
    assert redact_text(text, {"PWD": "/home/me/project"}) == text
    written = json.dumps([text])
    assert "-N" in text or redact_text(written, {}) == written  # a quoted nothing is quoted twice


SETS = {
    "all": LETTERS,
    "lower": string.ascii_lowercase + string.digits,
    "upper": string.ascii_uppercase + string.digits,
    "digits": string.digits,
    "hex": "0123456789abcdef",
    "url": string.ascii_letters + "-_0",
}
SHAPES = json.loads(Path(__file__).with_name("secret_shapes.json").read_text())
"""As services publish them: a prefix, which characters follow (or the ones), and how many."""


@pytest.mark.parametrize("name", SHAPES)
def test_the_shapes_of_services_are_known(name):
    draw = random.Random(name)
    for place in WORDS["places"]:
        parts = [
            (prefix, "".join(draw.choices(SETS.get(of, of), k=k))) for prefix, of, k in SHAPES[name]
        ]
        text = place.format("".join(prefix + rest for prefix, rest in parts))
        found = redact_text(text, {})
        assert [rest for _, rest in parts if len(rest) > 8 and rest in found] == []
        assert "<redacted>" in found
        assert "step" not in text or "step" in found


def test_what_is_no_secret_stays_as_it_is():
    root = Path(__file__).parents[2]
    files = [*root.rglob("configs/**/*.yaml"), root / "README.md", *root.glob("docs/**/*.md")]
    assert len(files) > 50
    for path in files:
        text = path.read_text()
        assert redact_text(text, {}) == text, path


PIECES = ["a", "a.", "eyJ-", "sk-", "token ", 'token="', "a: str | ", 'a="\\', "&quot;", "M.aa"]
PIECES += ["-----BEGIN PRIVATE KEY-----", "ab://", "http://a:", "Basic A", "?token", " ", " -u a"]


@pytest.mark.parametrize("piece", PIECES)
def test_no_text_takes_long(piece):
    started = time.process_time()
    redact_text(piece * (200_000 // len(piece)), {})
    assert time.process_time() - started < 5


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
    run.write_json(run.environment, capture_environment(tmp_path))
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
