"""Tiny random models and batches of the families that most people train."""

import functools
import math

import torch
import transformers

FAMILIES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen2_vl": "Qwen2VLForConditionalGeneration",
    "qwen3": "Qwen3ForCausalLM",
    "glm": "GlmForCausalLM",
    "glm4": "Glm4ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "gemma": "GemmaForCausalLM",
}
MORE = {"ministral": "MinistralForCausalLM", "olmo2": "Olmo2ForCausalLM"}
"""Two that were never listed anywhere; the norms of olmo2 stand behind its blocks."""
WINDOWED = {"mistral", "qwen2", "qwen3", "phi3", "ministral"}
"""What cannot be on, and why."""

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "use_cache": False,
}
IMAGE = 120
# Only what a family's configuration needs beyond SIZES.
QWEN2_VL = {
    "text_config": {
        **SIZES,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]},
    },
    "vision_config": {
        "depth": 1,
        "embed_dim": 32,
        "num_heads": 2,
        "hidden_size": 64,
        "patch_size": 4,
        "mlp_ratio": 2,
    },
    "image_token_id": IMAGE,
    "video_token_id": 121,
    "vision_start_token_id": 122,
    "vision_end_token_id": 123,
}


NOT_THERE = {
    "layer_norm": "the model has no LayerNorm",
    "add_layer_norm": "no addition is followed by a LayerNorm",
    "gated_rms_norm": "the model has no RMSNorm with a gate",
    "experts": "the model has no experts with their weights in stacks",
    "gated_delta_rule": "no layer carries a state by a gated delta rule",
}
OFF = {name: dict(NOT_THERE) for name in (*FAMILIES, *MORE)}
OFF["olmo2"]["add_rms_norm"] = "no addition is followed by a norm"


def make(name, *, dtype=torch.float32, seed=0, device=DEVICE, **overrides):
    """The causal LM, tiny, with every vector (norms, biases) away from its neutral value."""
    causal_lm = getattr(transformers, {**FAMILIES, **MORE}[name])
    values = QWEN2_VL if name == "qwen2_vl" else {**SIZES, **overrides}
    torch.manual_seed(seed)
    model = causal_lm(causal_lm.config_class(**values))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model.to(device, dtype).train()


def exact(model):
    """The same model in fp64 throughout; Hugging Face's norms would round to fp32 inside."""
    model = model.double()
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = functools.partial(_exact_norm, module)
    return model


def _exact_norm(module, x):
    gemma = type(module).__name__.startswith("Gemma")
    epsilon = module.eps if gemma else module.variance_epsilon
    normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + epsilon)
    return normed * (1 + module.weight if gemma else module.weight)


def make_batch(name, *, seed=1, rows=2, length=13):
    """Right-padded text with labels; for qwen2_vl one image in each row."""
    torch.manual_seed(seed)
    input_ids = torch.randint(3, 119, (rows, length))
    attention_mask = torch.ones_like(input_ids)
    attention_mask[-1, length - 3 :] = 0
    batch = {"input_ids": input_ids, "attention_mask": attention_mask}
    if name == "qwen2_vl":
        input_ids[:, 1:6] = torch.tensor([122, IMAGE, IMAGE, IMAGE, IMAGE])
        batch |= {
            "pixel_values": torch.randn(rows * 16, 3 * 2 * 4 * 4),
            "image_grid_thw": torch.tensor([[1, 4, 4]] * rows),
            "mm_token_type_ids": (input_ids == IMAGE).int(),
        }
    labels = input_ids.masked_fill(attention_mask == 0, -100)
    labels[:, :4] = -100
    return batch | {"labels": labels}


def like_model(batch, model):
    """The batch where the model is, images in its dtype."""
    example = next(model.parameters())
    return {
        key: value.to(example if value.is_floating_point() else example.device)
        for key, value in batch.items()
    }


def run(model, batch, *, want_logits=True, **arguments):
    """Loss, logits and every gradient."""
    model.zero_grad(set_to_none=True)
    batch = like_model(batch, model)
    loss = model(**batch, **arguments).loss
    loss.backward()
    results = {"loss": loss.detach()}
    if want_logits:  # with labels, the patched model computes a loss and no logits
        with torch.no_grad():
            text = {key: value for key, value in batch.items() if key != "labels"}
            results["logits"] = model(**text).logits
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return results | gradients


def excess_errors(plain, patched, truth):
    """Where one patched result is further from the fp64 truth than the plain one may explain."""
    return pooled_excess_errors([(plain, patched, truth)])


def pooled_excess_errors(runs):
    """Where patched results are further from the truth than plain ones may explain.

    Distances are Euclidean, over the size of the truth, and root mean squares over the runs (plain,
    patched, truth), one for each batch. Both sides round in the same dtype at about as many places,
    so the logarithm of patched over plain scatters around 0. Measured over nine families in fp32,
    bf16 and autocast, on a CPU and an H200, 8 batches each: its median is -0.05, its deviation over
    the batches 0.09 for half of the tensors and 0.4 for the 99th of 100 (gradients of biases that
    nearly cancel). 3.5 such deviations are allowed: a factor of 4 for one batch, of 2 for four.

    The hair is for where the plain one happens to be exact, as a loss, one number, often is: eight
    roundings of fp32, and in 16 bits one in 16 last places.
    """
    values = runs[0][0].values()
    coarsest = max(torch.finfo(value.dtype).eps for value in values)
    single = torch.finfo(torch.float32).eps
    hair = 8 * single + (coarsest / 16 if coarsest > single else 0.0)
    factor = math.exp(3.5 * 0.4 / math.sqrt(len(runs)))
    bad = {}
    for name in runs[0][2]:
        eager, error = (
            math.sqrt(sum(_distance(run[side], run[2], name) ** 2 for run in runs) / len(runs))
            for side in (0, 1)
        )
        allowed = factor * eager + hair
        if not error <= allowed:
            bad[name] = (error, allowed)
    return bad


def _distance(found, truth, name):
    size = truth[name].norm().item() or 1.0
    return (found[name].double() - truth[name]).norm().item() / size
