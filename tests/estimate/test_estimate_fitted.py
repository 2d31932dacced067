"""A recipe for a model, data and a GPU: it loads, it fits, and what it says is true of it."""

import json
import os
import re
from pathlib import Path

import gguf
import pytest

from trainkit.cli.app import main
from trainkit.errors import RecipeError
from trainkit.estimate.estimate import estimate
from trainkit.estimate.fitted import METHODS, fitted_recipe
from trainkit.estimate.gpus import GPUS, gpu_of
from trainkit.estimate.recipe import plan_of
from trainkit.recipe import load_recipe

SMALL, LARGE = "Qwen/Qwen2.5-0.5B-Instruct", "Qwen/Qwen2.5-7B-Instruct"


@pytest.mark.sample("*lora-24g-1", "*10g*", "*fp8*", "*40g*", "*full-24g*")
@pytest.mark.parametrize(
    ("model", "method", "gpu", "gpus"),
    [
        (LARGE, "lora", "24g", 1),
        (LARGE, "qlora", "10g", 1),
        (LARGE, "fp8", "4090", 1),
        (LARGE, "lora", "h100", 4),
        (LARGE, "full", "a100-40g", 8),
        (LARGE, "full", "24g", 2),
        (SMALL, "full", "4090", 1),
        (SMALL, "lora", "8g", 2),
    ],
)
def test_it_loads_and_fits(tmp_path, model, method, gpu, gpus):
    found = fitted_recipe(model, ["mine.jsonl"], method, gpu_of(gpu), gpus)
    file = tmp_path / "r.yaml"
    file.write_text(found.text)
    recipe = load_recipe(file).recipe
    assert recipe.model.name_or_path == model
    assert [source.path for source in recipe.data.train] == ["mine.jsonl"]
    assert (recipe.lora is not None) == (method != "full")
    again = estimate(plan_of(recipe, gpus), gpu_of(gpu))
    assert again.fits
    assert again.peak.gib == pytest.approx(found.expected.peak.gib)
    assert METHODS[method] in found.text
    assert "40 M" not in found.text, "that is of the shipped recipe's model"
    shipped_rows = recipe.global_batch_size
    assert shipped_rows, "the rows of a step do not change to make it fit"


def test_what_cannot_fit_is_refused_with_the_way_out():
    with pytest.raises(RecipeError, match="nothing that trains the same weights") as refused:
        fitted_recipe(LARGE, [], "lora", gpu_of("2g"))
    assert "--method" in refused.value.fix


def test_a_base_in_eight_bits_needs_a_gpu_that_multiplies_so():
    with pytest.raises(RecipeError, match="no cores for fp8") as refused:
        fitted_recipe(LARGE, [], "fp8", gpu_of("a100-80g"))
    assert refused.value.where == "--method"
    assert "quantize: fp8" in fitted_recipe(LARGE, [], "fp8", gpu_of("h100")).text


def test_a_model_of_unknown_size_is_written_without_figures():
    found = fitted_recipe("nobody/no-such-model", ["a.jsonl"], "lora", gpu_of("h100"))
    assert found.expected is None
    assert "Expected" not in found.text


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("config", "longest"),
    [
        ({"model_type": "qwen2", "max_position_embeddings": 1024}, 1024),
        ({"model_type": "gpt2", "n_positions": 512}, 512),
        (
            {
                "model_type": "llama",
                "max_position_embeddings": 512,
                "rope_scaling": {"rope_type": "linear", "factor": 2.0},
            },
            1024,
        ),
        ({"model_type": "any", "text_config": {"max_position_embeddings": 640}}, 640),
        ({"model_type": "qwen2", "max_position_embeddings": 131_072}, None),
        ({"model_type": "qwen2"}, None),
    ],
    ids=lambda each: str(each.get("model_type")) if isinstance(each, dict) else None,
)
def test_no_sample_is_longer_than_the_model_can_read(tmp_path, method, config, longest):
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "vocab_size": 512}
    (tmp_path / "config.json").write_text(json.dumps({**sizes, **config}))
    found = fitted_recipe(str(tmp_path), ["a.jsonl"], method, gpu_of("h100"))
    (tmp_path / "r.yaml").write_text(found.text)
    length = load_recipe(tmp_path / "r.yaml").recipe.data.max_length
    assert length >= 2048 if longest is None else length == longest


def test_a_size_is_a_gpu():
    assert gpu_of("24g").memory_gib == pytest.approx(GPUS["4090"].memory_gib, abs=0.1)
    assert gpu_of("80GB").memory_gib == pytest.approx(GPUS["h100"].memory_gib, abs=1)


@pytest.mark.parametrize(
    ("name", "row", "memory"),
    [
        ("RTX 4090", "4090", None),
        ("rtx4090", "4090", None),
        ("NVIDIA GeForce RTX 4090", "4090", None),
        ("4090-24gb", "4090", None),
        ("h100-80g", "h100", None),
        ("NVIDIA H100 80GB HBM3", "h100", None),
        ("h100-94g", "h100", 92),
        ("h200-141gb", "h200", None),
        ("A100-SXM4-40GB", "a100-40g", None),
        ("a100 80GB", "a100-80g", None),
        ("l40s-48g", "l40s", None),
        ("rtx_6000_ada", "rtx-6000-ada", None),
    ],
)
def test_a_gpu_by_any_of_its_names(name: str, row: str, memory: float | None) -> None:
    found = gpu_of(name)
    assert found.teraflops == GPUS[row].teraflops
    assert found.memory_gib == pytest.approx(memory or GPUS[row].memory_gib, abs=0.3)


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("A100", "there are a100-80g and a100-40g; or a size as 24g"),
        ("v100", "or a size as 24g"),
        ("h100-0g", "write a size as 24g"),
        ("h100-foo", "or a size as 24g"),
        ("", "known are h200"),
    ],
)
def test_a_gpu_that_is_none_is_refused_with_what_there_is(name: str, fix: str) -> None:
    with pytest.raises(RecipeError, match="no GPU") as raised:
        gpu_of(name)
    assert fix in str(raised.value)


def test_the_list_has_sizes_and_asks_no_hub(capsys, monkeypatch):
    def refuse(name, revision):
        raise AssertionError(f"asked the hub for {name}")

    monkeypatch.setattr("trainkit.estimate.shape._download", refuse)
    assert main(["new"]) == 0
    told = capsys.readouterr().out
    assert "qlora" in told
    assert " GiB " in told
    for line in told.splitlines():
        assert line.endswith("."), f"a sentence that is cut: {line}"


@pytest.mark.parametrize("model", ["./absent", "/absent/model", "absent.gguf", "a/b/c"])
def test_a_model_that_is_not_there_gets_no_recipe(model, tmp_path, capsys):
    assert main(["new", "--model", model, "-o", str(tmp_path / "r.yaml")]) == 2
    assert "there is no model at" in capsys.readouterr().err
    assert not (tmp_path / "r.yaml").exists()


def test_a_gguf_file_has_the_size_of_its_model(tmp_path, monkeypatch, capsys):
    """Its head alone is read: an estimate and a recipe need no weights."""
    monkeypatch.chdir(tmp_path)
    writer = gguf.GGUFWriter("m.gguf", "qwen2")
    writer.add_context_length(64)
    writer.add_embedding_length(64)
    writer.add_block_count(2)
    writer.add_feed_forward_length(128)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(260)
    for write in ("write_header_to_file", "write_kv_data_to_file", "close"):
        getattr(writer, write)()
    assert main(["new", "--model", "m.gguf", "-o", "r.yaml"]) == 0
    assert "max_length: 64 " in Path("r.yaml").read_text()
    for place in ({"name_or_path": "m.gguf"}, {"name_or_path": ".", "gguf_file": "m.gguf"}):
        loaded = load_recipe(
            Path("r.yaml"), [f"model.{key}={value}" for key, value in place.items()]
        )
        assert plan_of(loaded.recipe, 1).shape.hidden == 64
    capsys.readouterr()


@pytest.mark.parametrize("name", ["d.tsv", "d.docx", "d", "d.jsonl", "d.csv", "pipe.jsonl"])
def test_data_that_is_there_and_cannot_be_read_gets_no_recipe(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    if name == "d":
        Path(name).mkdir()
    elif name.startswith("pipe"):
        os.mkfifo(name)
    else:
        Path(name).write_bytes(b"\xff\xfe\0" if name == "d.jsonl" else b"")
    assert main(["new", "--model", "Qwen/Qwen2.5-7B", "--data", name, "-o", "r.yaml"]) == 2
    assert name in capsys.readouterr().err
    assert not Path("r.yaml").exists()


def test_the_name_of_a_shape_is_no_model(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["new", "--model", "Qwen2.5-7B"]) == 2
    assert "hub name with its owner" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_every_option_acts_or_is_refused(tmp_path, monkeypatch, capsys):
    """Alone, and with a name: what then does nothing is not passed over."""
    monkeypatch.chdir(tmp_path)
    values = {"--method": "full", "--gpus": "2", "--gpu": "24g", "--tool": "trl"}
    values |= {"--data": "a.jsonl", "--output": "r.yaml"}
    assert main(["new", "--help"]) == 0
    taken = set(re.findall(r"(--[a-z-]+) <", capsys.readouterr().out))
    assert set(values) == taken - {"--model", "--from"}
    for option, value in values.items():
        assert main(["new", option, value]) == 2, option
        assert "goes with" in capsys.readouterr().err
        code = main(["new", "qwen2-7b-lora", option, value])
        if option in ("--data", "--output"):
            assert code == 0
            written = Path(value if option == "--output" else "qwen2-7b-lora.yaml")
            assert ("train: [a.jsonl]" in written.read_text()) == (option == "--data")
        else:
            assert code == 2, option
        capsys.readouterr()


def test_what_makes_it_fit_is_explained_behind_it():
    found = fitted_recipe("Qwen/Qwen2.5-72B", [], "lora", gpu_of("h100"), 8)
    assert found.changed
    lines = found.text.splitlines()
    for each in found.changed:
        key = each.partition("=")[0].rpartition(".")[2].replace("shard", "deepspeed")
        (line,) = [line for line in lines if line.strip().startswith(f"{key}:")]
        assert " # " in line


def test_what_the_gpu_does_not_say_is_said(tmp_path, capsys, monkeypatch):
    """Data that is not there yet, and the host's memory behind a model that fits with its help."""
    monkeypatch.chdir(tmp_path)
    command = ["new", "-m", LARGE, "--method", "full", "--gpu", "24g", "-d", "mine.jsonl", "-d"]
    assert main([*command, "org/set"]) == 0
    told = capsys.readouterr().err
    assert "not here yet: mine.jsonl\n" in told
    weights = 7.6e9  # at least two moments of 8 bits of each, and no fp32 masters
    (line,) = [line for line in told.splitlines() if "of the host's memory" in line]
    assert weights * 2 / 2**30 < float(line.split()[1]) < weights * 4 / 2**30
    assert main([*command, "org/set", "-o", "b.yaml", "--json"]) == 0
    row = json.loads(capsys.readouterr().out)
    assert row["absent"] == ["mine.jsonl"]
    assert weights * 2 / 2**30 < row["host_gib"] < weights * 4 / 2**30
    recipe = load_recipe(tmp_path / "b.yaml").recipe
    assert recipe.optim_in_backward
    assert recipe.parallel.shard == "none"


@pytest.mark.parametrize(("gpus", "starter"), [(1, "sft"), (8, "launch --nproc_per_node 8")])
def test_what_is_said_of_several_gpus_is_true(gpus, starter, tmp_path, capsys):
    """The command to train, and the one in the header, whose answer is the header's."""
    file = tmp_path / "r.yaml"
    command = ["new", "-m", SMALL, "--method", "full", "--gpu", "h100", "--gpus", str(gpus)]
    assert main([*command, "-o", str(file)]) == 0
    assert f"train with: trainkit {starter} --config" in capsys.readouterr().err
    said = re.search(r"Expected: ([\d.]+) GiB .*`trainkit (estimate) FILE (.*)`", file.read_text())
    assert main([said[2], str(file), *said[3].split(), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["peak_gib"] == pytest.approx(float(said[1]), abs=0.06)  # of one digit


def test_the_rows_of_the_data_are_looked_at(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("faq.csv").write_text("question,answer\nWhat?,That.\n")
    Path("de.csv").write_text("frage,antwort\nWas?,Das.\n")
    Path("chat.jsonl").write_text(json.dumps(ROWS_OF["messages"]))
    files = [word for name in ("faq.csv", "de.csv", "chat.jsonl") for word in ("-d", name)]
    assert main(["new", "-m", SMALL, "--gpu", "h100", *files, "-o", "r.yaml"]) == 0
    assert "'frage' is read as instruction" in capsys.readouterr().err
    faq, de, chat = load_recipe(tmp_path / "r.yaml").recipe.data.train
    assert faq.columns == {"instruction": "question", "output": "answer"}
    assert de.columns == {"instruction": "frage", "output": "antwort"}
    assert (chat.path, chat.columns) == ("chat.jsonl", {})
    Path("odd.csv").write_text("id,metadata,body\nx1,y,A long text.\n")
    assert main(["new", "-m", SMALL, "--gpu", "h100", "-d", "odd.csv", "-o", "o.yaml"]) == 2
    assert "no known format has these keys: body, id, metadata" in capsys.readouterr().err
    Path("broken.jsonl").write_text('{"messages": [\n' + Path("chat.jsonl").read_text())
    assert main(["new", "-m", SMALL, "--gpu", "h100", "-d", "broken.jsonl", "-o", "b.yaml"]) == 0


ROWS_OF = {
    "pairs": {"prompt": "Say 1.", "chosen": "One.", "rejected": "No."},
    "ratings": {"prompt": "Say 1.", "completion": "One.", "label": True},
    "bad ratings": {"prompt": "Say 1.", "completion": "No.", "label": 0},
    "half a pair": {"conversations": [{"from": "human", "value": "?"}], "chosen": "One."},
    "turns in a list": ["Was?"],
    "messages": {"conversations": [{"from": "human", "value": "?"}, {"from": "gpt", "value": "!"}]},
    "unknown": {"frage": "Was?", "rejected": "Das."},
}
FITTING = {
    "pairs": {"dpo", "orpo", "simpo", "reward"},
    "ratings": {"lora", "kto"},
    "bad ratings": {"kto"},
    "messages": {"lora"},
    "unknown": {"lora"},  # whose columns are proposed
}


@pytest.mark.parametrize("rows", ROWS_OF)
@pytest.mark.parametrize("method", ["lora", "dpo", "kto", "reward", "distill"])
def test_rows_of_another_method_are_refused_with_theirs(rows, method, tmp_path, capsys):
    file = tmp_path / "rows.jsonl"
    before = json.dumps(ROWS_OF["ratings"]) if rows == "bad ratings" else ""
    file.write_text(f"{before}\n{json.dumps(ROWS_OF[rows])}\n".lstrip())
    command = ["new", "-m", SMALL, "--method", method, "--gpu", "h100", "-d", str(file)]
    code = main([*command, "-o", str(tmp_path / "r.yaml")])
    said = capsys.readouterr().err
    assert code == (0 if method in FITTING.get(rows, ()) else 2), said
    if code and rows != "unknown":
        assert f"its rows are not those of {method}: row " in said
        named = said.partition("it is one of: ")[2].partition(";")[0]
        assert set(named.split(", ")) == FITTING.get(rows, {""})
    elif rows == "pairs":
        assert load_recipe(tmp_path / "r.yaml").recipe.data.train[0].columns == {}
    assert (tmp_path / "r.yaml").exists() == (code == 0)


def test_a_shipped_recipe_looks_at_the_rows_too(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text(json.dumps(ROWS_OF["messages"]) + "\n")
    assert main(["new", "quickstart-dpo", "-d", "rows.jsonl"]) == 2
    assert "it is one of: lora" in capsys.readouterr().err
