"""Twenty conversations of the kinds that a run trained on: its own, and made ones."""

import base64
import io
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image as Pil

from trainkit.data.files import read_rows, resolve_files
from trainkit.data.messages import Conversation, Row, RowError, TextRow
from trainkit.data.prompt import conversation_of
from trainkit.data.questions import QuestionOptions, read_question
from trainkit.data.template import ChatTemplate, join_reasoning
from trainkit.errors import DataError
from trainkit.infer.engine import Engine
from trainkit.recipe import load_recipe
from trainkit.run.files import read_record

COUNT = 20
_MAX_ROWS_READ = 2000
_ROOM_FOR_ANSWERS = 64
_TEXTS = (
    "Hello!",
    "What is 1234567890 + 42.5?  Answer with the number only.",
    "Translate to English: 今天天气很好，我们去公园吧。",
    "def add(a, b):\n\treturn a + b\n\n\nExplain this, please.",
    "I've said it's DON'T, didn't I? Emoji: 🚀🦙 café naïve Ελληνικά",
    "  Two spaces before, three behind   ",
)
_TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "Its name"}},
            "required": ["city"],
        },
    },
}


@dataclass(frozen=True)
class Prompt:
    """What the trained and the exported model are both asked."""

    id: str
    row: Conversation | TextRow
    kinds: tuple[str, ...]


def kinds_of(row: Row) -> tuple[str, ...]:
    """What a conversation has in it: system, tools, thinking, several turns; or plain."""
    if not isinstance(row, Conversation):
        return ("text",)
    messages = row.messages
    found = {
        "system": any(message.role in ("system", "developer") for message in messages),
        "tools": bool(row.tools) or any(m.tool_calls or m.role == "tool" for m in messages),
        "thinking": any(m.reasoning or "</think>" in m.content for m in messages),
        "several turns": sum(message.role == "user" for message in messages) > 1,
    }
    return tuple(kind for kind, is_there in found.items() if is_there) or ("plain",)


def conversations_of(run: Path | None, engine: Engine, *, is_text: bool) -> list[Prompt]:
    """Twenty prompts, of every kind that the run has, each one that the engine can render."""
    template = None if is_text else ChatTemplate(engine.tokenizer, engine.options)
    rows = (_as_asked(prompt, template) for prompt in islice(_rows_of(run), _MAX_ROWS_READ))
    own = _spread([prompt for prompt in rows if _can_ask(engine, prompt)])
    wanted = {kind for prompt in own for kind in prompt.kinds}
    if not own and template is not None:
        wanted = {"system", "several turns"}
        wanted |= {"tools"} if "tools" in template.text else set()
        thinks = template.style.reasoning_field or "</think>" in template.text
        wanted |= {"thinking"} if thinks else set()
    made = [
        prompt
        for prompt in (_as_asked(prompt, template) for prompt in _made(is_text=is_text))
        if set(prompt.kinds) <= wanted | {"plain", "text"} and _can_ask(engine, prompt)
    ]
    # Some are always made: they hold digits, spaces and scripts that a run's first rows may lack.
    num_made = max(COUNT - len(own), min(len(made), len(_TEXTS)))
    return [*own[: COUNT - num_made], *made[:num_made]]


def _as_asked(prompt: Prompt, template: ChatTemplate | None) -> Prompt:
    """A row as a client would send it to have the prompt that training made of it.

    Control tokens in it are broken up as in training, thinking stands where the template reads it,
    and a system prompt that the run removed or replaced is left to the exported template.
    """
    row = prompt.row
    if template is None or not isinstance(row, Conversation):
        return prompt
    if template.options.system_policy != "keep":
        messages = [m for m in row.messages if m.role not in ("system", "developer")]
        row = replace(row, messages=tuple(messages))
        kept = ChatTemplate(template.tokenizer, template.options.replace(system_policy="keep"))
        row, _ = kept.prepare(row)
    else:
        row, _ = template.prepare(row)
    if not template.style.reasoning_field:
        messages = [
            message
            if message.reasoning is None
            else replace(
                message, reasoning=None, content=join_reasoning(message.reasoning, message.content)
            )
            for message in row.messages
        ]
        row = replace(row, messages=tuple(messages))
    return Prompt(prompt.id, row, kinds_of(row))


def _can_ask(engine: Engine, prompt: Prompt) -> bool:
    if isinstance(prompt.row, Conversation) and not prompt.row.messages:
        return False
    try:
        ids = engine.prompt_ids(prompt.row)
    except DataError:
        return False  # the template has no such role, or no tools
    room = engine.context
    return bool(ids) and (room is None or len(ids) + _ROOM_FOR_ANSWERS <= room)


def _spread(prompts: Sequence[Prompt]) -> list[Prompt]:
    """The same prompts, rarest combination of kinds first and then in turn."""
    counts = Counter(prompt.kinds for prompt in prompts)
    seen: Counter[tuple[str, ...]] = Counter()
    keyed = []
    for prompt in prompts:
        seen[prompt.kinds] += 1
        keyed.append(((seen[prompt.kinds], counts[prompt.kinds]), prompt))
    return [prompt for _, prompt in sorted(keyed, key=lambda pair: pair[0])]


def _rows_of(run: Path | None) -> Iterator[Prompt]:
    """The questions of a run's training files; nothing where they are not there any more."""
    resolved = None if run is None else run / "resolved.yaml"
    if run is None or resolved is None or not resolved.is_file():
        return
    recipe = load_recipe(resolved).recipe
    # Relative paths of a recipe begin where the run was started.
    started = run / "environment.json"
    home = read_record(started, lambda content: Path(content["working_directory"]), Path())
    for source in recipe.data.train:
        name = recipe.data.format if source.format == "auto" else source.format
        options = QuestionOptions(name, source.columns, plain_prompts=True)
        try:
            for file in resolve_files(str(home / Path(source.path).expanduser())):
                for raw in read_rows(file):
                    with suppress(RowError):
                        _, row = read_question(raw, options)
                        if isinstance(row, Conversation | TextRow):
                            yield Prompt(f"{file.name}:{raw.line}", row, kinds_of(row))
        except DataError:
            continue  # moved, or on the hub


def _made(*, is_text: bool) -> Iterator[Prompt]:
    rows: list[Conversation | TextRow] = []
    if is_text:
        rows = [TextRow("", prompt=f"{text} {number}") for number in range(6) for text in _TEXTS]
    else:
        for number in range(6):  # some may have no place in a template
            for place, text in enumerate(_TEXTS):
                rows.append(_conversation(f"{number}. {text}" if number else text, place + number))
    for number, row in enumerate(rows, 1):
        yield Prompt(f"made:{number}", row, kinds_of(row))


def _conversation(text: str, shape: int) -> Conversation:
    user, first = {"role": "user", "content": text}, {"role": "user", "content": "First?"}
    second: dict[str, Any] = {"role": "assistant", "content": "Second."}
    thought = {**second, "reasoning_content": "It is about order."}
    system = {"role": "system", "content": "You are terse.\nAnswer in one line."}
    function = {"name": "get_weather", "arguments": {"city": "Delft"}}
    call = {"id": "call00001", "type": "function", "function": function}
    called = {"role": "assistant", "content": "", "tool_calls": [call]}
    found = {"role": "tool", "content": '{"celsius": 21}', "tool_call_id": "call00001"}
    shapes: list[list[dict[str, Any]]] = [
        [user],
        [system, user],
        [first, second, user],
        [first, thought, user],
        [user, called, found],
        [system, first, second, user],
    ]
    messages = shapes[shape % len(shapes)]
    return conversation_of(messages, [_TOOL] if called in messages else None)


def made_pictures() -> list[Conversation]:
    """Questions about pictures that look alike at any size: four fields of a color each."""
    found = []
    for seed in range(_NUM_PICTURES):
        levels = np.random.default_rng(seed).integers(0, 255, (2, 2, 3)).astype(np.uint8)
        stream = io.BytesIO()
        Pil.fromarray(levels.repeat(_HALF_SIDE, 0).repeat(_HALF_SIDE, 1)).save(stream, "PNG")
        url = f"data:image/png;base64,{base64.b64encode(stream.getvalue()).decode()}"
        parts = [{"type": "image", "url": url}, {"type": "text", "text": "What is this?"}]
        found.append(conversation_of([{"role": "user", "content": parts}]))
    return found


_NUM_PICTURES, _HALF_SIDE = 8, 224
