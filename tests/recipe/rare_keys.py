"""Rare keys of other tools: the tool, its keys, and the key and value of ours they come to."""

RARE = [
    # two keys of theirs decide one of ours
    ("llamafactory", {"warmup_ratio": 0.1, "warmup_steps": 0}, "training.warmup_steps", 0.1),
    ("llamafactory", {"warmup_steps": 7, "warmup_ratio": 0.1}, "training.warmup_steps", 7),
    ("trl", {"assistant_only_loss": True, "completion_only_loss": False}, "data.mask", "assistant"),
    ("trl", {"dataset_name": "d", "completion_only_loss": True}, "data.mask", "assistant"),
    ("trl", {"assistant_only_loss": False}, "data.mask", "none"),
    (
        "llamafactory",
        {"use_swanlab": True, "report_to": ["wandb"]},
        "training.report_to",
        ["wandb", "swanlab"],
    ),
    (
        "axolotl",
        {"lr_scheduler": "cosine", "cosine_min_lr_ratio": 0.1},
        "training.lr_scheduler_kwargs",
        {"min_lr_rate": 0.1},
    ),
    (
        "llamafactory",
        {"streaming": True, "buffer_size": 9, "max_steps": "100"},
        "data.streaming",
        9,
    ),
    # numbers in quotes, as YAML 1.1 and JSON have them
    ("trl", {"learning_rate": "2e-4"}, "training.learning_rate", 2e-4),
    ("llamafactory", {"max_steps": "100"}, "training.max_steps", 100),
    ("axolotl", {"adapter": "lora", "lora_alpha": "32"}, "lora.alpha", 32),
    # null is an answer, too
    ("trl", {}, "data.max_length", 1024),
    # the less known
    (
        "axolotl",
        {"adapter": "lora", "peft_init_lora_weights": "pissa"},
        "lora.init_lora_weights",
        "pissa",
    ),
    ("axolotl", {"optimizer": "ao_adamw_8bit"}, "training.optim", "adamw_torch_8bit"),
    ("axolotl", {"noisy_embedding_alpha": 5}, "training.neftune_noise_alpha", 5),
    ("axolotl", {"sequence_parallel_degree": 4}, "parallel.sequence", 4),
    ("axolotl", {"context_parallel_size": 1}, "parallel.sequence", 1),
    ("axolotl", {"excess_length_strategy": "truncate"}, "data.truncation", "right"),
    ("axolotl", {}, "data.truncation", "drop"),
    ("trl", {"truncation_mode": "keep_start"}, "data.truncation", "right"),
    ("trl", {"bf16": False, "model_init_kwargs": {"dtype": "float32"}}, "model.dtype", "float32"),
    ("trl", {"use_liger_kernel": True, "liger_kernel_config": {"rope": True}}, "kernels", True),
    ("llamafactory", {"early_stopping_steps": 3, "val_size": 0.1}, "early_stopping.patience", 3),
    (
        "llamafactory",
        {"group_by_length": True},
        "training.train_sampling_strategy",
        "group_by_length",
    ),
    (
        "unsloth",
        {"adapters": True, "load_in_4bit": False, "r": 8, "init_lora_weights": "olora"},
        "lora.init_lora_weights",
        "olora",
    ),
    # some weights alone
    ("llamafactory", {"finetuning_type": "freeze"}, "model.frozen", ["*", "!last-2"]),
    (
        "llamafactory",
        {
            "finetuning_type": "freeze",
            "freeze_trainable_layers": 6,
            "freeze_trainable_modules": "all",
            "freeze_extra_modules": "embed_tokens,norm",
        },
        "model.frozen",
        ["*", "!last-6", "!embed_tokens", "!norm"],
    ),
    (
        "llamafactory",
        {
            "finetuning_type": "freeze",
            "freeze_trainable_layers": -3,
            "freeze_trainable_modules": "mlp,self_attn",
        },
        "model.frozen",
        ["*", "!0-2.mlp", "!0-2.self_attn"],
    ),
    (
        "llamafactory",
        {
            "finetuning_type": "freeze",
            "use_llama_pro": True,
            "freeze_trainable_layers": 8,
            "use_badam": True,
            "badam_mode": "layer",
        },
        "model.frozen",
        ["*", "!last-8"],
    ),
    (
        "axolotl",
        {"unfrozen_parameters": ["^lm_head.weight$", "model.layers.7.mlp"]},
        "model.frozen",
        ["*", "!lm_head.weight", "!model.layers.7.mlp*"],
    ),
    # an expression is not a list of names
    (
        "axolotl",
        {"adapter": "lora", "lora_target_modules": r"model.layers.[\d]+.(q|v)_proj"},
        "lora.target_modules",
        r"model.layers.[\d]+.(q|v)_proj",
    ),
    # fp8, kernels, templates, losses
    (
        "llamafactory",
        {"finetuning_type": "full", "fp8": True, "fp8_backend": "te"},
        "model.fp8",
        True,
    ),
    ("llamafactory", {"fp8": True}, "model.fp8", False),
    ("axolotl", {"fp8": True, "use_kernels": True}, "model.fp8", True),
    ("llamafactory", {"use_kernels": True, "kernel_name": "k"}, "kernels", True),
    ("trl", {"chat_template_path": "mine.jinja"}, "data.chat_template", "mine.jinja"),
    ("trl", {"loss_type": "dft", "max_length": 9}, "data.max_length", 9),
]
