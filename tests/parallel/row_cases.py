"""What ranks that share rows run in the tests; each function returns plain JSON values."""

import torch
from torch.nn.functional import scaled_dot_product_attention


def _split(size=None):
    from trainkit.parallel.rows import RowSplit

    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo")
    world_size = torch.distributed.get_world_size()
    size = size or world_size
    return RowSplit.of([range(start, start + size) for start in range(0, world_size, size)])


def attention_of_all_heads(shapes):
    """For (query heads, key heads): what each rank attended with, and the largest differences.

    Whole rows in fp64 are the truth; values and gradients of queries, keys and values.
    """
    split, found = _split(), []
    for heads, key_heads in shapes:
        torch.manual_seed(heads * 10 + key_heads)
        length, width = 6 * split.size, 8
        states = [
            torch.randn(2, n, length, width, dtype=torch.float64)
            for n in (heads, key_heads, key_heads)
        ]
        weights = torch.randn(2, length, heads, width, dtype=torch.float64)
        whole = [each.clone().requires_grad_() for each in states]
        truth = _attend(*whole)
        (truth * weights).sum().backward()
        mine = [_part(each, 2, split).requires_grad_() for each in states]
        gathered = [split.to_heads(each) for each in mine]
        output = split.to_tokens(_attend(*gathered))
        (output * _part(weights, 1, split)).sum().backward()
        differences = [(output - _part(truth, 1, split)).abs().max().item()]
        differences += [
            (m.grad - _part(w.grad, 2, split)).abs().max().item()
            for m, w in zip(mine, whole, strict=True)
        ]
        found.append([[list(each.shape[1:3]) for each in (mine[0], gathered[0])], max(differences)])
    return found


def _attend(query, key, value):
    output = scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    return output.transpose(1, 2)


def _part(tensor, dim, split):
    return tensor.detach().chunk(split.size, dim)[split.rank].clone()


def proofs(broken=None):
    """What the tests before the first step say of a model of each kind, ``broken`` somewhere.

    Args:
        broken: "positions" of the parts, the "exchange" of heads, or the "documents" of a row.
    """
    from models.packed_cases import run_documents_together
    from tiny import make_qwen2

    from trainkit.errors import TrainkitError
    from trainkit.models.attention import install, register
    from trainkit.models.leak_test import leak_test
    from trainkit.models.row_test import row_test
    from trainkit.parallel import rows

    split = _split(2)
    register()
    model = make_qwen2(96, attn_implementation="trainkit", use_cache=False)
    install(model)
    part, to_heads = rows.RowSplit.part, rows.RowSplit.to_heads

    def local_positions(self, batch):
        found = part(self, batch)
        found["position_ids"] = found["position_ids"] - found["position_ids"][:, :1]
        return found

    if broken == "positions":
        rows.RowSplit.part = local_positions
    if broken == "exchange":
        rows.RowSplit.to_heads = lambda self, states: to_heads(self, states).roll(1, dims=2)
    if broken == "documents":
        run_documents_together()
    said = []
    for test in (
        lambda: row_test(model, split, vocab_size=96, dtype=torch.float32),
        lambda: leak_test(model, attention="trainkit", vocab_size=96, split=split),
    ):
        try:
            said.append(float(test()))
        except TrainkitError as error:
            said.append(str(error))
    return said


def refusals():
    """Why each of some models cannot have its rows split."""
    from tiny import make_qwen2

    from trainkit.errors import ModelError
    from trainkit.models.row_test import refuse_unsplittable

    split, said = _split(2), []
    longrope = {"rope_type": "longrope", "rope_theta": 1e4, "factor": 2.0}
    longrope |= {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    longrope |= {"original_max_position_embeddings": 64}
    dynamic = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    for config, given in (
        ({}, {}),
        ({}, {"attention": "eager"}),
        ({}, {"takes_num_items": False}),
        ({"output_router_logits": True}, {}),
        ({"rope_parameters": longrope}, {}),
        ({"rope_parameters": {"full_attention": dynamic}}, {}),
        ({"num_attention_heads": 7}, {}),
    ):
        made = make_qwen2(96)
        for name, value in config.items():
            setattr(made.config, name, value)
        try:
            refuse_unsplittable(
                made, split, **{"attention": "trainkit", "takes_num_items": True, **given}
            )
            said.append("")
        except ModelError as error:
            said.append(str(error))
    return said


def classes_of_each_kind(names):
    """For each class: why its rows cannot be split, or how far their gradients are from whole ones.

    The truth is a backward pass over whole rows; the distance is relative to the largest gradient.
    """
    from tiny_classes import classes, make_tiny

    from trainkit.errors import TrainkitError
    from trainkit.models.attention import install, register
    from trainkit.models.row_test import refuse_unsplittable, row_test

    split, found, known = _split(2), {}, classes()
    register()
    for name in names:
        torch.manual_seed(0)
        model = make_tiny(*known[name], use_cache=False)
        takes = getattr(model, "accepts_loss_kwargs", True)
        try:
            model.set_attn_implementation("trainkit")
            install(model)
            refuse_unsplittable(model, split, attention="trainkit", takes_num_items=takes)
            row_test(model, split, vocab_size=100, dtype=torch.float32)
        except (TrainkitError, ValueError, TypeError) as error:
            found[name] = f"{type(error).__name__}: {error}"
            continue
        found[name] = _gradients_apart(model, split)
    return found


def _gradients_apart(model, split):
    ids = torch.randint(3, 100, (2, 10 * split.size), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(ids.shape[1]).expand(ids.shape)
    batch, whole = {"input_ids": ids, "labels": ids, "position_ids": positions}, []
    number = torch.tensor(ids.numel())
    model.eval()
    model(**batch, num_items_in_batch=number).loss.backward()
    for parameter in model.parameters():
        whole.append(parameter.grad)
        parameter.grad = None
    with split.at_work():
        model(**split.part(batch), num_items_in_batch=number).loss.backward()
    worst, largest = 0.0, max(each.abs().max().item() for each in whole if each is not None)
    for parameter, wanted in zip(model.parameters(), whole, strict=True):
        mine = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        torch.distributed.all_reduce(mine, group=split.group)
        if wanted is not None:
            worst = max(worst, (mine - wanted).abs().max().item())
    return worst / largest
