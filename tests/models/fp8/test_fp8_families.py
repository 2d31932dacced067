"""Every family in fp8, its norms, gates and output layer fused: as far from fp64 as layer by layer.

Fused, rows are quantised where they are made and carried to whoever reads them: a norm of a family
that feeds something else, or a layer in 16 bits between two in fp8, would be read wrongly.
"""

import copy
import math

import pytest
import torch
from families.family_models import FAMILIES, exact, make, make_batch, run

import trainkit
from trainkit.models.fp8.base import PRODUCT_LIMIT
from trainkit.models.fp8.choice import find_candidates
from trainkit.models.fp8.trained import KeptCodes, swap_in
from trainkit.models.proof.norms import let_norms_quantize
from trainkit.options import Fp8Options

BOTH = (True, True)


def in_fp8(model, *, is_fused):
    if is_fused:
        trainkit.patch(model)
    swap_in(model, dict.fromkeys(find_candidates(model, Fp8Options(head="fp8")).layers, BOTH))
    number = let_norms_quantize(model)
    KeptCodes(model)
    return number


def errors(found, truth):
    assert found.keys() == truth.keys()
    return {
        name: ((found[name].double() - value).norm() / value.norm()).item()
        for name, value in truth.items()
        if name != "logits"
    }


def root_mean_square(values):
    return math.sqrt(sum(value**2 for value in values) / len(values))


@pytest.mark.parametrize(
    ("name", "width"), [*((name, 96) for name in FAMILIES), ("llama", 100), ("glm4", 100)]
)
def test_fused_as_layer_by_layer(name, width):
    """Of a feed-forward block 100 wide no product fits the tensor cores; attention's do."""
    model = make(name, dtype=torch.bfloat16, intermediate_size=width)
    with torch.no_grad():  # so that a gate is no straight line
        for key, weight in model.named_parameters():
            if "mlp.gate" in key:
                weight.mul_(20)
    batch = make_batch(name)
    truth = run(exact(copy.deepcopy(model)), batch)
    found = []
    for is_fused in (False, True):
        other = copy.deepcopy(model)
        number = in_fp8(other, is_fused=is_fused)
        assert bool(number) == is_fused
        found.append(errors(run(other, batch), truth))
    alone, fused = (root_mean_square(each.values()) for each in found)
    # Each product is off by PRODUCT_LIMIT at most, and errors of two layers add up as squares do.
    assert 0.01 < alone < 3 * PRODUCT_LIMIT
    assert fused < 1.2 * alone  # by other roundings, but no more of them
    assert all(each < 2 * found[0][key] for key, each in found[1].items() if key != "loss")
