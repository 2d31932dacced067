"""What a user's recipe trains is what an independent loop in fp64 trains."""

import pytest
from invariance.random_recipes import differences


@pytest.mark.sample("[0-4]")
@pytest.mark.parametrize("seed", range(10))
def test_a_random_recipe_trains_what_an_independent_loop_trains(seed, tmp_path):
    for what, ours, truth, error, bound in differences(seed, tmp_path):
        assert error <= bound, f"{what}: {ours} and not {truth}"
