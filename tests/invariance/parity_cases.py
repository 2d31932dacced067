"""One recipe through our loop and through transformers' Trainer: what differs in any bit."""

from pathlib import Path

from lab import Lab
from tiny import make_tokenizer

ROWS = ("loss", "grad_norm", "learning_rate", "epoch", "train_loss", "total_flos")


def differences(root, *, lora=False, steps=24, **options):
    """Names of logged figures, weights and optimizer states that are not equal to the bit."""
    import torch

    lab = Lab(make_tokenizer(), Path(root))
    given = {"max_steps": steps, "save_strategy": "no", "learning_rate": 3e-3, **options}
    given["wrap"] = adapt if lora else None
    ours = lab.trainer("ours", **given)
    theirs = plain(lab, lab.trainer("theirs", **given))
    torch.manual_seed(1), ours.train()
    torch.manual_seed(1), theirs.train()
    return [
        *_rows(ours.state.log_history, theirs.state.log_history),
        *_tensors("weights", ours.model.state_dict(), theirs.model.state_dict()),
        *_tensors("state", _states(ours.optimizer), _states(theirs.optimizer)),
    ]


def adapt(model):
    """The model with LoRA adapters, dropout included."""
    import torch
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(3)
    config = LoraConfig(r=4, lora_alpha=8, lora_dropout=0.1, target_modules="all-linear")
    return get_peft_model(model, config)


def plain(lab, ours):
    """transformers' own Trainer on the model, the arguments and the batches of another."""
    from torch.utils.data import DataLoader
    from transformers import PrinterCallback, Trainer

    from trainkit.train.data import sample_loader

    class Plain(Trainer):
        def get_train_dataloader(self):
            loader = sample_loader(
                lab.data(seed=self.args.seed), self.args, ours.layout, self.args.train_batch_size
            )
            counting, sampler = loader.collate_fn, loader.batch_sampler
            return _Epochs(
                loader.dataset,
                batch_sampler=sampler,
                collate_fn=lambda rows: _model_inputs(counting(rows)),
                generator=loader.generator,
            )

    class _Epochs(DataLoader):
        def set_epoch(self, epoch):
            self.batch_sampler.set_epoch(epoch)

    trainer = Plain(ours.model, ours.args, train_dataset=lab.samples)
    trainer.remove_callback(PrinterCallback)
    return trainer


def _model_inputs(batch):
    return {name: batch[name] for name in ("input_ids", "labels", "attention_mask")}


def _rows(ours, theirs):
    if len(ours) != len(theirs):
        return [f"{len(ours)} rows and {len(theirs)}"]
    return [
        f"{name} at step {mine['step']}: {mine.get(name)} and {yours.get(name)}"
        for mine, yours in zip(ours, theirs, strict=True)
        for name in ROWS
        if mine.get(name) != yours.get(name)
    ]


def _states(optimizer):
    optimizer = getattr(optimizer, "optimizer", optimizer)
    return {
        f"{number}.{name}": value
        for number, state in optimizer.state_dict()["state"].items()
        for name, value in state.items()
    }


def _tensors(what, ours, theirs):
    import torch

    if ours.keys() != theirs.keys():
        return [f"{what}: {sorted(ours.keys() ^ theirs.keys())[:4]}"]
    same = {
        name: torch.equal(value, theirs[name]) if torch.is_tensor(value) else value == theirs[name]
        for name, value in ours.items()
    }
    return [f"{what} of {name}" for name, is_same in same.items() if not is_same]
