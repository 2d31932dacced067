"""Kernels that are compiled on threads before they are launched."""

from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from trainkit import kernels
from trainkit.kernels import ahead, launch


class Jitted:
    """As `ahead` knows a kernel of Triton: a pointer, an integer and a constant."""

    params = tuple(SimpleNamespace(is_constexpr=constant) for constant in (False, False, True))

    def __init__(self, fails=False):
        self.fails, self.compiled = fails, []

    def warmup(self, *arguments, grid, **options):
        if self.fails:
            raise RuntimeError("no such instruction")
        self.compiled.append((arguments, options))
        return SimpleNamespace(run=None)


@pytest.fixture
def gpu(monkeypatch):
    """What the threads ask of a GPU."""
    triton = pytest.importorskip("triton")
    monkeypatch.setattr(torch.cuda, "device", lambda index: torch.no_grad())
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    driver = SimpleNamespace(active=SimpleNamespace(get_current_target=lambda: None))
    monkeypatch.setattr(triton.runtime, "driver", driver)


def test_each_launch_that_is_other_code_is_compiled_once(gpu):
    jitted = Jitted()
    with ahead.noting(0) as noted:
        for number, constant in ((32, 5), (64, 5), (7, 5), (9, 5), (1, 5), (32, 6)):
            ahead.note(jitted, (torch.empty(1), number, constant), {"num_warps": 4})
        ahead.note(jitted, (torch.empty(1).half(), 32, 5), {"num_warps": 4})
        ahead.note(jitted, (torch.empty(1), 32, 5), {"num_warps": 8})
    ahead.compile_noted(noted, world_size=1)
    ahead.wait_for(jitted)
    given = [(*arguments, options["num_warps"]) for arguments, options in jitted.compiled]
    assert sorted(given, key=str) == [
        (torch.float16, 32, 5, 4),
        (torch.float32, 1, 5, 4),
        (torch.float32, 32, 5, 4),
        (torch.float32, 32, 5, 8),
        (torch.float32, 32, 6, 4),
        (torch.float32, 7, 5, 4),
    ]


def test_outside_nothing_is_noted_and_what_fails_is_left_to_the_launch(gpu):
    ahead.note(Jitted(), (torch.empty(1), 32, 5), {})
    with ahead.noting(None) as noted:
        ahead.note(Jitted(), (torch.empty(1), 32, 5), {})
    assert not noted.launches
    fails = Jitted(fails=True)
    with ahead.noting(0) as noted:
        ahead.note(fails, (torch.empty(1), 32, 5), {})
    ahead.compile_noted(noted, world_size=1)
    ahead.wait_for(fails)
    ahead.wait_for_all()


@pytest.mark.gpu
def test_what_is_noted_of_fake_tensors_is_what_real_ones_launch(monkeypatch, tmp_path):
    import triton

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    compiled = []
    monkeypatch.setattr(
        triton.knobs.compilation, "listener", lambda src, **_: compiled.append(src.fn.__name__)
    )

    def step(device):
        x = torch.ones(64, 1088, dtype=torch.bfloat16, device=device, requires_grad=True)
        weight = torch.ones(1088, dtype=torch.bfloat16, device=device)
        gate = kernels.rms_norm(x, weight)
        h = kernels.swiglu(gate, gate * 2)
        h.sum().backward()

    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        launch.shapes_only(),
        ahead.noting(torch.cuda.current_device()) as noted,
    ):
        step("cpu")
    ahead.compile_noted(noted, world_size=1)
    ahead.wait_for_all()
    before = len(compiled)
    step("cuda")
    assert before  # another test may have had the same widths
    assert compiled[before:] == []
