"""Unsloth's documented script for `trainkit bench command`: it has no command for rows of ids.

It runs by its path, and nothing of trainkit is imported: Unsloth has to come before transformers.
"""

import json
import sys


def main() -> None:
    """Train as the JSON argument says."""
    from unsloth import FastLanguageModel  # isort: skip
    import torch
    from datasets import load_dataset
    from trl import SFTConfig, SFTTrainer

    about = json.loads(sys.argv[1])
    model, tokenizer = FastLanguageModel.from_pretrained(
        about["base"],
        max_seq_length=about["max_length"],
        dtype=torch.bfloat16,
        load_in_4bit=about["in_4bit"],
        local_files_only=True,
    )
    model = FastLanguageModel.get_peft_model(
        model,
        **about["lora"],
        lora_dropout=0,
        use_gradient_checkpointing="unsloth" if about["in_4bit"] else False,
    )
    args = SFTConfig(**about["settings"], max_length=about["max_length"])
    rows = load_dataset("json", data_files=about["rows"], split="train")
    SFTTrainer(model=model, args=args, train_dataset=rows, processing_class=tokenizer).train()


if __name__ == "__main__":
    main()
