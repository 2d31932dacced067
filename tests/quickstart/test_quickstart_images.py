"""The quickstart with pictures: held-out things are new, and the shipped recipe trains on them."""

import json

import pytest
from commands import trainkit

from trainkit import quickstart_images
from trainkit.recipe.write import shipped_recipes


@pytest.fixture(scope="module")
def assets(tmp_path_factory):
    root = tmp_path_factory.mktemp("seen")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quickstart_images, "NUM_TRAIN", 150)
        patch.setattr(quickstart_images, "NUM_HELD_OUT", 8)
        for place in ("quickstart/images", "again"):
            quickstart_images.make_assets(root / place)
    return root


def told(file):
    """Each answer of a file that tells all of a picture."""
    rows = [json.loads(line)["messages"] for line in file.open()]
    whole = next(iter(quickstart_images.QUESTIONS))
    return {answer["content"] for asked, answer in rows if asked["content"] == whole}


def test_no_thing_is_in_both_splits_and_two_runs_write_the_same(assets):
    folder = assets / "quickstart/images"
    both = [told(folder / f"{name}.jsonl") for name in ("train", "held_out")]
    assert all(both)
    assert both[0].isdisjoint(both[1])
    files = [path.relative_to(folder) for path in folder.rglob("*") if path.is_file()]
    assert len(files) > 160
    for file in files:
        assert (folder / file).read_bytes() == (assets / "again" / file).read_bytes(), file


def test_the_shipped_recipe_trains_on_a_cpu(assets):
    recipe = shipped_recipes()["quickstart-images"]
    said = trainkit(
        assets, "sft", "--config", recipe, "--output-dir", "run", "training.max_steps=2"
    )
    assert said.code == 0, said.err
    assert "trained: text" in said.err
    answers = json.loads((assets / "run/generation_eval.json").read_text())
    assert answers
