"""The commands convert and merge, as a user types them."""

import json

import pytest
import torch
from ranks import run_ranks
from safetensors.torch import load_file
from tiny import make_adapter, make_qwen2, make_tokenizer
from transformers import AutoModelForCausalLM

from trainkit.cli.app import main

TARGETS = ["q_proj", "down_proj"]


def output(capsys):
    return json.loads(capsys.readouterr().out)


def test_convert_there_and_back(glm_directory, tmp_path, capsys):
    target, back = str(tmp_path / "qwen2"), str(tmp_path / "glm")
    command = ["convert", "glm4-to-qwen2", str(glm_directory), target, "--shard-size", "1MB"]
    assert main([*command, "--json"]) == 0
    row = output(capsys)
    assert row["max_position"] == 131071
    assert row["max_logit_error"] < 1e-5 * row["max_logit"]
    assert main(["convert", "qwen2-to-glm4", target, back, "--no-verify", "--json"]) == 0
    assert output(capsys) == {"target": back, "num_tensors": 36}
    assert main(["convert", "glm4-to-qwen2", str(glm_directory), target]) == 1
    assert "exists already" in capsys.readouterr().err


def test_an_adapter_is_merged_first(glm_directory, tmp_path, capsys):
    adapter = make_adapter(glm_directory, tmp_path / "a", TARGETS)
    assert main(["convert", "glm4-to-qwen2", str(adapter), str(tmp_path / "b")]) == 2
    assert "trainkit merge" in capsys.readouterr().err


@pytest.mark.parametrize("size", ["lots", "0GB", "-1GB", "5"])
def test_bad_shard_size(glm_directory, tmp_path, capsys, size):
    command = ["convert", "glm4-to-qwen2", str(glm_directory), str(tmp_path / "t")]
    assert main([*command, f"--shard-size={size}"]) == 2
    assert "--shard-size" in capsys.readouterr().err


def as_run(directory, tiny_qwen2, quantize=None):
    """A run directory with an adapter as its final model."""
    directory.mkdir()
    make_adapter(tiny_qwen2, directory / "final", TARGETS)
    (directory / "status.json").write_text(json.dumps({"state": "done"}))
    lora = f"lora: {{r: 4, quantize: {quantize or 'null'}}}\n"
    recipe = f"model: {{name_or_path: {tiny_qwen2}}}\ndata: {{train: [d.jsonl]}}\n{lora}"
    (directory / "resolved.yaml").write_text(recipe)
    return directory


def test_merge_a_run(tiny_qwen2, tmp_path, capsys):
    run = as_run(tmp_path / "run", tiny_qwen2)
    assert main(["merge", str(run), str(tmp_path / "m"), "--json"]) == 0
    row = output(capsys)
    assert row["num_merged"] == 4
    assert row["num_same_continuations"] == row["num_prompts"] == 4
    assert row["divergence"] < 1e-9 < row["adapter_effect"]
    AutoModelForCausalLM.from_pretrained(tmp_path / "m")
    assert main(["merge", str(run), str(tmp_path / "n"), "--no-verify"]) == 0
    assert "4 tensors changed" in capsys.readouterr().out


@pytest.mark.parametrize("base", ["dequantized", "original"])
def test_a_base_that_was_not_quantised_is_not_rounded_for_a_merge(
    base, tiny_qwen2, tmp_path, capsys
):
    """It was rounded to 4 bits, which no run had seen, and the result said nothing of it."""
    run = as_run(tmp_path / "run", tiny_qwen2)
    assert main(["merge", str(run), str(tmp_path / "m"), "--base", base]) == 2
    assert "was not quantised" in capsys.readouterr().err
    assert not (tmp_path / "m").exists()
    foreign = tmp_path / "adapter"  # of no run: nobody knows but who asks
    (run / "final").rename(foreign)
    assert main(["merge", str(foreign), str(tmp_path / "m"), "--base", base, "--no-verify"]) == 0


@pytest.mark.parametrize("quantize", ["nf4", "int8", "fp8"])
def test_merge_over_a_quantised_base_takes_what_the_adapter_is_used_on(
    quantize, tiny_qwen2, tmp_path, capsys
):
    """Over fp8 that is the plain base, otherwise what training saw."""
    own, other = ("original", "dequantized")[:: 1 if quantize == "fp8" else -1]
    run = as_run(tmp_path / "run", tiny_qwen2, quantize=quantize)
    assert main(["merge", str(run), str(tmp_path / "m"), "--json"]) == 0
    row = output(capsys)
    assert row["merged_into"] == own
    assert row["weight_error_dequantized"] < 1e-6 < row["weight_error_original"]
    assert row["divergence"] < row["other_divergence"]
    if quantize == "fp8":
        assert 0.005 < row["weight_error_original"] < 0.0361  # of weights and updates together
        assert row["divergence"] < 1e-9
    assert main(["merge", str(run), str(tmp_path / "o"), "--base", other]) == 0
    assert f"this is {other}" in capsys.readouterr().out


def test_merge_a_zero3_checkpoint(tmp_path, capsys):
    run_ranks("checkpoint.zero_cases:save", root=str(tmp_path), stage=3)
    assert main(["merge", str(tmp_path / "checkpoint-2"), str(tmp_path / "m"), "--json"]) == 0
    assert output(capsys)["num_tensors"] == 26
    truth = load_file(tmp_path / "truth.safetensors")
    ours = load_file(tmp_path / "m" / "model.safetensors")
    assert all(torch.equal(ours[name], truth[name].to(ours[name].dtype)) for name in ours)


def test_merge_a_zero_checkpoint_of_an_adapter(tmp_path, capsys):
    run_ranks("checkpoint.zero_cases:save", root=str(tmp_path), stage=1, lora=True)
    tokenizer = make_tokenizer()
    make_qwen2(len(tokenizer)).to(torch.bfloat16).save_pretrained(tmp_path / "base")
    command = ["merge", str(tmp_path / "checkpoint-2"), str(tmp_path / "m")]
    assert main([*command, "--base-model", str(tmp_path / "base"), "--json"]) == 0
    assert output(capsys)["num_merged"] == 4
    record = json.loads((tmp_path / "m" / "merge.json").read_text())
    assert record["adapter"] == str(tmp_path / "checkpoint-2")  # not where it was unpacked
    assert main([*command[:2], str(tmp_path / "n")]) == 2
    assert f"{tmp_path / 'checkpoint-2'}: " in capsys.readouterr().err


def test_merge_of_nothing(tiny_qwen2, tmp_path, capsys):
    assert main(["merge", str(tiny_qwen2), str(tmp_path / "m")]) == 2
    assert "nothing to merge" in capsys.readouterr().err
    for words in (["merge", tmp_path / "nowhere", tmp_path / "m"], ["checkpoint", "verify", "no"]):
        assert main([*map(str, words)]) in (1, 2)
        assert "no such directory" in capsys.readouterr().err


def test_verify(tmp_path, capsys):
    from trainkit.checkpoint.whole.atomic import staged_directory

    for name in ("a", "b"):
        with staged_directory(tmp_path / name) as staging:
            (staging / "x").write_text("x")
    both = [str(tmp_path / "a"), str(tmp_path / "b")]
    assert main(["checkpoint", "verify", *both]) == 0
    assert "complete, 1 files" in capsys.readouterr().out
    (tmp_path / "b" / "x").write_text("y")
    assert main(["checkpoint", "verify", *both, "--json"]) == 1
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["status"] for row in rows] == ["whole", "damaged"]
    assert "x was altered" in rows[1]["reason"]


def test_verify_a_run_with_all_that_is_in_it(tmp_path, capsys):
    from trainkit.checkpoint.whole.atomic import staged_directory

    run = tmp_path / "run"
    run.mkdir()
    (run / "status.json").write_text("{}")
    assert main(["checkpoint", "verify", str(run)]) == 1
    assert "neither a checkpoint nor a final model" in capsys.readouterr().err
    for name in ("checkpoint-20", "checkpoint-100", "final"):
        with staged_directory(run / name) as staging:
            (staging / "x").write_text("x")
    assert main(["checkpoint", "verify", str(run)]) == 0
    said = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in said] == [
        str(run / name) for name in ("checkpoint-20", "checkpoint-100", "final")
    ]
    (run / "final" / "x").write_text("y")
    assert main(["checkpoint", "verify", str(run)]) == 1


def test_merge_says_when_rounding_loses_much_of_the_adapter(tiny_qwen2, tmp_path, capsys):
    """An update near the resolution of bfloat16: a short run with a small learning rate."""
    model = AutoModelForCausalLM.from_pretrained(tiny_qwen2, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "base")
    make_adapter(tmp_path / "base", tmp_path / "adapter", TARGETS)
    path = tmp_path / "adapter" / "adapter_config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "lora_alpha": config["lora_alpha"] * 1e-3}))
    said = {}
    for dtype in ("bfloat16", "float32"):
        target = str(tmp_path / dtype)
        assert main(["merge", str(tmp_path / "adapter"), target, "--dtype", dtype]) == 0
        said[dtype] = capsys.readouterr().out
    assert "--dtype float32 keeps all of it" in said["bfloat16"]
    assert "keeps all of it" not in said["float32"]
