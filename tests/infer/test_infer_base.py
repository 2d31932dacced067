"""An adapter is put over its own base only, and weights are loaded as they were written."""

import itertools
import json
import shutil

import pytest
import torch
from tiny import SIZES, make_adapter, make_qwen2, record_run
from transformers import AutoModelForCausalLM, GlmConfig, GlmForCausalLM

from trainkit.checkpoint.weights.base_fingerprint import FILE_NAME, write_fingerprint
from trainkit.checkpoint.whole.atomic import staged_directory
from trainkit.cli.app import main
from trainkit.errors import CheckpointError
from trainkit.infer.base import prove_base
from trainkit.infer.engine import load_engine
from trainkit.infer.locate import find_model
from trainkit.lora.adapter import attach
from trainkit.models.tokenizer import check_exists
from trainkit.options import LoraOptions, ModelOptions
from trainkit.options.model import OTHER_ADAPTERS


@pytest.fixture(scope="module")
def adapter(tiny_qwen2, tiny_tokenizer, tmp_path_factory):
    """An adapter with a tokenizer and its base's fingerprint next to it, as a run saves it."""
    directory = tmp_path_factory.mktemp("adapter")
    make_adapter(tiny_qwen2, directory, r=2)
    tiny_tokenizer.save_pretrained(directory)
    assert write_fingerprint(directory)
    return directory


def one_late_value(model):
    model.model.layers[1].mlp.down_proj.weight.data[-1, -1] += 1


def one_bias(model):
    model.model.layers[0].self_attn.k_proj.bias.data += 1


def new_head(model):
    model.config.tie_word_embeddings = False
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight * 1.5)


def everything(model):
    for parameter in model.parameters():
        parameter.data *= 1.01


def wider(model):
    return make_qwen2(model.config.vocab_size, intermediate_size=192)


def glm(model):
    sizes = {**SIZES, "vocab_size": model.config.vocab_size, "head_dim": 16, "pad_token_id": 0}
    sizes["eos_token_id"] = 1
    return GlmForCausalLM(GlmConfig(**sizes))


def other_base(tiny_qwen2, target, change):
    shutil.copytree(tiny_qwen2, target)
    for file in target.glob("model*.safetensors*"):
        file.unlink()
    model = AutoModelForCausalLM.from_pretrained(tiny_qwen2)
    (change(model) or model).save_pretrained(target)
    return str(target)


def command(kind, adapter, base, tmp_path, monkeypatch):
    """The arguments with which each command puts an adapter over a base."""
    monkeypatch.setattr("sys.stdin", open("/dev/null"))  # noqa: SIM115, PTH123 - read to its end
    (tmp_path / "p.txt").write_text("one\n")
    few = ["--max-new-tokens", "2", "--device", "cpu"]
    asked = ["--prompts", str(tmp_path / "p.txt"), "--out", str(tmp_path / "out.jsonl")]
    return {
        "chat": ["chat", str(adapter), "--base-model", base, *few],
        "chat --adapter": ["chat", base, "--adapter", str(adapter), *few],
        "generate": ["generate", str(adapter), "--base-model", base, *asked, *few],
        "merge": ["merge", str(adapter), str(tmp_path / "out"), "--base-model", base],
    }[kind]


KINDS = ["chat", "chat --adapter", "generate", "merge"]
OTHERS = [one_late_value, one_bias, new_head, everything]
# Chat finds its base as generate does: each is tried on one base, and the two ways on all.
CASES = [*itertools.product(["generate", "merge"], OTHERS), *zip(KINDS, OTHERS, strict=True)]


@pytest.mark.parametrize(("kind", "change"), dict.fromkeys(CASES))
def test_another_base_of_the_same_shapes_is_refused_unless_asked_for(
    kind, change, adapter, tiny_qwen2, tmp_path, monkeypatch, capsys
):
    base = other_base(tiny_qwen2, tmp_path / "base", change)
    arguments = command(kind, adapter, base, tmp_path, monkeypatch)
    assert main(arguments) == 1
    told = capsys.readouterr().err
    assert "is not the base that the adapter was trained over" in told
    assert "model.safetensors was changed" in told
    assert "--any-base" in told
    assert not list(tmp_path.glob("out*"))
    no_parity = ["--no-verify"] if kind == "merge" else []
    assert main([*arguments, "--any-base", *no_parity]) == 0


MISFITS = [
    *itertools.product(["generate", "merge"], [wider, glm], [True, False]),
    ("chat", wider, False),
    ("chat --adapter", glm, True),
]


@pytest.mark.parametrize(("kind", "change", "proof"), MISFITS)
def test_a_base_that_does_not_fit_is_refused_in_any_case(
    kind, change, proof, adapter, tiny_qwen2, tmp_path, monkeypatch, capsys
):
    if not proof:
        adapter = shutil.copytree(adapter, tmp_path / "foreign")
        (adapter / FILE_NAME).unlink()
    base = other_base(tiny_qwen2, tmp_path / "base", change)
    arguments = command(kind, adapter, base, tmp_path, monkeypatch)
    assert main([*arguments, "--any-base"]) == 1
    told = capsys.readouterr().err
    assert "mlp" in told
    assert "bug" not in told
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize("kind", KINDS)
def test_its_own_base_is_taken_in_silence_and_a_foreign_adapter_with_a_word(
    kind, adapter, tiny_qwen2, tmp_path, monkeypatch, capsys
):
    arguments = command(kind, adapter, str(tiny_qwen2), tmp_path, monkeypatch)
    assert main(arguments) == 0
    assert "shapes only" not in capsys.readouterr().err
    foreign = shutil.copytree(adapter, tmp_path / "foreign")
    (foreign / FILE_NAME).unlink()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    assert main(command(kind, foreign, str(tiny_qwen2), elsewhere, monkeypatch)) == 0
    assert "shapes only" in capsys.readouterr().err


@pytest.fixture
def finished(tiny_qwen2, tmp_path):
    """A run whose final model has its manifest."""
    run = tmp_path / "run"
    run.mkdir()
    record_run(run)
    with staged_directory(run / "final", metadata={}) as staging:
        for file in tiny_qwen2.iterdir():
            shutil.copy(file, staging)
        (staging / "README.md").write_text("a card")
    return run


def loaded_files(directory):
    return sorted(
        file.name
        for file in directory.iterdir()
        if file.suffix in (".safetensors", ".json", ".jinja") and file.name != "manifest.json"
    )


@pytest.mark.parametrize("kind", ["chat", "generate", "eval"])
def test_a_final_model_that_was_altered_is_named(kind, finished, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", open("/dev/null"))  # noqa: SIM115, PTH123 - read to its end
    (tmp_path / "p.txt").write_text("one\n")
    (tmp_path / "q.jsonl").write_text('{"prompt": "one", "response": "1"}\n')
    asked = {
        "generate": ["--prompts", str(tmp_path / "p.txt"), "--out", str(tmp_path / "out.jsonl")],
        "eval": ["--tasks", str(tmp_path / "q.jsonl"), "--output", str(tmp_path / "out")],
    }
    arguments = [kind, str(finished), *asked.get(kind, [])]
    arguments += ["--device", "cpu", "--max-new-tokens", "1"]
    names = loaded_files(finished / "final")
    assert "model.safetensors" in names
    for name in names:
        file = finished / "final" / name
        whole = file.read_bytes()
        file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))  # of the same length
        assert main(arguments) == 1, name
        told = capsys.readouterr().err
        assert f"{name} was altered" in told
        assert "--no-verify" in told
        file.write_bytes(whole)
    (finished / "final" / "README.md").write_text("another card")
    (finished / "final" / "notes.md").write_text("mine")
    assert main(arguments) == 0  # a card is not loaded
    file = finished / "final" / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    (tmp_path / "out.jsonl").unlink(missing_ok=True)
    shutil.rmtree(tmp_path / "out", ignore_errors=True)
    assert main([*arguments, "--no-verify"]) == 0


def gpt_oss():
    from transformers import GptOssConfig, GptOssForCausalLM

    return GptOssForCausalLM(GptOssConfig(**SMALL, num_local_experts=2, num_experts_per_tok=1))


def gemma2():
    from transformers import Gemma2Config, Gemma2ForCausalLM

    return Gemma2ForCausalLM(Gemma2Config(**SMALL, attn_logit_softcapping=1.0))


SMALL = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 300,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@pytest.mark.parametrize("make", [gpt_oss, gemma2])
def test_answers_come_from_the_models_own_attention(make, tiny_tokenizer, tmp_path):
    """Sinks and capped scores: what SDPA would drop."""
    torch.manual_seed(0)
    make().save_pretrained(tmp_path / "model")
    tiny_tokenizer.save_pretrained(tmp_path / "model")
    engine = load_engine(find_model(str(tmp_path / "model")), device="cpu")
    eager = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", attn_implementation="eager"
    ).eval()
    ids = torch.arange(3, 40)[None]
    with torch.inference_mode():
        assert torch.equal(engine.model(ids).logits, eager(ids).logits)


def test_a_plain_model_answers_with_sdpa(tiny_qwen2):
    engine = load_engine(find_model(str(tiny_qwen2)), device="cpu")
    assert engine.model.config._attn_implementation == "sdpa"


def test_the_tokenizer_of_a_trained_adapter_serves_to_look_at_data(adapter, tmp_path, capsys):
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    (tmp_path / "d.jsonl").write_text(json.dumps({"messages": turns}))
    looked = ["--data", str(tmp_path / "d.jsonl"), "--model", str(adapter)]
    assert main(["data", "preview", *looked]) == 0, capsys.readouterr().err


def test_the_revision_of_an_adapter_s_base_is_the_hub_s_alone(adapter, tmp_path):
    """A run over a hub's base writes it; what lies on this disk has none."""
    mine = shutil.copytree(adapter, tmp_path / "mine")
    path = mine / "adapter_config.json"
    given = {**json.loads(path.read_text()), "revision": "abc"}
    path.write_text(json.dumps(given))
    load_engine(find_model(str(mine)), device="cpu")
    path.write_text(json.dumps({**given, "base_model_name_or_path": "someone/base"}))
    paths = find_model(str(mine))
    assert paths.source.revision == paths.at("someone/base").revision == "abc"
    check_exists(paths.at(paths.tokenizer), is_model=False)


@pytest.mark.parametrize("kind", OTHER_ADAPTERS)
def test_an_adapter_of_another_kind_is_put_over_its_own_base_alone(
    kind, tiny_qwen2, tmp_path, monkeypatch
):
    monkeypatch.setattr("peft.tuners.boft.layer._FBD_CUDA", False)  # not compiled, for a GPU
    more = {f"{kind}_block_size": 8} if kind in ("oft", "boft") else {}
    model = AutoModelForCausalLM.from_pretrained(tiny_qwen2)
    attach(model, LoraOptions(peft={"peft_type": kind, **more})).save_pretrained(tmp_path / "mine")
    make_qwen2(model.config.vocab_size, num_hidden_layers=1).save_pretrained(tmp_path / "less")

    def prove(base):
        source = ModelOptions(name_or_path=str(base))
        prove_base(tmp_path / "mine", source, pytest.fail, any_base=True)

    prove(tiny_qwen2)
    with pytest.raises(CheckpointError, match=r"the base has no model\.layers\.1"):
        prove(tmp_path / "less")
