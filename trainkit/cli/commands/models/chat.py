"""``trainkit chat``: talk to a model in the terminal."""

import json
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trainkit.cli import answering as shared
from trainkit.cli.arguments import BaseModel, TrustRemoteCode
from trainkit.cli.output import echo
from trainkit.errors import TrainkitError

if TYPE_CHECKING:
    from trainkit.infer.conversation import ChatHistory
    from trainkit.infer.engine import Answer, Engine
    from trainkit.infer.sampling import SamplingOptions

HELP = """/reset      start a new conversation
/undo       take back the last question and its answer
/save FILE  add the conversation to a messages file that trains again
/system X   set the system prompt (nothing removes it) and start again
/ids        show the token ids that the model saw last
/quit       leave; so does Ctrl-D. Ctrl-C stops an answer"""

_CUT = {
    "interrupted": "[stopped]",
    "length": "[cut at --max-new-tokens]",
    "context": "[cut: the model's context is full; /undo or /reset makes room]",
}


def chat(
    model: shared.Model,
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
    show_ids: Annotated[
        bool, typer.Option("--show-ids", help="Print the prompt's token ids on stderr.")
    ] = False,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json",
            help="Print one JSON object {question, answer, finish, input_ids, output_ids} a line.",
        ),
    ] = False,
) -> None:
    """Talk to a model, with the template and the stop tokens of its training."""
    from trainkit.infer.conversation import ChatHistory
    from trainkit.infer.locate import find_model
    from trainkit.infer.sampling import SamplingOptions

    sampling = SamplingOptions(
        max_new_tokens, greedy, temperature, top_p, top_k, repetition_penalty, beams, seed
    )
    paths = find_model(model, adapter=adapter, base_model=base_model, trust_remote_code=trusted)
    held = shared.Held(dtype, quantize, device)
    engine = shared.load(paths, held, system, shared.Trust(verify, any_base))
    import torch

    torch.manual_seed(seed)
    name = paths.model if paths.adapter is None else f"{paths.adapter} over {paths.model}"
    if sys.stdin.isatty():
        echo(f"{name}. /help lists the commands.", err=True)
    Chat(engine, ChatHistory(system), sampling, show_ids=show_ids, as_json=as_json).run()


class Chat:
    """The loop of a chat: a line in, an answer or a command's effect out."""

    def __init__(
        self,
        engine: "Engine",
        history: "ChatHistory",
        sampling: "SamplingOptions",
        *,
        show_ids: bool = False,
        as_json: bool = False,
    ) -> None:
        self.as_json = as_json
        self.engine, self.history, self.sampling = engine, history, sampling
        self.show_ids = show_ids
        self.last_ids: tuple[int, ...] = ()

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
                _note(f"error: {error}")

    def command(self, text: str) -> bool:
        """Do what a line starting with a slash says.

        Returns:
            Whether the chat goes on.
        """
        word, _, rest = text.partition(" ")
        rest = rest.strip()
        if word in ("/quit", "/exit"):
            return False
        if word == "/reset":
            self.history.reset()
            _note("a new conversation")
        elif word == "/undo":
            _note("taken back" if self.history.undo() else "there is nothing to take back")
        elif word == "/save" and rest:
            number = self.history.save(Path(rest).expanduser())
            _note(f"saved: {rest} holds {number} conversation{'s' if number > 1 else ''}")
        elif word == "/system":
            self.history.reset()
            self.history.system = rest or None
            self.engine.keep_system_prompts()
            _note("a new conversation with that system prompt" if rest else "no system prompt")
        elif word == "/ids":
            _note(" ".join(map(str, self.last_ids)) or "no question yet")
        else:
            _note(HELP)
        return True

    def ask(self, question: str) -> None:
        """Stream the answer to a question and keep both."""
        messages = self.history.with_question(question)
        if self.show_ids:
            _note(" ".join(map(str, self.engine.prompt_ids(messages))))
        with _ctrl_c_stops() as should_stop:
            answer = self.engine.answer(
                messages,
                self.sampling,
                on_text=None if self.as_json else _print,
                should_stop=should_stop,
            )
        echo(_object(question, answer) if self.as_json else "")
        self.last_ids = (*answer.input_ids, *answer.output_ids)
        if answer.finish != "stop":
            _note(_CUT[answer.finish])
        self.history.add(question, answer.text, is_whole=answer.finish == "stop")


def _object(question: str, answer: "Answer") -> str:
    """A question and its answer for programs."""
    row = {
        "question": question,
        "answer": answer.text,
        "finish": answer.finish,
        "input_ids": answer.input_ids,
        "output_ids": answer.output_ids,
    }
    return json.dumps(row, ensure_ascii=False)


def _lines() -> Iterator[str]:
    """Lines from the terminal with editing, or from a pipe."""
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
    from trainkit.terminal import visible

    sys.stdout.write(visible(text))
    sys.stdout.flush()


def _note(text: str) -> None:
    from trainkit.terminal import visible

    echo(visible(text), err=True)
