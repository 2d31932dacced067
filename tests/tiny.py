"""Makers of tiny models and tokenizers for tests; nothing is fetched."""

from importlib.metadata import version

from packaging.version import Version

SINCE_5_18 = Version(version("transformers")) >= Version("5.18")
"""Later ones make a mask for Doge's layers under any attention; 5.17 hands our pattern to them."""

DELTA_NET = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
}
"""Sizes of a Qwen3.5 or Qwen3-Next: a layer with a gated delta rule, and one with attention."""


def chat_lines(pairs):
    """JSON lines of conversations: a question and its answer each."""
    import json

    turns = ((("user", question), ("assistant", answer)) for question, answer in pairs)
    rows = ({"messages": [{"role": who, "content": text} for who, text in row]} for row in turns)
    return "\n".join(map(json.dumps, rows))


def make_tokenizer():
    """A byte-level tokenizer (every string round-trips) with a ChatML template."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    from trainkit.quickstart import chatml_tokenizer

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: index for index, character in enumerate(alphabet)}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return chatml_tokenizer(core)


def train_bpe(texts, pre_tokenizer, *, size, special, normalizer=None):
    """A byte-level BPE backend that splits in the given way."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizer
    core.decoder = decoders.ByteLevel()
    if normalizer is not None:
        core.normalizer = normalizer
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(texts, trainer)
    return core


SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2}


TABLES = {
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 16},
    "opt": {"hidden_size": 32, "word_embed_proj_dim": 32, "ffn_dim": 48, "num_hidden_layers": 2,
            "num_attention_heads": 2, "max_position_embeddings": 16},
    "gpt_neo": {"hidden_size": 32, "num_layers": 2, "attention_types": [[["global"], 2]],
                "num_heads": 2, "max_position_embeddings": 16},
    "mpt": {"d_model": 32, "n_heads": 2, "n_layers": 2, "max_seq_len": 16},
}  # fmt: skip
"""Models that read 16 positions and no more."""


def make_qwen2(vocab_size, *, seed=0, **overrides):
    """A tiny random Qwen2 in fp32: hidden 64, two layers, grouped heads."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(seed)
    sizes = {**SIZES, "max_position_embeddings": 512, "tie_word_embeddings": True, **overrides}
    return Qwen2ForCausalLM(Qwen2Config(vocab_size=vocab_size, **sizes))


def attending(model, engine="blocks"):
    """The model with trainkit's attention, on one of its engines."""
    from trainkit.models.attention import NAME, install, register

    register()
    model.set_attn_implementation(NAME)
    install(model, engine)
    return model


def make_adapter(base, directory, targets="all-linear", *, size=0.1, dtype=None, seed=1, **options):
    """A peft adapter of a model or its directory, every part away from its start as if trained."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, PreTrainedModel

    given = isinstance(base, PreTrainedModel)
    model = base if given else AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    torch.manual_seed(seed)
    config = LoraConfig(**{"r": 4, "lora_alpha": 8, "target_modules": targets, **options})
    wrapped = get_peft_model(model, config)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if parameter.requires_grad and "magnitude" in name:
                parameter.mul_(torch.empty_like(parameter).uniform_(0.8, 1.2))
            elif parameter.requires_grad:
                parameter.add_(size * torch.randn_like(parameter))
            if parameter.requires_grad and dtype is not None:
                parameter.data = parameter.data.to(dtype)
    wrapped.save_pretrained(directory)
    return directory


def record_run(run):
    """What every run has written by its end, as little of it as there is."""
    (run / "status.json").write_text('{"state": "done"}')
    (run / "data.json").write_text('{"train": {}}')
    (run / "resolved.yaml").write_text("model: {name_or_path: m}\ndata: {train: [d.jsonl]}\n")
