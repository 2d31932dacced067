"""What the ranks of the ZeRO tests run; each function returns plain JSON values."""

import json
import os
from pathlib import Path

from lab import Lab
from tiny import make_tokenizer


def zero_file(root, stage):
    """The shipped preset, sharding even tiny parameters: by default they would not be sharded."""
    from trainkit.parallel import STRATEGIES

    config = json.loads(STRATEGIES[f"zero{stage}"].config.read_text())
    if stage == 3:
        config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    path = Path(root) / f"zero{stage}-{os.getpid()}.json"
    path.write_text(json.dumps(config))
    return str(path)


def train(root, stage=None, *, shard=None, resume=None, dtype=None, **options):
    """Train; stage 0 is plain data parallel (or one process)."""
    lab = Lab(make_tokenizer(), Path(root))
    trainer = lab.trainer(
        shard or f"stage{stage}",
        dtype=dtype,
        shard=shard or (zero_file(root, stage) if stage else "none"),
        **options,
    )
    checkpoint = None if resume is None else str(Path(root) / (shard or f"stage{stage}") / resume)
    trainer.train(resume_from_checkpoint=checkpoint)
    rows = [row for row in trainer.state.log_history if "loss" in row]
    return {
        "losses": [row["loss"] for row in rows],
        "grad_norms": [row["grad_norm"] for row in rows],
        "num_trained_tokens": [row["num_trained_tokens"] for row in rows],
        "eval_loss": trainer.evaluate()["eval_loss"],
        "global_step": trainer.state.global_step,
        "share_held": _share_held(trainer.model),
        "bubble": [row.get("pipeline_bubble") for row in rows],
        "held": [name for name, _ in trainer.model.named_parameters()],
    }


def _share_held(model):
    """The share of the weights that this rank holds."""
    from trainkit.parallel.parameters import num_elements, own_part

    parameters = list(model.parameters())
    return sum(own_part(p).numel() for p in parameters) / sum(map(num_elements, parameters))


def stop_one_rank(root):
    """Ask one rank only to stop; both must save the same step."""
    import os

    lab = Lab(make_tokenizer(), Path(root))
    trainer = lab.trainer("stopped", batch=2, save_steps=100)
    if os.environ["RANK"] == "1":
        trainer.stop.number = 15
    trainer.train()
    return trainer.state.global_step
