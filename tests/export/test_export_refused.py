"""What cannot be served as it was trained is refused, before anything is loaded or written."""

import json
import shutil

import pytest
import torch

from trainkit.checkpoint.weights.adapter import Adapter, ModuleAdapter
from trainkit.cli.app import main
from trainkit.data import DataOptions
from trainkit.data.prompt import PromptRenderer, conversation_of
from trainkit.errors import CheckpointError
from trainkit.export.certificate import Answer, Reference, certify
from trainkit.export.conversations import Prompt
from trainkit.export.source import served_template
from trainkit.export.vllm import _UNSERVED, unserved

ROW = conversation_of([{"role": "user", "content": "hi"}])


class Fake:
    """Stands for a server."""

    read_with = "a test"

    def __init__(self, ids, logits):
        self.ids, self.given = ids, logits

    def prompt_ids(self, row):
        return self.ids

    def logits(self, input_ids, start):
        return self.given

    def close(self):
        pass


def reference(base=None):
    logits = torch.eye(8) * 9
    answer = Answer("made:1", 2, [1, 2, *range(8)], logits, base)
    return Reference((Prompt("made:1", ROW, ("plain",)),), ([1, 2],), (answer,))


def test_a_server_that_says_the_same_is_certified():
    row = certify(reference(torch.ones(8, 8)), Fake([1, 2], torch.eye(8) * 9), required=1.0)
    assert row["answers"]["agreement"] == 1.0
    assert row["adapter"]["tokens_changed"] == 7 / 8
    padded = torch.cat([torch.eye(8) * 9, torch.full((8, 3), -9.0)], dim=1)
    assert certify(reference(), Fake([1, 2], padded), required=1.0)["adapter"] is None


def test_a_kind_that_may_differ_is_counted_and_no_other():
    served = Fake([1], torch.eye(8) * 9)
    prompts = certify(reference(), served, required=1.0, excepted=("plain",))["prompts"]
    assert prompts["num_equal"] == 0
    assert prompts["excepted"] == {"plain": 1}
    with pytest.raises(CheckpointError, match="--except 'plain'"):
        certify(reference(), served, required=1.0, excepted=("tools",))


@pytest.mark.parametrize(
    ("served", "base", "word"),
    [
        (Fake([1, 1, 2], torch.eye(8) * 9), None, "from token 1 on"),  # a bos too many
        (Fake([1], torch.eye(8) * 9), None, "from token 1 on"),
        (Fake([1, 2], torch.eye(8).roll(1, 0)), None, "0.0% of 8"),
        (Fake([1, 2], torch.full((8, 8), float("nan"))), None, "not finite"),
        (Fake([1, 2], torch.eye(8) * 9), torch.eye(8) * 9, "changes nothing"),
        (Fake([1, 2], torch.eye(8) * 3), torch.eye(8) * 3.1, "the adapter is not in it"),
    ],
)
def test_a_server_that_says_something_else_is_not(served, base, word):
    with pytest.raises(CheckpointError, match=word):
        certify(reference(base), served, required=0.99)


def adapter(names=("model.layers.0.self_attn.q_proj",), rank=4, replaced=(), **config):
    part = ModuleAdapter(torch.ones(rank, 8), torch.ones(8, rank), None, None, False, 1.0)
    whole = {name: torch.ones(2, 2) for name in replaced}
    config = {"peft_type": "LORA", "r": rank, **config}
    return Adapter(None, config, dict.fromkeys(names, part), whole)


@pytest.mark.parametrize(
    ("taken", "family", "word"),
    [
        *((adapter(**{key: {"x": 1}}), "llama", key) for key in _UNSERVED),
        (adapter(bias="all"), "llama", "biases"),
        (adapter(peft_type="VERA"), "llama", "VERA"),
        (adapter(("lm_head",)), "llama", "lm_head"),
        (adapter(("model.embed_tokens",)), "llama", "embed_tokens"),
        (adapter(("model.layers.0.mlp.experts.0.up_proj",)), "llama", "experts"),
        (adapter(("model.layers.0.mlp.experts.0.up_proj",)), "qwen3_moe", "every expert"),
        (adapter(rank=1024), "llama", "at most 512"),
        (adapter(replaced=("model.norm.weight",)), "llama", "model.norm.weight"),
        (adapter(()), "llama", "no modules"),
        (adapter(), "a_family_of_tomorrow", "a_family_of_tomorrow"),
    ],
)
def test_an_adapter_that_vllm_would_pass_over_is_named(taken, family, word):
    assert word in "; ".join(unserved(taken, family))
    assert not list(unserved(adapter(), "llama"))


@pytest.mark.parametrize(
    ("options", "has_system"),
    [
        ({}, True),
        ({"template_kwargs": {"enable_thinking": False, "note": 'a "b"\n{% c %} \\ ü'}}, True),
        ({"system_policy": "Say 'so', {{ please }}\n\\n"}, False),
        ({"system_policy": "none"}, False),
    ],
)
def test_the_template_has_in_it_what_the_recipe_said(tiny_tokenizer, options, has_system):
    """A server knows the template and the messages, and no recipe."""
    template = (
        "\n{{ strftime_now('%d %B %Y') }}{{ note }}{{ enable_thinking is defined }}"
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    tokenizer = tiny_tokenizer
    before = tokenizer.chat_template
    tokenizer.chat_template = template
    try:
        chosen = DataOptions(**options)
        messages = [{"role": "user", "content": "hi"}]
        if has_system:
            messages.insert(0, {"role": "system", "content": "s"})
        expected = PromptRenderer(tokenizer, chosen).input_ids(conversation_of(messages))
        text = tokenizer.apply_chat_template(
            messages,
            chat_template=served_template(tokenizer, chosen),
            add_generation_prompt=True,
            tokenize=False,
        )
        assert tokenizer.encode(text, add_special_tokens=False) == expected
    finally:
        tokenizer.chat_template = before


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["vllm", "{run}", "{run}"], "exists already"),
        (["vllm", "{run}", "{out}", "--name", "a b; rm"], "--name"),
        (["vllm", "{run}", "{out}", "--min-agreement", "2"], "--min-agreement"),
        (["vllm", "{run}", "{out}", "--as-adapter", "--dtype", "float16"], "--dtype"),
        (["vllm", "{base}", "{out}", "--as-adapter"], "no adapter"),
        (["gguf", "nowhere/at/all", "{out}"], "nothing at this path"),
    ],
)
def test_refused_by_name_and_nothing_is_left(lora_run, tmp_path, capsys, words, said):
    places = {"run": lora_run, "base": lora_run.parents[1] / "base", "out": tmp_path / "o"}
    assert main(["export", *(word.format(**places) for word in words)]) in (1, 2)
    assert said in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_file_that_servers_read_is_not_exported(tmp_path, capsys):
    (tmp_path / "m.gguf").touch()
    assert main(["export", "vllm", str(tmp_path / "m.gguf"), str(tmp_path / "o")]) == 2
    assert "serve this file as it is" in capsys.readouterr().err


def test_an_adapter_from_before_the_first_step_is_refused(lora_run, tmp_path, capsys):
    from safetensors.torch import load_file, save_file

    folder = tmp_path / "adapter"
    shutil.copytree(lora_run / "final", folder)
    (folder / "manifest.json").unlink()
    tensors = load_file(folder / "adapter_model.safetensors")
    zero = {k: v * (0 if "lora_B" in k else 1) for k, v in tensors.items()}
    save_file(zero, folder / "adapter_model.safetensors")
    assert main(["export", "vllm", str(folder), str(tmp_path / "o"), "--as-adapter"]) == 1
    assert "changes nothing" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["adapter"]


def test_no_code_travels(lora_run, tmp_path):
    """Entries that name remote code, and files of code beside the weights, stay behind."""
    folder = tmp_path / "model"
    shutil.copytree(lora_run.parents[1] / "base", folder)
    (folder / "evil.py").write_text("raise SystemExit(3)")
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "evil.Config"}
    (folder / "config.json").write_text(json.dumps(config))
    assert main(["export", "vllm", str(folder), str(tmp_path / "o")]) == 0
    assert not list((tmp_path / "o").glob("*.py"))
    assert "auto_map" not in json.loads((tmp_path / "o" / "config.json").read_text())
