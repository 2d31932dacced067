"""A model with weights of every kind, and its optimizer, driven as the Trainer drives them."""

import io
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from trainkit.options.optimizers import DEFAULT, OPTIMIZERS, OURS
from trainkit.parallel.part_files import WITHOUT, by_name, refuse_unfit_state, without_state
from trainkit.train.optimizer import make_optimizer


class Plan(NamedTuple):
    """What a recipe says of the optimizer besides ``training``."""

    lora_plus_ratio: float | None = None
    in_backward: bool = False
    keeps_masters: bool = True
    part_ratio: Callable[[nn.Parameter], float | None] = lambda _: None


class Tiny(nn.Module):
    """An embedding, a hidden matrix of more than 4096 numbers, a pair as of LoRA, and a head."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(80, 64)
        self.hidden = nn.Linear(64, 72)
        self.lora_A = nn.Linear(72, 8, bias=False)
        self.lora_B = nn.ModuleDict({"default": nn.Linear(8, 64, bias=False)})
        self.norm = nn.LayerNorm(64)
        self.head = nn.Linear(64, 80, bias=False)

    def get_output_embeddings(self):
        return self.head

    def forward(self, ids):
        x = self.embed(ids)
        x = x + self.lora_B["default"](self.lora_A(torch.tanh(self.hidden(x))))
        return self.head(self.norm(x))


def arguments(name, folder, **settings):
    from transformers import TrainingArguments

    low_rank = OPTIMIZERS[name].per_rank_bytes is not None
    if low_rank:
        settings = {"optim_target_modules": ["hidden"], "optim_args": "rank=4", **settings}
    made = TrainingArguments(
        str(folder), optim=DEFAULT if name in OURS else name, use_cpu=True, report_to="none",
        learning_rate=1e-2, weight_decay=0.1, **settings,
    )  # fmt: skip
    if name in OURS:
        made.optim = name
    return made


class Run:
    """A model and its optimizer, with a schedule, as the Trainer drives them."""

    def __init__(self, name, folder, plan, dtype=torch.bfloat16, device="cpu", **settings):
        torch.manual_seed(0)
        self.model = Tiny().to(device, dtype)
        self.optimizer = make_optimizer(
            self.model, arguments(name, folder, **settings), **plan._asdict(),
            engine_keeps_masters=False,
        )  # fmt: skip
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda n: 1 / (n + 1))

    def step(self, number):
        if hasattr(self.optimizer, "begin_micro_batch"):
            self.optimizer.begin_micro_batch(self.model, accumulates=False)
        ids = torch.randint(80, (4, 9), generator=torch.Generator().manual_seed(number))
        logits = self.model(ids).float()
        nn.functional.cross_entropy(logits.flatten(0, 1), ids.roll(1, 1).flatten()).backward()
        if hasattr(self.optimizer, "gather_gradients"):
            self.optimizer.gather_gradients()
        self.optimizer.step()
        self.schedule.step()
        self.model.zero_grad()
        return self

    def saved(self):
        """Through bytes, read as a checkpoint is: nothing in it can run."""
        file = io.BytesIO()
        parts = (self.model, self.optimizer, self.schedule)
        states = [part.state_dict() for part in parts]
        states[1][WITHOUT] = without_state(self.model, self.optimizer)
        torch.save(states, file)
        file.seek(0)
        return torch.load(file, weights_only=True)

    def resumed(self, saved):
        """As a strategy does: what it holds against the run's own first is always let pass."""
        file = Path("optimizer.pt")
        named = by_name(self.model, self.optimizer, saved[1], file)
        refuse_unfit_state(self.model, self.optimizer, named, file, step=3)
        saved[1].pop(WITHOUT)
        for part, state in zip((self.model, self.optimizer, self.schedule), saved, strict=True):
            part.load_state_dict(state)
        return self

    def weights(self):
        return [parameter.detach().clone() for parameter in self.model.parameters()]
