"""Hub names go through datasets; without a network the error says what to do."""

import json

import datasets
import pytest
from chats import chat

from trainkit.data import Source
from trainkit.data.files import hub_name
from trainkit.errors import DataError


def test_what_counts_as_a_hub_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "local").touch()
    assert hub_name("hf://datasets/org/name") == "org/name"
    assert hub_name("org/na-me.v2") == "org/na-me.v2"
    for path in ("data/local", "data/x.jsonl", "./org/name", "/org/name", "a/b/c", "data/*"):
        assert hub_name(path) is None


def test_rows_come_from_datasets(ready, monkeypatch, dropped):
    asked = []

    def load_dataset(path, split, **chosen):
        asked.append((path, split, chosen))
        return datasets.Dataset.from_list([chat("q", "a"), chat("q", " "), chat("r", "b")])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr("trainkit.data.files.check_hub", lambda *_: None)
    data = ready(Source("org/name", split="train[:3]"))
    ready(Source("org/name", subset="en", files=["a.json"]))
    assert asked == [
        ("org/name", "train[:3]", {}),
        ("org/name", "train", {"name": "en", "data_files": ["a.json"]}),
    ]
    assert len(data) == 2
    assert data.sample_id(1) == "org/name:3"
    assert data.source_names == ("name",)
    assert dropped()[0]["file"] == "org/name"


def test_a_subset_of_a_local_path_is_refused(ready, tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps(chat("q", "a")) + "\n")
    with pytest.raises(DataError, match="local path"):
        ready(Source(str(tmp_path / "a.jsonl"), subset="en"))


def test_offline_the_error_says_what_to_do(ready):
    with pytest.raises(DataError, match="HF_HUB_OFFLINE is set") as error:
        ready("some-org/some-data")
    assert "download it elsewhere" in str(error.value)
