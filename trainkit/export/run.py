"""One export from start to end: check, ask the trained model, write, ask again, certify."""

import importlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from trainkit.checkpoint.whole.atomic import free_space_check, staged_directory
from trainkit.errors import CheckpointError
from trainkit.export.certificate import FILE_NAME, MIN_AGREEMENT
from trainkit.export.source import Held, Source, open_source
from trainkit.infer.locate import ModelPaths, base_directory, weights_digest
from trainkit.infer.plain_base import plain_base
from trainkit.version import __version__


@dataclass(frozen=True)
class ExportOptions:
    """What the command line says.

    Attributes:
        type: of the numbers in a GGUF.
        dtype: of a plain model's weights; None keeps each tensor's own.
        as_adapter: for vLLM: base and adapter apart.
        name: what the server is to call the model.
        excepted: kinds of conversations whose prompts may differ from training's.
        system: for Ollama: a system prompt for every chat.
        group_size: for AWQ: inputs that share a scale.
        min_agreement: the share of greedy tokens that must agree; None is the target's own rule.
    """

    type: str = "f16"
    dtype: str | None = None
    as_adapter: bool = False
    name: str = "model"
    excepted: tuple[str, ...] = ()
    system: str | None = None
    group_size: int = 128
    min_agreement: float | None = None

    def required(self, *, is_quantized: bool) -> float | None:
        """The rule for agreement: 99% for plain weights, stated only for quantised ones."""
        if self.min_agreement is not None:
            return self.min_agreement
        return None if is_quantized else MIN_AGREEMENT


@dataclass(frozen=True)
class Job:
    """What a target is told.

    Attributes:
        options: of the command line.
        out: where the result will be; nothing is written there directly.
        say: called with one line about each stage.
    """

    options: ExportOptions
    out: Path
    say: Callable[[str], None]


@dataclass(frozen=True)
class Written:
    """What a target has written.

    Attributes:
        certificate: of ``certify``.
        command: how to serve it.
        notes: for the user.
    """

    certificate: Mapping[str, Any]
    command: str
    notes: tuple[str, ...] = field(default=())


class Target(Protocol):
    """A module of this package that writes for one server."""

    COPIES: float
    """How much disk it takes at most, in copies of the weights."""

    def check(self, paths: ModelPaths, job: Job) -> None:
        """Refuse what cannot be served, before anything is loaded."""

    def write(self, source: Source, staging: Path, job: Job) -> Written:
        """Write into ``staging``, read it back, certify."""


TARGETS: Mapping[str, str] = {
    "gguf": "trainkit.export.gguf.target",
    "ollama": "trainkit.export.ollama.target",
    "vllm": "trainkit.export.vllm",
    "fp8": "trainkit.export.fp8",
    "awq": "trainkit.export.awq",
}
"""Name on the command line -> module."""


def export(target: str, paths: ModelPaths, job: Job, held: Held) -> dict[str, Any]:
    """Write a trained model for a server.

    Args:
        target: of ``TARGETS``.
        paths: of ``find_model``.
        job: options and place.
        held: how the run held its base.

    Returns:
        The certificate, as it is written next to the result.

    Raises:
        TrainkitError: it cannot be served as it was trained; nothing is left behind.
    """
    module: Target = importlib.import_module(TARGETS[target])
    if os.path.lexists(job.out):
        raise CheckpointError(
            "it exists already; an export does not write over anything",
            where=str(job.out),
            fix="choose another path or move the old one away",
        )
    module.check(paths, job)
    with _over_plain_base(paths, held, job) as plain:
        from trainkit.export.plain import refuse_unmergeable, stored_bytes

        if not job.options.as_adapter:
            refuse_unmergeable(plain)
        free_space_check(job.out, int(module.COPIES * stored_bytes(plain)))
        source = replace(open_source(paths, held, job.say), paths=plain)
        with staged_directory(job.out, metadata={"kind": "export", "target": target}) as staging:
            written = module.write(source, staging, job)
            certificate = {
                "target": target,
                "trainkit": __version__,
                "source": {
                    "model": paths.model,
                    "adapter": None if paths.adapter is None else str(paths.adapter),
                    "run": None if paths.run is None else str(paths.run),
                    "weights_sha256": weights_digest(paths),
                },
                **written.certificate,
                "stop_tokens": list(source.stop_tokens),
                "command": written.command,
            }
            certificate["notes"] = [*source.notes, *certificate["notes"], *written.notes]
            text = json.dumps(certificate, indent=2, ensure_ascii=False) + "\n"
            (staging / FILE_NAME).write_text(text, encoding="utf-8")
    return certificate


@contextmanager
def _over_plain_base(paths: ModelPaths, held: Held, job: Job) -> Iterator[ModelPaths]:
    """An adapter's base as plain weights, for as long as it is written."""
    if paths.adapter is None:
        yield paths
        return
    base = base_directory(paths.source)
    with plain_base(paths.source, base, held.dtype, job.out, job.say) as plain:
        yield paths if plain == base else replace(paths, source=paths.at(plain), stored=base)
