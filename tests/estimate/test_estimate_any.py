"""Whatever model and recipe is asked about: an answer that holds together, or a refusal by name."""

import json
import logging
import math
import random
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from tiny import SIZES
from torch._subclasses.fake_tensor import FakeTensorMode

from trainkit.cli.app import main
from trainkit.estimate.build import quiet
from trainkit.estimate.gpus import GPUS
from trainkit.estimate.peak import NF4
from trainkit.estimate.shape import NAMED

MODEL = {"model_type": "llama", "vocab_size": 100, **SIZES}
RECIPE = "model: {name_or_path: ./model}\ndata: {train: [rows.jsonl], max_length: 2048}\n"


@pytest.fixture
def said(tmp_path, monkeypatch, capsys):
    """What the command says of a model and overrides: its JSON, or its error."""
    monkeypatch.chdir(tmp_path)
    Path("model").mkdir()
    Path("rows.jsonl").write_text("x" * 1000)
    Path("recipe.yaml").write_text(RECIPE)

    def ask(model, *words):
        Path("model/config.json").write_text(json.dumps(model))
        code = main(["estimate", "recipe.yaml", *words, "--json"])
        printed = capsys.readouterr()
        assert code in (0, 2), (model, words, printed.err)
        return printed.err if code else json.loads(printed.out)

    return ask


def with_settings(words, suggestion):
    """Overrides with those of a suggestion, each key once."""
    changed = [*words, *suggestion["settings"].split()]
    return {word.partition("=")[0]: word for word in changed}.values()


SIZES = (*list(MODEL)[1:], "head_dim")


@pytest.mark.parametrize("size", [0, -2, "2", 1.5, True, [8], {}, 10**30])
def test_a_size_that_no_layer_can_have_is_refused_by_its_key(said, size):
    for key in SIZES:
        assert key in said({**MODEL, key: size}), key


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings"),
        ({"attention_bias": "no"}, "attention_bias"),
        ({"text_config": [1]}, "text_config"),
        ({"vision_config": "x"}, "vision_config"),
        ({"model_type": "qwen2_vl", "vision_config": {"depth": "3"}}, "depth"),
        ({"model_type": ["llama"]}, "llama"),
        ({"model_type": None}, "model_type"),
        ({"model_type": "llama9"}, "llama9"),
        ({"auto_map": {"AutoConfig": "code.Config"}}, "code"),
    ],
    ids=str,
)
def test_a_model_that_nobody_can_count_is_refused(said, change, named):
    answer = said({**MODEL, **change})
    assert isinstance(answer, str)
    assert named in answer


@pytest.mark.parametrize("gpu", ["0g", "99999999g", "-1g", "", "h200x"])
def test_a_gpu_that_is_none_is_refused(said, gpu):
    answer = said(MODEL, "--gpu", gpu or " ")
    assert isinstance(answer, str)
    assert "--gpu" in answer


FAMILIES = ("llama", "phi3", "glm4", "gemma3_text", "olmo2", "cohere2", "qwen3_moe", "gpt_oss")


def _model(pick):
    heads, size = pick.choice([1, 4, 12, 32]), pick.choice([16, 64, 128, 256])
    return {
        "model_type": pick.choice(FAMILIES),
        "hidden_size": pick.choice([heads * size, 64, 896, 4096, 12288]),
        "intermediate_size": pick.choice([16, 1000, 4864, 53248]),
        "num_hidden_layers": pick.choice([1, 2, 16, 126]),
        "num_attention_heads": heads,
        "num_key_value_heads": pick.choice([1, heads, None]),
        "head_dim": pick.choice([size, None]),
        "vocab_size": pick.choice([10, 32000, 262144, 1000000]),
        "tie_word_embeddings": pick.choice([True, False, None]),
    }


RECOMPUTED = (
    *("recompute=full", "recompute=none", "recompute=selective", "recompute.every=3"),
    *("recompute.budget_gib=20", "recompute.every=1 recompute.offload=true"),
)
SHARED = (
    *("parallel.shard=zero1", "parallel.shard=zero2", "parallel.shard=zero3"),
    *("parallel.shard=fsdp2", "parallel.shard=zero3_offload", "parallel.tensor=2"),
    *("parallel.pipeline=2", "parallel.pipeline=2 parallel.schedule=zbv", "parallel.sequence=2"),
)


def _words(pick):
    """Overrides, and how many rows of how many tokens they ask for."""
    rows, length, gpus = pick.choice([1, 3, 16]), pick.choice([16, 512, 4096]), pick.choice([1, 2])
    words = [
        f"training.per_device_train_batch_size={rows}",
        f"data.max_length={length}",
        f"kernels={pick.choice(['true', 'false'])}",
        f"training.gradient_accumulation_steps={pick.choice([1, 4])}",
    ]
    if pick.random() < 0.5:
        words += ["lora.r=16", *pick.choice([[], ["lora.quantize=nf4"], ["lora.dropout=0.1"]])]
    elif pick.random() < 0.4:
        words.append(f"training.optim={pick.choice(['adafactor', 'adamw_8bit', 'muon', 'sgd'])}")
    if pick.random() < 0.7:
        words += pick.choice(RECOMPUTED).split()
    if gpus > 1:
        words += pick.choice(SHARED).split()
    place = ["--gpu", pick.choice(list(GPUS)), "--gpus", str(gpus)]
    return words, place, rows, length


@pytest.mark.sample("0")
@pytest.mark.parametrize("seed", range(3))
def test_an_answer_holds_together(said, seed):
    """Owners make the peak, larger is not smaller, and what is suggested is what is then said."""
    pick = random.Random(seed)
    answered = 0
    while answered < 2:
        model, (words, place, rows, length) = _model(pick), _words(pick)
        found = said(model, *words, *place)
        if isinstance(found, str):
            assert "error: " in found
            continue
        answered += 1
        about = (model, words, place)
        owners = found["by_owner"]
        assert min(owners.values()) >= 0, about
        assert sum(owners.values()) == pytest.approx(found["peak_gib"], abs=0.01), about
        assert found["fits"] == (found["needed_gib"] <= found["gpu_memory_gib"]), about
        assert found["needed_gib"] > found["peak_gib"] > 0, about
        assert 0 < found["tokens_per_second"] < math.inf, about
        if "recompute.budget_gib=20" not in words:
            for more in (
                said(model, *words, f"training.per_device_train_batch_size={rows + 1}", *place),
                said(model, *words, f"data.max_length={length * 2}", *place),
                said(
                    {**model, "num_hidden_layers": model["num_hidden_layers"] + 1}, *words, *place
                ),
            ):
                assert isinstance(more, str) or more["peak_gib"] >= found["peak_gib"], about
        for each in found["suggestions"][:1]:
            again = said(model, *with_settings(words, each), *place)
            assert again["fits"], (about, each)
            assert again["peak_gib"] == pytest.approx(each["peak_gib"], rel=0.01), (about, each)


def test_beside_a_budget_a_suggestion_has_the_peak_that_the_budget_then_gives(said):
    words = [
        "lora.r=512", "recompute.budget_gib=20", "training.per_device_train_batch_size=3",
        "kernels=false", "training.gradient_accumulation_steps=5", "training.optim=adagrad",
        "data.packing=false",
    ]  # fmt: skip
    model, place = NAMED["llama-3.2-3b"], ["--gpu", "3090", "--gpus", "1"]
    found = said(model, *words, *place)
    assert not found["fits"]
    assert len(found["suggestions"]) >= 3
    for each in found["suggestions"]:
        again = said(model, *with_settings(words, each), *place)
        assert again["fits"], each
        assert again["peak_gib"] == pytest.approx(each["peak_gib"], rel=0.01), each


def test_a_base_whose_files_are_quantised_counts_as_what_it_is(said):
    """Else a card would be called too small for adapters over it."""
    model = {**MODEL, "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 16}
    packed = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    ours = said(model, "lora.r=8", "lora.quantize=nf4")
    theirs = said({**model, "quantization_config": packed}, "lora.r=8")
    assert theirs["by_owner"] == ours["by_owner"]
    assert said(model, "lora.r=8")["by_owner"] != ours["by_owner"]
    other = {**MODEL, "quantization_config": {"quant_method": "gptq", "bits": 4}}
    assert "gptq" in " ".join(said(other, "lora.r=8")["notes"])


def test_a_base_in_int8_is_a_byte_a_weight_and_experts_are_as_they_are_kept(said):
    model = {**MODEL, "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 16}
    plain, packed = (said(model, "lora.r=8", f"lora.quantize={kind}") for kind in ("null", "int8"))
    linears = 16 * (3 * 1024 * 4096 + 2 * 1024 * 1024) / 2**30  # and keys and values
    saved = plain["by_owner"]["weights"] - packed["by_owner"]["weights"]
    assert linears < saved < 1.2 * linears
    assert "int8 has not been measured" in " ".join(packed["notes"])
    words = ("lora.r=8", "lora.quantize=nf4")
    whole, part = (said(model, *words, f"lora.quantize_skip={x}") for x in ("[]", "[down_proj]"))
    more = part["by_owner"]["weights"] - whole["by_owner"]["weights"]
    assert more == pytest.approx(16 * 1024 * 4096 * (2 - NF4) / 2**30, rel=0.02)
    moe = {"model_type": "qwen3_moe", "num_experts": 8, "moe_intermediate_size": 8192}
    moe, stacks = {**MODEL, **moe, "num_experts_per_tok": 2}, 2 * 8 * 3 * 64 * 8192 / 2**30
    words = ("lora.r=8", "lora.experts=false")
    for kind, taken in (("nf4", 0.5), ("int8", 1.0)):  # bytes of each instead of 2
        both = (f"lora.quantize={kind} lora.quantize_experts={x}".split() for x in (True, False))
        packed, apart = (said(moe, *words, *each)["by_owner"]["weights"] for each in both)
        assert apart - packed == pytest.approx((2 - taken) * stacks, rel=0.1)


def test_what_fails_on_shapes_is_raised_and_not_logged(caplog):
    """torch logs a traceback of every operation that its fake tensors cannot run."""
    fakes = logging.getLogger(FakeTensorMode.__module__)
    fakes.addHandler(caplog.handler)
    for is_quiet in (False, True):
        with quiet() if is_quiet else nullcontext(), FakeTensorMode(), pytest.raises(RuntimeError):
            torch.ones(4).split([1, 2])
        assert ("failed while attempting" in caplog.text) != is_quiet
        caplog.clear()
    fakes.removeHandler(caplog.handler)
