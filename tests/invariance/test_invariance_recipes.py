"""What a user's recipe trains is what an independent loop in fp64 trains."""

from invariance.random_recipes import differences


def test_random_recipes_train_what_an_independent_loop_trains(tmp_path):
    for seed, figures in differences(range(6), tmp_path).items():
        for what, ours, truth, error, bound in figures:
            assert error <= bound, f"recipe {seed}, {what}: {ours} and not {truth}"
