"""GaLore's projections: what they hold, and that a resumed run has the same bytes."""

import sys
import types

import torch

from trainkit.train.optimizer import keep_projections

RANK, WIDTH, HEIGHT = 2, 24, 40


class _AsPackaged:
    """As galore_torch 1.0 and apollo_torch 1.0.3 make it."""

    def __init__(self) -> None:
        self.ortho_matrix = None

    def get_orthogonal_matrix(self, weights: torch.Tensor, rank: int, type: str):
        left, _, right = torch.linalg.svd(weights, full_matrices=False)
        if type == "full":
            return [left[:, :rank], right[:rank, :]]
        return left[:, :rank] if type == "left" else right[:rank, :]


class _Optimizer(torch.optim.Optimizer):
    def step(self, closure=None):
        module = sys.modules[type(self).__module__]
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if "projector" not in state:
                state["projector"] = module.GaLoreProjector()
            made = state["projector"]
            made.ortho_matrix = made.get_orthogonal_matrix(parameter.grad, RANK, self.kind)


def _stepped(monkeypatch, kind: str) -> torch.optim.Optimizer:
    module = types.ModuleType("packaged")
    module.GaLoreProjector = _AsPackaged
    monkeypatch.setitem(sys.modules, "packaged", module)
    of_package = type("_Optimizer", (_Optimizer,), {"__module__": "packaged", "kind": kind})
    parameter = torch.nn.Parameter(torch.randn(HEIGHT, WIDTH))
    parameter.grad = torch.randn(HEIGHT, WIDTH)
    optimizer = keep_projections(of_package([parameter], {}))
    keep_projections(of_package([parameter], {}))  # a second run in one process
    optimizer.step()
    return optimizer


def test_a_projection_holds_its_own_rows_alone(monkeypatch) -> None:
    for kind, numbers in (("left", HEIGHT), ("right", WIDTH), ("full", HEIGHT + WIDTH)):
        optimizer = _stepped(monkeypatch, kind)
        (state,) = optimizer.state.values()
        held = state["projector"].ortho_matrix
        parts = held if kind == "full" else [held]
        bytes_held = sum(part.untyped_storage().nbytes() for part in parts)
        assert bytes_held == 4 * RANK * numbers, kind


def test_a_projection_is_that_of_the_package(monkeypatch) -> None:
    optimizer = _stepped(monkeypatch, "right")
    ((parameter, state),) = optimizer.state.items()
    truth = _AsPackaged().get_orthogonal_matrix(parameter.grad, RANK, "right")
    assert torch.equal(state["projector"].ortho_matrix, truth)


def test_a_checkpoint_has_plain_values_and_comes_back(monkeypatch) -> None:
    optimizer = _stepped(monkeypatch, "left")
    saved = optimizer.state_dict()
    ((_, entry),) = saved["state"].items()
    assert list(entry) == ["projector_values"]
    again = type(optimizer)(optimizer.param_groups[0]["params"], {})
    keep_projections(again).load_state_dict(saved)
    ((_, state),) = again.state.items()
    (before,) = optimizer.state.values()
    assert torch.equal(state["projector"].ortho_matrix, before["projector"].ortho_matrix)
