"""A causal language model as a chain of layers between two ends, and what one rank has of it.

No list says which model is one. A small replica runs once: each layer must be called once, in
order, on the very states that the one before gave, and everything else that has weights before the
first layer or behind the last. Then the replica is run a layer at a time, as stages would run it,
and must give the whole's loss and gradients.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from trainkit.auto_class import FAILURES
from trainkit.errors import ModelError, TrainkitError
from trainkit.parallel.pipeline.share import Share


@dataclass(frozen=True)
class Chain:
    """Where a model's layers and ends are: paths from the causal language model.

    Attributes:
        before: what has weights and runs before the layers, with whether its result has a row for
            each row of a batch, and the result's width.
        num_outputs: of a layer: 0 where it gives the states alone, else the length of its tuple.
    """

    layers: str
    embedding: str
    head: str
    before: Mapping[str, tuple[bool, int]]
    after: tuple[str, ...]
    num_outputs: int
    hidden_size: int
    layer_weights: float

    def head_in_layers(self, vocabulary: int) -> float:
        """How many layers compute as much as the head and the loss, by their matrix products."""
        return self.hidden_size * vocabulary / self.layer_weights


def causal_lm(model: nn.Module) -> Any:
    get_base: Any = getattr(model, "get_base_model", None)
    return model if get_base is None else get_base()


# -- Finding it -----------------------------------------------------------------------------------

_ROWS, _TOKENS = 2, 5


class _NoChain(Exception):
    """Why a model is none."""


_FAILURES = (*FAILURES, _NoChain, TrainkitError, ArithmeticError)


def find_chain(config: Any, replica_of: Callable[[Any], Any]) -> Chain:
    """The chain that a model of a configuration is."""
    try:
        model = replica_of(config)
        chain = _recorded(model)
        _prove(model, chain)
    except _FAILURES as error:
        has_reason = isinstance(error, _NoChain | TrainkitError)
        why = str(error) if has_reason else f"{type(error).__name__}: {error}"
        first, _, _ = why.partition("\n")
        raise ModelError(
            f"{config.model_type} is no chain of layers that can be cut: {first}",
            where="parallel.pipeline",
            fix="set parallel: {shard: fsdp2} instead",
        ) from error
    return chain


def _batch(model: Any) -> dict[str, Tensor]:
    size = min(model.config.get_text_config().vocab_size, 64)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, size, (_ROWS, _TOKENS), generator=generator).to(model.device)
    return {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}


def _recorded(model: Any) -> Chain:
    """What one run shows."""
    number = model.config.get_text_config().num_hidden_layers
    lists = {
        name: each
        for name, each in model.named_modules()
        if isinstance(each, nn.ModuleList) and len(each) == number
    }
    if not lists:
        raise _NoChain("it has no list of its layers")
    path = max(lists, key=lambda name: sum(p.numel() for p in lists[name].parameters()))
    layers = list(lists[path])
    ends = dict(_ends(model, path))
    order: list[Any] = []
    given: dict[int, tuple[Any, list[Tensor]]] = {}
    results: dict[Any, Any] = {}

    def on_call(what: Any) -> Callable[..., None]:
        def run(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            order.append(what)
            if isinstance(what, int):
                first, *others = [*args, *kwargs.values()]
                states = first if args else kwargs.get("hidden_states")
                leaves = tree_leaves([first, *others])
                rest = [e for e in leaves if isinstance(e, Tensor) and e is not states]
                given[what] = states, rest

        return run

    def on_result(what: Any) -> Callable[..., None]:
        return lambda _, __, result: results.__setitem__(what, result)

    with ExitStack() as hooks:
        for what, module in (*enumerate(layers), *ends.items()):
            handle = module.register_forward_pre_hook(on_call(what), with_kwargs=True)
            hooks.enter_context(handle)
            hooks.enter_context(module.register_forward_hook(on_result(what)))
        model(**_batch(model))
    _refuse_other_orders(order, given, results, number, ends)
    first, last = order.index(0), order.index(number - 1)
    before = {}
    for name in ends:
        places = [place for place, what in enumerate(order) if what == name]
        if places[-1] < first:
            result = results[name]
            if not isinstance(result, Tensor) or result.shape[1:-1] != (_TOKENS,):
                raise _NoChain(f"what {name} gives has no place for each token")
            before[name] = (len(result) == _ROWS, result.shape[-1])
        elif places[0] < last:
            raise _NoChain(f"{name} has weights and does not run at one end alone")
    names = {id(module): name for name, module in model.named_modules()}
    embedding = names[id(model.get_input_embeddings())]
    head = names.get(id(model.get_output_embeddings()), "")
    after = tuple(name for name in ends if name not in before)
    if embedding not in before or head not in after:
        raise _NoChain("its embeddings do not come first, or its head does not come last")
    output = results[0]
    return Chain(
        path,
        embedding,
        head,
        before,
        after,
        len(output) if isinstance(output, tuple) else 0,
        given[0][0].shape[-1],
        # Weights that a token meets: a replica has twice as many experts as a token goes to.
        sum(
            w.numel() / (w.dim() - 1)
            for each in layers
            for w in each.parameters()
            if w.dim() in (2, 3)
        )
        / number,
    )


def _ends(model: nn.Module, layers: str, at: str = "") -> Iterator[tuple[str, nn.Module]]:
    module = model.get_submodule(at)
    own = [name for name, _ in module.named_parameters(recurse=False)]
    is_around = layers.startswith(f"{at}." if at else "")
    if own and is_around:
        raise _NoChain(f"{', '.join(own)} of its own take part next to the layers")
    if own:
        yield at, module
    elif at != layers:
        for child, _ in module.named_children():
            yield from _ends(model, layers, f"{at}.{child}" if at else child)


def _refuse_other_orders(
    order: list[Any],
    given: Mapping[int, tuple[Any, list[Tensor]]],
    results: Mapping[Any, Any],
    number: int,
    ends: Mapping[str, nn.Module],
) -> None:
    if [what for what in order if isinstance(what, int)] != list(range(number)):
        raise _NoChain("its layers are not called once each, in order")
    if idle := [name for name in ends if name not in order]:
        raise _NoChain(f"{idle[0]} takes no part in a pass over text")
    for index, (states, rest) in given.items():
        result = results[index - 1] if index else states
        if (result[0] if isinstance(result, tuple) else result) is not states:
            raise _NoChain(f"layer {index} does not begin with what the one before has given")
        if not isinstance(states, Tensor) or states.shape[:-1] != (_ROWS, _TOKENS):
            raise _NoChain(
                "what goes from layer to layer has another shape than (batch, tokens, width)"
            )
        if any(each.requires_grad for each in rest):
            raise _NoChain(f"layer {index} takes another tensor that needs a gradient")


def _prove(model: Any, chain: Chain) -> None:
    """Hold stages of one layer each against the whole."""
    batch, number = _batch(model), len(model.get_submodule(chain.layers))

    def learned(loss: Tensor) -> dict[str, Tensor | None]:
        model.zero_grad(set_to_none=True)
        loss.backward()
        gradients = {name: each.grad for name, each in model.named_parameters()}
        return {"the loss": loss.detach(), **gradients}

    whole = learned(model(**batch, use_cache=False).loss)
    share = Share(
        {index: range(index, index + 1) for index in range(number)}, number, (0,) * number
    )
    found: Any = None
    for index in share.stages:
        stage = Stage(model, index, share, nullcontext, chain)
        found = stage.run(found, batch, lambda body, given: body(**given, use_cache=False).loss)
    parts = learned(found)
    model.zero_grad(set_to_none=True)
    top = max(each.abs().max() for name, each in whole.items() if each is not None)
    for name, wanted in whole.items():
        mine = parts[name]
        if (wanted is None) != (mine is None):
            raise _NoChain(f"run in parts, {name} has no gradient, or one too many")
        if wanted is not None and mine is not None:
            error = ((mine - wanted).abs().max() / wanted.abs().max().clamp(min=1e-3 * top)).item()
            if not error < 1e-4:
                raise _NoChain(f"run in parts, {name} is off by {error:.0e}")


# -- A model of which this rank holds a part: the rest of it has names and shapes, but no memory.
#
# It is loaded with its own weights only; adapters and kernels are put into the whole of it, so
# that they are numbered and initialised as in one process; then the rest is cut away.


class _Crossing:
    """The states that come into a stage, and those that leave it."""

    incoming: Tensor | None = None
    outgoing: Tensor | None = None


class Placeholder(nn.Module):
    """Stands where another rank's module was; states pass through.

    Args:
        stood: the module, whose plain attributes the model's code may ask for.
        num_outputs: of a layer, see `Chain`.
        swap: what is done with the states.
    """

    def __init__(
        self, stood: nn.Module, num_outputs: int = 0, swap: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        super().__init__()
        for name, value in vars(stood).items():
            is_plain = isinstance(value, bool | int | float | str)
            if is_plain and not name.startswith("_") and "checkpointing" not in name:
                setattr(self, name, value)
        self._num_outputs, self._swap = num_outputs, swap

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The states as they came, as a layer would give them."""
        states = args[0] if args else kwargs["hidden_states"]
        states = states if self._swap is None else self._swap(states)
        return (states, *[None] * (self._num_outputs - 1)) if self._num_outputs else states


class _NoEmbedding(Placeholder):
    """Gives zeros: what comes of them is replaced where the stage's own layers begin."""

    def __init__(self, stood: nn.Module, crossing: _Crossing, has_rows: bool, width: int) -> None:
        super().__init__(stood)
        self._crossing, self._has_rows, self._width = crossing, has_rows, width

    @property
    def weight(self) -> Tensor | None:
        return self._crossing.incoming

    def forward(self, *_: Any, **__: Any) -> Tensor:
        """Of the shape that the module would give, in the states' dtype."""
        states = self._crossing.incoming
        assert states is not None
        rows = states.shape[0] if self._has_rows else 1
        return states.new_zeros(rows, states.shape[1], self._width)


def foreign(base: Any, share: Share, chain: Chain, *, ties: bool) -> list[tuple[nn.Module, str]]:
    """The modules that other ranks hold: (parent, name of the child)."""
    layers = base.get_submodule(chain.layers)
    found = [(layers, str(index)) for index in range(len(layers)) if index not in share.layers]
    for names, has, twice in (
        (chain.before, share.has_first, chain.embedding),
        (chain.after, share.has_last, chain.head),
    ):
        for path in names:
            is_here = has or (ties and path == twice and (share.has_first or share.has_last))
            parent, _, name = path.rpartition(".")
            found += [] if is_here else [(base.get_submodule(parent), name)]
    return found


def loading_class(model_class: type, share: Share, chain: Chain) -> type:
    """A class whose ``from_pretrained`` reads this rank's weights only; see `whole_skeleton`."""

    class Loading(model_class):
        _keys_to_ignore_on_load_unexpected = (r".*",)  # those of other ranks are in the files, too

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            ties = bool(self.config.tie_word_embeddings)
            set_aside = [
                (parent, name, parent.get_submodule(name))
                for parent, name in foreign(self, share, chain, ties=ties)
            ]
            for parent, name, module in set_aside:
                parent._modules[name] = Placeholder(module)
            object.__setattr__(self, "set_aside", set_aside)
            if not (share.has_first or share.has_last):
                self.all_tied_weights_keys: dict[str, str] = {}

    Loading.__name__, Loading.__qualname__ = model_class.__name__, model_class.__qualname__
    Loading.__module__ = model_class.__module__
    return Loading


def whole_skeleton(model: Any, model_class: type, chain: Chain) -> Any:
    """Put what was set aside back, without memory; the model is of its own class again."""
    for parent, name, module in model.set_aside:
        module.to("meta")
        parent._modules[name] = module
    del model.set_aside
    model.__class__ = model_class
    if model.config.tie_word_embeddings:
        embedding = model.get_submodule(chain.embedding)
        model.get_submodule(chain.head).weight = embedding.weight
    model.all_tied_weights_keys = model.get_expanded_tied_weights_keys(all_submodels=True)
    return model


def cut_away(model: nn.Module, share: Share, chain: Chain) -> None:
    """Leave this rank's modules in a model, which may be whole or a skeleton."""
    base = causal_lm(model)
    for parent, name in foreign(base, share, chain, ties=bool(base.config.tie_word_embeddings)):
        parent._modules[name] = Placeholder(parent.get_submodule(name))


_OF_THE_LOSS = ("labels", "num_trained_tokens", "source_ids", "num_items_in_batch")
"""Of a batch: what only the last stage takes."""

RunLoss = Callable[[nn.Module, dict[str, Any]], Any]
"""Takes a model that ends with a head, and a batch; returns the loss."""


class Stage(nn.Module):
    """Token ids or hidden states in, hidden states or what ``run`` returns out.

    The model's own forward builds masks and rotary tables on every stage. Whatever it makes of the
    embeddings before its layers is for the first stage alone: in the others the states come in
    where their own layers begin. Parameters and layers are shared with the model.

    Args:
        model: cut to this rank's share, adapters and kernels in it; or whole.
        index: of the stage.
        share: of this rank.
        autocast: what the forward pass runs under.
        chain: what the model is.
    """

    def __init__(
        self,
        model: nn.Module,
        index: int,
        share: Share,
        autocast: Callable[[], AbstractContextManager[Any]],
        chain: Chain,
    ) -> None:
        super().__init__()
        base, own = causal_lm(model), share.stages[index]
        self.index = index
        self.is_first, self.is_last = index == 0, index == share.num_stages - 1
        self._crossing = crossing = _Crossing()
        edges: dict[int, Callable[[Tensor], Tensor]] = {
            own[0] - 1: self._arrive,
            own[-1] + 1: self._depart,
        }
        self._layers: list[nn.Module] = [
            layer if number in own else Placeholder(layer, chain.num_outputs, edges.get(number))
            for number, layer in enumerate(base.get_submodule(chain.layers))
        ]
        changed: dict[str, nn.Module] = {chain.layers: nn.ModuleList(self._layers)}
        if not self.is_first:
            for path, shape in chain.before.items():
                changed[path] = _NoEmbedding(base.get_submodule(path), crossing, *shape)
        if not self.is_last:
            changed |= {path: Placeholder(base.get_submodule(path)) for path in chain.after}
        body = _twin(base, changed)
        around, is_inside, _ = chain.layers.partition(".")  # what needs no head
        self.body = getattr(body, around) if is_inside and not self.is_last else body
        self._autocast = autocast

    def layers(self) -> list[nn.Module]:
        return self._layers

    def _arrive(self, states: Tensor) -> Tensor:
        incoming = self._crossing.incoming
        return states if incoming is None else incoming

    def _depart(self, states: Tensor) -> Tensor:
        self._crossing.outgoing = states
        return states.detach()

    def run(self, states: Tensor | None, batch: Mapping[str, Any], loss: RunLoss) -> Any:
        """The stage's part of a forward pass.

        The stages behind the first go on from ``states`` (B, S, H); the last returns what ``loss``
        gives.
        """
        given = dict(batch)
        self._crossing.incoming = None if self.is_first else states
        try:
            with self._autocast():
                if self.is_last:
                    return loss(self.body, given)
                given = {name: value for name, value in given.items() if name not in _OF_THE_LOSS}
                self.body(**given, use_cache=False)
                return self._crossing.outgoing
        finally:
            self._crossing.incoming = self._crossing.outgoing = None


def _twin(module: nn.Module, changed: Mapping[str, nn.Module]) -> Any:
    """The same module with other modules in it; parameters, buffers and hooks stay shared."""
    twin = copy.copy(module)
    twin._modules = dict(module._modules)
    inner: dict[str, dict[str, nn.Module]] = {}
    for path, new in changed.items():
        name, _, rest = path.partition(".")
        if rest:
            inner.setdefault(name, {})[rest] = new
        else:
            twin._modules[name] = new
    for name, those in inner.items():
        child = twin._modules[name]
        assert child is not None
        twin._modules[name] = _twin(child, those)
    return twin
