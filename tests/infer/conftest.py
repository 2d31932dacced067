"""Run directories and a model whose answers are known."""

from pathlib import Path

import pytest
from tiny import record_run


@pytest.fixture
def run_directory(tmp_path, tiny_qwen2) -> Path:
    """A finished run with its final model and the record of its data."""
    import shutil

    run = tmp_path / "train_model" / "run-1"
    shutil.copytree(tiny_qwen2, run / "final")
    record_run(run)
    return run


class Parrot:
    """Stands for a model: generates given token ids, one batch a call, and remembers its inputs."""

    def __init__(self, tokenizer, answers, *, stop=True):
        import torch
        from transformers import GenerationConfig, Qwen2Config

        self.tokenizer, self.answers, self.stop = tokenizer, list(answers), stop
        self.seen = []
        self.device = torch.device("cpu")
        self.config, self.modules = Qwen2Config(), tuple  # of which none is a table of positions
        self.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id)

    def generate(self, *, input_ids, attention_mask, generation_config, streamer, **options):
        import torch

        answers = [self.answers.pop(0) for _ in range(len(input_ids))]
        self.seen += [
            row[mask.bool()].tolist() for row, mask in zip(input_ids, attention_mask, strict=True)
        ]
        ids = [self.tokenizer.encode(answer, add_special_tokens=False) for answer in answers]
        if self.stop:
            ids = [[*row, self.tokenizer.eos_token_id] for row in ids]
        width = max(map(len, ids))
        pad = generation_config.pad_token_id
        new = torch.tensor([row + [pad] * (width - len(row)) for row in ids])
        if streamer is not None:
            streamer.put(input_ids)
            for token in new[0]:
                streamer.put(token[None])
                for criterion in options["stopping_criteria"]:
                    if criterion(input_ids, None).all():
                        break
            streamer.end()
        return torch.cat((input_ids, new), dim=1)


@pytest.fixture
def parrot():
    return Parrot
