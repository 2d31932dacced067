"""Documents that begin with tokens of the one before them, against documents of their own."""

import numpy as np
import pytest
import torch
from test_attention_choice import varlen_on_cpu  # noqa: F401
from tiny import DELTA_NET, attending, make_qwen2
from torch import nn
from torch.nn import functional
from transformers import MistralConfig, MistralForCausalLM, Qwen3NextConfig, Qwen3NextForCausalLM
from transformers.masking_utils import causal_mask_function

from trainkit.data.collator import PackingCollator
from trainkit.errors import ModelError
from trainkit.models.attention import NAME
from trainkit.models.attention.pattern import Documents, Pattern
from trainkit.models.attention.proof import require_shared_prompts
from trainkit.objectives.answers import num_shared
from trainkit.parallel.rows import next_tokens


def sample(ids, first, source=0):
    ids = np.array(ids, dtype=np.int32)
    return {
        "input_ids": ids,
        "loss_mask": (np.arange(len(ids)) >= first).astype("uint8"),
        "source": source,
    }


def test_what_is_shared_ends_before_the_token_that_predicts_an_answer():
    same = [sample([1, 2, 3, 4, 5, 6], 4), sample([1, 2, 3, 4, 5, 7], 4)]
    assert num_shared(*same) == 3  # the answers begin alike, and each is scored
    assert num_shared(sample([1, 2, 9, 4], 3), sample([1, 2, 3, 4], 3)) == 1
    assert num_shared(sample([8, 2], 1), sample([1, 2], 1)) == 0
    assert num_shared(sample([1, 2, 3], 9), sample([1, 2, 3], 9)) == 2


def mistral(window):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    config = MistralConfig(vocab_size=90, sliding_window=window, **sizes, **heads)
    model = MistralForCausalLM(config)
    for layer in model.model.layers:  # transformers' own norms compute in fp32
        layer.input_layernorm, layer.post_attention_layernorm = nn.RMSNorm(32), nn.RMSNorm(32)
    model.model.norm = nn.RMSNorm(32)
    return model.double()


def batches():
    """Two pairs in a row and one in another, with their prompts once and twice."""
    generator = torch.Generator().manual_seed(3)
    rows, apart = [], []
    for lengths in (((9, 5, 7), (3, 2, 4)), ((12, 6, 1),)):
        once, twice = [], []
        for prompt, first, second in lengths:
            own = [
                torch.randint(1, 90, (n,), generator=generator).tolist()
                for n in (prompt, first, second)
            ]
            whole = [sample(own[0] + each, prompt) for each in own[1:]]
            count = num_shared(*whole)
            cut = {name: whole[1][name][count:] for name in ("input_ids", "loss_mask")}
            once += [whole[0], {**whole[1], **cut, "shared": count}]
            twice += whole
        rows.append(once)
        apart.append(twice)
    return PackingCollator(64, 0)(rows), PackingCollator(64, 0)(apart)


@pytest.mark.parametrize("engine", ["blocks", "varlen"])
@pytest.mark.parametrize("window", [None, 4, 11])
def test_loss_and_gradient_are_those_of_a_prompt_each(window, engine, request):
    """All in fp64 but the angles of positions, which are the same numbers on both sides."""
    if engine == "varlen":
        request.getfixturevalue("varlen_on_cpu")
    found = []
    for batch in batches():
        model = attending(mistral(window), engine)
        targets = next_tokens(batch.pop("labels"), -100)
        logits = model(**batch, use_cache=False).logits
        loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss.backward()
        found.append((loss.item(), {n: p.grad for n, p in model.named_parameters()}))
    assert batches()[0]["input_ids"].ne(0).sum() < batches()[1]["input_ids"].ne(0).sum()
    (loss, gradients), (wanted, theirs) = found
    assert loss == pytest.approx(wanted, rel=1e-9)
    for name, gradient in theirs.items():
        assert (gradients[name] - gradient).norm() <= 1e-9 * gradient.norm(), name


def test_flex_sees_what_the_blocks_show():
    batch, _ = batches()
    keys = batch["shared_keys"], batch["cu_seq_lens_k"], batch["max_length_k"]
    documents = Documents(batch["cu_seq_lens_q"], batch["max_length_q"], keys)
    pattern = Pattern(causal_mask_function, 2, 64, device=torch.device("cpu"), documents=documents)
    shown = torch.zeros(2, 64, 64, dtype=torch.bool)
    for rows, start, stop in pattern.spans:
        prefix = pattern.shared.get((rows.start, start), slice(0, 0))
        begin = start - (prefix.stop - prefix.start)
        block = pattern.block(rows, begin, slice(start, stop), slice(begin, stop))[:, 0]
        shown[rows, start:stop, start:stop] = block[..., start - begin :]
        shown[rows, start:stop, prefix] = block[..., : start - begin]
    query, key = (torch.arange(64).view(shape) for shape in ((1, -1, 1), (1, 1, -1)))
    seen = pattern.block_mask.mask_mod(torch.arange(2).view(-1, 1, 1), torch.tensor(0), query, key)
    assert torch.equal(seen.expand(2, 64, 64), shown)


def test_what_does_not_share_is_refused():
    """An attention that drops the prompt; and layers that carry state, which has none in front."""
    with pytest.raises(ModelError, match="differ by") as caught:
        require_shared_prompts(make_qwen2(300), attention="sdpa", dtype=torch.float32)
    assert str(caught.value.where) == "preference.share_prompts"
    require_shared_prompts(attending(make_qwen2(300)), attention=NAME, dtype=torch.float32)
    model = Qwen3NextForCausalLM(Qwen3NextConfig(vocab_size=60, num_experts=0, **DELTA_NET))
    with pytest.raises(ModelError, match="from nothing"):
        require_shared_prompts(model, attention=NAME, dtype=torch.float32)
