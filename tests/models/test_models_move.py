"""Weights on their way to a device."""

import pytest
import torch
from torch import nn

from trainkit.models import loading

gpu = pytest.param("cuda", marks=pytest.mark.gpu)


@pytest.mark.parametrize("device", ["cpu", gpu])
def test_every_bit_arrives_and_what_is_elsewhere_stays(device, monkeypatch):
    monkeypatch.setattr(loading, "_STAGE", 1 << 10)  # several parts, the last one short
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(37, 53, dtype=torch.bfloat16), nn.Linear(53, 37))
    model[1].weight = nn.Parameter(torch.randn(53, 37).t())  # not contiguous
    model.tied, model.none = model[0], nn.Parameter(torch.empty(0))
    model.absent = nn.Parameter(torch.empty(2, device="meta"))
    model.register_buffer("table", torch.arange(7))
    before = {name: each.clone() for name, each in model.state_dict().items()}
    loading.move(model, torch.device(device))
    assert model.tied is model[0]
    for name, each in model.state_dict().items():
        assert each.device.type == ("meta" if name == "absent" else device)
        assert each.is_meta or torch.equal(each.cpu(), before[name])
