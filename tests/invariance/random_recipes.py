"""Random recipes, typed as a user types them, against a loop that shares no code with ours.

The truth is a plain Hugging Face model in fp64, each conversation by itself, and AdamW, clipping,
schedule and masks written out here. A step is all rows, so the order of rows plays no part.

    python tests/invariance/random_recipes.py 300      # so many, from seed 0 on
"""

import json
import math
import random
from pathlib import Path

from commands import trainkit_each
from tiny import make_tokenizer

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,  # far from the flat start that hides errors
    "pad_token_id": None,
}
FAMILIES = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {},
    "mistral": {"sliding_window": None},
    "gemma2": {"query_pre_attn_scalar": 8, "hidden_activation": "gelu_pytorch_tanh"},
    "glm4": {"partial_rotary_factor": 0.5},
    "granite": {"residual_multiplier": 0.7, "logits_scaling": 2.0, "embedding_multiplier": 3.0},
    "olmo2": {},
}
HAVE_KERNELS = ("llama", "qwen2", "qwen3", "mistral", "gemma2", "glm4")
STEPS = 4


def draw(seed):
    """A recipe and its rows: ``(recipe, rows, is_chat, family)``."""
    roll = random.Random(seed)
    family, is_chat = roll.choice([*FAMILIES]), roll.random() < 0.75
    rows = [_conversation(roll) if is_chat else _text(roll) for _ in range(roll.randint(3, 7))]
    micro = roll.choice([1, 2, 3, 8])
    training = {
        "seed": seed,
        "max_steps": STEPS,
        "per_device_train_batch_size": micro,
        "gradient_accumulation_steps": math.ceil(len(rows) / micro),
        "learning_rate": roll.choice([1e-3, 3e-3]),
        "weight_decay": roll.choice([0.0, 0.1]),
        "adam_beta2": roll.choice([0.999, 0.95]),
        "max_grad_norm": roll.choice([0.0, 0.3, 1.0]),
        "lr_scheduler_type": roll.choice(["linear", "cosine", "constant_with_warmup"]),
        "warmup_steps": roll.choice([1, 2]),
        "label_smoothing_factor": roll.choice([0.0, 0.0, 0.1]),
        "gradient_checkpointing": roll.random() < 0.3,
        "logging_steps": 1,
        "save_steps": 1,
        "save_total_limit": STEPS,
    }
    mask = roll.choice(["assistant", "last_assistant"]) if is_chat else "none"
    recipe = {
        "model": {"name_or_path": f"{seed}/m", "dtype": "float32"},
        "data": {
            "train": [f"{seed}/d.jsonl"],
            "max_length": 256,
            "packing": roll.random() < 0.5,
            "mask": mask,
            "cache_dir": "cache",
        },
        "kernels": family in HAVE_KERNELS and roll.random() < 0.7,
        "training": training,
    }
    if roll.random() < 0.5:
        recipe["lora"] = {"r": roll.choice([2, 4]), "alpha": 8, "use_rslora": roll.random() < 0.3}
    return recipe, rows, is_chat, family


def _conversation(roll):
    messages = [{"role": "system", "content": "s" * 3}] if roll.random() < 0.3 else []
    for _ in range(roll.randint(1, 3)):
        messages.append({"role": "user", "content": "u" * roll.randint(1, 9) + "?"})
        answer = {"role": "assistant", "content": "ab" * roll.randint(1, 7)}
        if roll.random() < 0.3:
            answer["weight"] = roll.choice([0, 1])
        messages.append(answer)
    if messages[-1].get("weight") == 0:
        del messages[-1]["weight"]  # a row that trains nothing would be left out
    return {"messages": messages}


def _text(roll):
    return {"text": "".join(roll.choice("abcde ") for _ in range(roll.randint(5, 40))) + "."}


def differences(seeds, folder):
    """Train recipes; per step how far loss and norm are from the truth, and may be.

    Returns:
        For each seed ``(what, is, truth, error, bound)`` of each figure. What may be is three times
        what the same plain loop in fp32 is off at its worst, since other orders of the same sums
        round otherwise, and at least 32 roundings.
    """
    places, tokenizer = {seed: folder / str(seed) for seed in seeds}, make_tokenizer()
    for seed, place in places.items():
        _write(seed, place, tokenizer)
    commands = [
        ["sft", "--config", f"{seed}/r.yaml", "--output-dir", f"{seed}/run"] for seed in seeds
    ]
    said = trainkit_each(folder, commands)
    assert [each.code for each in said] == [0] * len(places), said
    return {seed: _compared(seed, place, tokenizer) for seed, place in places.items()}


def _write(seed, place, tokenizer):
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    recipe, rows, _, family = draw(seed)
    torch.manual_seed(seed)
    config = AutoConfig.for_model(
        family,
        vocab_size=len(tokenizer),
        eos_token_id=tokenizer.eos_token_id,
        **{**SIZES, **FAMILIES[family]},
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(place / "m")
    tokenizer.save_pretrained(place / "m")
    (place / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (place / "r.yaml").write_text(json.dumps(recipe))


def _compared(seed, place, tokenizer):
    import torch

    recipe, rows, is_chat, _ = draw(seed)
    lines = map(json.loads, (place / "run" / "metrics.jsonl").read_text().splitlines())
    ours = [(row["loss"], row["grad_norm"]) for row in lines if "loss" in row]
    samples = [_tokens(tokenizer, row, recipe["data"]["mask"], is_chat) for row in rows]
    true, plain = (_train(recipe, samples, place, kind) for kind in (torch.float64, torch.float32))
    assert len(ours) == len(true) == STEPS
    found = []
    for column, what in enumerate(("loss", "grad_norm")):
        worst = max(abs(a[column] / b[column] - 1) for a, b in zip(plain, true, strict=True))
        bound = max(3 * worst, 32 * torch.finfo(torch.float32).eps)
        for step, (a, b) in enumerate(zip(ours, true, strict=True), 1):
            error = abs(a[column] / b[column] - 1)
            found.append((f"{what} at step {step}", a[column], b[column], error, bound))
    return found


def _tokens(tokenizer, row, mask, is_chat):
    """``(ids, is_trained)``: an answer through its end-of-turn token, by rendering prefixes."""
    if not is_chat:
        ids = [*tokenizer(row["text"])["input_ids"], tokenizer.eos_token_id]
        return ids, [True] * len(ids)
    messages = row["messages"]
    last = max(place for place, each in enumerate(messages) if each["role"] == "assistant")

    def render(count, **options):
        return tokenizer.apply_chat_template(messages[:count], tokenize=False, **options)

    whole = render(len(messages))
    ids, trained = tokenizer(whole, add_special_tokens=False)["input_ids"], set()
    for place, message in enumerate(messages):
        by_mask = message["role"] == "assistant" and (mask == "assistant" or place == last)
        if not message.get("weight", by_mask):
            continue
        start, end = render(place, add_generation_prompt=True), render(place + 1).rstrip("\n")
        first, behind = (
            len(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in (start, end)
        )
        trained.update(range(first, behind))
    return ids, [place in trained for place in range(len(ids))]


def _train(recipe, samples, folder, dtype):
    """``(loss, norm)`` of each step."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        folder / "m", dtype=dtype, attn_implementation="eager"
    )
    if "lora" in recipe:  # nothing has moved behind the first step, whose rate is zero
        first = folder / "run" / "checkpoint-1"
        model = PeftModel.from_pretrained(model, first, is_trainable=True).to(dtype)
    model.train()
    options = recipe["training"]
    trained = [(name, each) for name, each in model.named_parameters() if each.requires_grad]
    states = [(torch.zeros_like(each), torch.zeros_like(each)) for _, each in trained]
    total = sum(sum(mask[1:]) for _, mask in samples)
    figures = []
    for step in range(STEPS):
        loss = sum(_loss(model, *each, options["label_smoothing_factor"]) for each in samples)
        loss = loss / total
        loss.backward()
        norm = math.sqrt(sum(each.grad.double().square().sum().item() for _, each in trained))
        limit = options["max_grad_norm"]
        factor = min(1.0, limit / (norm + 1e-6)) if limit else 1.0
        rate = options["learning_rate"] * _share(options, step)
        with torch.no_grad():
            for (name, weight), (first, second) in zip(trained, states, strict=True):
                is_plain = name.endswith("bias") or "norm" in name
                decay = 0.0 if is_plain else options["weight_decay"]
                beta = options["adam_beta2"]
                gradient = weight.grad * factor
                first.mul_(0.9).add_(gradient, alpha=0.1)
                second.mul_(beta).add_(gradient.square(), alpha=1 - beta)
                size = (second / (1 - beta ** (step + 1))).sqrt() + 1e-8
                weight.mul_(1 - rate * decay)
                weight.sub_(rate * first / (1 - 0.9 ** (step + 1)) / size)
                weight.grad = None
        figures.append((loss.item(), norm))
    return figures


def _loss(model, ids, mask, smoothing):
    """Summed over the trained tokens of one sample, each predicted by what is before it."""
    import torch

    logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, :-1]
    logs = logits.log_softmax(-1)
    labels = torch.tensor(ids[1:])
    each = -(1 - smoothing) * logs.gather(1, labels[:, None])[:, 0] - smoothing * logs.mean(-1)
    return each[torch.tensor(mask[1:])].sum()


def _share(options, step):
    """Of the rate, in a step that is counted from 0."""
    warm = options["warmup_steps"]
    if step < warm:
        return step / warm
    done = (step - warm) / (STEPS - warm)
    kind = options["lr_scheduler_type"]
    if kind == "constant_with_warmup":
        return 1.0
    return 1 - done if kind == "linear" else 0.5 * (1 + math.cos(math.pi * done))


if __name__ == "__main__":
    import sys
    import tempfile

    for number in range(int(sys.argv[1])):
        with tempfile.TemporaryDirectory() as place:
            found = differences([number], Path(place))[number]
            off = [row for row in found if not row[3] <= row[4]]
            print(number, draw(number)[3], "is off:" if off else "fits", *off, flush=True)
