"""From files to packed batches: messages, templates, masks, truncation, packing.

The collators live in ``trainkit.data.collator``, the only module here that imports torch.
"""

from trainkit.data.datasets import PackedDataset, PreparedData, SampleDataset, pack
from trainkit.data.options import DataOptions
from trainkit.data.sources import Progress, prepare
from trainkit.data.store import Entry, Ledger
from trainkit.options import Source

__all__ = [
    "DataOptions",
    "Entry",
    "Ledger",
    "PackedDataset",
    "PreparedData",
    "Progress",
    "SampleDataset",
    "Source",
    "pack",
    "prepare",
]
