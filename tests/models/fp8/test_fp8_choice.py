"""Which layers run in fp8: what they cost and save decides, on every start alike."""

import json
import math
from types import SimpleNamespace

import pytest
import torch
from tiny import make_qwen2
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, MixtralConfig, MixtralForCausalLM

from trainkit.errors import ModelError
from trainkit.models.fp8 import savings
from trainkit.models.fp8.choice import (
    BACKWARD,
    BOTH,
    OUTSIDE,
    PLAIN,
    Candidates,
    Fp8Choice,
    Increase,
    Probe,
    choose,
    find_candidates,
    group_layers,
    probe_batches,
)
from trainkit.models.fp8.decide import Fp8Setup, decide, train_in_fp8
from trainkit.models.fp8.savings import Saving, Timed, Took
from trainkit.models.fp8.trained import swap_in
from trainkit.options import Fp8Options

CPU = torch.device("cpu")


def samples(number=4, length=20):
    for row in range(number):
        ids = (torch.arange(length) * (3 + row) % 29)[None]
        yield {"input_ids": ids, "labels": ids}


def setup(**options):
    return Fp8Setup(Fp8Options(**options), samples(), 64)


class Prices:
    """A probe whose groups cost what is written here; together they cost a little more."""

    loss, num_tokens = 2.0, 100

    def __init__(self, together=1.1, **prices):
        self.prices, self.together = prices, together

    def part(self):
        return self

    def increase(self, layers):
        total = sum(self.prices[name.rpartition(".")[2]] for name in layers)
        return Increase(total * (self.together if len(list(layers)) > 1 else 1.0), total)


def chosen(budget, prices, saved, *, frozen=False):
    layers = {f"layers.0.{role}": nn.Linear(*size) for role, size in SHAPES.items()}
    by_layer = {
        name: saved.get(layer.out_features, Saving(1.0, 2.0)) for name, layer in layers.items()
    }
    options = Fp8Options(loss_budget=budget)
    found = choose(
        Candidates(layers, {}), options, by_layer, "by hand", Prices(**prices), frozen=frozen
    )
    return {group.group.split()[0]: group.runs for group in found.groups}, found


SHAPES = {"cheap": (16, 16), "dear": (16, 32), "slow": (16, 48)}
COSTS = {"cheap": 0.001, "dear": 0.1, "slow": 0.001}


def test_groups_are_taken_by_time_saved_per_loss():
    runs, found = chosen(0.01, COSTS, {48: Saving(-1.0, 2.0)})
    assert runs == {"cheap": BOTH, "dear": BACKWARD, "slow": BACKWARD}
    reasons = {group.group.split()[0]: group.reason for group in found.groups}
    assert reasons == {"cheap": "", "dear": "not within the budget", "slow": "would not be faster"}
    assert found.loss_increase == 0.001
    assert sum(group.saved_ms for group in found.groups) == 7.0


def test_what_was_taken_is_measured_together():
    """Alone they would fit; together they cost a tenth more, so the dearer one is given back."""
    runs, found = chosen(0.0011, {**COSTS, "dear": 0.0011}, {48: Saving(-1.0, -1.0)})
    assert runs == {"cheap": BOTH, "dear": BACKWARD, "slow": PLAIN}
    assert found.loss_increase <= 0.0011 * 2.0


def test_what_saves_most_within_a_budget_is_taken():
    """By milliseconds per loss the small one comes first, and leaves no room for better ones."""
    saved = {16: Saving(2.2, 1.0), 32: Saving(3.0, 1.0), 48: Saving(3.0, 1.0)}
    prices = {"cheap": 0.002, "dear": 0.003, "slow": 0.003, "together": 1.0}
    runs, found = chosen(0.003, prices, saved)
    assert runs == {"cheap": BACKWARD, "dear": BOTH, "slow": BOTH}
    assert found.loss_increase == 0.006


@pytest.mark.parametrize(("together", "taken"), [(0.5, 3), (0.9, 2), (1.0, 2)])
def test_what_is_left_of_a_budget_is_used(together, taken):
    """One by one two of three fit; together they cost half, so that the third does as well."""
    prices = {"cheap": 0.001, "slow": 0.002, "dear": 0.0029, "together": together}
    runs, found = chosen(0.0015, prices, {})
    assert list(runs.values()).count(BOTH) == taken
    assert found.loss_increase <= 0.003


def test_no_budget_takes_all_that_gains_and_a_zero_one_nothing():
    assert set(chosen("all", COSTS, {})[0].values()) == {BOTH}
    assert set(chosen(0.0, COSTS, {})[0].values()) == {BACKWARD}
    assert set(chosen("all", COSTS, {48: Saving(-1.0, -2.0)})[0].values()) == {BOTH, PLAIN}


def test_a_group_without_numbers_is_never_taken():
    runs, _ = chosen(0.9, {**COSTS, "cheap": math.nan}, {})
    assert runs["cheap"] == BACKWARD


@pytest.mark.parametrize("trained", [True, False])
def test_layers_of_one_input_are_timed_together(trained, monkeypatch):
    """Alone, k and v would pay for quantising what q has quantised for them; and stay in 16 bits,
    where the norm before them quantises for nobody any more."""
    layers = find_candidates(make_qwen2(32), Fp8Options()).layers
    calls = []

    def took(function):
        calls.append(function.__name__)
        function()
        return Took(8.0 if "bf16" in function.__name__ else 4.0, 0.5)

    monkeypatch.setattr(savings, "_took", took)
    real = savings._measured
    monkeypatch.setattr(
        savings, "_measured", lambda shape, tokens, _, given: real(shape, tokens, CPU, given)
    )
    block = savings._measured_block
    monkeypatch.setattr(savings, "_measured_block", lambda *given: block(*given[:3], CPU))
    gpu = SimpleNamespace(type="cuda")  # what it computes on is the CPU
    found, timing = savings.measure_savings(layers, 16, gpu, trained=trained)
    assert timing == savings.MEASURED
    # qkv, o, gate and up, down, or all three in one; the second layer has the same shapes
    assert len(calls) == (3 if trained else 4) * 4
    assert set(found) == set(layers)
    first = {name.rpartition(".")[2]: each for name, each in found.items() if ".0." in name}
    assert first["o_proj"] == Saving(4.0, 4.0)
    assert first["down_proj"] == (Saving(1.3, 1.3) if trained else Saving(4.0, 4.0))
    assert first["q_proj"] == Saving(2.0, 2.0)  # 64 of 128 outputs
    assert first["k_proj"] == first["v_proj"] == Saving(1.0, 1.0)
    assert first["gate_proj"] == first["up_proj"]
    assert first["up_proj"] == (first["down_proj"] if trained else Saving(2.0, 2.0))


def wide_and_narrow(monkeypatch, clocks, tokens=2**15):
    """What is chosen of a model, as GPU and host take so long for a token or a call."""
    layers = {
        f"layers.{number}.{role}": nn.Linear(size, size, bias=False, device="meta")
        for number in range(4)
        for role, size in {"o_proj": 128, "down_proj": 2048}.items()
    }

    def measured(shape, num_tokens, *_):
        (output,), width = shape
        work = output * width * num_tokens / 2**35
        plain, in_fp8 = (
            Took(work * gpu + start, host) for gpu, start, host in (clocks["plain"], clocks["fp8"])
        )
        return (Timed(plain, in_fp8),) * 2

    monkeypatch.setattr(savings, "_measured", measured)
    found, timing = savings.measure_savings(
        layers, tokens, SimpleNamespace(type="cuda"), trained=False
    )
    options = Fp8Options(loss_budget="all")
    choice = choose(Candidates(layers, {}), options, found, timing, None, frozen=True)
    return sorted({name.rpartition(".")[2] for name in choice.directions}), timing


def test_a_busy_host_changes_no_choice(monkeypatch):
    """Layers whose kernels take the host many times as long to start as the GPU to run are fp8 all
    the same, where the step as a whole leaves the host time; and however busy it is just then."""
    for busy in (0.001, 0.03, 0.3):
        clocks = {"plain": (8.0, 0.0, busy), "fp8": (4.0, 0.002, 3 * busy)}
        roles, timing = wide_and_narrow(monkeypatch, clocks)
        assert (roles, timing) == (["down_proj", "o_proj"], savings.MEASURED), busy


def test_a_step_that_waits_for_the_host_gets_nothing_in_fp8(monkeypatch):
    clocks = {"plain": (8.0, 0.0, 0.1), "fp8": (4.0, 0.002, 0.3)}
    roles, timing = wide_and_narrow(monkeypatch, clocks, tokens=64)
    assert (roles, timing) == ([], savings.MEASURED_BY_HOST)


def test_a_layer_that_the_gpu_runs_no_faster_stays_in_16_bits(monkeypatch):
    """Quantising takes a narrow layer longer than its products take less."""
    clocks = {"plain": (8.0, 0.0, 0.1), "fp8": (4.0, 0.1, 0.3)}
    assert wide_and_narrow(monkeypatch, clocks)[0] == ["down_proj"]


def test_a_gpu_that_waited_for_the_host_is_timed_again(monkeypatch):
    """The GPU's own time is between two marks in its queue, all of which has to be there first."""
    # Seconds that the host takes for each call: one before the tries, eight in each of them.
    slow = iter([0.0, *[0.0] * 4, 0.05, *[0.0] * 100])
    now, waited = [0.0], []

    class Event:
        def __init__(self, **_):
            pass

        def record(self):
            self.at = now[0]

        def elapsed_time(self, other):
            return 17.0 if other.at == self.at else 8.0  # the waiting, then eight calls

        def synchronize(self):
            pass

    def call():
        now[0] += next(slow)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "_sleep", waited.append)
    monkeypatch.setattr(savings.time, "perf_counter", lambda: now[0])
    savings._took(call)
    assert waited == [30_000_000] + [60_000_000] * 3


def test_an_output_layer_is_timed_with_its_loss(monkeypatch):
    """Its gradient is quantised by the loss; a layer alone would pay for that."""
    head = torch.nn.Linear(32, 64, bias=False, dtype=torch.bfloat16)
    seen = []

    def linear_cross_entropy(x, weight, labels, *, in_fp8):
        seen.append((weight.requires_grad, in_fp8 and (in_fp8.forward, in_fp8.backward)))
        return real(x, weight, labels, in_fp8=in_fp8)

    real = savings.linear_cross_entropy
    monkeypatch.setattr(savings, "linear_cross_entropy", linear_cross_entropy)
    times = iter((9.0, 8.0, 6.5))
    monkeypatch.setattr(savings, "_took", lambda call: (call(), Took(next(times), 0.1))[1])
    found = savings._measured_head(head, 16, CPU, trained=False)
    assert [each.saved(by_host=False) for each in found] == [1.0, 2.5]
    assert seen == [(False, None), (False, (True, False)), (False, (False, True))]


def test_layers_are_grouped_by_role_and_depth():
    names = [f"model.layers.{i}.mlp.{role}" for i in range(30) for role in ("up", "down")]
    groups = group_layers([*names, "lm_head"])
    labels = [group.label for group in groups]
    assert labels[:2] == ["up of layer 0", "down of layer 0"]
    assert "up of layers 1-5" in labels
    assert "down of layer 29" in labels
    assert labels[-1] == "lm_head"
    assert sorted(name for group in groups for name in group.layers) == sorted([*names, "lm_head"])
    assert [group.label for group in group_layers(names[:2])] == labels[:2]


def test_layers_that_cannot_or_shall_not():
    model = make_qwen2(32)
    model.model.layers[0].mlp.up_proj.weight.requires_grad_(False)
    found = find_candidates(model, Fp8Options(skip=["layers.1", "down_proj"], min_size=48))
    assert set(found.layers) == {
        f"model.layers.0.{name}" for name in ("self_attn.q_proj", "self_attn.o_proj")
    } | {"model.layers.0.mlp.gate_proj"}
    assert found.kept == {
        "named in skip": 8,
        "narrower than min_size 48": 2,
        "not trained": 1,
        "the output layer": 1,
    }
    for name, meant in ("layers.7", "give names"), ("dwn_proj", "did you mean down_proj"):
        with pytest.raises(ModelError, match=f"no linear layer of the model has {name}") as caught:
            find_candidates(model, Fp8Options(skip=[name]))
        assert meant in str(caught.value)
    for frozen, key in (True, "lora.quantize"), (False, "model.fp8"):
        with pytest.raises(ModelError, match="no linear layer can run in fp8") as caught:
            find_candidates(model, Fp8Options(min_size=4096), frozen=frozen)
        assert caught.value.where == key
        assert f"remove {key}" in str(caught.value)


def test_weights_that_no_linear_layer_holds_are_counted_among_those_in_16_bits():
    """Experts are most of such a model; convolutions over neighbouring tokens are not products."""
    sizes = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    experts = MixtralConfig(**sizes, **heads, intermediate_size=16, num_local_experts=2)
    found = find_candidates(MixtralForCausalLM(experts), Fp8Options())
    assert found.kept == {OUTSIDE: 2, "the output layer": 1}
    assert len(found.layers) == 4
    with pytest.raises(ModelError, match=f"8: {OUTSIDE}"):
        find_candidates(
            GPT2LMHeadModel(GPT2Config(vocab_size=32, n_embd=16, n_layer=2, n_head=2)), Fp8Options()
        )
    convolved = nn.Sequential(nn.Conv1d(16, 16, 4), nn.Linear(16, 16))
    assert find_candidates(convolved, Fp8Options()).kept == {}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_a_group_costs(dtype):
    """The divergence from the plain model; nothing for what only sums in another order."""
    model = make_qwen2(32).to(dtype).eval()
    names = list(find_candidates(model, Fp8Options()).layers)
    batches = probe_batches(samples(), 32, CPU)
    assert [batch["input_ids"].shape for batch in batches] == [(4, 20)]
    with torch.no_grad():
        probe = Probe(model, batches)
        probe.begin()
        logits = [model(input_ids=batch["input_ids"]).logits[:, :-1] for batch in batches]
        swaps = swap_in(model, dict.fromkeys(names, (True, True)), in_evaluation=True)
        other = [model(input_ids=batch["input_ids"]).logits[:, :-1] for batch in batches]
        swaps.revert()
        exact = nn.functional.kl_div(
            torch.cat(other).double().log_softmax(-1).flatten(0, 1),
            torch.cat(logits).double().log_softmax(-1).flatten(0, 1),
            reduction="batchmean",
            log_target=True,
        ).item()
        found = probe.increase(names).expected
        floor = probe._floor(names[0])
        probe._floors[names[0].rpartition(".")[0]] = exact / 2
        halved = probe.increase(names).expected
    assert found + floor == pytest.approx(exact, rel=0.05)
    assert halved == pytest.approx(exact / 2, rel=0.05)
    # In fp32 the two logarithms are rounded where their difference is taken; bf16 rounds logits.
    rounding = 2 * 2**-24 * torch.cat(logits).double().log_softmax(-1).abs().max().item()
    assert abs(floor) < (0.3 * exact if dtype == torch.bfloat16 else rounding)


def test_a_third_of_the_text_ranks_groups():
    model = make_qwen2(32).eval()
    names = list(find_candidates(model, Fp8Options()).layers)
    ids = torch.randint(2, 32, (6, 2, 20))
    batches = [{"input_ids": each, "labels": each} for each in ids]
    with torch.no_grad():
        whole, third = Probe(model, batches), Probe(model, batches[:2])
        third.begin()
        part = whole.part()
        whole.begin()
        assert (part.loss, part.num_tokens) == (third.loss, third.num_tokens)
        assert part.increase(names) == third.increase(names) != whole.increase(names)


def test_the_choice_is_recorded_and_taken_again():
    model = make_qwen2(32)
    made = train_in_fp8(model, setup(), CPU)
    assert len(made.choice.directions) == 14
    record = json.loads(json.dumps(made.choice.to_dict()))
    assert Fp8Choice.of(record) == made.choice
    made.swaps.revert()
    marked = {**record, "num_tokens": 12345}

    def again(**options):
        given = Fp8Setup(Fp8Options(**options), samples(), 64, recorded=marked)
        return decide(make_qwen2(32), given, CPU)

    assert again().num_tokens == 12345
    assert again(loss_budget=0.5).num_tokens != 12345  # another budget: measured anew
    assert again(skip=["down_proj"]).num_tokens != 12345


def test_every_start_chooses_alike():
    first, second = (decide(make_qwen2(32), setup(loss_budget=1e-6), CPU) for _ in range(2))
    assert first == second
    assert {group.runs for group in first.groups} == {BOTH, BACKWARD}


def test_errors_of_layers_are_within_their_limits_and_broken_ones_are_refused():
    model = make_qwen2(32)
    made = train_in_fp8(model, setup(loss_budget="all"), CPU)
    rows = made.errors["layers"]
    assert sum(row["number"] for row in rows) == 14
    for row in rows:
        for key in ("forward_error", "backward_error", "weight_gradient_error"):
            assert 0.01 < row[key] < made.errors["product_limit"]
    broken = make_qwen2(32)
    broken.model.layers[1].mlp.up_proj.weight.data[3, 3] = math.nan
    with pytest.raises(ModelError, match=r"layers\.1\.mlp\.up_proj in fp8 is off"):
        train_in_fp8(broken, setup(loss_budget="all"), CPU)


def test_text_without_trained_tokens_is_refused():
    masked = ({**each, "labels": torch.full_like(each["labels"], -100)} for each in samples())
    with pytest.raises(ModelError, match="no trained token"):
        decide(make_qwen2(32), Fp8Setup(Fp8Options(), masked, 64), CPU)
