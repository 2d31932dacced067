"""Code that comes with a model runs where a command was told so, and nowhere else.

The model's modules leave a mark when they are imported, and double the logits, so that neither the
code nor its absence goes unseen.
"""

import importlib.util
import json
import shutil

import pytest
import torch
from commands import trainkit, trainkit_each
from safetensors.torch import load_file
from tiny import make_qwen2, make_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM

from trainkit.errors import ModelError
from trainkit.infer.engine import load_engine
from trainkit.infer.locate import find_model

MARK = "from pathlib import Path\nwith Path({mark!r}).open('a') as stream:\n    stream.write('x')\n"
CONFIG = """from transformers import Qwen2Config
class OwnConfig(Qwen2Config):
    model_type = "own_code"
"""
MODEL = """from transformers import Qwen2ForCausalLM
from .own_parts import SCALE
{config}
class OwnModel(Qwen2ForCausalLM):
    {attribute}
    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = output.logits * SCALE
        return output
"""
TOKENIZER = """from transformers import PreTrainedTokenizerFast
class OwnTokenizerFast(PreTrainedTokenizerFast):
    pass
"""
RECIPE = """\
model: {{name_or_path: {model}, dtype: float32, trust_remote_code: true}}
data: {{train: [d.jsonl], max_length: 128, cache_dir: cache}}
{more}
training: {{learning_rate: 1e-2, per_device_train_batch_size: 4, max_steps: 2}}
"""


def make(place, mark, *, is_known):
    """A model of a type that transformers has too, or of one that it has not."""
    tokenizer = make_tokenizer()
    make_qwen2(len(tokenizer)).save_pretrained(place)
    tokenizer.save_pretrained(place)
    config = json.loads((place / "config.json").read_text())
    code = {"own_parts": "SCALE = 2.0\n", "own_tokenizer": TOKENIZER}
    config["auto_map"] = {"AutoModelForCausalLM": "own_model.OwnModel"}
    config["architectures"] = ["OwnModel"]
    if is_known:
        code["own_model"] = MODEL.format(config="", attribute="")
    else:
        config["model_type"] = "own_code"
        config["auto_map"]["AutoConfig"] = "own_config.OwnConfig"
        code["own_config"] = CONFIG
        named = "from .own_config import OwnConfig"
        code["own_model"] = MODEL.format(config=named, attribute="config_class = OwnConfig")
    settings = json.loads((place / "tokenizer_config.json").read_text())
    settings["auto_map"] = {"AutoTokenizer": [None, "own_tokenizer.OwnTokenizerFast"]}
    settings["tokenizer_class"] = "OwnTokenizerFast"
    (place / "config.json").write_text(json.dumps(config))
    (place / "tokenizer_config.json").write_text(json.dumps(settings))
    for name, text in code.items():
        (place / f"{name}.py").write_text(MARK.format(mark=str(mark)) + text)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Two models, and a run of each kind over them."""
    root = tmp_path_factory.mktemp("own")
    for name in ("own", "known"):
        make(root / name, root / "mark", is_known=name == "known")
    turns = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Good day!"}]
    (root / "d.jsonl").write_text(8 * (json.dumps({"messages": turns}) + "\n"))
    (root / "p.txt").write_text("Hello\n")
    (root / "sets" / "boolq").mkdir(parents=True)
    asked = {"question": "is 2 even", "title": "n", "passage": "Two is.", "answer": True}
    (root / "sets" / "boolq" / "dev.jsonl").write_text(json.dumps(asked) + "\n")
    adapter = "lora: {r: 4, alpha: 32}"
    for run, model, more in (
        ("own-full", "own", ""), ("own-lora", "own", adapter), ("known-lora", "known", adapter),
        ("own-zero", "own", "deepspeed: zero2"),
    ):  # fmt: skip
        (root / f"{run}.yaml").write_text(RECIPE.format(model=model, more=more))
        said = trainkit(root, "sft", f"{run}.yaml", "--output-dir", run)
        assert said.code == 0, said.err
    return root


GENERATE = "--prompts p.txt --max-new-tokens 3 --greedy --device cpu"
COMMANDS = {
    "generate": f"generate {{model}} {GENERATE} -o {{out}}",
    "chat": "chat {model} --greedy --device cpu --max-new-tokens 3",
    "eval": "eval {model} --tasks boolq --data sets --device cpu -o {out}",
    "merge": "merge {model} {out}",
    "gguf": "export gguf {model} {out}",
    "ollama": "export ollama {model} {out}",
    "vllm": "export vllm {model} {out}",
    "adapter": "export vllm {model} {out} --as-adapter",
    "fp8": "export fp8 {model} {out}",
    "kernels": "kernels check --model {model}/final --device cpu",
    "data": "data check --data d.jsonl --model {model}/final",
}
WORKS = ("generate", "chat", "eval", "merge", "vllm", "fp8", "data")
HAS_HARNESS = importlib.util.find_spec("lm_eval") is not None


@pytest.mark.parametrize("run", ["own-full", "own-lora", "known-lora"])
def test_without_the_flag_nothing_of_it_runs(root, run):
    """A type that transformers has as well is refused too: its own code would be another model."""
    left = {"kernels", "data"} if run != "own-full" else set()  # these take a model
    left |= set() if HAS_HARNESS else {"eval"}
    asked = [each for each in COMMANDS if each not in left]
    (root / "mark").unlink(missing_ok=True)
    words = [COMMANDS[each].format(model=run, out=root / "none").split() for each in asked]
    for command, said in zip(asked, trainkit_each(root, words), strict=True):
        assert said.code == 2, command
        assert "auto_map names own_" in said.err, command
        assert "config.json" in said.err
        assert "--trust-remote-code" in said.err
        assert ("its run used code" in said.err) is (command not in ("kernels", "data"))
    assert not (root / "mark").exists()
    assert not (root / "none").exists()


@pytest.mark.sample("generate-*", "*-own-full", "merge-*", "vllm-known-lora", "fp8-own-lora")
@pytest.mark.parametrize("run", ["own-full", "own-lora", "known-lora"])
@pytest.mark.parametrize("command", WORKS)
def test_with_the_flag_every_command_takes_it(root, command, run, tmp_path):
    if (command, run) in (("merge", "own-full"), ("data", "own-lora"), ("data", "known-lora")):
        return
    if command == "eval" and not HAS_HARNESS:
        pytest.skip("needs lm_eval")
    (root / "mark").unlink(missing_ok=True)
    words = COMMANDS[command].format(model=run, out=tmp_path / "out").split()
    said = trainkit(root, *words, "--trust-remote-code", typed="Hello\nAnd you?\n")
    assert said.code == 0, said.err
    assert (root / "mark").exists()
    if command == "chat":
        assert len(said.out.splitlines()) >= 2
    if command in ("vllm", "fp8"):
        assert "--trust-remote-code" in (tmp_path / "out" / "serve.sh").read_text()
    if command in ("merge", "vllm", "fp8"):
        assert (tmp_path / "out" / "own_parts.py").is_file()
        assert "own_tokenizer.py" in {path.name for path in (tmp_path / "out").iterdir()}


@pytest.mark.parametrize("server", ["gguf", "ollama"])
def test_llama_cpp_runs_no_such_code(root, server, tmp_path):
    (root / "mark").unlink(missing_ok=True)
    words = COMMANDS[server].format(model="known-lora", out=tmp_path / "out").split()
    said = trainkit(root, *words, "--trust-remote-code")
    assert said.code == 2
    assert "auto_map names own_model.OwnModel" in said.err
    assert "export vllm" in said.err
    assert not (root / "mark").exists()


def test_shards_are_put_together_with_the_flag(root, tmp_path):
    """A checkpoint of ZeRO's, from which the plain weights were lost."""
    shards = tmp_path / "shards"
    shutil.copytree(root / "own-zero" / "checkpoint-2", shards)
    (shards / "model.safetensors").unlink()
    (shards / "manifest.json").unlink()
    (root / "mark").unlink(missing_ok=True)
    refused = trainkit(root, "merge", shards, tmp_path / "out")
    assert refused.code == 2
    assert "--trust-remote-code" in refused.err
    assert not (root / "mark").exists()
    said = trainkit(root, "merge", shards, tmp_path / "out", "--trust-remote-code")
    assert said.code == 0, said.err
    ids = torch.arange(8)[None]
    ours, final = (
        AutoModelForCausalLM.from_pretrained(place, trust_remote_code=True)
        for place in (tmp_path / "out", root / "own-zero" / "final")
    )
    with torch.no_grad():
        torch.testing.assert_close(ours(ids).logits, final(ids).logits, rtol=0, atol=0)


def test_the_permission_is_in_the_record_of_the_run(root):
    from trainkit.infer.locate import run_settings

    assert run_settings(root / "own-full").trust_remote_code
    assert "trust_remote_code: true" in (root / "own-full" / "recipe.yaml").read_text()


@pytest.mark.parametrize("model", ["own", "known"])
def test_what_is_merged_computes_as_base_and_adapter(root, model, tmp_path):
    run, out = root / f"{model}-lora", tmp_path / "out"
    said = trainkit(root, "merge", run, out, "--trust-remote-code")
    assert said.code == 0, said.err
    paths = find_model(str(run), trust_remote_code=True)
    ids = torch.arange(8)[None]
    engine = load_engine(paths, device="cpu", say=lambda line: None)
    merged = AutoModelForCausalLM.from_pretrained(out, trust_remote_code=True)
    with torch.no_grad():
        torch.testing.assert_close(merged(ids).logits, engine.model(ids).logits)
        plain = make_qwen2(merged.config.vocab_size)
        plain.load_state_dict(load_file(out / "model.safetensors"), strict=False)
        torch.testing.assert_close(merged(ids).logits, 2 * plain(ids).logits)


def test_a_known_type_that_was_not_trained_by_its_code_needs_no_flag(root):
    assert find_model(str(root / "known")).source.trust_remote_code is False
    with pytest.raises(ModelError, match="it needs code"):
        find_model(str(root / "own"))


def test_changed_code_of_a_run_is_not_run(root):
    code = root / "own-full" / "final" / "own_parts.py"
    before = code.read_text()
    code.write_text(before + "raise SystemExit\n")
    words = COMMANDS["generate"].format(model="own-full", out=root / "none").split()
    said = trainkit(root, *words, "--trust-remote-code")
    code.write_text(before)
    assert said.code == 1
    assert "own_parts.py has" in said.err


def test_a_part_of_a_model_is_never_built_by_asking_the_terminal(tmp_path, monkeypatch):
    """Left out, ``trust_remote_code`` makes transformers ask, and run the code on a yes."""
    from trainkit.auto_class import empty_model
    from trainkit.models.attention.packable import skeleton_of

    make(tmp_path / "fresh", tmp_path / "mark", is_known=False)  # nobody has allowed it before
    config = AutoConfig.from_pretrained(tmp_path / "fresh", trust_remote_code=True)
    monkeypatch.setattr("builtins.input", lambda _: "y")
    (tmp_path / "mark").unlink()
    assert skeleton_of(config) is None
    with pytest.raises(ValueError, match="trust_remote_code"):
        empty_model(config, trust_remote_code=False)
    assert not (tmp_path / "mark").exists()
    empty_model(config, trust_remote_code=True)


def test_an_adapter_keeps_the_revision_of_its_base(tmp_path):
    from trainkit.infer.locate import base_of
    from trainkit.lora import attach
    from trainkit.options import LoraOptions

    model = make_qwen2(64)
    model.config._commit_hash = 40 * "a"
    attach(model, LoraOptions(r=2)).save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "adapter_config.json").read_text())
    settings["base_model_name_or_path"] = "someone/something"
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
    source = base_of(tmp_path)
    assert (source.name_or_path, source.revision) == ("someone/something", 40 * "a")
