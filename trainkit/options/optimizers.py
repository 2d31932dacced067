"""THE TABLE of ``training.optim``: one row per optimizer, by the name that transformers gives it.

What it keeps and how many bytes that takes, where it runs, and what it cannot be combined with. The
recipe's checks, the estimate and the optimizer that a run makes all read it. No torch.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# -- ``training.optim_args``, which are text: what each takes, and its value ----------------------


_ON, _OFF = ("true", "1", "yes"), ("false", "0", "no")


@dataclass(frozen=True)
class Argument:
    """One of ``training.optim_args``, which are text.

    Attributes:
        kind: ``float``, ``int``, ``bool``, or ``str``.
        keeps: bytes of state a trained number, where it is neither 0 nor false.
        like: the field of ``training`` that says the same; one of them may.
    """

    name: str
    kind: type = float
    least: float = 0.0
    below: float = math.inf
    words: tuple[str, ...] = ()
    keeps: float = 0.0
    like: str = ""

    def broken_rule(self, text: str) -> str | None:
        """What the text must be and is not; None where it is right."""
        if self.kind is str:
            return None if text in self.words else f"must be one of {', '.join(self.words)}"
        if self.kind is bool:
            return None if text.lower() in (*_ON, *_OFF) else "must be true or false"
        try:
            value = self.kind(text)
        except ValueError:
            return "must be a whole number" if self.kind is int else "must be a number"
        if self.least <= value < self.below:  # nan is not
            return None
        if not math.isfinite(value):
            return "must be a number"
        end = "" if self.below == math.inf else f" and below {self.below:g}"
        return f"must be {self.least:g} or more{end}"

    def read(self, text: str) -> Any:
        """The value of a text that breaks no rule."""
        return text.lower() in _ON if self.kind is bool else self.kind(text)


def count(name: str, least: int = 1) -> Argument:
    return Argument(name, int, least=least)


def switch(name: str) -> Argument:
    return Argument(name, bool)


def word(name: str, *words: str) -> Argument:
    return Argument(name, str, words=words)


def parts_of(text: str | None) -> list[tuple[str, str]]:
    """``a=1, b=2`` in parts; one without ``=`` has an empty value."""
    parts = (part.partition("=") for part in (text or "").replace(" ", "").split(",") if part)
    return [(name, value) for name, _, value in parts]


ZERO, FSDP2 = "zero", "fsdp2"


@dataclass(frozen=True)
class Package:
    """What has to be installed."""

    module: str
    pip: str


_ADAM = ("adam_beta1", "adam_beta2", "adam_epsilon")


@dataclass(frozen=True)
class Optimizer:
    """One row.

    Attributes:
        about: what it keeps for each trained number.
        matrix_bytes: of state for a number of a layer's matrix, on the GPU.
        per_rank_bytes: for a matrix that is projected to a rank: of state for each of its numbers.
        step_bytes: of temporaries for every trained number, while all step together on a GPU.
        step_largest_bytes: of temporaries for every number of the largest weight.
        slower: of a step, on top of reading and writing all numbers once, as torch's fused AdamW
            does: seconds a weight, seconds a number on an H200, and FLOPs a number over the
            narrower side of its matrix.
        paged: the states wait in host memory, bytes a number; above they count as nothing.
        arguments: what ``training.optim_args`` may hold.
        reads: of ``training``'s ``adam_*`` fields those that it obeys.
        package: what it needs besides torch and transformers.
        is_ours: transformers does not know it.
        shards: under which engines its result is that of one process: `ZERO`, `FSDP2`.
        steps_alone: a parameter's step looks at nothing of another, so that it may run in backward.
        elementwise: not even at other numbers of the same parameter, beyond blocks of 256.
        one_pass: bf16 weights without masters are stepped by one kernel, with no fp32 copy of them.
        instead: of a row that is not served: why, and what to write.
    """

    name: str
    about: str
    matrix_bytes: float = 8.0
    embedding_bytes: float = 8.0
    head_bytes: float = 8.0
    per_rank_bytes: float | None = None
    step_bytes: float = 0.0
    step_largest_bytes: float = 0.0
    slower: tuple[float, float, float] = (0.0, 0.0, 0.0)
    paged: float = 0.0
    arguments: tuple[Argument, ...] = ()
    reads: tuple[str, ...] = _ADAM
    package: Package | None = None
    is_ours: bool = False
    shards: tuple[str, ...] = ()
    why_whole: str = ""
    steps_alone: bool = True
    needs_gpu: bool = False
    elementwise: bool = False
    one_pass: bool = False
    instead: str = ""

    def read(self, text: str | None) -> dict[str, Any]:
        """The values of ``training.optim_args``, without those that are none."""
        known = {argument.name: argument for argument in self.arguments}
        return {
            name: known[name].read(value)
            for name, value in parts_of(text)
            if name in known and known[name].broken_rule(value) is None
        }

    def kept_by(self, text: str | None) -> float:
        """Bytes of state a number that ``training.optim_args`` adds."""
        known = {argument.name: argument.keeps for argument in self.arguments}
        return sum(known[name] for name, value in self.read(text).items() if value)


_BITSANDBYTES = Package("bitsandbytes", "bitsandbytes>=0.50")
_TORCHAO = Package("torchao", "torchao>=0.18")
_GALORE = Package("galore_torch", "galore-torch")
_APOLLO = Package("apollo_torch", "apollo-torch")

_MATRICES = "it looks at whole matrices, and a shard holds a piece of a flat vector"
_EVERYWHERE = (ZERO, FSDP2)
_MOMENTS = "two moments, fp32"
_FACTORED = 0.01
_FUSED, _PLAIN = (0.0, 0.0, 0.0), (30e-6, 0.0, 0.0)
"""`slower` of one kernel for many weights, and of a few; the others' are what steps of a 0.5B took
beyond the estimate, and of a 1B on two GPUs."""


def _torch(
    name: str, about: str, size: float, *arguments: Argument, step: float = 0.0
) -> Optimizer:
    return Optimizer(
        name, about, size, size, size,
        step_bytes=step, arguments=arguments, shards=_EVERYWHERE, elementwise=True,
        reads=_ADAM if "adam" in name else (), slower=_PLAIN if "adam" not in name else _FUSED,
    )  # fmt: skip


def _blockwise(name: str, about: str, size: float, wide: float, *arguments: Argument) -> Optimizer:
    """Of bitsandbytes; embeddings keep fp32 states, as transformers has it."""
    is_paged = name.startswith("paged")
    return Optimizer(
        name,
        about + (", in pages of host memory that the GPU fetches" if is_paged else ""),
        *((0.0, 0.0, 0.0) if is_paged else (size, wide, size)),
        paged=size if is_paged else 0.0,
        arguments=arguments,
        reads=() if "rmsprop" in name else _ADAM[:2] if "lion" in name else _ADAM,
        package=_BITSANDBYTES,
        shards=(ZERO,),
        why_whole="its blocks of 256 numbers do not end where shards do",
        elementwise=True,
        one_pass="adamw" in name,
        slower=(50e-6, 33e-12 if "ada" in name or "ade" in name else 0.0, 0.0),
    )


def _torchao(name: str, about: str, size: float) -> Optimizer:
    return Optimizer(
        name, about, size, size, size, slower=(420e-6, 0.0, 0.0),
        arguments=(count("block_size", 2),), package=_TORCHAO,
        why_whole="its states are tensors of a kind of their own, which shards' files cannot hold",
        elementwise=True,
    )  # fmt: skip


def _low_rank(
    name: str, about: str, package: Package, per_rank: float, *more: Argument
) -> Optimizer:
    return Optimizer(
        name,
        about,
        steps_alone=package is not _APOLLO,  # it draws by a parameter's place among all
        embedding_bytes=_FACTORED if "adafactor" in name else 8.0,
        head_bytes=_FACTORED if "adafactor" in name else 8.0,
        per_rank_bytes=per_rank,
        slower=(160e-6, 0.0, 0.0),
        arguments=(*_PROJECTED, *more),
        reads=() if "adafactor" in name else _ADAM,
        package=package,
        why_whole=_MATRICES,
    )


def _unserved(name: str, instead: str) -> Optimizer:
    return Optimizer(name, "", instead=instead)


_MOMENTUM = Argument("momentum", below=1)
_ADDED_MOMENTUM = Argument("momentum", below=1, keeps=4)
_ADEMAMIX = (
    Argument("beta1", below=1, like="adam_beta1"),
    Argument("beta2", below=1, like="adam_beta2"),
    Argument("beta3", below=1),
    Argument("alpha"),
    Argument("eps", like="adam_epsilon"),
    count("t_alpha"),
    count("t_beta3"),
)
_PROJECTED = (
    count("rank"),
    count("update_proj_gap"),
    Argument("scale"),
    word("proj_type", "std", "reverse_std", "left", "right"),
)
_EIGHT = 1 + 4 / 256
_LOST = "it keeps its states where no checkpoint finds them: write "
_LAYERWISE = f"{_LOST}optim_in_backward: true with "
_UNTRIED = "it has not been held against galore_adamw: write that, or apollo_adamw"
_PAST = "it steps past the Trainer: write optim_in_backward: true with "
_GPUS = "trainkit trains on CPUs and NVIDIA GPUs: write adamw_torch_fused"
_ANY = (
    "its package is kept no more: write adamw_torch_fused; model.master_weights: false trains bf16 "
    "weights without fp32 copies"
)
_AVERAGED = (
    "what it trains is not what it means to be saved and measured: write adamw_torch_fused with "
    "lr_scheduler_type: constant_with_warmup"
)

OPTIMIZERS: Mapping[str, Optimizer] = {
    row.name: row
    for row in (
        _torch("adamw_torch", _MOMENTS, 8, step=4),
        _torch("adamw_torch_fused", _MOMENTS, 8),
        Optimizer(
            "flat_adamw",
            "two moments, fp32, in one buffer, as weights and gradients are",
            is_ours=True,
            why_whole="it keeps weights in a buffer of its own, and the engine does the same",
            steps_alone=False,
        ),
        _torch(
            "sgd", "nothing; with momentum 4 bytes", 0,
            _ADDED_MOMENTUM, Argument("dampening"), switch("nesterov"),
        ),
        _torch(
            "adagrad", "a sum of squares, fp32", 4, Argument("lr_decay"), Argument("eps"), step=8
        ),
        _torch(
            "rmsprop", "a mean of squares, fp32", 4,
            _ADDED_MOMENTUM, Argument("alpha", below=1), Argument("eps"),
            Argument("centered", bool, keeps=4), step=4,
        ),
        Optimizer(
            "adafactor", "a mean of squares of each row and column, fp32", _FACTORED, _FACTORED,
            _FACTORED, step_largest_bytes=8, why_whole=_MATRICES, reads=(),
            slower=(180e-6, 0.0, 0.0),
        ),
        Optimizer(
            "muon", "a momentum of hidden matrices, fp32; elsewhere AdamW", 4.0,
            step_largest_bytes=10, slower=(250e-6, 0.0, 25.0),
            arguments=(
                _MOMENTUM,
                switch("nesterov"),
                Argument("ns_steps", int, least=1, below=100),
                word("adjust_lr_fn", "original", "match_rms_adamw"),
            ),
            is_ours=True,
            why_whole=_MATRICES,
        ),
        _blockwise("adamw_8bit", "two moments, 8 bits", 2 * _EIGHT, 8),
        _blockwise("adamw_bnb_8bit", "two moments, 8 bits", 2 * _EIGHT, 8),
        _blockwise("paged_adamw_8bit", "two moments, 8 bits", 2 * _EIGHT, 8),
        _blockwise("paged_adamw_32bit", _MOMENTS, 8, 8),
        _torchao("adamw_torch_8bit", "two moments, 8 bits", 2 * _EIGHT),
        _torchao("adamw_torch_4bit", "two moments, 4 bits", 1 + 8 / 256),
        _blockwise("lion_8bit", "a momentum, 8 bits", _EIGHT, 4),
        _blockwise("lion_32bit", "a momentum, fp32", 4, 4),
        _blockwise("paged_lion_8bit", "a momentum, 8 bits", _EIGHT, 4),
        _blockwise("paged_lion_32bit", "a momentum, fp32", 4, 4),
        _blockwise("ademamix_8bit", "three moments, 8 bits", 3 * _EIGHT, 12, *_ADEMAMIX),
        _blockwise("ademamix", "three moments, fp32", 12, 12, *_ADEMAMIX),
        _blockwise("paged_ademamix_8bit", "three moments, 8 bits", 3 * _EIGHT, 12, *_ADEMAMIX),
        _blockwise("paged_ademamix_32bit", "three moments, fp32", 12, 12, *_ADEMAMIX),
        _blockwise("rmsprop_bnb_8bit", "a mean of squares, 8 bits", _EIGHT, 4),
        _blockwise("rmsprop_bnb", "a mean of squares, fp32", 4, 4),
        _blockwise("rmsprop_bnb_32bit", "a mean of squares, fp32", 4, 4),
        _low_rank("galore_adamw", "two moments of projected gradients", _GALORE, 8),
        _low_rank("galore_adafactor", "row and column means of the same", _GALORE, 0),
        _low_rank(
            "apollo_adamw", "two moments of randomly projected gradients", _APOLLO, 8,
            word("proj", "random", "svd"), word("scale_type", "channel", "tensor"),
        ),
        Optimizer(
            "stable_adamw", _MOMENTS, slower=(35e-6, 0.0, 0.0),
            arguments=(Argument("max_lr"), switch("kahan_sum"), switch("decouple_lr")),
            package=Package("optimi", "torch-optimi"),
            why_whole="it clips by the whole of a weight",
            needs_gpu=True,
        ),
        _unserved("galore_adamw_8bit", _UNTRIED),
        _unserved("galore_adamw_layerwise", f"{_LAYERWISE}galore_adamw"),
        _unserved("galore_adamw_8bit_layerwise", f"{_LAYERWISE}galore_adamw"),
        _unserved("galore_adafactor_layerwise", f"{_LAYERWISE}galore_adafactor"),
        _unserved("apollo_adamw_layerwise", f"{_LOST}apollo_adamw"),
        _unserved("grokadamw", _LOST + "adamw_torch_fused"),
        _unserved("lomo", f"{_PAST}sgd"),
        _unserved("adalomo", f"{_PAST}adafactor"),
        _unserved("schedule_free_adamw", _AVERAGED),
        _unserved("schedule_free_radam", _AVERAGED),
        _unserved("schedule_free_sgd", _AVERAGED),
        _unserved("adamw_torch_xla", _GPUS),
        _unserved("adamw_torch_npu_fused", _GPUS),
        _unserved("adamw_anyprecision", _ANY),
    )
}  # fmt: skip

DEFAULT = "adamw_torch_fused"
OURS: tuple[str, ...] = tuple(name for name, row in OPTIMIZERS.items() if row.is_ours)
"""Those that transformers does not know."""

SERVED: tuple[str, ...] = tuple(name for name, row in OPTIMIZERS.items() if not row.instead)


def optimizer_row(name: object) -> Optimizer:
    """The row of a name, or of what transformers makes of it; of None that of the default."""
    return OPTIMIZERS.get(str(getattr(name, "value", name)), OPTIMIZERS[DEFAULT])


# -- Optimizers by the names that other tools give them, and what to write here -------------------


_OTHERS: Mapping[str, Mapping[str, Sequence[str]]] = json.loads(
    Path(__file__).with_suffix(".json").read_text(encoding="utf-8")
)


def _bare(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "")


def _turned(table: Mapping[str, Sequence[str]]) -> dict[str, str]:
    return {_bare(other): ours for ours, others in table.items() for other in others}


_SERVED_AS, _NEAR = _turned(_OTHERS["same"]), _turned(_OTHERS["nearest"])


def served_as(name: str, served: Iterable[str]) -> str | None:
    """What is the same here as another tool's optimizer; None where nothing is."""
    package, _, word = name.rpartition(".")
    if package.startswith("torchao"):
        return _SERVED_AS.get("ao" + _bare(word))
    own = {_bare(each): each for each in served}
    return _SERVED_AS.get(_bare(word)) or own.get(_bare(word))


def nearest_of(name: str) -> str | None:
    """What to take in place of another tool's optimizer that is not served; None for any other."""
    return _NEAR.get(_bare(name.rpartition(".")[2]))
