"""Trainers on documents of three sources, for one process and for ranks."""

from pathlib import Path

import numpy as np

NAMES = ("chat", "math", "rare")
NUM_DOCUMENTS = 32
ROW = 64
"""Tokens a packed row; four documents of at most 15 fit."""


def documents():
    """Sources of unlike sizes; the rare one is not in every batch."""
    random = np.random.default_rng(3)
    return [
        {
            "input_ids": random.integers(0, 255, length).astype(np.int32),
            "loss_mask": (random.random(length) < 0.6).astype(np.uint8),
            "source": 2 if place % 15 == 7 else int(place % 3 == 1),
        }
        for place, length in enumerate(random.integers(4, 16, NUM_DOCUMENTS))
    ]


class Rows:
    """Items in a fixed order."""

    def __init__(self, items):
        self.items = items
        self.lengths = np.ones(len(items), dtype=np.int64)

    def set_epoch(self, epoch):
        pass

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        return self.items[index]


def make_data(*, packed, sources=NAMES):
    from trainkit.data.collator import PackingCollator, PaddingCollator
    from trainkit.objectives.objective import CountingCollator, TrainingData

    def untrained(sample):
        return {**sample, "loss_mask": np.zeros_like(sample["loss_mask"])}

    held = documents()
    with_source = bool(sources)
    if packed:
        return TrainingData(
            Rows([held[start : start + 4] for start in range(0, len(held), 4)]),
            CountingCollator(PackingCollator(ROW, 0, with_source=with_source), lambda rows: 0),
            lambda row: [untrained(sample) for sample in row],
            sources,
        )
    collate = PaddingCollator(0, with_source=with_source)
    return TrainingData(Rows(held), CountingCollator(collate, lambda rows: 0), untrained, sources)


def make_trainer(
    root, *, kernels=False, packed=False, batch=8, accumulate=1, sources=NAMES, **training
):
    """Eight documents a step, whatever the cut; four steps are all of them."""
    from lab import arguments_of, trainer_of
    from tiny import make_qwen2, make_tokenizer

    from trainkit.models import attention
    from trainkit.objectives import SFT
    from trainkit.parallel import STRATEGIES, Layout, ProcessRank
    from trainkit.patching import patch
    from trainkit.train.checkpoints import CheckpointWriter

    values = {
        "per_device_train_batch_size": batch // 4 if packed else batch,
        "per_device_eval_batch_size": 3,
        "max_steps": 4,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "seed": 1,
        **training,
    }
    layout = Layout.of(STRATEGIES["none"], ProcessRank.from_environment())
    args = arguments_of(values, layout, Path(root) / "run", accumulate, has_eval=True)
    tokenizer = make_tokenizer()
    model = make_qwen2(len(tokenizer)).train()
    if packed:
        attention.register()
        model.config.use_cache = False
        model.set_attn_implementation(attention.NAME)
        attention.install(model)
    if kernels:
        patch(model)
    (Path(root) / "run").mkdir(parents=True, exist_ok=True)
    return trainer_of(
        objective=SFT,
        model=model,
        args=args,
        layout=layout,
        tokenizer=tokenizer,
        train_data=make_data(packed=packed, sources=sources),
        eval_data=make_data(packed=packed, sources=sources),
        checkpoints=CheckpointWriter(Path(root) / "run", {}),
    )


def rows_of(trainer):
    """The training rows of the log."""
    return [row for row in trainer.state.log_history if "loss" in row]


def logged(root, **options):
    """Per step and for the evaluation: what the log says about losses and counts."""
    trainer = make_trainer(root, **options)
    trainer.train()
    rows = [*rows_of(trainer), trainer.evaluate()]
    return [
        {key: value for key, value in row.items() if "loss" in key or "num_trained" in key}
        for row in rows
    ]
