"""``trainkit estimate`` as it is typed."""

import json
from pathlib import Path

import pytest

from trainkit.cli.app import main
from trainkit.recipe.write import shipped_recipes

RECIPE = """
model: {name_or_path: MODEL}
data: {train: [train.jsonl], max_length: 2048, packing: true}
kernels: true
training: {per_device_train_batch_size: 4, num_train_epochs: 2}
"""
KEYS = {
    *("peak_gib", "by_owner", "step_seconds", "tokens_per_second", "total_hours"),
    *("fits", "suggestions"),
}


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "recipe.yaml"
    file.write_text(RECIPE.replace("MODEL", "Qwen/Qwen2.5-7B-Instruct"))
    (tmp_path / "train.jsonl").write_text("x" * 440_000)
    return file


def _json(capsys: pytest.CaptureFixture[str], *words: str) -> dict:  # type: ignore[type-arg]
    assert main(["estimate", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)  # type: ignore[no-any-return]


def test_says_what_does_not_fit_and_what_would(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = _json(capsys, str(recipe), "--gpu", "4090", "--gpus", "1")
    assert set(found) >= KEYS
    assert not found["fits"]
    assert found["peak_gib"] == pytest.approx(sum(found["by_owner"].values()), abs=0.01)
    assert found["total_hours"] * 3600 * found["tokens_per_second"] == pytest.approx(2e5, rel=0.05)
    assert len(found["suggestions"]) >= 3
    for suggestion in found["suggestions"]:
        # What is suggested is what the same command then says.
        words = suggestion["settings"].split()
        again = _json(capsys, str(recipe), *words, "--gpu", "4090", "--gpus", "1")
        assert again["fits"], suggestion
        assert again["peak_gib"] == pytest.approx(suggestion["peak_gib"], rel=0.01)


def test_every_way_to_recompute_is_counted(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    adapters = ("lora.r=16", "training.per_device_train_batch_size=16")
    found = {
        said: _json(capsys, str(recipe), "--gpu", "h200", *adapters, *said.split())
        for said in (
            "recompute=none",
            "recompute=selective",
            "recompute.every=2",
            "recompute=full lora.offload_activations=false",
            "training.gradient_checkpointing=true lora.offload_activations=false",
            "recompute=full",
            "recompute.budget_gib=60",
        )
    }
    peaks = [each["peak_gib"] for each in found.values()]
    times = [each["step_seconds"] for each in found.values()]
    none, selective, half, full, older, offloaded, budget = peaks
    assert none > half > full == older > offloaded
    assert none > selective > full
    assert 0.92 * 60 <= budget <= 60
    # As fast as a mixture of none and full with that peak would be, within a layer of 28.
    share = (none - budget) / (none - full)
    assert times[-1] <= times[0] + (share + 1 / 28) * (times[3] - times[0])


def test_a_directory_with_a_config_is_enough(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from trainkit.estimate.shape import NAMED

    model = recipe.parent / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(NAMED["llama-3.2-1b"]))
    found = _json(capsys, str(recipe), f"model.name_or_path={model}", "--gpu", "h200")
    assert found["parameters"] == 1_235_814_400
    assert found["fits"]
    assert found["suggestions"] == []


def test_words_for_a_terminal(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", "--config", str(recipe), "--gpu", "4090"]) == 0
    out = capsys.readouterr().out
    for part in ("peak memory", "activations", "NO: needs", "tokens/s", "lora.quantize=nf4"):
        assert part in out


def test_shipped_recipes_have_estimates_and_the_list_has_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["new", "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    listed = {row["name"]: row["one_gpu_gib"] for row in rows}
    for name, path in shipped_recipes().items():
        if not name.startswith("quickstart"):  # their model is made by `trainkit new`
            found = _json(capsys, str(path), "--gpu", "h200", "--gpus", "1")["needed_gib"]
            assert listed.pop(name) == pytest.approx(found, abs=0.051)
    assert set(listed.values()) == {None}
    assert all(name.startswith("quickstart") for name in listed)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--gpu", "h2000"], "h200"),
        (["model.name_or_path=nobody/knows-this"], "config.json"),
        (["model.name_or_path=./nowhere"], "config.json"),
        (["global_batch_size=3"], "global_batch_size"),
    ],
)
def test_refuses_by_name(
    recipe: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    assert main(["estimate", str(recipe), *words]) != 0
    assert said in capsys.readouterr().err


def test_a_family_that_transformers_does_not_know_is_named(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (recipe.parent / "config.json").write_text('{"model_type": "mumba"}')
    assert main(["estimate", str(recipe), f"model.name_or_path={recipe.parent}"]) != 0
    assert "mumba" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["estimate r.yaml", "new --model m -o new.yaml"])
def test_a_type_of_which_nothing_trains_is_told_what_does(command, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m").mkdir()
    (tmp_path / "m/config.json").write_text('{"model_type": "qwen2_audio"}')
    (tmp_path / "r.yaml").write_text("model: {name_or_path: m}\ndata: {train: [a.jsonl]}\n")
    assert main(command.split()) == 2
    assert "AutoModelForImageTextToText" in capsys.readouterr().err
    assert not (tmp_path / "new.yaml").exists()
