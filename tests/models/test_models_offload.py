"""Checkpointed inputs on the host: the same numbers, and the right tensors travel."""

import contextlib
from types import SimpleNamespace

import pytest
import torch
from families.family_models import like_model, make, make_batch, run
from transformers import TrainingArguments

from trainkit.errors import PatchError
from trainkit.models import recompute
from trainkit.models.recompute import Recomputed, every
from trainkit.train.recompute import ALL, RecomputeLayers


@pytest.fixture
def journeys(monkeypatch):
    """Without a GPU the way to the host and back is a copy; this counts them."""
    seen = {"sent": 0, "fetched": 0}

    def to_host(self, tensor):
        seen["sent"] += 1
        return [piece.clone() for piece in recompute.pieces_of(tensor)]

    def start(self, away):
        seen["fetched"] += 1
        away.back = torch.empty(away.shape)
        for there, here in zip(recompute.pieces_of(away.back), away.host, strict=True):
            there.copy_(here)

    monkeypatch.setattr(recompute, "PIECE_BYTES", 512)  # several to a tensor
    monkeypatch.setattr(recompute.Travel, "travels", lambda self, tensor: tensor.dim() == 3)
    monkeypatch.setattr(recompute.Travel, "to_host", to_host)
    monkeypatch.setattr(recompute.Travel, "start", start)
    return seen


def send_away(model):
    layers = Recomputed(model)
    layers.apply(every(len(layers.layers), 1, "offload"))
    return layers.undo


@pytest.mark.parametrize("reentrant", [True, False])
def test_nothing_changes_and_every_layer_but_the_last_travels(journeys, reentrant):
    model = make("qwen2", num_hidden_layers=4)
    expected = run(model, make_batch("qwen2"), want_logits=False)
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    undo = send_away(model)
    for step in range(1, 3):
        found = run(model, make_batch("qwen2"), want_logits=False)
        assert all(torch.equal(found[key], expected[key]) for key in expected)
        assert journeys == {"sent": 3 * step, "fetched": 3 * step}
    undo()
    run(model, make_batch("qwen2"), want_logits=False)
    assert journeys["sent"] == 6


def test_a_second_backward_pass_fetches_again(journeys):
    model = make("qwen2", num_hidden_layers=3)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    send_away(model)
    loss = model(**like_model(make_batch("qwen2"), model)).loss
    parameters = list(model.parameters())
    first = torch.autograd.grad(loss, parameters, retain_graph=True)
    second = torch.autograd.grad(loss, parameters)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert journeys["fetched"] == 2 * journeys["sent"]


def test_without_checkpointing_it_is_refused():
    with pytest.raises(PatchError, match="no layer"):
        Recomputed(make("qwen2"))


class Stream:
    """Knows what is surely done before whatever is put on it next."""

    def __init__(self, device="cuda"):
        self.done = set()

    def wait_stream(self, other):
        self.done |= other.done

    def record_event(self):
        return frozenset(self.done)

    def wait_event(self, event):
        self.done |= event


class Copied:
    """Stands for a tensor: who wrote it, and which other streams keep its memory from reuse."""

    shape, dtype, is_cuda = (1,), torch.float32, True

    def __init__(self, written, streams, device="cuda"):
        self.written, self.streams, self.device, self.kept_for = written, streams, device, []
        streams[-1].done.add(written)

    def numel(self):
        return 1

    def element_size(self):
        return 4

    def detach(self):
        return self

    def record_stream(self, stream):
        self.kept_for.append(stream)

    def reshape(self, *_):
        return self

    def split(self, _):
        return [self]

    def copy_(self, other, non_blocking):
        assert other.written in self.streams[-1].done, "copied before it was written, or sent"
        way = "on the host" if self.device == "cpu" else "back"
        self.written = f"{other.written}, {way}"
        self.streams[-1].done.add(self.written)


def test_every_copy_waits_for_what_it_reads(monkeypatch):
    """Streams run side by side: only waits order them, and a missing one is seen on no CPU."""
    streams = [Stream()]
    main = streams[0]

    @contextlib.contextmanager
    def using(stream):
        streams.append(stream)
        yield
        streams.pop()

    cuda = SimpleNamespace(Stream=Stream, stream=using, current_stream=lambda _: streams[-1])
    empty = lambda *_, device="cpu", **__: Copied("nothing", streams, device)  # noqa: E731
    monkeypatch.setattr(recompute, "torch", SimpleNamespace(cuda=cuda, empty=empty))
    travel = recompute.Travel(min_bytes=0)
    inputs = [Copied(f"layer {number}", streams) for number in range(3)]
    aways = [travel.send(each) for each in inputs]
    (side,) = travel.streams.values()
    assert all(each.kept_for == [side] for each in inputs)
    for number in (2, 1, 0):
        back = travel.fetch(aways[number])
        assert back.written == f"layer {number}, on the host, back"
        assert back.written in main.done, "used before it arrived"
        assert back.kept_for == [main]
        ahead = aways[number - 1].back if number else None
        assert number == 0 or ahead is not None, "the next one must be on its way by now"
        assert ahead is None or ahead.written not in main.done


@pytest.mark.gpu
@pytest.mark.parametrize("reentrant", [True, False])
def test_on_a_gpu_nothing_changes(monkeypatch, reentrant):
    model = make("qwen2", num_hidden_layers=6).cuda()
    batch = {key: value.cuda() for key, value in make_batch("qwen2", length=64).items()}
    expected = run(model, batch, want_logits=False)
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    monkeypatch.setattr(recompute, "MIN_BYTES", 0)
    send_away(model)
    for _ in range(5):
        found = run(model, batch, want_logits=False)
        assert all(torch.equal(found[key], expected[key]) for key in expected)


def test_a_cpu_run_keeps_everything_where_it_is():
    model = make("qwen2", num_hidden_layers=3, device="cpu")
    expected = run(model, make_batch("qwen2"), want_logits=False)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for setting in ("auto", True, False):
        assert not recompute.pays(model, model.config, setting)
    send_away(model)  # and where it is put in all the same, no tensor travels
    found = run(model, make_batch("qwen2"), want_logits=False)
    assert all(torch.equal(found[key], expected[key]) for key in expected)


@pytest.mark.parametrize(
    ("setting", "width", "offloads"),
    [("auto", 2048, True), ("auto", 64, False), (True, 64, True), (False, 2048, False)],
)
def test_what_a_recipe_asks_for(monkeypatch, setting, width, offloads):
    monkeypatch.setattr(torch.nn.Parameter, "is_cuda", True, raising=False)
    model = make("qwen2")
    model.config.hidden_size = width
    assert recompute.pays(model, model.config, setting) is offloads


@pytest.mark.parametrize("setting", ["auto", True])
def test_a_model_that_checkpoints_in_its_own_way(monkeypatch, setting):
    monkeypatch.setattr(torch.nn.Parameter, "is_cuda", True, raising=False)
    model = make("qwen2")  # nobody has switched its layers on
    model.config.hidden_size = 2048
    callback = RecomputeLayers(ALL, setting)
    asked = (
        pytest.raises(PatchError, match="no layer") if setting is True else contextlib.nullcontext()
    )
    with asked:
        callback.begin(SimpleNamespace(model=model), None)


def test_the_trainers_callback_offloads_while_training_lasts(journeys, monkeypatch):
    monkeypatch.setattr(torch.nn.Parameter, "is_cuda", True, raising=False)
    model = make("qwen2", num_hidden_layers=4)
    expected = run(model, make_batch("qwen2"), want_logits=False)
    callback = RecomputeLayers(ALL, True)
    args = TrainingArguments(output_dir="unused", gradient_checkpointing=True, report_to=[])
    model.gradient_checkpointing_enable(args.gradient_checkpointing_kwargs)
    callback.begin(SimpleNamespace(model=model), None)
    found = run(model, make_batch("qwen2"), want_logits=False)
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    assert journeys == {"sent": 3, "fetched": 3}
    callback.on_train_end(SimpleNamespace(model=model))
    run(model, make_batch("qwen2"), want_logits=False)
    assert journeys["sent"] == 3


@pytest.mark.parametrize("tokens", [8192, 100_000, 450_000])
def test_pinned_memory_is_hardly_more_than_what_travels(tokens):
    """Pinned blocks are powers of two; 450,000 tokens of width 4096 would take 4 GiB for 3.4."""
    tensor = torch.empty(1, tokens, 4096, dtype=torch.bfloat16, device="meta")
    sizes = [piece.nbytes for piece in recompute.pieces_of(tensor)]
    assert sum(sizes) == tensor.nbytes
    assert sum(1 << (size - 1).bit_length() for size in sizes) - tensor.nbytes < 32 << 20
