"""THE TABLE of GPUs: memory, matrix throughput and memory bandwidth by the vendors' datasheets."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, replace

from trainkit.errors import RecipeError
from trainkit.options.section import did_you_mean

ANCHOR = "h200"
"""The GPU that speeds are measured on; others are scaled by the datasheet."""


@dataclass(frozen=True)
class Gpu:
    """One row.

    Attributes:
        teraflops: dense bf16 with fp32 sums.
        link: to another GPU of the host, in GB/s one way.
        fp8: twice the throughput in fp8.
        words: that a driver's name for it contains.
    """

    name: str
    memory_gib: float
    teraflops: float
    bandwidth: float
    link: float
    fp8: bool
    words: tuple[str, ...]


GPUS: Mapping[str, Gpu] = {
    row.name: row
    for row in (
        Gpu("h200", 139.8, 989, 4800, 450, True, ("H200",)),
        Gpu("h100", 79.2, 989, 3350, 450, True, ("H100 80GB HBM3", "H100", "H800")),
        Gpu("h100-pcie", 79.2, 756, 2000, 64, True, ("H100 PCIe",)),
        Gpu("h100-nvl", 93.1, 835, 3900, 300, True, ("H100 NVL",)),
        Gpu("b200", 178.4, 2250, 8000, 900, True, ("B200",)),
        Gpu("a100-80g", 79.2, 312, 2039, 300, False, ("A100-SXM4-80GB", "A100 80GB PCIe", "A800")),
        Gpu("a100-40g", 39.4, 312, 1555, 300, False, ("A100-SXM4-40GB", "A100-PCIE-40GB")),
        Gpu("l40s", 44.4, 362, 864, 32, True, ("L40S",)),
        Gpu("l4", 22.0, 121, 300, 32, True, ("L4",)),
        Gpu("a10g", 22.1, 70, 600, 32, False, ("A10G",)),
        Gpu("rtx-6000-ada", 47.4, 364, 960, 32, True, ("RTX 6000 Ada",)),
        Gpu("rtx-a6000", 47.4, 155, 768, 56, False, ("RTX A6000",)),
        Gpu("5090", 31.3, 210, 1792, 64, True, ("RTX 5090",)),
        Gpu("4090", 23.5, 165, 1008, 32, True, ("RTX 4090",)),
        Gpu("3090", 23.6, 71, 936, 32, False, ("RTX 3090",)),
    )
}


_FOUND = 0.98
"""Of the GiB that a card is sold with: what a process finds."""


def gpu_of(name: str) -> Gpu:
    """The row of a name, as the table, a shop or the driver writes it.

    Of a size as 24g the row that is nearest, with so much memory; of a name with a size that its
    row does not have, as h100-94g, the row with that.
    """
    if size := re.fullmatch(r"(\d+)\s*g(?:i?b)?", name.lower()):
        memory = _memory(size[1], name)
        like = min(GPUS.values(), key=lambda row: abs(row.memory_gib - memory))
        return replace(like, name=name.lower(), memory_gib=memory, words=())
    plain = re.sub(r"[\s_]+", "-", name.strip().lower())
    plain = re.sub(r"^((nvidia|geforce|tesla)-|rtx-?(?=\d{4}(-\d+gi?b?)?$))+", "", plain)
    plain = re.sub(r"(?<=\d)gi?b$", "g", plain)
    if plain in GPUS:
        return GPUS[plain]
    bare, _, size_text = plain.rpartition("-")
    if named := GPUS.get(bare) or gpu_named(name):
        sizes = re.findall(r"(\d+)\s*gi?b?\b", name.lower())
        memory = _memory(sizes[-1], name) if sizes else named.memory_gib
        if not sizes and bare and size_text and named.name == bare:
            raise _unknown(name, plain)
        is_as_sold = abs(memory / named.memory_gib - 1) < _SOLD
        return named if is_as_sold else replace(named, name=plain, memory_gib=memory)
    raise _unknown(name, plain)


_SOLD = 0.08
"""A card that is sold with so much more than a process finds is the row's own."""


def _memory(gigabytes: str, name: str) -> float:
    if not 1 <= int(gigabytes) <= 10_000:
        raise RecipeError(f"no GPU has {name}", where="--gpu", fix="write a size as 24g")
    return int(gigabytes) * _FOUND


def _unknown(name: str, plain: str) -> RecipeError:
    sizes = [known for known in GPUS if known.startswith(f"{plain}-")]
    near = f"there are {' and '.join(sizes)}" if sizes else did_you_mean(plain, list(GPUS))
    known = near or f"known are {', '.join(GPUS)}"
    fix = f"{known.rstrip('?')}; or a size as 24g"
    return RecipeError(f"no GPU {name!r} in the table", where="--gpu", fix=fix)


def gpu_named(driver_name: str) -> Gpu | None:
    """The row of the name that a driver gives, the longest match; None where no row has it."""
    found = [
        (len(word), row.name)
        for row in GPUS.values()
        for word in row.words
        if re.search(rf"\b{re.escape(word)}\b", driver_name, re.IGNORECASE)
    ]
    return GPUS[max(found)[1]] if found else None


def this_gpu() -> Gpu | None:
    """The row of this machine's first GPU, asked of the driver; None without one."""
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    listing = subprocess.run(command, capture_output=True, text=True, check=False)
    first = listing.stdout.partition("\n")[0]
    return gpu_named(first) if listing.returncode == 0 and first else None
