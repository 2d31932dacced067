"""``trainkit generate``: answers to a file of prompts."""

import json
from dataclasses import asdict
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from trainkit.cli import answering as shared
from trainkit.cli.arguments import BaseModel, TrustRemoteCode
from trainkit.cli.output import echo
from trainkit.errors import RecipeError


class TooLongChoice(str, Enum):
    """What is done with a prompt that leaves no room for an answer."""

    error = "error"
    drop = "drop"
    left_turns = "left_turns"


Output = Annotated[
    Path,
    typer.Option("--output", "-o", "--out", help="The file to write, one JSON object a line."),
]


def generate(
    model: shared.Model,
    prompts: Annotated[
        Path,
        typer.Option(help="Rows in any format that trains, or a .txt file with a question a line."),
    ],
    out: Output,
    batch_size: Annotated[int, typer.Option(help="Prompts answered at once.")] = 8,
    row_format: Annotated[
        str, typer.Option("--format", help="Format of the rows, where their keys do not tell.")
    ] = "auto",
    too_long: Annotated[
        TooLongChoice,
        typer.Option(
            help="A prompt without room for an answer: refuse the file (error), leave the row "
            "unanswered (drop), or leave out its oldest exchanges (left_turns)."
        ),
    ] = TooLongChoice.error,
    adapter: shared.Adapter = None,
    base_model: BaseModel = None,
    trusted: TrustRemoteCode = False,
    system: shared.System = None,
    max_new_tokens: shared.MaxNewTokens = 512,
    greedy: shared.Greedy = False,
    temperature: shared.Temperature = None,
    top_p: shared.TopP = None,
    top_k: shared.TopK = None,
    repetition_penalty: shared.RepetitionPenalty = None,
    beams: shared.Beams = 1,
    seed: shared.Seed = 0,
    dtype: shared.DtypeOption = shared.LoadDtype.auto,
    quantize: shared.Quantize = shared.Base.auto,
    device: shared.Device = "auto",
    any_base: shared.AnyBase = False,
    verify: shared.Verify = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Answer every row of a file; the same command again goes on where it stopped."""
    _refuse(batch_size, prompts, out)
    from trainkit.infer.locate import find_model, is_trained_on_texts, weights_digest
    from trainkit.infer.sampling import SamplingOptions

    sampling = SamplingOptions(
        max_new_tokens, greedy, temperature, top_p, top_k, repetition_penalty, beams, seed
    )
    paths = find_model(model, adapter=adapter, base_model=base_model, trust_remote_code=trusted)
    held = shared.Held(dtype, quantize, device)
    from trainkit.train.log.quiet import quieten_libraries

    quieten_libraries()  # first: some libraries speak when they are imported
    from trainkit.data.read.formats import FORMATS
    from trainkit.data.read.questions import QuestionOptions, read_questions
    from trainkit.infer.batch import BatchOptions, generate_file, outcome_of

    if row_format not in ("auto", *FORMATS):
        raise RecipeError(f"{row_format!r} is none of auto, {', '.join(FORMATS)}", where="--format")
    is_text = is_trained_on_texts(paths.run)
    reading = QuestionOptions(format=row_format, system=system, plain_prompts=is_text)
    questions = read_questions(str(prompts), reading)
    settings = {
        "model": paths.model,
        "adapter": str(paths.adapter),
        "weights": weights_digest(paths),
        **held.settings(),
    }
    before = generate_file(
        lambda: shared.load(paths, held, system, shared.Trust(verify, any_base)),
        questions,
        out,
        sampling,
        BatchOptions(batch_size, settings, too_long.value),
        progress=lambda done, total: echo(f"{done} of {total} answered", err=True),
    )
    outcome = outcome_of(out)
    row = {"out": str(out), **asdict(outcome), "num_found": before}
    if as_json:
        echo(json.dumps(row))
        return
    words = [f"{before} of them from an earlier call", *outcome.in_words()]
    echo(f"{out}: {outcome.num_answers} answers, {', '.join(words)}")


def _refuse(batch_size: int, prompts: Path, out: Path) -> None:
    if batch_size < 1:
        raise RecipeError("it must be at least 1", where="--batch-size")
    if out.exists() and prompts.exists() and out.samefile(prompts):
        raise RecipeError(
            "the answers would take the place of the questions",
            where="--output",
            fix="give the answers a name of their own",
        )
