"""Ten rows rendered by other tools' own code and by ours, token by token.

    python benchmarks/foreign_prompts.py CLONES

CLONES holds axolotl, LLaMA-Factory, unsloth and ms-swift. The tokenizer is one of bytes with
control tokens.
A line each: rows whose tokens differ, rows whose trained tokens differ.
"""

import ast
import itertools
import json
import os
import re
import sys
import tempfile
from collections.abc import Iterable, Iterator
from copy import deepcopy
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import datasets  # before the placeholders, which it would take for what they are not
import numpy as np
import trl  # noqa: F401
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from trainkit.data import DataOptions, Ledger, Source, prepare
from trainkit.data.template import FROZEN_DATE
from trainkit.errors import RecipeError
from trainkit.recipe import load_recipe
from trainkit.recipe.translate.draft import table, tool_table
from trainkit.recipe.translate.engine import translate

CONTROL = (
    "<think> </think> <|start|> <|message|> <|channel|> <|return|> "
    "<B> <E> <|im_start|> <|im_end|> <|start_header_id|> <|end_header_id|> <|eot_id|> <|eot|> "
    "<start_of_turn> <end_of_turn> <|im_sep|> <|end|> <|user|> <|assistant|> <|header_start|> "
    "<|header_end|> <|turn> <turn|> <|bom|> <|eom|> <|END_OF_TURN_TOKEN|> "
    "<｜User｜> <｜Assistant｜> <｜end▁of▁sentence｜>"
)
ALPACA = [
    {"instruction": f"do {n}", "input": f"in {n}" * (n % 2), "output": f"ans {n}"}
    for n in range(10)
]


def chat(number: int) -> list[dict[str, str]]:
    """A conversation with or without a system turn, of one exchange or two."""
    turns = [("system", f"sys {number}")] * (number % 2) + [("user", "hi"), ("assistant", "yo")]
    turns += [("user", "more"), ("assistant", f"end {number}")] * (number % 3 == 0)
    return [{"role": role, "content": content} for role, content in turns]


def tokenizer(eos: str, *, bos: bool = True) -> Any:
    """Bytes, and control tokens; begins texts with a bos, where there is to be one."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={c: n for n, c in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.add_special_tokens([AddedToken(each, special=True) for each in CONTROL.split()])
    if not bos:
        return PreTrainedTokenizerFast(tokenizer_object=made, eos_token=eos)
    begin = [("<B>", made.token_to_id("<B>"))]
    made.post_processor = processors.TemplateProcessing(single="<B> $A", special_tokens=begin)
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<B>", eos_token=eos)


def ours(tok: Any, rows: list[Any], source: dict[str, Any], **options: Any) -> list[Any]:
    """(ids, mask) of each row."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.jsonl"
        file.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
        given = DataOptions(cache_dir=folder, max_length=4096, num_workers=0, **options)
        data = prepare((Source(path=str(file), **source),), tok, given, ledger=Ledger())
        return [(list(each["input_ids"]), list(each["loss_mask"])) for each in data]


def cases(clones: Path) -> Iterator[tuple[str, list[Any], list[Any]]]:
    """The prompt's name, theirs and ours; tokens alone where they make no mask."""
    from axolotl.prompt_tokenizers import AlpacaPromptTokenizingStrategy
    from axolotl.prompters import AlpacaPrompter
    from llamafactory.data.template import TEMPLATES

    axolotl, names = tool_table("axolotl"), table("templates")
    for kind in ("alpaca", "alpaca:chat", "alpaca:chatml", "alpaca:phi"):
        tok = tokenizer("<E>")
        style = kind.partition(":")[2] or "instruct"
        made = AlpacaPromptTokenizingStrategy(AlpacaPrompter(style), tok, False, 4096)
        rows = [made.tokenize_prompt(row) for row in ALPACA]
        theirs = [(row["input_ids"], [int(x != -100) for x in row["labels"]]) for row in rows]
        source = {"format": "template", "columns": axolotl["prompts"][kind]}
        yield f"axolotl {kind}", theirs, ours(tok, ALPACA, source)
    jinja = clones / "axolotl/src/axolotl/utils/chat_templates/templates"
    texts = {name: (jinja / f"{name}.jinja").read_text() for name in axolotl["templates"]}
    given = [("axolotl", name, text, axolotl) for name, text in texts.items()]
    unsloth = tool_table("unsloth")
    for name, text in unsloths(clones / "unsloth/unsloth/chat_templates.py").items():
        if name in unsloth["templates"]:  # `get_chat_template` begins Gemma's with a bos
            bos = "{{ bos_token }}" * ("gemma" in name and "bos_token" not in text[:20])
            given.append(("unsloth", name, bos + text, unsloth))
        if name == "chatml":  # its end of turn is the tokenizer's eos by another name
            renamed = "{{ bos_token }}" + text.replace("<|im_end|>", "<E>")
            given.append(("unsloth", "chatml_eos", renamed, unsloth))
            renamed = renamed.replace("<|im_start|>", "<start_of_turn>")
            given.append(("unsloth", "chatml_gemma", renamed, unsloth))
    for tool, name, text, rows in given:
        known = names[rows["templates"][name]]["text"]
        tok = tokenizer(eos_of(known))
        render = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True).from_string(
            text
        )
        plain = [{"messages": chat(n)} for n in range(10) if name != "gemma" or n % 2 == 0]
        fixed = {
            "bos_token": "<B>",
            "eos_token": tok.eos_token,
            "strftime_now": lambda _: "26 Jul 2024",
            "add_generation_prompt": False,
        }
        shown = [render.render(row, **fixed) for row in plain]
        theirs = [(tok(each, add_special_tokens=False)["input_ids"],) for each in shown]
        yield f"{tool} {name}", theirs, ours(tok, plain, {}, chat_template=known)
    kept = tool_table("llamafactory")["templates"].items()
    for name, written in (each for each in kept if each[0] in TEMPLATES):
        known, template = names[written]["text"], TEMPLATES[name]
        tok = tokenizer(eos_of(known))
        theirs = []
        for turns in map(chat, range(10)):
            system = turns.pop(0)["content"] if turns[0]["role"] == "system" else None
            pairs = template.encode_multiturn(tok, turns, system, None)
            ids = [token for pair in pairs for half in pair for token in half]
            theirs.append((ids, [n for pair in pairs for n in (0, 1) for _ in pair[n]]))
        plain = [{"messages": chat(n)} for n in range(10)]
        ends = "line_break" if re.search("chatml|qwen|gemma", name) else True
        thinks = "empty" if "thoughts" in written else "template"
        mine = ours(tok, plain, {}, chat_template=known, end_texts=ends, thinking=thinks)
        yield f"LLaMA-Factory {name}", theirs, mine


class Placeholders(MetaPathFinder, Loader):
    """Of packages that are not installed, with all that is in them."""

    def __init__(self, *names: str) -> None:
        self.names = names

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        del path, target
        is_away = name.split(".")[0] in self.names
        return ModuleSpec(name, self, is_package=True) if is_away else None

    def create_module(self, spec: ModuleSpec) -> Any:
        return MagicMock(__spec__=spec, __path__=[], __name__=spec.name)

    def exec_module(self, module: Any) -> None:
        """Nothing is in it."""


MODELS = {
    "Qwen/Qwen2.5-7B": "qwen2_5",
    "Qwen/Qwen2-7B-Instruct": "qwen",
    "Qwen/Qwen3-8B": "qwen3",
    "Qwen/Qwen3.5-9B": "qwen3_5",
    "Qwen/Qwen3-4B-Instruct-2507": "qwen3_nothinking",
    "Qwen/Qwen2.5-1.5B --template default": "default",
    "openai-mirror/gpt-oss-20b": "gpt_oss",
    "nv-community/NVIDIA-Nemotron-3.5-Lightning-30B-A3B-BF16": "nemotron_h",
}
ENDS = {"default": "<E>", "gpt_oss": "<|return|>"}
TURNS = [
    {"messages": [*chat(n)[:-1], {"role": "assistant", "content": f"<think>\nR\n</think>\n\n{n}"}]}
    if n % 4
    else {"messages": chat(n)}
    for n in range(10)
]


def swifts(clones: Path) -> Iterator[tuple[str, list[Any], list[Any]]]:
    """ms-swift's rows and prompts."""
    from swift.dataset import DATASET_MAPPING
    from swift.dataset.preprocessor import AutoPreprocessor
    from swift.template import TEMPLATE_MAPPING
    from swift.template.templates import llm

    llm.datetime = MagicMock(now=lambda: FROZEN_DATE)  # as templates here print it
    own = {"response": "{{NAME}} of {{AUTHOR}}"}
    calls = [
        ("system", "with these: {}"),
        ("human", "it's <one>?"),
        ("function-call", '{"name": "find", "arguments": \'{"by": "it\\\'s \\\\"x\\\\""}\'}'),
        ("function-response", '{"found": ["é"]}'),
        ("gpt", "That."),
        ("human", "And?"),
        ("function-call", '{"name": "go", "arguments": {"to": "it\'s"}}'),
        ("function-response", "gone"),
        ("function-response", "far"),
        ("gpt", "Gone."),
    ]
    described = [json.dumps({"name": "find", "é": {}}, indent=1), '{"name": "go"}']
    rows = {
        "AI-ModelScope/alpaca-gpt4-data-zh": [
            {**a, "input": f"输入：{a['input']}"} for a in ALPACA
        ],
        "AI-ModelScope/alpaca-gpt4-data-en": ALPACA,
        "AI-ModelScope/LongAlpaca-12k": [
            {**a, "output": f"Answer:  {a['output']} "} for a in ALPACA
        ],
        "swift/Qwen3-SFT-Mixin": TURNS,
        "AI-ModelScope/function-calling-chatml": [
            {
                "function_description": "\n\n".join(described[: n % 3]),
                "conversations": [
                    {"from": a, "value": b} for a, b in calls[n % 2 : 5 + n // 5 * 5]
                ],
            }
            for n in range(10)
        ],
    }
    for part in ("", ":qwen3", ":empty_think"):  # whose rows ms-swift would take from its cache
        names = [{**own, "query": f"{{{{NAME}}}}{part}?", "tag": "zh"[n % 2 :]} for n in range(10)]
        rows[f"swift/self-cognition{part}"] = names
    scales = ("default", "ignore_empty_think")
    owns = {"qwen": table("templates")["qwen2"]["text"]}
    owns["gpt_oss"] = (clones / "trl/trl/chat_templates/gptoss.jinja").read_text()
    for (name, given), (model, kind), system, scale in itertools.product(
        rows.items(), MODELS.items(), (None, "S"), scales
    ):
        part = name.partition(":")[2] or "default"
        keys = {name, name.partition(":")[0].rpartition("/")[2]}
        held = (m for key, m in DATASET_MAPPING.items() if keys & {key, *map(str, key)})
        meta = next(held, None)
        reads: Any = AutoPreprocessor()
        if meta is not None:
            subset = next(each for each in meta.subsets if each.name in (part, "default"))
            subset = next((each for each in meta.subsets if each.name == part), subset)
            reads = subset.preprocess_func or meta.preprocess_func
        if "self-cognition" in name:
            reads.set_name_author(("a", "b"), ("c", "c"))
        command = f"swift sft --model {model} --dataset {name} --max_length 4096"
        command += f" --model_name a b --model_author c --loss_scale {scale}"
        command += f" --system {system}" * bool(system)
        command += " --agent_template hermes" * ("function-calling" in name)
        with tempfile.TemporaryDirectory() as folder:
            file, target = Path(folder) / "theirs.sh", Path(folder) / "ours.yaml"
            file.write_text(command, encoding="utf-8")
            try:
                target.write_text(translate(file).text, encoding="utf-8")
            except RecipeError:
                continue
            data = load_recipe(target).recipe.data
        (source,) = data.train
        template = deepcopy(TEMPLATE_MAPPING[kind])
        tok = tokenizer(ENDS.get(kind, "<|im_end|>"), bos=kind == "default")
        tok.chat_template = owns.get(kind, table("templates")["chatml"]["text"])
        tok.model_info = MagicMock(task_type="causal_lm", max_model_len=4096)
        tok.model_meta = SimpleNamespace(is_multimodal=False, model_arch=None)
        made = template.template_cls(None, template, system, 4096, loss_scale=scale)
        made.init_processor(tok)
        made.set_mode("train")
        theirs, some = [], given
        if source.format == "template" and "messages" in given[0]:
            some = [row for row in given if len(row["messages"]) < 4]  # of one answer
        for row in reads(datasets.Dataset.from_list(some), enable_auto_mapping=True):
            encoded = made.encode(row)
            mask = [int(x != -100) for x in encoded["labels"]]
            theirs.append((list(encoded["input_ids"]), mask))
        shape = {"format": source.format, "columns": source.columns}
        held = {key: getattr(data, key) for key in ("chat_template", "system_policy", "end_texts")}
        options = {key: value for key, value in held.items() if value is not None}
        mine = ours(tok, some, shape, **options)
        yield f"ms-swift {name} {kind} {system} {scale}", theirs, mine


def eos_of(template: str) -> str:
    """The token that ends a turn of a template."""
    if "<｜User｜>" in template:
        return "<｜end▁of▁sentence｜>"
    ends = (
        "<|im_end|> <|eot_id|> <turn|> <|eom|> <|END_OF_TURN_TOKEN|> <end_of_turn> <|eot|> <|end|>"
    )
    return next((end for end in ends.split() if end in template), "<E>")


def unsloths(file: Path) -> dict[str, str]:
    """Unsloth's templates, read from its source, with the system text that each begins with."""
    values: dict[str, Any] = {}
    found: dict[str, str] = {}
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign):
            target = node.targets[0]
            if isinstance(target, ast.Name):
                try:
                    values[target.id] = ast.literal_eval(node.value)
                except ValueError:
                    values[target.id] = values.get(ast.unparse(node.value))
            elif ast.unparse(target).startswith("CHAT_TEMPLATES") and isinstance(
                node.value, ast.Tuple
            ):
                text = values.get(ast.unparse(node.value.elts[0])) or ""
                name = ast.literal_eval(target.slice)  # type: ignore[attr-defined]
                system = values.get("qwen25_default_system_message") if "qwen" in name else ""
                found[name] = text.replace("{system_message}", system or "")
    return found


def set_up(clones: Path, folder: str) -> None:
    """The tools' code can be imported; what is not installed is a placeholder."""
    os.chdir(folder)  # where a placeholder's name is taken for a folder
    os.environ["DISABLE_VERSION_CHECK"] = "1"
    sys.path[:0] = [str(clones / each) for each in ("axolotl/src", "LLaMA-Factory/src", "ms-swift")]
    sys.meta_path.append(Placeholders("modelscope", "addict", "json_repair"))
    for name in ("omegaconf", "torchaudio", "av"):
        sys.modules.setdefault(name, MagicMock(__spec__=ModuleSpec(name, None)))


def report(cases: Iterable[tuple[str, list[Any], list[Any]]]) -> None:
    """A line for each: rows with other tokens, others trained, and other pixels if there are."""
    for name, theirs, mine in cases:
        pairs = list(zip(theirs, mine, strict=True))
        kinds = [list(zip(*pair, strict=False)) for pair in pairs]
        counts = [sum(not same(*each) for each in kind) for kind in zip(*kinds, strict=True)]
        what = ("other tokens", "others trained", "other pixels")
        said = [f"{number} with {each}" for number, each in zip(counts, what, strict=False)]
        print(f"{name}: {len(pairs)} rows, {', '.join(said)}", flush=True)


def same(theirs: Any, mine: Any) -> bool:
    """Numbers to the last bit, as far as 16 bits of pixels tell them."""
    if theirs is None or mine is None:
        return theirs is mine
    first, second = np.asarray(theirs, np.float32), np.asarray(mine, np.float32)
    return first.shape == second.shape and bool(np.allclose(first, second, atol=0))


def main() -> None:
    """Print a line for each prompt."""
    clones, here = Path(sys.argv[1]).resolve(), tempfile.TemporaryDirectory()
    set_up(clones, here.name)
    report(itertools.chain(swifts(clones), cases(clones)))


if __name__ == "__main__":
    main()
