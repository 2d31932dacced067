"""``trainkit export gguf``: merge, convert, quantise, read back with llama.cpp."""

import json
import shlex
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainkit.checkpoint.weights.plain_files import read_config
from trainkit.data.messages import Conversation, TextRow
from trainkit.errors import CheckpointError, ModelError
from trainkit.export.certificate import mean_divergence
from trainkit.export.conversations import made_pictures
from trainkit.export.llama_cpp import DIRECT, LlamaServer, check_llama_cpp, convert, quantize
from trainkit.export.plain import weights_directory, write_plain
from trainkit.export.source import Job, Source, Written
from trainkit.infer.locate import ModelPaths

COPIES = 3.2
_WINDOW = 112
"""Pixels, of Qwen2.5-VL, in llama.cpp's code and not in the file."""


def check(paths: ModelPaths, job: Job) -> None:
    """Refuse code that comes with the model; and to begin without converter, llama.cpp, weights."""
    refuse_own_code(paths)
    check_llama_cpp(job.type)
    weights_directory(paths)


def refuse_own_code(paths: ModelPaths) -> None:
    """Refuse what was trained by its own code, which llama.cpp does not run."""
    config = weights_directory(paths) / "config.json"
    if paths.source.trust_remote_code and config.is_file():
        code = read_config(config.parent).get("auto_map")
        if code:
            raise ModelError(
                f"llama.cpp does not run the code that comes with the model: auto_map names "
                f"{next(iter(code.values()))}",
                where=str(config),
                fix="trainkit export vllm takes that code along, and vLLM runs it",
            )


def write(source: Source, staging: Path, job: Job) -> Written:
    file = write_gguf(source, staging, job)
    projector = write_projector(source, staging, job)
    with served_gguf(file, source, projector) as served:
        certificate = job.certify(source, served, is_quantized=is_quantized(source, job))
        pictures = compare_pictures(source, served.server)
    shutil.rmtree(staging / "merged")
    command = f"llama-server --jinja -m {shlex.quote(str((job.out / file.name).absolute()))}"
    if projector is not None:
        certificate["pictures"] = pictures
        command += f" --mmproj {shlex.quote(str((job.out / projector.name).absolute()))}"
    for name, size in zip(("min", "max"), source.limits, strict=False):
        command += f" --image-{name}-tokens {size}"
    if source.variables:
        command += f" --chat-template-kwargs {shlex.quote(json.dumps(dict(source.variables)))}"
    return Written(certificate, command)


class GgufServed:
    """A GGUF as llama.cpp's server has it: its template engine, its tokenizer, its numbers."""

    def __init__(self, server: LlamaServer, vocab_size: int) -> None:
        self.server = server
        self.read_with = f"{self.server.version}, cpu"
        self._vocab_size = vocab_size

    def prompt_ids(self, row: Conversation | TextRow) -> list[int]:
        """As the server makes them of a chat, or of a text to go on with."""
        text = self.server.prompt(row) if isinstance(row, Conversation) else row.prompt
        return self.server.tokenize(text)

    def logits(self, input_ids: Sequence[int], start: int) -> Tensor:
        """Log probabilities, which is the same to a softmax."""
        ends = range(start, len(input_ids))
        return torch.stack(
            [self.server.log_probs(input_ids[:end], self._vocab_size) for end in ends]
        )


def write_gguf(source: Source, staging: Path, job: Job) -> Path:
    """Make the GGUF; the plain model stays in ``merged``, for its tokenizer."""
    kind, work = job.type, staging / "merged"
    write_plain(source, work, job)
    file = staging / f"model-{kind}.gguf"
    job.say(f"converting to {kind}")
    if kind in DIRECT:
        convert(work, file, kind, job.name)
    else:
        whole = staging / "whole.gguf"
        convert(work, whole, "bf16", job.name)
        quantize(whole, file, kind)
        whole.unlink()
    job.say("asking llama.cpp")
    return file


def write_projector(source: Source, staging: Path, job: Job) -> Path | None:
    """Make the GGUF of tower and projector, in 16 bits; None for a model of text."""
    if source.pictures is None:
        return None
    tower = read_config(staging / "merged").get("vision_config") or {}
    if tower.get("window_size", _WINDOW) != _WINDOW:
        raise ModelError(
            f"llama.cpp's tower attends in windows of {_WINDOW} pixels",
            where=f"vision_config.window_size: {tower['window_size']}",
            fix="trainkit export vllm serves it through the model's own code",
        )
    kind = job.type if job.type in ("f32", "bf16") else "f16"
    file = staging / f"mmproj-{kind}.gguf"
    job.say(f"converting tower and projector to {kind}")
    convert(staging / "merged", file, kind, job.name, is_projector=True)
    return file


def compare_pictures(source: Source, server: LlamaServer) -> dict[str, Any] | None:
    """Hold first tokens of answers about pictures against the trained model's.

    llama.cpp scales images in its own way, so they are near and not the same: what it says of a
    picture must be nearer to what the trained model says of that one than of any other.
    """
    trained = source.pictures
    if trained is None:
        return None
    found = torch.stack([server.look(row, trained.shape[1]) for row in made_pictures()])
    own = mean_divergence([trained], [found])
    turns = range(1, len(trained))
    other = min(mean_divergence([trained.roll(turn, 0)], [found]) for turn in turns)
    if not own < other:
        raise CheckpointError(
            f"llama.cpp sees otherwise: what it says of a picture is {own:.2e} nats from what the "
            f"trained model says of it, and {other:.2e} from what that says of another",
            fix="trainkit export vllm serves it through the model's own code",
        )
    return {
        "num_pictures": len(trained),
        "agreement": float((trained.argmax(-1) == found.argmax(-1)).float().mean()),
        "divergence_nats": own,
        "divergence_from_another_nats": other,
    }


@contextmanager
def served_gguf(file: Path, source: Source, projector: Path | None = None) -> Iterator[GgufServed]:
    """A GGUF in llama.cpp's server, with room for the longest prompt or answer.

    Raises:
        CheckpointError: generation would run on where training ended its answers.
    """
    reference = source.reference
    sizes = [len(ids) for ids in reference.prompt_ids]
    sizes += [len(answer.input_ids) for answer in reference.answers]
    sizes.append(2 * source.picture_tokens)  # llama.cpp may cut a picture into more tiles
    context = -(-(max(sizes) + 8) // 256) * 256  # llama.cpp rounds to this itself
    seeing = () if projector is None else (projector, *source.limits)
    server = LlamaServer(file, context, source.variables, seeing)
    try:
        if source.stop_ids and not server.is_end(source.stop_ids[0]):
            raise CheckpointError(
                f"llama.cpp would not stop at {source.stop_tokens[0]!r}, which ends the trained "
                "answers",
                fix="make it the tokenizer's eos_token, and train with that",
            )
        yield GgufServed(server, reference.answers[0].logits.shape[1])
    finally:
        server.close()


def is_quantized(source: Source, job: Job) -> bool:
    """Whether the export is, or the base in training was."""
    return job.type not in ("f32", "f16", "bf16") or source.quantize is not None
