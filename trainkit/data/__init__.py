"""From files to packed batches: messages, templates, masks, truncation, packing.

The collators live in ``trainkit.data.serve.collator``, the only module here that imports torch.
"""

from trainkit.data.build.datasets import PackedDataset, PreparedData, SampleDataset, pack
from trainkit.data.build.ledger import Entry, Ledger
from trainkit.data.build.prepare import Progress, prepare
from trainkit.data.options import DataOptions
from trainkit.data.render.prompt import PromptRenderer, render_prompt
from trainkit.options import Source

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
