"""The sections of a recipe, each defined once: its keys, defaults, rules and descriptions.

A recipe is made of them, and the packages that do the work take them as they are. This package
knows errors and nothing else of trainkit, and imports neither torch nor transformers, so a recipe
is checked at once. The names that tables elsewhere give a meaning (formats, roles, ops, strategies,
dtypes, kinds of quantisation) are listed here, too.
"""

from trainkit.options.data import DataSection, ImageOptions, SampleOptions, Source
from trainkit.options.model import Fp8Options, Kernels, LoraOptions, ModelOptions
from trainkit.options.parallel import ParallelOptions, Recompute, RecomputeOptions
from trainkit.options.section import Section, broken_rule
from trainkit.options.training import (
    DistillOptions,
    EaftOptions,
    EarlyStopping,
    FaultOptions,
    GenerationOptions,
    PreferenceOptions,
    TaskOptions,
)

__all__ = [
    "DataSection",
    "DistillOptions",
    "EaftOptions",
    "EarlyStopping",
    "FaultOptions",
    "Fp8Options",
    "GenerationOptions",
    "ImageOptions",
    "Kernels",
    "LoraOptions",
    "ModelOptions",
    "ParallelOptions",
    "PreferenceOptions",
    "Recompute",
    "RecomputeOptions",
    "SampleOptions",
    "Section",
    "Source",
    "TaskOptions",
    "broken_rule",
]
