"""What each token may look at: itself and earlier tokens, of its document, inside its window.

transformers asks for a mask (`make_mask`) and hands the answer to every layer unread. Where the
mask is causal, the answer is a `Pattern`, from which each engine takes what it needs: bounds, a
window, a block mask, or one block of a dense mask. No mask of a whole row squared is ever made,
unless the model itself reads its mask.

Nothing here makes the host wait for the device in training. Shapes: B batch, S sequence.
"""

import functools
import itertools
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from transformers.masking_utils import (
    and_masks,
    causal_mask_function,
    sdpa_mask,
    sliding_window_overlay,
)

from trainkit.errors import ModelError
from trainkit.parallel.rows import RowSplit

Engine = Literal["varlen", "flex", "blocks"]
"""The fastest that may run; a layer that it cannot serve runs on the next."""

MaskFunction = Callable[[Any, Any, Any, Any], Any]
"""transformers': (row, head, query, key) -> whether the query may look at the key."""


@dataclass(frozen=True, eq=False)
class Documents:
    """The documents of a packed batch, end to end; padding is one as well.

    Args:
        bounds: (documents + 1,) int32, in the flattened batch.
        longest: tokens of the longest one.
        keys: where some begin with tokens of another: the tokens that each attends to, one document
            after the other; (documents + 1,) their bounds; and of the longest.
    """

    bounds: Tensor
    longest: int
    keys: tuple[Tensor, Tensor, int] | None = None

    @functools.cached_property
    def prefixes(self) -> tuple[Tensor, Tensor]:
        """(documents,) where the shared tokens of each are, and how many."""
        if self.keys is None:
            return torch.zeros_like(self.bounds[1:]), torch.zeros_like(self.bounds[1:])
        tokens, bounds, _ = self.keys
        return tokens[bounds[:-1].clamp(max=len(tokens) - 1)], bounds.diff() - self.bounds.diff()

    def numbers(self, batch_size: int, length: int) -> Tensor:
        """(B, S): which document each token belongs to."""
        tokens = torch.arange(batch_size * length, device=self.bounds.device)
        return torch.bucketize(tokens, self.bounds[1:-1], right=True).view(batch_size, length)

    def apart(self, function: MaskFunction, batch_size: int, length: int) -> MaskFunction:
        """The same mask in each document: its positions count from the document's start."""
        numbers = self.numbers(batch_size, length)
        tokens = torch.arange(batch_size * length, device=numbers.device).view(numbers.shape)
        firsts, counts = (each[numbers] for each in self.prefixes)
        positions = tokens - self.bounds[numbers] + counts
        is_shared = self.keys is not None

        def inside(b: Any, h: Any, q: Any, kv: Any) -> Any:
            seen = numbers[b, q] == numbers[b, kv]
            if is_shared:
                place = tokens[b, kv] - firsts[b, q]
                seen = seen | ((place >= 0) & (place < counts[b, q]))
            return seen & function(b, h, positions[b, q], positions[b, kv])

        return inside


@dataclass(frozen=True, eq=False)
class Batch:
    """What `install`'s hooks know of the batch that is going through.

    Attributes:
        split: how rows are shared by ranks; None where the batch has whole ones.
    """

    engine: Engine
    documents: Documents | None = None
    split: RowSplit | None = None


current_batch: ContextVar[Batch | None] = ContextVar("current_batch", default=None)
"""Set by `install`'s hooks; transformers' way to a mask has no room for it."""


class Pattern:
    """A causal mask that is not spelled out. To the layers it is opaque."""

    def __init__(
        self,
        function: MaskFunction,
        batch_size: int,
        length: int,
        *,
        device: torch.device,
        engine: Engine = "blocks",
        documents: Documents | None = None,
        use_vmap: bool = False,
        split: RowSplit | None = None,
    ) -> None:
        self.is_plain, self.window = _causal_or_window(function)
        if self.window is not None and self.window >= length:
            self.window = None
        self.batch_size = batch_size
        self.length = length
        self.device = device
        self.engine = engine
        self.documents = documents
        self.split = split
        self._function = function
        self._use_vmap = use_vmap

    @property
    def is_causal_only(self) -> bool:
        """Plain causality over whole rows: no mask is needed."""
        return self.is_plain and self.window is None and self.documents is None

    @functools.cached_property
    def bounds(self) -> Tensor:
        """(documents + 1,) int32 in the flattened batch; without documents, of the rows."""
        if self.documents is not None:
            return self.documents.bounds
        total = self.batch_size * self.length
        return torch.arange(0, total + 1, self.length, dtype=torch.int32, device=self.device)

    @property
    def longest(self) -> int:
        return self.length if self.documents is None else self.documents.longest

    @functools.cached_property
    def spans(self) -> list[tuple[slice, int, int]]:
        """(rows, start, stop) of every document; the host waits for the bounds, once a batch."""
        if self.documents is None:
            return [(slice(None), 0, self.length)]
        found = []
        bounds = self.documents.bounds.tolist()
        for start, stop in itertools.pairwise(bounds):
            row, offset = divmod(start, self.length)
            if stop > start:
                found.append((slice(row, row + 1), offset, offset + stop - start))
        return found

    @functools.cached_property
    def shared(self) -> dict[tuple[int, int], slice]:
        """Row and start of each document that begins with tokens of another: where these are."""
        if self.documents is None or self.documents.keys is None:
            return {}
        lists = (each.tolist() for each in (self.documents.bounds[:-1], *self.documents.prefixes))
        found = {}
        for start, first, count in zip(*lists, strict=True):
            if count:
                row, offset = divmod(start, self.length)
                begin = first - row * self.length
                found[row, offset] = slice(begin, begin + count)
        return found

    def block(self, rows: slice, start: int, queries: slice, keys: slice) -> Tensor:
        """(rows, 1, queries, keys), bool: one block of the mask of one document."""
        first, stop, _ = rows.indices(self.batch_size)

        def shifted(b: Any, h: Any, q: Any, kv: Any) -> Any:
            return self._function(b + first, h, q, kv)

        return sdpa_mask(
            batch_size=stop - first,
            q_length=queries.stop - queries.start,
            kv_length=keys.stop - keys.start,
            q_offset=queries.start - start,
            kv_offset=keys.start - start,
            mask_function=shifted,
            allow_is_causal_skip=False,
            use_vmap=self._use_vmap,
            device=self.device,
        )

    @functools.cached_property
    def block_mask(self) -> BlockMask:
        """For flex attention, which skips blocks in which nobody looks at anything."""
        function = self._function
        if self.documents is not None:
            function = self.documents.apart(function, self.batch_size, self.length)
        sizes = (self.batch_size, None, self.length, self.length)
        # Uncompiled it would write out the dense mask first.
        compiled = self.device.type == "cuda"
        return create_block_mask(function, *sizes, device=self.device, _compile=compiled)


def make_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    mask_function: MaskFunction = causal_mask_function,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **settings: Any,
) -> Tensor | Pattern | None:
    """Transformers' mask hook: a `Pattern` where the mask is causal, else SDPA's dense mask.

    Padding needs no mask where it comes after the tokens: no token sees it, and its own outputs
    have no label. In training that is asserted on the device.

    Args:
        batch_size: B.
        q_length: rows of the mask.
        kv_length: its columns.
        q_offset: of the first row.
        kv_offset: of the first column.
        mask_function: what may be looked at.
        attention_mask: (B, kv_length), bool, true for tokens.
        allow_is_causal_skip: false where the model reads the mask, or its function is not causal.
        use_vmap: the function takes single indices only.
        device: of the mask.
        settings: passed on to transformers' ``sdpa_mask``.
    """
    batch = current_batch.get()
    documents = None if batch is None else batch.documents
    fresh = isinstance(q_offset, int) and q_offset == kv_offset == 0 and q_length == kv_length
    split = None if batch is None else batch.split
    if split is not None:
        _require_causal(fresh and allow_is_causal_skip)
        q_length, kv_length = q_length * split.size, kv_length * split.size
        attention_mask = None
    if documents is not None:
        if not fresh:
            raise ModelError(
                f"packed documents attend to themselves only, and here {q_length} tokens look at "
                f"{kv_length}",
                where="data.packing",
                fix="set data.packing to false",
            )
        attention_mask = None  # all ones: `install` says so to keep transformers from looking
        if not allow_is_causal_skip:
            mask_function = documents.apart(mask_function, batch_size, q_length)
    if fresh and allow_is_causal_skip and _padding_is_last(attention_mask, q_length):
        return Pattern(
            mask_function,
            batch_size,
            q_length,
            device=torch.device(device),
            engine="blocks" if batch is None else batch.engine,
            documents=documents,
            use_vmap=use_vmap,
            split=split,
        )
    return sdpa_mask(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        allow_is_causal_skip=allow_is_causal_skip,
        use_vmap=use_vmap,
        device=device,
        **settings,
    )


def _require_causal(is_causal: bool) -> None:
    """Ranks that share rows have one mask, that of whole rows; a model gets none to read."""
    if not is_causal:
        raise ModelError(
            "the model reads its mask, or looks at other tokens than its own row's",
            where="parallel.sequence",
            fix="remove parallel.sequence",
        )


def _padding_is_last(attention_mask: Tensor | None, length: int) -> bool:
    """Whether no padding precedes a token; in training that must be so, and nobody waits for it."""
    if attention_mask is None:
        return True
    if attention_mask.shape[-1] != length:
        return False
    last = (attention_mask[:, 1:] <= attention_mask[:, :-1]).all()
    if torch.is_grad_enabled():
        torch._assert_async(
            last, "trainkit's attention trains on right-padded rows only; these are not"
        )
        return True
    return not torch.compiler.is_compiling() and bool(last)


def _causal_or_window(function: MaskFunction) -> tuple[bool, int | None]:
    """Whether it is plain causality or a sliding window, and how wide that is.

    Functions are recognised by their code: any other one is run as it is, never guessed at.
    """
    if function is causal_mask_function:
        return True, None
    code = getattr(function, "__code__", None)
    if code is and_masks(causal_mask_function).__code__:
        parts = _captured(function)["mask_functions"]
        others = [each for each in parts if each is not causal_mask_function]
        overlay = sliding_window_overlay(1).__code__
        if len(others) == 1 < len(parts) and getattr(others[0], "__code__", None) is overlay:
            window = _captured(others[0])["sliding_window"]
            if isinstance(window, int):
                return True, window
    return False, None


def _captured(function: Any) -> dict[str, Any]:
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    return dict(zip(function.__code__.co_freevars, cells, strict=True))
