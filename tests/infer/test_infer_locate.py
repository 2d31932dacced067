"""Runs, checkpoints, adapters and models are found; what is none says so."""

import json
import shutil

import pytest

from trainkit.checkpoint.whole.atomic import staged_directory
from trainkit.errors import ModelError
from trainkit.infer.locate import find_model, trained_stop_ids, training_options
from trainkit.options import ImageOptions


def test_run_gives_its_final_model(run_directory):
    place = find_model(str(run_directory))
    assert place.directory == run_directory / "final"
    assert place.model == str(run_directory / "final")
    assert place.run == run_directory
    assert place.adapter is None


def test_run_without_final_gives_its_newest_whole_checkpoint(run_directory, tiny_qwen2, capsys):
    shutil.rmtree(run_directory / "final")
    for step in (1, 2, 3):
        with staged_directory(run_directory / f"checkpoint-{step}") as staging:
            shutil.copytree(tiny_qwen2, staging, dirs_exist_ok=True)
    (run_directory / "checkpoint-3" / "config.json").unlink()
    assert find_model(str(run_directory)).directory == run_directory / "checkpoint-2"
    said = capsys.readouterr().err
    assert "no final model yet; taken is its checkpoint-2; checkpoint-3: " in said
    assert find_model(str(run_directory / "checkpoint-1")).run == run_directory
    assert capsys.readouterr().err == ""


def test_plain_model_and_hub_name(tiny_qwen2):
    assert find_model(str(tiny_qwen2)).run is None
    assert find_model("Qwen/Qwen2-0.5B").model == "Qwen/Qwen2-0.5B"


def write_adapter(directory, base):
    directory.mkdir(parents=True)
    (directory / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": base}))


def test_adapter_names_its_base(tmp_path, tiny_qwen2):
    write_adapter(tmp_path / "a", str(tiny_qwen2))
    place = find_model(str(tmp_path / "a"))
    assert (place.model, place.adapter) == (str(tiny_qwen2), tmp_path / "a")
    assert place.tokenizer == str(tiny_qwen2)
    shutil.copy(tiny_qwen2 / "tokenizer_config.json", tmp_path / "a")
    assert find_model(str(tmp_path / "a")).tokenizer == str(tmp_path / "a")
    over = find_model(str(tiny_qwen2), adapter=tmp_path / "a")
    assert (over.model, over.adapter) == (str(tiny_qwen2), tmp_path / "a")
    assert over.tokenizer == str(tmp_path / "a")


def test_what_is_no_model_says_so(tmp_path, run_directory):
    with pytest.raises(ModelError, match="nothing at this path"):
        find_model(str(tmp_path / "nowhere"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match="no model and no adapter"):
        find_model(str(tmp_path / "empty"))
    (tmp_path / "empty" / "global_step5").mkdir()
    with pytest.raises(ModelError, match=r"DeepSpeed shards only[\s\S]*trainkit merge"):
        find_model(str(tmp_path / "empty"))
    write_adapter(tmp_path / "moved", "/not/here/any/more")
    with pytest.raises(ModelError, match=r"not at /not/here[\s\S]*--base-model"):
        find_model(str(tmp_path / "moved"))
    shutil.rmtree(run_directory / "final")
    with pytest.raises(ModelError, match="no final model"):
        find_model(str(run_directory))


def test_a_checkpoint_that_was_removed_is_not_sought_on_the_hub(run_directory, monkeypatch):
    monkeypatch.chdir(run_directory.parent)
    for step in (8, 12):
        (run_directory / f"checkpoint-{step}").mkdir()
    with pytest.raises(ModelError, match="nothing at this path") as refused:
        find_model("run-1/checkpoint-4")
    assert "checkpoint-8, checkpoint-12, final" in str(refused.value)
    assert find_model("train_model/Qwen2").model == "train_model/Qwen2"


def test_record_of_the_run_decides_prompts_and_stops(run_directory):
    record = {
        "train": {
            "options": {"system_policy": "Be kind.", "max_length": 7, "thinking": "preserve"},
            "end_of_turn": {"<|im_end|>": 257},
        }
    }
    (run_directory / "data.json").write_text(json.dumps(record))
    assert training_options(run_directory) == {"system_policy": "Be kind.", "thinking": "preserve"}
    assert trained_stop_ids(run_directory) == (257,)
    assert training_options(None) == {}
    images = {"folder": "elsewhere", "max_pixels": 4096, "processor": {}}
    record["train"]["options"]["images"] = images
    (run_directory / "data.json").write_text(json.dumps(record))
    assert training_options(run_directory)["images"] == ImageOptions(max_pixels=4096)
    (run_directory / "data.json").write_text("[]")
    with pytest.raises(ModelError, match="damaged"):
        training_options(run_directory)
