"""A model on several ranks, layer by layer, trains what one process trains."""

import collections
import copy
import json
from contextlib import nullcontext

import pytest
import torch
from commands import trainkit
from families.family_models import make
from ranks import run_ranks
from safetensors.torch import load_file
from tiny import make_qwen2, make_tokenizer
from tiny_classes import classes, make_tiny
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaModel

from trainkit.errors import ModelError, RecipeError
from trainkit.models.loading import load_model
from trainkit.models.proof.replica import make_replica, replica_of
from trainkit.options.model import ModelOptions
from trainkit.options.parallel import ParallelOptions
from trainkit.parallel.pipeline.chain import Stage, cut_away, find_chain
from trainkit.parallel.pipeline.engine import Pipeline
from trainkit.parallel.pipeline.schedule import LateWeights
from trainkit.parallel.pipeline.share import SCHEDULES, Share, cut, refuse_micro_batches
from trainkit.parallel.process import ProcessRank

CASE = "distributed.zero_cases:train"


def layers_of(names):
    return {int(name.split(".")[2]) for name in names if ".layers." in name}


@pytest.mark.parametrize(
    ("parallel", "num_ranks", "layers"),
    [
        ({"pipeline": 2}, 2, 3),
        ({"pipeline": 2, "schedule": "interleaved"}, 4, 4),
        ({"pipeline": 2, "shard": "fsdp2"}, 4, 3),
    ],
    ids=["1f1b", "interleaved-and-data", "fsdp2"],
)
def test_stages_equal_one_process(parallel, num_ranks, layers, tmp_path):
    """fp32, uneven masks, clipping, a tied head, a short step where an epoch ends.

    Only the order of fp32 sums differs: 1e-6 of a norm, 1e-5 of a loss after a few steps.
    """
    rows = num_ranks // 2
    options = {"layers": layers, "max_grad_norm": 0.5, "max_steps": 6, "root": str(tmp_path)}
    options |= {"shard": "none", "save_strategy": "no", "batch": 1}
    (one,) = run_ranks(CASE, world_size=1, accumulate=8, **options)
    ranks = run_ranks(
        CASE, world_size=num_ranks, accumulate=8 // rows, parallel=parallel, **options
    )
    share = [layers_of(each.pop("held")) for each in ranks]
    held = [each.pop("share_held") for each in ranks]
    assert held == pytest.approx([0.5 if "shard" in parallel else 1.0] * num_ranks, abs=0.01)
    assert share[0] | share[-1] == set(range(layers))
    assert not share[0] & share[-1]
    assert all(0 <= each < 1 for rank in ranks for each in rank.pop("bubble"))
    assert all(rank == ranks[0] for rank in ranks)
    found = ranks[0]
    assert found["losses"] == pytest.approx(one["losses"], abs=1e-5)
    assert found["grad_norms"][0] == pytest.approx(one["grad_norms"][0], rel=1e-6)
    assert found["grad_norms"] == pytest.approx(one["grad_norms"], rel=1e-5)
    assert found["num_trained_tokens"] == one["num_trained_tokens"]
    assert found["eval_loss"] == pytest.approx(one["eval_loss"], abs=1e-5)


def test_bf16_gradients_are_summed_in_fp32_whatever_the_schedule(tmp_path):
    """zbv adds to gradients past autograd's hooks; summed in bf16 the norm is off by 4e-5."""
    options = {"layers": 4, "max_steps": 2, "root": str(tmp_path), "dtype": "bfloat16"}
    options |= {"shard": "none", "save_strategy": "no", "batch": 1, "accumulate": 16}
    found, other = (
        run_ranks(CASE, parallel={"pipeline": 2, "schedule": schedule}, **options)[0]
        for schedule in ("1f1b", "zbv")
    )
    assert found["grad_norms"][0] == pytest.approx(other["grad_norms"][0], rel=1e-6)
    # Behind the first step a sum in another order may round a bf16 weight to its neighbour.
    assert found["grad_norms"] == pytest.approx(other["grad_norms"], rel=1e-4)
    assert found["losses"] == pytest.approx(other["losses"], abs=1e-5)


def test_a_split_backward_pass_recomputes_a_layer_once(tmp_path):
    """To the bit what is kept, dropout too. The last stage goes back at once and keeps all."""
    options = {"layers": 4, "max_steps": 2, "root": str(tmp_path), "dropout": 0.2, "shard": "none"}
    options |= {"save_strategy": "no", "batch": 1, "accumulate": 4}
    kept, recomputed = (
        run_ranks(
            "parallel.pipeline_cases:train_and_count",
            parallel={"pipeline": 2, "schedule": "zbv"},
            gradient_checkpointing=on,
            **options,
        )
        for on in (False, True)
    )
    for figure in ("losses", "grad_norms"):
        assert recomputed[0][figure] == kept[0][figure]
    once = 2 * 4
    assert [rank["runs"] for rank in kept] == [{"0": once, "3": once}, {"1": once, "2": once}]
    runs = [rank["runs"] for rank in recomputed]
    assert runs == [{"0": 2 * once, "3": once}, {"1": 2 * once, "2": 2 * once}]


@pytest.mark.sample("full", "lora-fsdp2")
@pytest.mark.parametrize(
    ("lora", "shard"),
    [(None, "none"), (None, "fsdp2"), ({"r": 4}, "none"), ({"r": 4}, "fsdp2")],
    ids=["full", "full-fsdp2", "lora", "lora-fsdp2"],
)
def test_a_run_goes_on_exactly_after_a_kill_and_its_model_loads(lora, shard, tmp_path):
    """From the command line: packed rows, bf16, evaluation, answers, and the model they leave."""
    tokenizer = make_tokenizer()
    make_qwen2(len(tokenizer), num_hidden_layers=4).bfloat16().save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    rows = [
        {"messages": [{"role": "user", "content": "q" * n}, {"role": "assistant", "content": "a"}]}
        for n in range(1, 40)
    ]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "rows.jsonl").write_text(text, encoding="utf-8")
    (tmp_path / "few.jsonl").write_text("".join(text.splitlines(True)[:3]), encoding="utf-8")
    recipe = {
        "model": {"name_or_path": "model"},
        "data": {"train": ["rows.jsonl"], "eval": ["few.jsonl"], "max_length": 96,
                 "packing": True, "num_workers": 1, "cache_dir": "cache"},
        "lora": lora,
        "parallel": {"shard": shard, "pipeline": 2, "schedule": "interleaved"},
        "generation_eval": {"data": ["few.jsonl"], "max_new_tokens": 2},
        "training": {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4,
                     "max_steps": 4 if lora is None else 1, "save_steps": 2, "eval_steps": 2,
                     "logging_steps": 1, "gradient_checkpointing": True, "learning_rate": 1e-3},
    }  # fmt: skip
    (tmp_path / "r.json").write_text(json.dumps(recipe), encoding="utf-8")
    words = ("sft", "--config", "r.json", "--output-dir")
    options = {"num_ranks": 2 if shard == "none" else 4, "pictures": False}
    trainkit(tmp_path, *words, "whole", **options).well()
    final = weights_of(tmp_path / "whole/final")
    if lora is None:
        assert trainkit(tmp_path, *words, "killed", kill_at=3, **options) is None
        trainkit(tmp_path, "sft", "--resume", "killed", **options).well()
        same = weights_of(tmp_path / "killed/final")
        assert final.keys() == same.keys()
        assert all(torch.equal(value, same[name]) for name, value in final.items())
    model, report = AutoModelForCausalLM.from_pretrained(
        tmp_path / "whole/final", output_loading_info=True
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert model.dtype == torch.bfloat16
    if lora is None:
        files = sorted((tmp_path / "whole/final").glob("model-*.safetensors"))
        assert [layers_of(load_file(file)) for file in files] == [{0, 2}, {1, 3}]
        assert final.keys() == load_file(tmp_path / "model/model.safetensors").keys()
    else:
        assert len(final) == 4 * 7 * 2  # layers, linears of each, A and B


def weights_of(folder):
    found = {}
    for file in folder.glob("*.safetensors"):
        found |= load_file(file)
    return found


ODD = {name: {} for name in ("llama", "gpt2", "bloom", "gpt_oss", "falcon_h1")} | {
    "granite": {"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "logits_scaling": 8.0},
    "gemma2": {"head_dim": 16},
}
"""A plain one; factors on the embeddings; positions and a norm of their own before the layers;
layers of several kinds; layers that give tuples."""


def chain_of(model):
    """What `find_chain` says of a model that is small already."""
    return find_chain(model.config, lambda _: make_replica(model, 4096, least_layers=2))


@pytest.mark.sample("False-[glb]*", "True-gemma2", "False-falcon_h1")
@pytest.mark.parametrize("model_type", ODD)
@pytest.mark.parametrize("tied", [False, True])
def test_the_stages_of_a_chain_are_the_whole(model_type, tied):
    """Loss and gradients of two cut shares, run one after the other, are those of the model."""
    model = make_tiny(*classes()[model_type], tie_word_embeddings=tied, **ODD[model_type])
    model = model.double()
    if model_type == "gpt_oss":
        model.set_experts_implementation("eager")  # grouped products take no fp64
    chain, options = chain_of(model), ParallelOptions(pipeline=2)
    ids = torch.randint(3, 96, (2, 9))
    batch = {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}
    states, parts = None, []
    for rank in range(2):
        part, share = copy.deepcopy(model), Share.of(options, rank, 4)
        cut_away(part, share, chain)
        parts.append(part)
        for index in share.stages:
            stage = Stage(part, index, share, nullcontext, chain)
            states = stage.run(states, batch, lambda body, given: body(**given).loss)
    states.backward()
    held = [dict(part.named_parameters()) for part in parts]
    names = dict(model.named_parameters())
    ends = {f"{chain.embedding}.weight", f"{chain.head}.weight"}
    assert set(held[0]) | set(held[1]) == set(names)
    assert not set(held[0]) & set(held[1]) - (ends if tied else set())
    loss = model(**batch).loss
    loss.backward()
    assert states.item() == pytest.approx(loss.item(), rel=1e-12)
    for name, parameter in names.items():
        mine = sum(each[name].grad for each in held if name in each)
        torch.testing.assert_close(mine, parameter.grad, rtol=1e-9, atol=1e-12)


class Skips(LlamaModel):
    """Adds the embeddings to what the last layer gave."""

    def forward(self, input_ids=None, **kwargs):
        found = super().forward(input_ids=input_ids, **kwargs)
        found.last_hidden_state = found.last_hidden_state + self.embed_tokens(input_ids)
        return found


class Backwards(LlamaModel):
    """Its layers run in the other order."""

    def forward(self, *args, **kwargs):
        self.layers = nn.ModuleList(reversed(self.layers))
        try:
            return super().forward(*args, **kwargs)
        finally:
            self.layers = nn.ModuleList(reversed(self.layers))


class Looks(LlamaModel):
    """What it does behind its layers depends on what came before them."""

    def forward(self, input_ids=None, **kwargs):
        found = super().forward(input_ids=input_ids, **kwargs)
        found.last_hidden_state = found.last_hidden_state * (1 + self.embed_tokens.seen.mean())
        return found


class Seen(nn.Embedding):
    """Keeps what it gave."""

    def forward(self, ids):
        self.__dict__["seen"] = super().forward(ids)
        return self.seen


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (Skips, "embed_tokens has weights and does not run at one end alone"),
        (Backwards, "not called once each, in order"),
        (Looks, "_NoEmbedding.*seen"),
    ],
)
def test_what_is_no_plain_chain_is_refused(body, why):
    model = make("llama")
    model.model.__class__, model.model.embed_tokens.__class__ = body, Seen
    with pytest.raises(ModelError, match=why):
        find_chain(model.config, lambda _: model)


def test_a_chain_is_cut_where_the_head_takes_as_long_as_layers():
    model = make("llama", vocab_size=128)
    layer = sum(p.numel() for p in model.model.layers[0].parameters() if p.dim() == 2)
    width = model.config.hidden_size
    assert chain_of(model).head_in_layers(1000) == pytest.approx(1000 * width / layer)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("size", "layers"), [(2, 4), (2, 7), (4, 9), (3, 12)])
def test_every_layer_has_one_rank(schedule, size, layers):
    options = ParallelOptions(pipeline=size, schedule=schedule)
    shares = [Share.of(options, rank, layers) for rank in range(size)]
    found = sorted(layer for share in shares for layer in share.layers)
    assert found == list(range(layers))
    assert [share.has_first for share in shares].index(True) == 0
    assert [share.has_last for share in shares].index(True) == shares[0].last_rank
    sizes = [len(layers) for layers in cut(layers, shares[0].ranks)]
    assert max(sizes) - min(sizes) <= 1
    assert sizes[0] == min(sizes)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("size", "layers"), [(2, 28), (4, 32), (8, 80), (3, 12)])
@pytest.mark.parametrize("head", [0.3, 2.3, 5.0])
def test_the_head_counts_as_the_layers_that_take_as_long(schedule, size, layers, head):
    """No rank has a layer's work more than the mean, unless the head alone is more than that."""
    options = ParallelOptions(pipeline=size, schedule=schedule)
    shares = [Share.of(options, rank, layers, head) for rank in range(size)]
    work = [len(share.layers) + head * share.has_last for share in shares]
    mean = (layers + head) / size
    least = max(len(share.stages) for share in shares) + head
    assert max(work) <= max(mean + 1, least)


@pytest.mark.parametrize("tied", [False, True])
def test_random_weights_are_drawn_for_this_ranks_layers_only(tied, tmp_path):
    """The same on every rank, and however many there are; the rest has no memory."""
    make_qwen2(96, num_hidden_layers=4, tie_word_embeddings=tied).save_pretrained(tmp_path)
    source = ModelOptions(name_or_path=str(tmp_path), init="random", dtype="float32")

    def share_of(rank, size):
        torch.manual_seed(7)
        engine = Pipeline(ParallelOptions(pipeline=size), ProcessRank(rank, rank, size))
        engine.refuse_model(AutoConfig.from_pretrained(tmp_path), replica_of)
        model = load_model(source, attention="eager", load_part=engine.load_part)
        assert model.lm_head.weight is model.model.embed_tokens.weight or not tied
        return {name: p for name, p in model.named_parameters() if not p.is_meta}, model

    halves, quarters = ([share_of(rank, size) for rank in range(size)] for size in (2, 4))
    whole = dict(collections.ChainMap(*(held for held, _ in halves)))
    assert whole.keys() == dict(halves[0][1].named_parameters()).keys()
    assert [layers_of(held) for held, _ in quarters] == [{0}, {1}, {2}, {3}]
    assert len({value.double().sum().item() for value in whole.values() if value.dim() > 1}) > 20
    for held, model in (*halves, *quarters):
        assert all(torch.equal(value, whole[name]) for name, value in held.items())
        assert not model.model.rotary_emb.inv_freq.is_meta


@pytest.mark.parametrize("frozen", [False, True])
def test_a_backward_pass_in_two_parts_is_the_whole_one(frozen):
    """Twice over, one weight used twice; the second part forms products and nothing else."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 4, bias=False)
    ).double()
    net.append(net[0])
    net[2].weight.requires_grad_(not frozen)
    x = torch.randn(2, 5, 4, dtype=torch.float64, requires_grad=not frozen)
    wanted = [each for each in (x, *net.parameters()) if each.requires_grad]
    twice = torch.autograd.grad(2 * net(x).square().sum(), wanted)
    late = LateWeights()
    for _ in range(2):
        with late.of(net.modules()):
            net(x).square().sum().backward()
        assert all(type(each) in (torch.nn.Linear, torch.nn.Tanh) for each in net)
        before = None if net[0].weight.grad is None else net[0].weight.grad.clone()
        late.take()()
        assert before is None or not torch.equal(before, net[0].weight.grad)
    for each, value in zip(wanted, twice, strict=True):
        torch.testing.assert_close(each.grad, value, rtol=1e-12, atol=1e-14)


def test_what_cannot_be_cut_is_refused():
    engine = Pipeline(ParallelOptions(pipeline=4), ProcessRank(0, 0, 4))
    with pytest.raises(ModelError, match="3 layers cannot fill 4 stages"):
        engine.refuse_model(make("llama", num_hidden_layers=3).config, replica_of)
    for schedule, number in (("1f1b", 1), ("interleaved", 3), ("zbv", 1)):
        options = ParallelOptions(pipeline=2, schedule=schedule)
        with pytest.raises(RecipeError, match=f"{number} micro-batches"):
            refuse_micro_batches(options, number)
        refuse_micro_batches(options, 4)
    for wrong in ({"schedule": "zbv"}, {"pipeline": 2, "stages_per_rank": 2}):
        with pytest.raises(RecipeError):
            ParallelOptions(**wrong)
