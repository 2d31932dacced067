"""GLM-4 to Qwen2: the same function, and back to the same weights."""

import json
import resource
import signal

import pytest
import torch
from convert_cases import change_config, in_fp64, tensors_of, without_bias, written_twice
from ranks import run_ranks
from safetensors.torch import load_file, save_file
from tiny_glm import FAR, glm_model, write_chatglm
from transformers import AutoModelForCausalLM

from trainkit.checkpoint.convert import glm_formats, layers, rope
from trainkit.checkpoint.convert.convert import ConvertOptions, convert_model
from trainkit.checkpoint.convert.glm_formats import FORMATS
from trainkit.checkpoint.convert.proof import prove_same_function
from trainkit.checkpoint.weights.reader import TensorInfo
from trainkit.checkpoint.weights.writer import write_tensors
from trainkit.checkpoint.whole.atomic import verify_directory
from trainkit.errors import CheckpointError

SMALL_SHARDS = ConvertOptions(max_shard_bytes=100_000)
# Float32 with sums of 128 terms in another order: the bound for logits of about 5.
TOLERANCE = 2e-5


def assert_same_bits(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert ours[name].dtype == theirs[name].dtype, name
        assert torch.equal(ours[name], theirs[name]), name


def largest_difference(model, directory, positions):
    loaded = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    assert loaded.config.model_type == "qwen2"
    tokens = torch.arange(len(positions))[None] % model.config.vocab_size
    with torch.inference_mode():
        ours = loaded(tokens, position_ids=torch.tensor([positions])).logits
        theirs = model(tokens, position_ids=torch.tensor([positions])).logits
    return (ours - theirs).abs().max().item()


@pytest.fixture(scope="module")
def converted(glm_directory, chatglm_directory, tmp_path_factory):
    """Both layouts converted, by layout."""
    place = tmp_path_factory.mktemp("converted")
    for name, source in (("glm", glm_directory), ("chatglm", chatglm_directory)):
        convert_model(source, place / name, "qwen2", SMALL_SHARDS)
    return {name: place / name for name in ("glm", "chatglm")}


@pytest.mark.parametrize(
    "positions",
    [
        list(range(64)),
        [0],
        [63],
        list(range(8100, 8193)),
        list(range(FAR - 40, FAR)),
        [0, 63, 8191, FAR - 1],
    ],
    ids=["0-63", "0", "63", "8k", "128k", "near-and-far"],
)
def test_same_logits_as_transformers_glm(glm, converted, positions):
    assert largest_difference(glm, converted["glm"], positions) <= TOLERANCE


def test_both_layouts_give_the_same_bits(converted):
    assert_same_bits(tensors_of(converted["glm"]), tensors_of(converted["chatglm"]))


@pytest.mark.parametrize("layout", ["glm", "chatglm"])
def test_result_is_sharded_verified_and_recorded(converted, layout):
    directory = converted[layout]
    verify_directory(directory)
    assert len(list(directory.glob("model-*.safetensors"))) >= 3
    record = json.loads((directory / "conversion.json").read_text())
    assert (record["from"], record["to"]) == (layout, "qwen2")
    assert len(record["proof"]["layers"]) == 4
    assert record["proof"]["max_logit_error"] <= 1e-4  # over all positions at once
    assert record["proof"]["positions"][-1] == FAR - 1


@pytest.mark.parametrize("layout", ["glm", "chatglm"])
def test_inverse_gives_back_the_weights(layout, converted, glm_directory, tmp_path):
    convert_model(converted[layout], tmp_path / "back", "glm", SMALL_SHARDS)
    assert_same_bits(tensors_of(glm_directory), tensors_of(tmp_path / "back"))


def test_inverse_without_the_record_still_loads_as_glm(glm, converted, tmp_path):
    """As after training: only config and weights are left."""
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "model.safetensors.index.json"):
        (bare / name).write_bytes((converted["glm"] / name).read_bytes())
    for path in converted["glm"].glob("*.safetensors"):
        (bare / path.name).write_bytes(path.read_bytes())
    convert_model(bare, tmp_path / "back", "glm", SMALL_SHARDS)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "back", dtype=torch.float32).eval()
    assert loaded.config.model_type == "glm"
    tokens, far = torch.arange(32)[None], torch.arange(FAR - 32, FAR)[None]
    with torch.inference_mode():
        ours, theirs = loaded(tokens, position_ids=far), glm(tokens, position_ids=far)
    torch.testing.assert_close(ours.logits, theirs.logits, rtol=0, atol=0)


def test_result_survives_being_saved_by_transformers(glm, converted, tmp_path):
    AutoModelForCausalLM.from_pretrained(converted["glm"]).save_pretrained(tmp_path / "again")
    assert largest_difference(glm, tmp_path / "again", [0, 63, 8191, FAR - 1]) <= TOLERANCE


def test_version_4_spelling_is_written(converted):
    """transformers 4 ignores ``rope_parameters`` without a word and falls back to base 10000."""
    config = json.loads((converted["glm"] / "config.json").read_text())
    assert "rope_parameters" not in config
    assert config["rope_theta"] == 2.5e13
    assert config["rope_scaling"]["rope_type"] == "longrope"
    factors = config["rope_scaling"]["short_factor"]
    assert len(factors) == 16
    assert all(abs(factor - 1) < 1e-6 for factor in factors[:8])
    assert all(factor > 1e15 for factor in factors[8:])


def test_program_that_ignores_the_factors_is_nearly_right(glm, converted, tmp_path):
    """llama.cpp reads the base alone; the frequencies it then uses are GLM's, or below 2e-7."""
    for path in converted["glm"].iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    del config["rope_scaling"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert largest_difference(glm, tmp_path, list(range(64))) < 1e-3


@pytest.mark.parametrize(
    "overrides",
    [
        {"tie_word_embeddings": True},
        {"num_attention_heads": 2, "head_dim": 64, "num_key_value_heads": 1},
        {
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e8,
                "partial_rotary_factor": 0.25,
            }
        },
        {
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "partial_rotary_factor": 1.0,
            }
        },
    ],
    ids=["tied", "one-kv-head", "quarter-rotary", "full-rotary"],
)
def test_other_geometries(overrides, tmp_path):
    model = glm_model(num_hidden_layers=1, **overrides)
    model.save_pretrained(tmp_path / "source")
    convert_model(tmp_path / "source", tmp_path / "target", "qwen2", ConvertOptions())
    assert largest_difference(model, tmp_path / "target", [0, 63, 8191, FAR - 1]) <= TOLERANCE
    convert_model(tmp_path / "target", tmp_path / "back", "glm", ConvertOptions())
    assert_same_bits(tensors_of(tmp_path / "source"), tensors_of(tmp_path / "back"))


@pytest.mark.parametrize("theta", [500000.0, 123456.7, 61017490.0, 10000 / 3, 1e4 * 1.1])
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(8, 2), (32, 8), (32, 16), (32, 32)])
def test_any_base_comes_back_as_it_was(theta, head_dim, rotary_dim):
    """Not the nearest whole number: the config of the source would not be found again."""
    from trainkit.checkpoint.convert.rope import full_base, read_back, rope_scaling

    scaling = rope_scaling(theta, head_dim, rotary_dim, FAR)
    base = full_base(theta, head_dim, rotary_dim)
    assert read_back(base, scaling, head_dim) == (theta, rotary_dim)


def test_dtype_option(glm_directory, tmp_path):
    options = ConvertOptions(dtype="bfloat16")
    convert_model(glm_directory, tmp_path / "t", "qwen2", options)
    assert {tensor.dtype for tensor in tensors_of(tmp_path / "t").values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "t" / "config.json").read_text())["torch_dtype"] == "bfloat16"


def test_peak_memory_is_a_shard_not_the_model(glm_directory, tmp_path):
    """Of 18 tensors of 16 MB; mapped files are not its own."""
    model = glm_model(num_hidden_layers=6, intermediate_size=32_000, vocab_size=16)
    model.save_pretrained(tmp_path / "source")
    total = sum(path.stat().st_size for path in (tmp_path / "source").glob("*.safetensors"))
    given = {"source": str(tmp_path / "source"), "target": str(tmp_path / "target")}
    given["small"] = str(glm_directory)
    (used,) = run_ranks("checkpoint.convert_cases:memory_of", world_size=1, **given)
    assert total > 250e6
    assert 0 < used < total / 2, used


@pytest.mark.parametrize("layout", ["glm", "chatglm"])
@pytest.mark.parametrize("kind", ["no-bias", "swish", "tied-and-stored", "fp64"])
def test_what_is_exact_is_converted_and_goes_back(layout, kind, tmp_path):
    model = glm_model(num_hidden_layers=1, tie_word_embeddings=kind == "tied-and-stored")
    source = tmp_path / "source"
    if layout == "glm":
        model.save_pretrained(source)
    else:
        write_chatglm(model, source)
    if kind == "no-bias":
        without_bias(source, layout)
        for layer in model.model.layers:
            for part in "qkv":
                getattr(layer.self_attn, f"{part}_proj").bias.data.zero_()
    elif kind == "tied-and-stored":
        written_twice(source, layers.OUTSIDE[layout][::-2])
        change_config(source, {"tie_word_embeddings": True})
    elif kind == "fp64":
        in_fp64(source)
    else:
        change_config(source, {"hidden_act": "swish"})
    convert_model(source, tmp_path / "qwen2", "qwen2", ConvertOptions())
    assert largest_difference(model, tmp_path / "qwen2", [0, 5, FAR - 1]) <= TOLERANCE
    convert_model(tmp_path / "qwen2", tmp_path / "back", "glm", ConvertOptions())
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "back").state_dict()
    assert_same_bits(
        {name: each.to(back[name].dtype) for name, each in model.state_dict().items()}, back
    )


@pytest.mark.parametrize(
    ("value", "said"), [(torch.nan, "NaN or infinite"), (0.0, "logits of source and result differ")]
)
def test_proof_looks_at_the_last_logit(glm, glm_directory, tmp_path, value, said):
    """NaN compares as neither larger nor smaller, so a careless maximum would pass over it."""
    convert_model(glm_directory, tmp_path / "t", "qwen2", ConvertOptions(verify=False))
    path = tmp_path / "t" / "model.safetensors"
    tensors = load_file(path)
    tensors["lm_head.weight"][-1] = value
    save_file(tensors, path)
    geometry = FORMATS["glm"].geometry(glm.config.to_dict())
    with pytest.raises(CheckpointError, match=said):
        prove_same_function(glm_directory, tmp_path / "t", geometry)


@pytest.mark.parametrize("kind", ["order", "bias", "rope"])
def test_proof_catches_a_wrong_conversion(glm_directory, tmp_path, monkeypatch, kind):
    if kind == "order":  # the published script's mistake in another form: no reordering at all
        monkeypatch.setattr(
            layers, "interleaved_to_half_order", lambda head_dim: tuple(range(head_dim))
        )
    elif kind == "bias":  # weights reordered, biases forgotten
        apply = layers.reordered
        monkeypatch.setattr(layers, "reordered", lambda t, o: t if t.dim() == 1 else apply(t, o))
    else:  # GLM's base over all pairs, as the published script writes it
        monkeypatch.setattr(glm_formats, "full_base", lambda theta, *_: theta)
        monkeypatch.setattr(rope, "full_base", lambda theta, *_: theta)
        monkeypatch.setattr(rope, "longrope_factors", lambda *_: [1.0] * 16)
    with pytest.raises(CheckpointError, match="not exact"):
        convert_model(glm_directory, tmp_path / "t", "qwen2", ConvertOptions())
    assert list(tmp_path.iterdir()) == []


def test_full_disk_leaves_nothing(glm_directory, tmp_path):
    previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, hard))
        with pytest.raises(CheckpointError, match="disk is full"):
            convert_model(glm_directory, tmp_path / "t", "qwen2", ConvertOptions(verify=False))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, previous)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "coming", [[], [("a", torch.ones(3))], [("b", torch.ones(2))]], ids=["none", "shape", "name"]
)
def test_only_what_was_planned_is_written(coming, tmp_path):
    plan = [TensorInfo("a", torch.float32, (2,))]
    with pytest.raises(CheckpointError, match="planned TensorInfo"):
        write_tensors(tmp_path, plan, coming, max_shard_bytes=100)
    assert not list(tmp_path.iterdir())
