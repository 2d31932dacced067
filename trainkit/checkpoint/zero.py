"""Reads the weights out of a DeepSpeed ZeRO-1, 2 or 3 checkpoint, without a GPU or DeepSpeed.

The shards are pickles. They are read with torch's weights-only unpickler, which runs no code; the
three classes of DeepSpeed that they name are replaced by empty stand-ins. What comes out are the
float32 master weights of what was trained and the stored weights of what was frozen.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainkit.checkpoint.weights.adapter import CONFIG_NAME, PREFIX, read_adapter_config
from trainkit.checkpoint.weights.companions import copy_companions
from trainkit.checkpoint.weights.contents import open_pickle
from trainkit.checkpoint.weights.export import DTYPES, export_plain
from trainkit.checkpoint.weights.plain_files import plain_file, read_config, write_json
from trainkit.checkpoint.weights.reader import ADAPTER_WEIGHTS, TensorInfo, finite
from trainkit.checkpoint.weights.writer import save_tensors
from trainkit.errors import CheckpointError

_MODEL_STATES = re.compile(r"^(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt$")
_OPTIM_STATES = re.compile(r"^(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt$")
_TAG = re.compile(r"^global_step(\d+)$")


def find_zero_folder(checkpoint: Path) -> Path | None:
    """The folder of ZeRO shards in a checkpoint directory: the newest ``global_step`` folder.

    The ``latest`` file is not believed: DeepSpeed writes it before all ranks have written.
    """
    found = [
        (int(match.group(1)), path)
        for path in Path(checkpoint).iterdir()
        if path.is_dir() and (match := _TAG.match(path.name))
    ]
    return max(found)[1] if found else None


class ZeroReader:
    """The weights of one ZeRO checkpoint, put together tensor by tensor.

    Use it as a context manager. The shards are mapped, not read: memory is one tensor's.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)
        try:
            self._open()
        except (TypeError, ValueError, LookupError, AttributeError, RuntimeError) as error:
            raise CheckpointError(
                f"the shards are not laid out as DeepSpeed does ({type(error).__name__}: {error})",
                where=str(folder),
            ) from error

    def _open(self) -> None:
        models = [_load(path) for path in self._files(_MODEL_STATES)]
        optims = [
            _entry(_load(path), "optimizer_state_dict") for path in self._files(_OPTIM_STATES)
        ]
        self._is_partitioned = "fp32_flat_groups" in optims[0]
        self._world_size = len(optims)
        self._check_complete(models, optims)
        self._models, self._optims = models, optims
        self._trained = self._find_trained()
        self._infos = {name: self._info(name) for name in self._names()}

    def __enter__(self) -> "ZeroReader":
        return self

    def __exit__(self, *_: object) -> None:
        self._models, self._optims = [], []

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every weight and saved buffer; tied weights once, under the name that holds them."""
        return self._infos

    @property
    def tied(self) -> Mapping[str, str]:
        """Names that are another name's weight."""
        return dict(self._models[0].get("shared_params") or {})

    def load(self, name: str) -> Tensor:
        shape = self._infos[name].shape
        if name in self._trained:
            pieces = [group[start : start + size] for group, start, size in self._trained[name]]
        elif name in self._frozen(0):
            pieces = [
                self._frozen(rank)[name].reshape(-1)
                for rank in range(len(self._models) if self._is_partitioned else 1)
            ]
        else:
            pieces = [self._models[0]["module"][name].reshape(-1)]
        whole = torch.cat(pieces)[: math.prod(shape)].reshape(shape).clone()
        return finite(name, whole, self.folder)

    def _files(self, pattern: re.Pattern[str]) -> list[Path]:
        matches = [(pattern.match(path.name), path.name) for path in self.folder.iterdir()]
        found = sorted(
            (int(match.group(1) or 0), int(match.group(2)), name)
            for match, name in matches
            if match is not None
        )
        if any(model_rank for _, model_rank, _ in found):
            raise CheckpointError(
                "it was trained with tensor parallelism; only data-parallel shards are known here",
                where=str(self.folder),
            )
        if not found or [rank for rank, _, _ in found] != list(range(len(found))):
            raise CheckpointError(
                f"shards {[name for _, _, name in found] or 'of ' + pattern.pattern} are not all",
                where=str(self.folder),
            )
        return [plain_file(self.folder, name) for _, _, name in found]

    def _check_complete(
        self, models: Sequence[Mapping[str, Any]], optims: Sequence[Mapping[str, Any]]
    ) -> None:
        counts = [_entry(optim, "partition_count") for optim in optims]
        wanted = {max(count) if isinstance(count, list) else count for count in counts}
        num_models = self._world_size if self._is_partitioned else 1
        if wanted != {self._world_size} or len(models) != num_models:
            raise CheckpointError(
                f"{self._world_size} optimizer shards and {len(models)} model shards of a run "
                f"with {sorted(wanted)} ranks",
                where=str(self.folder),
            )

    def _names(self) -> list[str]:
        """In the model's own order, without the second names of tied weights."""
        module = _entry(self._models[0], "module")
        tied = self._models[0].get("shared_params") or {}
        known = {**dict.fromkeys(self._trained), **dict.fromkeys(self._frozen(0))}
        buffers = set(self._models[0].get("buffer_names") or ())
        order = [name for name in module if name not in tied]
        unknown = [name for name in order if name not in known and name not in buffers]
        # ZeRO-1 writes no list of frozen weights: they are whole among the model's own.
        lists_frozen = self._models[0].get("frozen_param_fragments") is not None
        if unknown and (self._is_partitioned or lists_frozen):
            raise CheckpointError(
                f"{len(unknown)} weights are in no shard: {unknown[:4]}", where=str(self.folder)
            )
        return order + [name for name in known if name not in module]

    def _info(self, name: str) -> TensorInfo:
        if name in self._trained:
            shape = next(group[name] for group in self._param_shapes() if name in group)
            return TensorInfo(name, torch.float32, tuple(shape))
        if name in self._frozen(0):
            shape = self._models[0]["frozen_param_shapes"][name]
            return TensorInfo(name, self._frozen(0)[name].dtype, tuple(shape))
        buffer = self._models[0]["module"][name]
        return TensorInfo(name, buffer.dtype, tuple(buffer.shape))

    def _param_shapes(self) -> list[Mapping[str, Sequence[int]]]:
        shapes = _entry(self._models[0], "param_shapes")
        return shapes if isinstance(shapes, list) else [shapes]

    def _frozen(self, rank: int) -> Mapping[str, Tensor]:
        return self._models[rank].get("frozen_param_fragments") or {}

    def _find_trained(self) -> dict[str, list[tuple[Tensor, int, int]]]:
        """Name to its pieces in the order of the ranks: flat buffer, start, length."""
        found = self._from_partitions() if self._is_partitioned else self._from_slices()
        for shapes in self._param_shapes():
            for name, shape in shapes.items():
                pieces = found.get(name, [])
                have = sum(size for _, _, size in pieces)
                is_inside = all(0 <= start <= len(group) - size for group, start, size in pieces)
                if have < math.prod(shape) or not is_inside:
                    raise CheckpointError(
                        f"{name} needs {math.prod(shape)} values and the shards hold {have}",
                        where=str(self.folder),
                    )
        return found

    def _from_slices(self) -> dict[str, list[tuple[Tensor, int, int]]]:
        """ZeRO-1 and 2 write down which slice of which parameter each rank holds."""
        found: dict[str, list[tuple[Tensor, int, int]]] = {}
        for optim in self._optims:
            groups = _entry(optim, "single_partition_of_fp32_groups")
            for group, slices in zip(groups, _entry(optim, "param_slice_mappings"), strict=True):
                for name, place in slices.items():
                    found.setdefault(name, []).append((group, place.start, place.numel))
        return found

    def _from_partitions(self) -> dict[str, list[tuple[Tensor, int, int]]]:
        """ZeRO-3 gives every rank an equal part of each parameter, the last one padded."""
        groups = [_entry(optim, "fp32_flat_groups") for optim in self._optims]
        found: dict[str, list[tuple[Tensor, int, int]]] = {}
        start = 0
        for shapes in self._param_shapes():
            for name, shape in shapes.items():
                size = math.ceil(math.prod(shape) / self._world_size)
                found[name] = [piece for rank in groups for piece in _cut(rank, start, size)]
                start += size
        return found


def _cut(groups: Sequence[Tensor], start: int, size: int) -> Iterator[tuple[Tensor, int, int]]:
    """The part ``[start, start + size)`` of buffers laid end to end, without joining them."""
    for group in groups:
        length = min(size, len(group) - start)
        if length > 0:
            yield group, start, length
            size -= length
        start = max(start - len(group), 0)


def _load(path: Path) -> dict[str, Any]:
    content = open_pickle(path)
    if not isinstance(content, dict):
        raise CheckpointError("it is not a ZeRO shard", where=str(path))
    return content


def _entry(shard: Mapping[str, Any], key: str) -> Any:
    if key not in shard:
        raise CheckpointError(
            f"a shard has no {key!r}: not a ZeRO checkpoint, or one of another DeepSpeed"
        )
    return shard[key]


# -- Plain models and adapters out of ZeRO checkpoints --------------------------------------------


def needs_adapter_from_shards(checkpoint: Path) -> bool:
    """Whether a checkpoint's adapter is in its shards only."""
    has_config = (checkpoint / CONFIG_NAME).is_file()
    return has_config and not (checkpoint / ADAPTER_WEIGHTS).exists()


def export_zero(
    folder: Path,
    checkpoint: Path,
    target: Path,
    *,
    dtype: str | None = None,
    max_shard_bytes: int = 5 * 10**9,
    with_code: bool = False,
) -> int:
    """Write the float32 masters of a ZeRO checkpoint as a plain model, rounded once.

    Without ``dtype`` it is what config.json says, else bfloat16.
    """
    config = read_config(checkpoint)
    own = str(config.get("dtype", config.get("torch_dtype")))
    with ZeroReader(folder) as reader:
        return export_plain(
            reader,
            checkpoint,
            target,
            dtype=dtype or (own if own in DTYPES else "bfloat16"),
            max_shard_bytes=max_shard_bytes,
            with_code=with_code,
        )


def extract_adapter(folder: Path, checkpoint: Path, target: Path) -> Path:
    """Write the adapter that a ZeRO checkpoint holds in its shards, as peft would have saved it."""
    config = read_adapter_config(checkpoint, with_peft=True)
    with ZeroReader(folder) as reader:
        tensors = {
            name.replace(".default", ""): reader.load(name)
            for name in reader.tensors
            if name.startswith(PREFIX) and (".lora_" in name or ".modules_to_save." in name)
        }
    if not tensors:
        raise CheckpointError("the shards hold no adapter", where=str(folder))
    save_tensors(target / "adapter_model.safetensors", tensors)
    write_json(target / CONFIG_NAME, config)
    copy_companions((checkpoint,), target)
    return target
