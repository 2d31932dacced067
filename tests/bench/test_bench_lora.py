"""The LoRA benchmarks run on a tiny model: every provider that is installed, every rung."""

import itertools

import pytest
import torch

from trainkit.bench import ladder
from trainkit.bench.lora import MODES, Cell, measure, quantize
from trainkit.bench.providers import Shape, build

TINY = Shape(
    "qwen2",
    {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 256,
        "tie_word_embeddings": False,
        "max_position_embeddings": 512,
    },
    2,
    32,
)
CPU = torch.device("cpu")


@pytest.mark.parametrize("mode", [mode for mode in MODES if not mode.startswith("fp8")])
def test_providers_train_the_same_model(mode):
    losses = {
        provider: measure(Cell("tiny", provider, mode, warmups=1, steps=1, shape=TINY), CPU)["loss"]
        for provider in ("peft", "trainkit", "frozen")
    }
    # bf16: random tokens, so a loss of log(256) = 5.5 with roundings of a few thousandths.
    assert losses["trainkit"] == pytest.approx(losses["peft"], abs=5e-3)
    assert losses["frozen"] == pytest.approx(losses["peft"], abs=5e-3)  # B starts at zero


def test_an_fp8_base_starts_near_bf16_and_is_trainkits_alone():
    def loss(provider, mode):
        return measure(Cell("tiny", provider, mode, warmups=1, steps=1, shape=TINY), CPU)["loss"]

    assert loss("trainkit", "fp8") == pytest.approx(loss("trainkit", "lora"), abs=5e-2)
    with pytest.raises(ValueError, match="peft has no fp8 base"):
        loss("peft", "fp8")


def test_quantising_in_place_packs_the_decoder_and_leaves_the_head():
    model = quantize(build(TINY, CPU, "sdpa"))
    kinds = {name: type(module).__name__ for name, module in model.named_modules()}
    assert kinds["model.layers.0.self_attn.q_proj"] == "Linear4bit"
    assert kinds["lm_head"] == "Linear"


def test_the_ladder_climbs_with_the_error_unchanged(tmp_path):
    rows = list(ladder.run(ladder.Settings(shape=TINY, steps=2), CPU))
    assert [row["row"] for row in rows] == list(range(1, 13))
    assert max(row["loss_error"] for row in rows) < 2e-3  # bf16 has steps of 4e-3
    assert all(row["seconds"] > 0 for row in rows)
    text = ladder.table(rows)
    assert "LoRA QKV backward" in text
    ladder.draw(rows, tmp_path / "ladder.png", title="tiny")
    assert (tmp_path / "ladder.png").stat().st_size > 10_000


def test_every_rung_adds_something():
    ladder_rungs = ladder.rungs()
    for below, above in itertools.pairwise(ladder_rungs):
        assert {**vars(below), "name": ""} != {**vars(above), "name": ""}
