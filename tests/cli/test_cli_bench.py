"""``trainkit bench`` on a machine without a GPU."""

import pytest
import torch

from trainkit.cli.app import main


@pytest.mark.parametrize("name", ["step", "lora"])
def test_what_needs_a_gpu_says_so_at_once(name, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["bench", name]) == 1
    assert "measured on a GPU, and there is none here" in capsys.readouterr().err
