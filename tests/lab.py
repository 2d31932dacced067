"""Trainers on random ragged samples that differ only in what a test varies."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np


def _collate(samples, pad_token_id):
    import torch

    width = max(len(sample["input_ids"]) for sample in samples)
    input_ids = torch.full((len(samples), width), pad_token_id)
    labels = torch.full((len(samples), width), -100)
    attention_mask = torch.zeros((len(samples), width), dtype=torch.long)
    for row, sample in enumerate(samples):
        ids = torch.from_numpy(sample["input_ids"])
        input_ids[row, : len(ids)] = ids
        attention_mask[row, : len(ids)] = 1
        trained = torch.from_numpy(sample["loss_mask"]) > 0
        labels[row, : len(ids)] = torch.where(trained, ids, -100)
    return {"input_ids": input_ids, "labels": labels, "attention_mask": attention_mask}


class ShuffledSamples:
    """Samples in an order that (seed, epoch) decide."""

    def __init__(self, samples, seed):
        self.samples, self.seed = samples, seed
        self.set_epoch(0)

    def set_epoch(self, epoch):
        self.order = np.arange(len(self.samples))
        if self.seed is not None:
            self.order = np.random.default_rng([self.seed, epoch]).permutation(len(self.samples))

    @property
    def lengths(self):
        return np.array([len(self.samples[index]["input_ids"]) for index in self.order])

    def __len__(self):
        return len(self.order)

    def __getitem__(self, place):
        return self.samples[self.order[place]]


@dataclass
class Lab:
    """Builds Trainers that differ only in what a test varies."""

    tokenizer: Any
    root: Path
    num_samples: int = 37
    samples: list[dict[str, Any]] = field(init=False)

    def __post_init__(self):
        random = np.random.default_rng(0)
        self.samples = [
            {
                "input_ids": random.integers(0, 255, length),
                "loss_mask": (random.random(length) < 0.6).astype(np.uint8),
            }
            for length in random.integers(5, 40, self.num_samples)
        ]

    def data(self, seed=None):
        from trainkit.objectives.objective import CountingCollator, TrainingData

        pad = self.tokenizer.pad_token_id
        return TrainingData(
            samples=ShuffledSamples(self.samples, seed),
            collator=CountingCollator(
                lambda samples: _collate(samples, pad),
                lambda samples: sum(len(sample["input_ids"]) for sample in samples),
            ),
            without_training=lambda sample: {
                **sample,
                "loss_mask": np.zeros_like(sample["loss_mask"]),
            },
        )

    def trainer(
        self,
        name,
        *,
        batch=4,
        accumulate=1,
        dropout=0.0,
        dtype=None,
        shard="none",
        parallel=None,
        layers=2,
        prepare=None,
        wrap=None,
        given=None,
        **training,
    ):
        """``prepare`` takes the model; ``given`` goes to the Trainer in place of the lab's own.

        ``wrap`` makes of the model what is trained: adapters.
        """
        import torch
        from tiny import make_qwen2
        from transformers import set_seed

        from trainkit.models.proof.replica import replica_of
        from trainkit.objectives import SFT
        from trainkit.options.parallel import ParallelOptions
        from trainkit.parallel import Layout, ProcessRank, strategy_for
        from trainkit.train.checkpoints import CheckpointWriter

        values = {
            "per_device_train_batch_size": batch,
            "max_steps": 8,
            "learning_rate": 1e-2,
            "logging_steps": 1,
            "report_to": "none",
            "save_strategy": "steps",
            "save_steps": 3,
            "seed": 1,
            **training,
        }
        directory = self.root / name
        directory.mkdir(parents=True, exist_ok=True)
        layout = Layout.of(
            strategy_for(shard), ProcessRank.from_environment(), ParallelOptions(**(parallel or {}))
        )
        dtype_name = "float32" if dtype is None else "bfloat16"
        args = arguments_of(values, layout, directory, accumulate, dtype_name, wrap is not None)
        set_seed(1)
        model = make_qwen2(len(self.tokenizer), attention_dropout=dropout, num_hidden_layers=layers)
        layout.engine.refuse_model(model.config, replica_of)
        if dtype is not None:
            model = model.to(getattr(torch, dtype))
        if prepare is not None:
            prepare(model)
        if wrap is not None:
            model = wrap(model)
        given = {
            "train_data": self.data(seed=values["seed"]),
            "eval_data": self.data(),
            "objective": SFT,
            **(given or {}),
        }
        return trainer_of(
            model=model,
            args=args,
            layout=layout,
            tokenizer=self.tokenizer,
            checkpoints=CheckpointWriter(directory, {"data": "fixed"}),
            **given,
        )


def arguments_of(
    values, layout, directory, accumulate, dtype="float32", has_adapters=False, **given
):
    """TrainingArguments of a section of a recipe."""
    import torch

    from trainkit.recipe import derive
    from trainkit.recipe.training import complete_training
    from trainkit.train.prepare import training_arguments

    values, on_cpu = complete_training(values), not torch.cuda.is_available()
    given = {"has_eval": False, "has_adapters": has_adapters, "model_dtype": dtype, **given}
    reads_precision = layout.strategy.reads_precision
    derived = derive(values, reads_precision=reads_precision, on_cpu=on_cpu, **given)
    values |= {name: each.value for name, each in derived.items()}
    values["gradient_accumulation_steps"] = accumulate
    return training_arguments(values, layout, output_dir=directory)


def run_of(model, args, layout, tokenizer, checkpoints, train_data, eval_data, objective, **given):
    """The context of a run that no command has begun.

    ``given`` are sections of its recipe, and ``of_model`` keys of its model's.
    """
    from trainkit.models.attention import Attention
    from trainkit.recipe import LoadedRecipe, Recipe, SftOptions
    from trainkit.run import Console, RunDirectory
    from trainkit.train.data import RunData
    from trainkit.train.model import BuiltModel
    from trainkit.train.run import Run

    recipe = {"model": {"name_or_path": "none"}, "data": {"train": ["none.jsonl"]}}
    recipe["model"] |= given.pop("of_model", {})
    loaded = LoadedRecipe(Recipe(**recipe, **given), {}, "", Path("lab.yaml"), None)
    run = Run(loaded, SftOptions(), layout.process, Console(interactive=False))
    nothing = {"ledger": None, "fingerprint": "", "parts": {}, "notes": (), "warnings": ()}
    run.data = RunData(objective, train_data, eval_data, {}, stop_token_ids=(), **nothing)
    run.layout, run.args, run.tokenizer, run.checkpoints = layout, args, tokenizer, checkpoints
    run.built = BuiltModel(model, Attention("eager", "a test's"), None, 0, 0)
    run.directory = RunDirectory(Path(args.output_dir))
    return run


def trainer_of(
    model, args, layout, tokenizer, checkpoints, train_data, eval_data, objective,
    hooks=(), numbers=None, warn=None, measurements=(), change=None, **given,
):  # fmt: skip
    """A loop with the hooks that every run has.

    Args:
        hooks: besides those.
        numbers: what to do about bad steps.
        warn: hears the run's warnings.
        measurements: that the evaluation takes.
        change: is called with the run before the loop is made.
        given: sections of the recipe; the rest is the run's.
    """
    from trainkit.train.callbacks import EmbeddingNoise, StopOnRequest
    from trainkit.train.evaluations import Evaluations, LookAhead
    from trainkit.train.log import Rows
    from trainkit.train.loop import Loop
    from trainkit.train.saves import Numbers, Saves

    class Trainer(Loop):
        """What most tests ask a loop."""

        def add_callback(self, callback):
            self.callbacks.add_callback(callback)

        evaluations = property(lambda self: self.hook(Evaluations))

        def evaluate(self):
            return self.evaluations.measure(self)

    run = run_of(
        model, args, layout, tokenizer, checkpoints, train_data, eval_data, objective, **given
    )
    run.numbers = numbers or run.numbers
    if warn is not None:
        run.console.warn = warn
    if change is not None:
        change(run)
    saves = Saves()
    if args.push_to_hub:
        from trainkit.train.hub import Hub

        saves.hub = Hub(args)
    noise = [EmbeddingNoise()] if args.neftune_noise_alpha is not None else []
    shared = [LookAhead(), Numbers(), Rows(), Evaluations(measurements), StopOnRequest(), saves]
    return Trainer(run, [*hooks, *noise, *shared])


def zero_engine(model, stage, *, micro_batch, learning_rate):
    """DeepSpeed's engine around a model, with plain SGD and no clipping."""
    import deepspeed
    import torch

    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.SGD(
            [p for p in model.parameters() if p.requires_grad], lr=learning_rate
        ),
        config={
            "train_micro_batch_size_per_gpu": micro_batch,
            "gradient_clipping": 0.0,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        },
    )
    return engine


def built(source, dtype="bfloat16", **given):
    """A model of a directory, or of its options, as a run on a CPU builds it."""
    import torch

    from trainkit.options import ModelOptions
    from trainkit.train.model import build_model

    source = source if isinstance(source, ModelOptions) else ModelOptions(str(source), dtype=dtype)
    if (attention := given.pop("attention", None)) is not None:
        source = source.replace(attn_implementation=attention)
    if (quantize := given.pop("quantize", None)) is not None:
        given["lora"] = given["lora"].replace(quantize=quantize)
    plain = {"packing": False, "lora": None, "kernels": False, "device": torch.device("cpu")}
    return build_model(source, **{**plain, **given})
