"""What a name means, and that nothing but regular files is read, by whichever door."""

import os
import shutil
import socket
from contextlib import suppress
from pathlib import Path

import pytest
from tiny import make_qwen2, make_tokenizer

from trainkit.checkpoint.whole.manifest import MANIFEST_NAME, read_manifest
from trainkit.errors import RecipeError, RunDirectoryError, TrainkitError
from trainkit.estimate.shape import find_config
from trainkit.infer.locate import find_model
from trainkit.lora.adapter import load_adapter
from trainkit.models.files import check_model_files
from trainkit.models.tokenizer import check_exists, load_config, load_tokenizer, stop_token_ids
from trainkit.options.data import read_tokens
from trainkit.options.model import ModelOptions
from trainkit.parallel.strategies import strategy_for
from trainkit.places import NAMED_TEMPLATES, local_path
from trainkit.recipe.document import read_document
from trainkit.recipe.load import read_chat_template
from trainkit.run.directory import RunDirectory, locked
from trainkit.run.files import read_json
from trainkit.run.listing import summarize
from trainkit.run.metrics import read_metrics
from trainkit.run.plot import History


def a_pipe(path):
    os.mkfifo(path)


def a_folder(path):
    path.mkdir()


def a_dead_link(path):
    path.symlink_to("gone")


def a_socket(path):
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(path))


SPECIALS = (a_pipe, a_folder, a_dead_link, a_socket)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(directory)
    make_qwen2(len(tokenizer)).save_pretrained(directory)
    return directory


MODEL_DOORS = {
    "check_exists": lambda at: check_exists(ModelOptions(name_or_path=at)),
    "load_tokenizer": lambda at: load_tokenizer(ModelOptions(name_or_path=at)),
    "load_config": lambda at: load_config(ModelOptions(name_or_path=at)),
    "stop_token_ids": lambda at: stop_token_ids(ModelOptions(name_or_path=at)),
    "find_model": find_model,
}


@pytest.mark.parametrize("special", SPECIALS)
@pytest.mark.parametrize("door", MODEL_DOORS)
@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "generation_config.json"])
def test_a_model_of_other_than_regular_files_is_refused(tmp_path, model, name, door, special):
    copy = Path(shutil.copytree(model, tmp_path / "copy"))
    (copy / name).unlink(missing_ok=True)
    special(copy / name)
    with pytest.raises(TrainkitError, match=r"where a file is meant|no tokenizer") as refused:
        MODEL_DOORS[door](str(copy))
    assert str(refused.value.where).endswith(name)


@pytest.mark.parametrize("place", [NAMED_TEMPLATES, f"{NAMED_TEMPLATES}/rag.jinja"])
def test_a_named_chat_template_is_a_file_of_the_model(tmp_path, model, place):
    copy = Path(shutil.copytree(model, tmp_path / "copy"))
    (copy / place).parent.mkdir(exist_ok=True)
    a_pipe(copy / place)
    for door in MODEL_DOORS.values():
        with pytest.raises(TrainkitError, match="where a file is meant"):
            door(str(copy))


def test_links_to_regular_files_are_read(tmp_path, model):
    for file in model.iterdir():
        (tmp_path / file.name).symlink_to(file)
    for door in MODEL_DOORS.values():
        door(str(tmp_path))


FILE_DOORS = {
    "recipe": (read_document, "r.yaml"),
    "status": (summarize, "status.json"),
    "metrics": (read_metrics, "metrics.jsonl"),
    "history": (History.read, "metrics.jsonl"),
    "record": (read_json, "data.json"),
    "template": (lambda at: read_chat_template(str(at)), "t.jinja"),
    "tokens": (lambda at: read_tokens(str(at), "model.add_tokens"), "t.txt"),
    "deepspeed": (lambda at: strategy_for(str(at)), "ds.json"),
    "manifest": (lambda at: read_manifest(at.parent), MANIFEST_NAME),
    "adapter": (lambda at: load_adapter(None, at.parent), "adapter_model.safetensors"),
    "estimate": (lambda at: find_config(str(at.parent)), "config.json"),
    "run": (lambda at: RunDirectory.open(at.parent), "environment.json"),
    "lock": (lambda at: locked(RunDirectory(at.parent)).__enter__(), ".lock"),
    "new": (lambda at: check_model_files(at.parent, with_weights=False), "config.json"),
}


@pytest.mark.parametrize("special", SPECIALS)
@pytest.mark.parametrize("door", FILE_DOORS)
def test_nothing_else_is_read_as_a_record_or_a_recipe(tmp_path, door, special):
    read, name = FILE_DOORS[door]
    if door in ("adapter", "run"):
        (tmp_path / {"adapter": "adapter_config.json", "run": "status.json"}[door]).write_text("{}")
    special(tmp_path / name)
    with pytest.raises(TrainkitError):
        read(tmp_path if door == "status" else tmp_path / name)


def test_a_name_is_a_path_or_the_hubs_by_one_rule(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "Qwen" / "here").mkdir(parents=True)
    for name in ("./a", "../a", "/a/b", "~/a", "~nobody/a", "a/b/c", "a/b.gguf", "a.jsonl.gz"):
        assert local_path(name) is not None, name
    for name in ("Qwen/Qwen2.5-7B", "gpt2", "hf://datasets/a/b/c", "a/ultrachat_200k_v1.5"):
        assert local_path(name) is None, name
    assert local_path("Qwen/here") == Path("Qwen/here")
    with suppress(RecipeError):
        assert local_path("x" * 5000) is None


@pytest.mark.parametrize("name", ["final", "plots", "logs"])
def test_what_is_in_place_of_a_runs_directory_is_named(name, tmp_path):
    """A run would hang at its end, when it is replaced."""
    run = RunDirectory.create(tmp_path)
    shutil.rmtree(run.root / name, ignore_errors=True)
    a_pipe(run.root / name)
    with pytest.raises(RunDirectoryError, match="where a directory") as error:
        RunDirectory.open(run.root)
    assert error.value.where == str(run.root / name)
