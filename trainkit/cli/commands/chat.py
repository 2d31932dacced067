"""``trainkit chat`` and ``generate``: answers in the terminal, or to a file of prompts."""

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from trainkit.cli.options import (
    Held,
    JsonObject,
    ModelChoice,
    echo,
    expanded,
    json_lines,
    note,
    tell,
)
from trainkit.cli.quick_imports import without_collection
from trainkit.errors import RecipeError, TrainkitError
from trainkit.terminal import visible

if TYPE_CHECKING:
    from trainkit.infer.conversation import ChatHistory
    from trainkit.infer.engine import Engine
    from trainkit.infer.locate import ModelPaths
    from trainkit.infer.sampling import SamplingOptions

System = Annotated[str | None, typer.Option(help="The system prompt.")]
Quantize = Annotated[
    Literal["auto", "none", "nf4", "int8", "fp8"],
    typer.Option(
        help="How the model's linear layers are held: none, as they were saved; nf4, in 4 bits; "
        "int8, in 8; fp8, in 8, those that an fp8 run had so; auto: nf4 or int8 where the adapter "
        "was trained over it."
    ),
]


@dataclass(frozen=True)
class Sampling:
    """How an answer is chosen: the fields of ``SamplingOptions``."""

    max_new_tokens: Annotated[int, typer.Option(help="Longest answer, in tokens.")] = 512
    greedy: Annotated[bool, typer.Option("--greedy", help="Always take the likeliest token.")] = (
        False
    )
    temperature: Annotated[
        float | None, typer.Option(help="Sample; lower is closer to greedy.")
    ] = None
    top_p: Annotated[
        float | None, typer.Option(help="Sample from this share of the likelihood.")
    ] = None
    top_k: Annotated[int | None, typer.Option(help="Sample from this many tokens; 0 is all.")] = (
        None
    )
    repetition_penalty: Annotated[
        float | None, typer.Option(help="Above 1, repeats are rarer.")
    ] = None
    num_beams: Annotated[int, typer.Option("--beams", help="Search with this many beams.")] = 1
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Of the sampling.")] = 0

    def options(self) -> "SamplingOptions":
        from trainkit.infer.sampling import SamplingOptions

        return SamplingOptions(**vars(self))


@without_collection()
def load(paths: "ModelPaths", held: Held, system: str | None, quantize: str = "auto") -> "Engine":
    from trainkit.train.quiet import quieten_libraries

    quieten_libraries()  # first: some libraries speak when they are imported
    from trainkit.infer.engine import load_engine
    from trainkit.infer.locate import run_settings

    kind = None if quantize == "none" else quantize
    if quantize == "auto":
        kind = run_settings(paths.run).quantize if paths.adapter is not None else None
        if kind == "fp8":
            note("the adapter was trained over a base in fp8, and answers over it in 16 bits here;")
            note("--quantize fp8 holds it as it was in training")
            kind = None
    return load_engine(paths, quantize=kind, system=system, say=note, **vars(held))


Logprobs = Annotated[
    int,
    typer.Option(
        min=0,
        help="Write so many of the likeliest tokens at each place, and their logarithms, "
        "for objective: distill.",
    ),
]


@expanded
def generate(
    *,
    prompts: Annotated[
        Path,
        typer.Option(help="Rows in any format that trains, or a .txt file with a question a line."),
    ],
    out: Annotated[
        Path,
        typer.Option("--output", "-o", "--out", help="The file to write, one JSON object a line."),
    ],
    batch_size: Annotated[int, typer.Option(help="Prompts answered at once.")] = 8,
    row_format: Annotated[
        str, typer.Option("--format", help="Format of the rows, where their keys do not tell.")
    ] = "auto",
    too_long: Annotated[
        Literal["error", "drop"],
        typer.Option(
            help="A prompt without room for an answer: refuse the file (error), or leave the row "
            "unanswered (drop)."
        ),
    ] = "error",
    logprobs: Logprobs = 0,
    source: ModelChoice,
    system: System = None,
    sampling: Sampling,
    held: Held,
    quantize: Quantize = "auto",
    as_json: JsonObject = False,
) -> None:
    """Answer every row of a file; the same command again goes on where it stopped."""
    if batch_size < 1:
        raise RecipeError("it must be at least 1", where="--batch-size")
    if out.exists() and prompts.exists() and out.samefile(prompts):
        raise RecipeError(
            "the answers would take the place of the questions",
            where="--output",
            fix="give the answers a name of their own",
        )
    from trainkit.infer.locate import is_trained_on_texts, weights_digest

    options, paths = sampling.options(), source.find()
    from trainkit.train.quiet import quieten_libraries

    quieten_libraries()  # first: some libraries speak when they are imported
    from trainkit.data.formats import FORMATS
    from trainkit.data.questions import QuestionOptions, read_questions
    from trainkit.infer.batch import generate_file, outcome_of

    if row_format not in ("auto", *FORMATS):
        raise RecipeError(f"{row_format!r} is none of auto, {', '.join(FORMATS)}", where="--format")
    plain = is_trained_on_texts(paths.run)
    how = QuestionOptions(format=row_format, system=system, plain_prompts=plain, images=True)
    settings = {
        "model": paths.model,
        "adapter": str(paths.adapter),
        "weights": weights_digest(paths),
        "dtype": held.dtype,
        **({} if quantize == "auto" else {"quantize": quantize}),
    }
    before = generate_file(
        lambda: load(paths, held, system, quantize),
        read_questions(str(prompts), how),
        out,
        options,
        batch_size=batch_size,
        settings=settings,
        too_long=too_long,
        logprobs=logprobs,
        progress=lambda done, total: note(f"{done} of {total} answered"),
    )
    outcome = outcome_of(out)
    row = {"out": str(out), **outcome, "num_found": before}
    words = [f"{outcome['num_answers']} answers", f"{before} of them from an earlier call"]
    for key, phrase in (
        ("num_cut", "cut at --max-new-tokens or at the model's context"),
        ("num_too_long", "questions too long for an answer"),
    ):
        if outcome[key]:
            words.append(f"{outcome[key]} {phrase}")
    tell(row, as_json, f"{out}: {', '.join(words)}")


# -- chat ---------------------------------------------------------------------------------------

HELP = """/reset      start a new conversation
/undo       take back the last question and its answer
/image PATH show a picture with the next question; several go in their order
/save FILE  add the conversation to a messages file that trains again
/system X   set the system prompt (nothing removes it) and start again
/ids        show the token ids that the model saw last
/quit       leave; so does Ctrl-D. Ctrl-C stops an answer"""

_CUT = {
    "interrupted": "[stopped]",
    "length": "[cut at --max-new-tokens]",
    "context": "[cut: the model's context is full; /undo or /reset makes room]",
}


@expanded
def chat(
    *,
    source: ModelChoice,
    system: System = None,
    sampling: Sampling,
    held: Held,
    quantize: Quantize = "auto",
    show_ids: Annotated[
        bool, typer.Option("--show-ids", help="Print the prompt's token ids on stderr.")
    ] = False,
    as_json: Annotated[bool, json_lines("question, answer, finish, input_ids, output_ids")] = False,
) -> None:
    """Talk to a model, with the template and the stop tokens of its training."""
    options, paths = sampling.options(), source.find()
    engine = load(paths, held, system, quantize)
    import torch

    from trainkit.infer.conversation import ChatHistory

    torch.manual_seed(options.seed)
    name = paths.model if paths.adapter is None else f"{paths.adapter} over {paths.model}"
    if sys.stdin.isatty():
        note(f"{name}. /help lists the commands.")
    Chat(engine, ChatHistory(system), options, show_ids=show_ids, as_json=as_json).run()


@dataclass
class Chat:
    """The loop of a chat: a line in, an answer or a command's effect out."""

    engine: "Engine"
    history: "ChatHistory"
    sampling: "SamplingOptions"
    show_ids: bool = False
    as_json: bool = False
    last_ids: tuple[int, ...] = ()
    images: tuple[str, ...] = ()

    def run(self) -> None:
        """Read lines until /quit or the end of the input."""
        for line in _lines():
            text = line.strip()
            if not text:
                continue
            try:
                if text.startswith("/"):
                    if not self.command(text):
                        return
                else:
                    self.ask(line.rstrip("\n"))
            except TrainkitError as error:
                note(f"error: {error}")

    def command(self, text: str) -> bool:
        """Do what a line starting with a slash says.

        Returns:
            Whether the chat goes on.
        """
        word, _, rest = text.partition(" ")
        rest = rest.strip()
        if word in ("/quit", "/exit"):
            return False
        if word in ("/reset", "/system"):
            self.images = ()
        if word == "/reset":
            self.history.reset()
            note("a new conversation")
        elif word == "/undo":
            note("taken back" if self.history.undo() else "there is nothing to take back")
        elif word == "/image" and rest:
            images = (*self.images, str(Path(rest).expanduser().absolute()))
            self.engine.images(self.history.with_question("", images))
            self.images = images
            note(f"images that go with the next question: {len(images)}")
        elif word == "/save" and rest:
            number = self.history.save(Path(rest).expanduser())
            note(f"saved: {rest} holds {number} conversation{'s' if number > 1 else ''}")
        elif word == "/system":
            self.history.reset()
            self.history.system = rest or None
            self.engine.keep_system_prompts()
            note("a new conversation with that system prompt" if rest else "no system prompt")
        elif word == "/ids":
            note(" ".join(map(str, self.last_ids)) or "no question yet")
        else:
            note(HELP)
        return True

    def ask(self, question: str) -> None:
        messages = self.history.with_question(question, self.images)
        if self.show_ids:
            note(" ".join(map(str, self.engine.prompt_ids(messages))))
        with _ctrl_c_stops() as should_stop:
            answer = self.engine.answer(
                messages,
                self.sampling,
                on_text=None if self.as_json else _print,
                should_stop=should_stop,
            )
        row = {
            "question": question,
            "answer": answer.text,
            "finish": answer.finish,
            "input_ids": answer.input_ids,
            "output_ids": answer.output_ids,
        }
        tell(row, self.as_json, "")
        self.last_ids = (*answer.input_ids, *answer.output_ids)
        if answer.finish != "stop":
            note(_CUT[answer.finish])
        self.history.add(question, answer.text, self.images, is_whole=answer.finish == "stop")
        self.images = ()


def _lines() -> Iterator[str]:
    if not sys.stdin.isatty():
        yield from sys.stdin
        return
    import readline  # noqa: F401  line editing and history for input()

    while True:
        try:
            yield input("> ")
        except EOFError:
            echo()
            return
        except KeyboardInterrupt:
            echo("  (/quit or Ctrl-D leaves)")


@contextmanager
def _ctrl_c_stops() -> Iterator[Callable[[], bool]]:
    """While an answer is written, Ctrl-C ends the answer and not the program."""
    pressed: list[int] = []

    def remember(number: int, frame: Any) -> None:
        if pressed:  # the second time: generation itself hangs
            raise KeyboardInterrupt
        pressed.append(number)

    before = signal.signal(signal.SIGINT, remember)
    try:
        yield lambda: bool(pressed)
    finally:
        signal.signal(signal.SIGINT, before)


def _print(text: str) -> None:
    """What a model writes must not move the cursor or rename the window."""
    sys.stdout.write(visible(text))
    sys.stdout.flush()
