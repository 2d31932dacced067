"""GLM's partial rotary embedding written as a full one, bit for bit.

GLM rotates the first ``rotary_dim`` dimensions of a head in pairs ``(2j, 2j+1)`` by the angle
``position * theta ** (-2j / rotary_dim)`` and leaves the rest alone. Qwen2 rotates all
``head_dim`` dimensions in pairs ``(j, head_dim/2 + j)``. Reordering the rows of q and k (even
rows first, then odd ones) turns the one pairing into the other; it cancels in the product of q
and k. What remains is to give Qwen2 GLM's frequencies for the first pairs and frequency zero
for the others.

``longrope`` can say that: it divides each default frequency by its own factor. The base is
chosen so that the first factors are 1 up to rounding: with base ``theta **
(head_dim/rotary_dim)`` the default frequencies *are* GLM's, so a program that ignores the
factors still computes nearly the same function (the other pairs then turn by less than
``1/theta`` a position). The factors make up for the rounding: each is moved by at most one unit
in the last place until the frequency that float32 arithmetic yields is GLM's own. The other
factors push the frequency to about 1e-30, whose rotation over any position is the identity in
every float format.
"""

import numpy as np
import torch

from trainkit.errors import CheckpointError

_STILL = 1e30
_ROUNDING = 1e-5  # how far from 1 the factor of a turning pair may lie; float32 needs 1e-6


def interleaved_to_half_order(head_dim: int) -> tuple[int, ...]:
    """Where each row of a head comes from: the even dimensions, then the odd ones."""
    return (*range(0, head_dim, 2), *range(1, head_dim, 2))


def wavelengths(base: float, dim: int) -> torch.Tensor:
    """``base ** (2j / dim)`` for ``j < dim/2`` in float32, as transformers computes it."""
    return base ** (torch.arange(0, dim, 2, dtype=torch.int64).to(torch.float) / dim)


def full_base(theta: float, head_dim: int, rotary_dim: int) -> float:
    """The base whose default frequencies over ``head_dim`` start with GLM's over ``rotary_dim``."""
    ratio = head_dim / rotary_dim
    return theta**ratio if ratio != 2 else theta * theta  # exact where theta is a whole number


def longrope_factors(theta: float, head_dim: int, rotary_dim: int) -> list[float]:
    """The factor of each of the ``head_dim/2`` pairs."""
    goal = 1.0 / wavelengths(theta, rotary_dim)
    full = wavelengths(full_base(theta, head_dim, rotary_dim), head_dim)
    pairs = rotary_dim // 2
    ideal = (wavelengths(theta, rotary_dim).double() / full[:pairs].double()).float().numpy()
    factors: list[float] = []
    for pair in range(pairs):
        up, down = np.float32(np.inf), np.float32(0)
        tries = (ideal[pair], np.nextafter(ideal[pair], up), np.nextafter(ideal[pair], down))
        exact = [float(f) for f in tries if 1.0 / (torch.tensor(f) * full[pair]) == goal[pair]]
        if not exact or not full.isfinite().all():
            raise CheckpointError(
                f"rope base {theta:g} with heads of {head_dim} cannot be written exactly: "
                f"pair {pair} has no float32 factor"
            )
        factors.append(exact[0])
    return factors + [float(f"{_STILL / wave:.4e}") for wave in full[pairs:].tolist()]


def rope_scaling(
    theta: float, head_dim: int, rotary_dim: int, max_positions: int
) -> dict[str, object]:
    """The ``rope_scaling`` entry of a config. Its ``rope_theta`` is ``full_base``.

    ``factor`` and the equal lengths switch off longrope's own scaling of lengths and attention.
    """
    factors = longrope_factors(theta, head_dim, rotary_dim)
    return {
        "rope_type": "longrope",
        "factor": 1.0,
        "attention_factor": 1.0,
        "original_max_position_embeddings": max_positions,
        "short_factor": factors,
        "long_factor": factors,
    }


def read_back(base: float, scaling: dict[str, object], head_dim: int) -> tuple[float, int]:
    """GLM's ``(theta, rotary_dim)`` out of what ``rope_scaling`` wrote."""
    short, long = scaling.get("short_factor"), scaling.get("long_factor")
    if scaling.get("rope_type") == "longrope" and isinstance(short, list) and short == long:
        is_turning = [abs(factor - 1) < _ROUNDING for factor in short]
        rotary_dim = 2 * (is_turning.index(False) if False in is_turning else len(short))
        if 0 < rotary_dim <= head_dim:
            theta = _theta_of(base, head_dim, rotary_dim)
            if longrope_factors(theta, head_dim, rotary_dim) == short:
                return theta, rotary_dim
    raise CheckpointError(
        "its rotary embedding is not that of a converted GLM-4, so the way back is not defined"
    )


def _theta_of(base: float, head_dim: int, rotary_dim: int) -> float:
    """The base that ``full_base`` was given, of those that give ``base`` the shortest to write."""
    theta = base ** (rotary_dim / head_dim)  # may have lost the last bits
    for digits in range(1, 17):
        candidate = float(f"{theta:.{digits}g}")
        if full_base(candidate, head_dim, rotary_dim) == base:
            return candidate
    return theta
