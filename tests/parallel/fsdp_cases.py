"""What the ranks of the FSDP2 tests run; each function returns plain JSON values."""

import torch


def _placed(make):
    """A model, placed on all ranks, and its engine."""
    from trainkit.parallel.fsdp import Fsdp2

    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo")
    model, engine = make(), Fsdp2()
    engine.place(model, torch.device("cpu"))
    return model, engine


def _tiny(dtype=torch.float32, **overrides):
    from tiny import make_qwen2

    return make_qwen2(96, **overrides).to(dtype)


def what_a_bf16_model_computes_with():
    """The token count and dtypes that a loss head sees, those of the shards, and of what is saved.

    1811 is no bfloat16 number: rounded, it would be 1808.
    """
    import trainkit
    from trainkit.models.loss import LossHead

    def patched():
        model = _tiny(torch.bfloat16)
        trainkit.patch(model)
        return model

    model, engine = _placed(patched)
    seen = []
    forward = LossHead.forward

    def watch(self, hidden_states, labels=None, *, num_items=None, **given):
        loss = forward(self, hidden_states, labels, num_items=num_items, **given)
        seen.append([int(num_items), *map(str, (hidden_states.dtype, self.weight.dtype))])
        return loss

    LossHead.forward = watch
    ids = torch.arange(12).view(2, 6)
    loss = model(input_ids=ids, labels=ids, num_items_in_batch=torch.tensor(1811)).loss
    loss.backward()
    held = {str(p.dtype) for p in model.parameters()} | {
        str(p.grad.dtype) for p in model.parameters()
    }
    whole = engine.whole_weights(model, keep=True, adapters_only=False)
    return {
        "seen": seen,
        "loss": str(loss.dtype),
        "held": sorted(held),
        "saved": sorted({str(value.dtype) for value in whole.values()}),
        "tied": whole["lm_head.weight"] is whole["model.embed_tokens.weight"],
    }


def a_weight_that_stays_in_fp32(is_trained):
    """What is said, or which weights stay whole, of a norm in fp32 in a bf16 model."""
    from trainkit.errors import ModelError

    def make():
        model = _tiny(torch.bfloat16)
        norm = model.model.layers[0].input_layernorm
        norm.weight.data = norm.weight.data.float()
        norm.weight.requires_grad_(is_trained)
        return model

    try:
        model, _ = _placed(make)
    except ModelError as error:
        return str(error)
    return [name for name, p in model.named_parameters() if not hasattr(p, "to_local")]


def steps_of(optims):
    """By the optimizer: the largest difference of a weight to one process, after three steps."""
    return {optim: _steps_of(optim) for optim in optims}


def _steps_of(optim):
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments("unused", optim=optim, use_cpu=True, learning_rate=1e-2)
    kind, options = Trainer.get_optimizer_cls_and_kwargs(arguments)
    plain = _tiny()
    model, engine = _placed(_tiny)
    ids = torch.arange(12).view(2, 6)
    for each in (plain, model):
        optimizer = kind(each.parameters(), **options)
        for _ in range(3):
            each(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    whole = engine.whole_weights(model, keep=True, adapters_only=False)
    return max((whole[k] - v).abs().max().item() for k, v in plain.state_dict().items())


def a_load_in_parts(model, lora):
    """What a rank reads and holds of a model on disk, held against one that is loaded whole."""
    from lab import built

    from trainkit.options import LoraOptions
    from trainkit.parallel.fsdp import Fsdp2
    from trainkit.parallel.slices import WeightFiles

    torch.distributed.init_process_group("gloo")
    device, num_read = torch.device("cpu"), []
    read = WeightFiles.read

    def counted(self, name, start, stop):
        rows = read(self, name, start, stop)
        num_read.append(rows.numel())
        return rows

    WeightFiles.read = counted
    found = {}
    for how in ("whole", "parts"):
        torch.manual_seed(0)
        engine = Fsdp2()
        made = built(
            model,
            packing=True,
            lora=LoraOptions(r=4, target_modules="all-linear") if lora else None,
            kernels=True,
            device=device,
            engine=engine if how == "parts" else None,
        )
        before = sum(p.numel() for p in made.model.parameters() if not p.is_meta)
        trained = [name for name, p in made.model.named_parameters() if p.requires_grad]
        engine.place(made.model, device)
        held = sum(p.to_local().numel() for p in made.model.parameters())
        whole = engine.whole_weights(made.model, keep=True, adapters_only=False)
        ids = torch.arange(12).view(2, 6)
        loss = made.model(input_ids=ids, labels=ids, use_cache=False).loss.item()
        found[how] = whole, trained, loss, before
    (first, *same), (second, *again) = found["whole"], found["parts"]
    return {
        "different": sorted(
            name
            for name in first.keys() | second.keys()
            if not torch.equal(first[name], second[name])
        ),
        "same": same[:2] == again[:2],
        "before": again[2],
        "all": same[2],
        "read": sum(num_read),
        "held": held,
        "adapters": sum(value.numel() for name, value in first.items() if "lora_" in name),
    }


def families_in_parts(folder):
    """Each family: whether its weights are read in parts, and are the files' then."""
    from functools import partial
    from pathlib import Path

    from families.family_models import FAMILIES, make

    from trainkit.models.skeleton import skeleton
    from trainkit.parallel.fsdp import Fsdp2

    torch.distributed.init_process_group("gloo")
    device, found = torch.device("cpu"), {}
    for name in FAMILIES:
        path = str(Path(folder, name))
        whole = make(name, device="cpu", num_hidden_layers=1).to(torch.bfloat16)
        whole.save_pretrained(path)
        read = partial(type(whole).from_pretrained, path, dtype="auto", output_loading_info=True)
        parts = skeleton(read, path, device, lambda _: True)
        if parts is None:
            found[name] = None
            continue
        engine, buffers = Fsdp2(), dict(parts.named_buffers())
        engine.place(parts, device)
        values = engine.whole_weights(parts, keep=True, adapters_only=False)
        values |= {key: values.get(key, value) for key, value in buffers.items()}
        wanted = {**whole.state_dict(), **dict(whole.named_buffers())}
        found[name] = values.keys() == wanted.keys() and all(
            torch.equal(value, wanted[key])
            for key, value in values.items()
            if "inv_freq" not in key
        )
    return found


def packed_weights_through_a_copy_that_rounds(model):
    """How many bytes of a 4-bit base a layer computes with are not those that were loaded.

    A GPU copies lists of bfloat16 tensors as floats, and writes one NaN for every other.
    """
    from lab import built

    from trainkit.options import LoraOptions
    from trainkit.parallel.fsdp import Fsdp2

    torch.distributed.init_process_group("gloo")
    copy = torch._foreach_copy_

    def rounding(into, given):
        copy(into, given)
        for each in into:
            if each.dtype == torch.bfloat16:
                each.masked_fill_(each.isnan(), float("nan"))

    torch._foreach_copy_ = rounding
    lora = LoraOptions(r=4, target_modules=["q_proj"])
    made = built(model, packing=True, lora=lora, quantize="nf4")
    layers = made.model.get_base_model().model.layers
    wanted = {}
    for name, p in layers.named_parameters():
        if hasattr(p, "quant_state"):
            p.data.view(torch.int16)[:1] = 0x7F85  # a NaN
            wanted[name] = p.data.view(torch.uint8).flatten().clone()
    Fsdp2().place(made.model, torch.device("cpu"))
    wrong = {}
    for number, layer in enumerate(layers):
        layer.unshard()
        for name, p in layer.named_parameters():
            if (loaded := wanted.get(f"{number}.{name}")) is not None:
                wrong[name] = int((p.data.view(torch.uint8).flatten() != loaded).sum())
        layer.reshard()
    return wrong
