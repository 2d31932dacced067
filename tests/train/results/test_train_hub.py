"""Uploading: the model goes to the hub, and nothing of the run around it."""

from fnmatch import fnmatch
from pathlib import Path

import pytest

from trainkit.train.saves import Saves

PRIVATE = ("command.sh", "environment.json", "dropped.jsonl", "recipe.yaml", "log.txt")


class FakeHub:
    """Takes down what an upload would send, as the real client reads it."""

    def __init__(self):
        self.sent = []

    def __call__(self, *_, **__):
        return self

    def upload_folder(self, *, folder_path, ignore_patterns, path_in_repo, **_):
        from concurrent.futures import Future

        files = [str(f.relative_to(folder_path)) for f in Path(folder_path).rglob("*")]
        ignored = ignore_patterns or []
        names = {f for f in files if not any(fnmatch(f, pattern) for pattern in ignored)}
        self.sent.append((Path(folder_path).name, path_in_repo, names))
        done = Future()
        done.set_result(None)
        return done


@pytest.fixture
def hub(monkeypatch):
    import huggingface_hub

    from trainkit.train import hub as uploads

    fake = FakeHub()
    monkeypatch.setattr(uploads, "HfApi", fake)
    monkeypatch.setattr(huggingface_hub, "upload_folder", fake.upload_folder)
    monkeypatch.setattr(
        uploads.Hub, "_make_repository", lambda self: setattr(self, "_model_id", "me/model")
    )
    return fake


@pytest.mark.parametrize("strategy", ["every_save", "end", "checkpoint", "all_checkpoints"])
def test_only_the_model_is_uploaded(strategy, lab, hub):
    root = lab.root / "run"
    root.mkdir()
    for name in PRIVATE:
        (root / name).write_text("private")
    trainer = lab.trainer("run", push_to_hub=True, hub_strategy=strategy, hub_token="hf_secret")
    trainer.train()
    trainer.hook(Saves).hub.push_final(root / "checkpoint-8")
    saves = [] if strategy == "end" else ["checkpoint-3", "checkpoint-6", "checkpoint-8"]
    assert [name for name, place, _ in hub.sent if place is None] == [*saves, "checkpoint-8"]
    for _, place, names in hub.sent:
        assert {"model.safetensors", "config.json", "tokenizer.json"} <= names
        assert not names & {*PRIVATE, "training_args.bin"}
        assert ("optimizer.pt" in names) == (place is not None)
    places = {place for _, place, _ in hub.sent} - {None}
    wanted = {"checkpoint": {"last-checkpoint"}, "all_checkpoints": set(saves)}
    assert places == wanted.get(strategy, set())
    assert not (root / "training_args.bin").exists()
