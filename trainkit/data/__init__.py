"""From files to packed batches: messages, templates, masks, truncation, packing.

The collators live in ``trainkit.data.collator``, the only module here that imports torch.
"""

from trainkit.data.ledger import Entry, Ledger
from trainkit.data.options import DataOptions, Source
from trainkit.data.packing import pack
from trainkit.data.prepare import Progress, prepare
from trainkit.data.prepared import PackedDataset, PreparedData, SampleDataset
from trainkit.data.prompt import PromptRenderer, render_prompt

__all__ = [
    "DataOptions",
    "Entry",
    "Ledger",
    "PackedDataset",
    "PreparedData",
    "Progress",
    "PromptRenderer",
    "SampleDataset",
    "Source",
    "pack",
    "prepare",
    "render_prompt",
]
