"""A hub out of reach is said at once: its clients would try each file of each part for minutes."""

import socket
import time

import huggingface_hub
import pytest

from trainkit import hub
from trainkit.data.files import fetch
from trainkit.errors import ModelError, TrainkitError
from trainkit.estimate.shape import find_config
from trainkit.infer.engine import load_engine
from trainkit.infer.locate import base_directory, find_model
from trainkit.models.tokenizer import check_exists
from trainkit.options import ModelOptions

NAME = "nobody/no-such-model"


@pytest.fixture(params=["offline", "no such host", "dead proxy", "silent proxy"])
def out_of_reach(request, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    is_offline = request.param == "offline"
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", is_offline)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)
    hub._trouble.cache_clear()
    huggingface_hub.close_session()
    with socket.socket() as proxy:
        proxy.bind(("127.0.0.1", 0))
        if request.param == "silent proxy":
            proxy.listen()
        if "proxy" in request.param:
            monkeypatch.setenv("HTTPS_PROXY", f"http://127.0.0.1:{proxy.getsockname()[1]}")
        if request.param == "no such host":
            monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "https://no.such.invalid")
        yield
    hub._trouble.cache_clear()
    huggingface_hub.close_session()


def test_every_reader_of_a_name_says_so(out_of_reach, tmp_path):
    readers = {
        "sft": lambda: check_exists(ModelOptions(name_or_path=NAME)),
        "generate": lambda: load_engine(find_model("smollm")),
        "merge": lambda: base_directory(ModelOptions(name_or_path=NAME)),
        "data": lambda: fetch(NAME, "train", tmp_path),
        "estimate": lambda: find_config(NAME),
    }
    for reader, read in readers.items():
        start = time.monotonic()
        with pytest.raises(TrainkitError) as refused:
            read()
        assert time.monotonic() - start < 10, reader
        told = "there is no config.json" if reader == "estimate" else "cannot be reached"
        assert told in str(refused.value), reader


def test_an_earlier_download_serves(out_of_reach, tmp_path):
    (tmp_path / "cache" / "models--nobody--no-such-model" / "snapshots").mkdir(parents=True)
    check_exists(ModelOptions(name_or_path=NAME))
    assert huggingface_hub.constants.HF_HUB_OFFLINE
    with pytest.raises(ModelError):
        check_exists(ModelOptions(name_or_path="nobody/else"))
