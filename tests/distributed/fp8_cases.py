"""What the ranks of the fp8 tests run; each function returns plain JSON values."""

from pathlib import Path

from distributed.zero_cases import zero_file
from lab import Lab
from tiny import make_qwen2, make_tokenizer

SAMPLES = [[(7 * row + 3 * place) % 250 for place in range(24)] for row in range(6)]


def _samples():
    import torch

    return [{"input_ids": (row := torch.tensor([each])), "labels": row} for each in SAMPLES]


def train(root, stage=None, *, shard=None, resume=None, budget="all", **options):
    """Train in fp8, as a run does: chosen, swapped in, codes kept; stage 0 is plain DDP."""
    import torch

    from trainkit.models.fp8.decide import Fp8Setup, train_in_fp8
    from trainkit.options import Fp8Options
    from trainkit.patching import patch
    from trainkit.train.callbacks import KeepFp8Codes

    made = []

    def prepare(model):
        patch(model)
        setup = Fp8Setup(Fp8Options(loss_budget=budget), _samples(), 96)
        made.append(train_in_fp8(model, setup, torch.device("cpu")))

    lab = Lab(make_tokenizer(), Path(root))
    name = shard or f"stage{stage}"
    trainer = lab.trainer(
        name,
        dtype="bfloat16",
        shard=shard or (zero_file(root, stage) if stage else "none"),
        prepare=prepare,
        given={"hooks": [KeepFp8Codes()]},
        **options,
    )
    checkpoint = None if resume is None else str(Path(root) / name / resume)
    trainer.train(resume_from_checkpoint=checkpoint)
    rows = [row for row in trainer.state.log_history if "loss" in row]
    return {
        "losses": [row["loss"] for row in rows],
        "grad_norms": [row["grad_norm"] for row in rows],
        "num_fp8": len(made[0].choice.directions),
    }


def choose_sharded(root):
    """What is chosen of a model, and of the same one as ZeRO-3 shards it while it is loaded."""
    import deepspeed
    import torch
    from accelerate.utils import broadcast_object_list
    from transformers import AutoModelForCausalLM
    from transformers.integrations import HfDeepSpeedConfig

    from trainkit.models.fp8.decide import Fp8Setup, decide
    from trainkit.options import Fp8Options
    from trainkit.parallel import Layout, ProcessRank, strategy_for
    from trainkit.patching import patch

    process = ProcessRank.from_environment()
    engine = Layout.of(strategy_for(zero_file(root, 3)), process).engine
    folder = Path(root) / f"model{process.dist_rank}"
    make_qwen2(256).save_pretrained(folder)
    deepspeed.init_distributed("gloo", verbose=False)

    def choose(**given):
        model = AutoModelForCausalLM.from_pretrained(folder)
        patch(model)
        setup = Fp8Setup(Fp8Options(loss_budget=0.000001), _samples(), 96, **given)
        choice = decide(model, setup, torch.device("cpu"))
        return choice.to_dict(), sum(parameter.numel() for parameter in model.parameters())

    plain, _ = choose()
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
    kept = HfDeepSpeedConfig(config)
    assert kept.is_zero3()
    sharded, num_left = choose(
        agree=lambda value: broadcast_object_list([value])[0], gathering=engine.gathering
    )
    return {"plain": plain, "sharded": sharded, "num_left": num_left}
