"""The one engine that swaps the classes of a model's modules, and undoes it.

A module is changed by giving it a generated subclass as ``__class__``: parameters, buffers, hooks,
state dict and the names of classes stay as they are, and reverting gives back the very model.
Kernels, fused adapters and fp8 linears all come in this way, and may lie on top of each other.

A swapped module pickles and deep-copies: it is saved as its plain class and the forwards on top.

What every forward that is swapped in says about itself, and what a proof says.
"""

import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import nn

from trainkit.errors import PatchError

_Layer = tuple[type[nn.Module], tuple[tuple[str, object], ...]]
"""A forward and its settings, as they lie on a class."""

_generated: dict[tuple[type[nn.Module], _Layer], type[nn.Module]] = {}
_made_of: dict[type[nn.Module], tuple[type[nn.Module], _Layer]] = {}
"""Every generated class: the class below, and what lies on it."""


def subclass_of(
    below: type[Any], forward: type[Any], settings: Mapping[str, object] | None = None
) -> type[Any]:
    """``forward`` in front of the class ``below``, under its name; made once.

    The name stays because others look classes up by it: FSDP's wrapping policy, transformers'
    record of outputs, ``_no_split_modules``. Building it as a subclass lets transformers' layer
    class wrap the new forward for gradient checkpointing.

    Args:
        below: the plain class, or one that this function made before.
        forward: the mixin whose ``super().forward`` is that of ``below``.
        settings: class attributes; plain values, since a pickled module carries them.
    """
    layer = (forward, tuple(sorted((settings or {}).items())))
    if (below, layer) not in _generated:
        namespace = {
            "__module__": below.__module__,
            "__qualname__": below.__qualname__,
            "__doc__": below.__doc__,
            "__reduce_ex__": _reduce,
            **(settings or {}),
        }
        made: type[nn.Module] = type(below.__name__, (forward, below), namespace)
        _generated[below, layer] = made
        _made_of[made] = (below, layer)
    return _generated[below, layer]


def plain_class(module: nn.Module) -> type[nn.Module]:
    """The class a module has, or had before anything was swapped in."""
    return _layers(type(module))[0]


class Swaps:
    """Classes swapped into one model, all or none; undone by `revert`.

    Modules are found again by their classes, so copies that peft makes of them are undone as well.
    The model is not kept alive.
    """

    def __init__(self, model: nn.Module, plan: Mapping[nn.Module, type[nn.Module]]) -> None:
        self._model = weakref.ref(model)
        self._classes = set(plan.values())
        for module, made in plan.items():
            module.__class__ = made

    @property
    def model(self) -> nn.Module:
        model = self._model()
        if model is None:
            raise PatchError("the patched model no longer exists")
        return model

    @property
    def active(self) -> bool:
        """Whether anything is swapped in: False after `revert`, or when nothing was to be."""
        return bool(self._classes)

    def revert(self) -> None:
        """Give every module its class back; a second call does nothing.

        The model computes bit for bit what it computed before.
        """
        for module in self._modules():
            if type(module) not in self._classes:
                raise PatchError(
                    f"{type(module).__name__} has another class swapped on top",
                    fix="undo the later change first, with its own revert",
                )
        self._restore()
        self._classes = set()

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Within, the model runs without these swaps, and without what lies on top of them."""
        before = self._restore()
        try:
            yield
        finally:
            for module, made in before.items():
                module.__class__ = made

    def joined(self, later: "Swaps") -> "Swaps":
        """These swaps and later ones in the same model as one, undone together."""
        both = Swaps(self.model, {})
        both._classes = self._classes | later._classes
        return both

    def _modules(self) -> Iterator[nn.Module]:
        classes = tuple(self._classes)
        return (module for module in self.model.modules() if isinstance(module, classes))

    def _restore(self) -> dict[nn.Module, type[nn.Module]]:
        """Give the modules the classes from below these swaps; returns what they had."""
        before = {module: type(module) for module in self._modules()}
        for module, made in before.items():
            ours = [kind for kind in made.__mro__ if kind in self._classes]
            module.__class__ = _made_of[ours[-1]][0]
        return before


def _layers(kind: type[nn.Module]) -> tuple[type[nn.Module], list[_Layer]]:
    """A class as the plain class at the bottom and what lies on it, lowest first."""
    layers: list[_Layer] = []
    while kind in _made_of:
        kind, layer = _made_of[kind]
        layers.insert(0, layer)
    return kind, layers


def _reduce(module: nn.Module, protocol: int) -> tuple[Any, ...]:
    """For pickle and copy: a generated class cannot be found by its name, so say how to make it."""
    state: tuple[Any, ...] = tuple(object.__reduce_ex__(module, max(int(protocol), 2)))[2:]
    return (_new, _layers(type(module)), *state)


def _new(kind: type[nn.Module], layers: list[_Layer]) -> nn.Module:
    """An empty module of a generated class, made again where it does not exist yet."""
    for forward, settings in layers:
        kind = subclass_of(kind, forward, dict(settings))
    return kind.__new__(kind)


class KernelForward(nn.Module):
    """A mixin in front of Hugging Face's class: ``super().forward`` is that class's own code.

    Weights are read as ``self.x.weight`` while the forward runs; ZeRO-3 gathers them then.
    Single-token decoding keeps Hugging Face's code: at that size a step is bound by launches, and
    generation stays what it was, bit for bit, after the prompt.
    """

    uses: ClassVar[tuple[str, ...]] = ()
    """The public functions of ``trainkit.kernels`` it calls."""
    keeps_documents_apart: ClassVar[bool] = False
    """Whether it carries state from token to token, and stops at the end of a packed document."""

    def decodes(self, x: torch.Tensor) -> bool:
        """Whether this call generates one token: then Hugging Face's own forward runs."""
        return not self.training and x.shape[1] == 1 and not torch.is_grad_enabled()
