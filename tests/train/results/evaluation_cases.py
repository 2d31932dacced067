"""A training with measurements on the way, and one without; on one rank or several."""

from dataclasses import replace
from pathlib import Path


def curves(root, data):
    """Losses and final weights without and with measurements, and what was measured."""
    import torch
    from lab import Lab
    from tiny import make_tokenizer
    from transformers import TrainerCallback

    from trainkit.data import DataOptions
    from trainkit.data.prompt import conversation_of
    from trainkit.evals.metrics import answer_metrics
    from trainkit.evals.tasks import TaskChoice, load_tasks
    from trainkit.train.evaluations import Measurement
    from trainkit.train.generation_eval import measurements

    tokenizer = make_tokenizer()
    rows = [
        [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": str(n)}]
        for n in range(4)
    ]

    def greedy_consumer(trainer):
        """Draws random numbers, as a metric of a user's own might."""
        import random

        torch.rand(3)
        random.random()
        return {"drawn": 1.0}

    class Rows(TrainerCallback):
        def __init__(self):
            self.rows = []

        def on_log(self, args, state, control, logs=None, **_):
            self.rows.append({"step": state.global_step, **logs})

    def ask(run):
        run.data_options = DataOptions()
        run.data = replace(run.data, stop_token_ids=(tokenizer.eos_token_id,))
        run.held_out = [conversation_of(row) for row in rows]
        run.metrics = answer_metrics(["exact_match"])
        run.tasks = load_tasks(TaskChoice(["boolq", "gsm8k"], data=data, shots=0))

    asked_for = {
        "generation_eval": {"data": ["x"], "every": 2, "max_new_tokens": 4},
        "eval_tasks": {"tasks": ["boolq", "gsm8k"], "every": 2, "limit": 3, "shots": 0},
    }
    found = []
    for name in ("plain", "measured"):
        lab = Lab(tokenizer, Path(root))
        given = {} if name == "plain" else {**asked_for, "change": ask}
        trainer = lab.trainer(name, dropout=0.3, max_steps=5, save_strategy="no", given=given)
        trainer.model.model.layers[0].mlp.eval()  # a part that somebody keeps out of training
        seen = Rows()
        trainer.add_callback(seen)
        if name == "measured":
            mine = Measurement(1, greedy_consumer)
            trainer.evaluations.measurements = (*measurements(trainer.run), mine)
        trainer.train()
        weights = torch.cat([each.detach().flatten() for each in trainer.model.parameters()])
        modes = [module.training for module in trainer.model.modules()]
        found.append(
            {
                "losses": [(row["step"], row["loss"]) for row in seen.rows if "loss" in row],
                "weights": weights.double().sum().item(),
                "digest": hash(weights.numpy().tobytes()),
                "modes": modes,
                "measured": [row for row in seen.rows if any("eval_" in key for key in row)],
            }
        )
    found[1]["same"] = found[0].pop("digest") == found[1].pop("digest")
    return found
