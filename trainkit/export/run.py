"""One export from start to end: check, ask the trained model, write, ask again, certify."""

import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from trainkit.checkpoint.weights.plain_files import write_json
from trainkit.checkpoint.whole.atomic import free_space_check, staged_directory
from trainkit.errors import CheckpointError
from trainkit.export.certificate import FILE_NAME
from trainkit.export.plain import refuse_unmergeable, stored_bytes
from trainkit.export.source import Job, Source, Written, open_source
from trainkit.infer.base import plain_base
from trainkit.infer.locate import ModelPaths, base_directory, run_settings, weights_digest
from trainkit.version import __version__


class Target(Protocol):
    """A module of this package that writes for one server."""

    COPIES: float
    """How much disk it takes at most, in copies of the weights."""

    def check(self, paths: ModelPaths, job: Job) -> None:
        """Refuse what cannot be served, before anything is loaded."""

    def write(self, source: Source, staging: Path, job: Job) -> Written:
        """Write into ``staging``, read it back, certify."""


def export(target: str, paths: ModelPaths, job: Job) -> dict[str, Any]:
    module: Target = importlib.import_module(f"trainkit.export.{target}")
    if os.path.lexists(job.out):
        raise CheckpointError(
            "it exists already; an export does not write over anything",
            where=str(job.out),
            fix="choose another path or move the old one away",
        )
    module.check(paths, job)
    with _over_plain_base(paths, job) as plain:
        if not job.as_adapter:
            refuse_unmergeable(plain)
        free_space_check(job.out, int(module.COPIES * stored_bytes(plain)))
        trained = open_source(paths, job.any_base, job.say, shows_pictures=target == "gguf")
        source = replace(trained, paths=plain)
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
            write_json(staging / FILE_NAME, certificate)
    return certificate


@contextmanager
def _over_plain_base(paths: ModelPaths, job: Job) -> Iterator[ModelPaths]:
    """An adapter's base as plain weights, for as long as it is written."""
    if paths.adapter is None:
        yield paths
        return
    base = base_directory(paths.source)
    dtype = run_settings(paths.run).dtype
    with plain_base(paths.source, base, dtype, job.out, job.say) as plain:
        yield paths if plain == base else replace(paths, source=paths.at(plain), stored=base)
