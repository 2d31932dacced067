"""A script of TRL's or Unsloth's, followed by its syntax tree up to its training; never run."""

import ast
import contextlib
import json
import operator
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainkit.errors import RecipeError
from trainkit.recipe.translate.draft import Theirs, other_kind, table, tool_table


@dataclass(frozen=True)
class Unknown:
    """A value that only running the script would tell."""

    expression: str


@dataclass
class Thing:
    """A model, a tokenizer, a configuration, a data set or a trainer, with its arguments."""

    kind: str
    values: dict[str, Any] = field(default_factory=dict)

    def but(self, **changes: Any) -> "Thing":
        """The same with other values."""
        return Thing(self.kind, {**self.values, **changes})

    def with_column(self, name: str, value: Any) -> "Thing":
        """The same rows with a column that was made."""
        return self.but(columns={**self.values["columns"], name: value})


@dataclass(frozen=True)
class Share:
    """So many times the rows of a data set."""

    of: float


@dataclass(frozen=True)
class Column:
    """A column of a row."""

    name: str


@dataclass(frozen=True)
class Text:
    """Texts and columns in a row; a None is the tokenizer's eos."""

    parts: tuple[Any, ...]


@dataclass(frozen=True)
class Made:
    """JSON that a template makes of a row."""

    template: str


@dataclass(frozen=True)
class Chat:
    """Turns that the chat template renders: a column, or messages."""

    turns: Any


_ARITHMETIC: dict[type, Any] = {ast.Mult: operator.mul, ast.Div: operator.truediv}
_ARITHMETIC |= {ast.Sub: operator.sub, ast.FloorDiv: operator.floordiv}
_PASSING = {"list", "Series", "DataFrame", "from_pandas", "concat", "concatenate_datasets"}
_PASSING |= {"prepare_model_for_kbit_training", "int", "dict_"}
"""Calls that give back what they are given, as far as rows go."""


_CONSTANT: dict[str, Any] = {"is_bfloat16_supported": True, "is_bf16_supported": True}
_CONSTANT |= dict.fromkeys(("DataCollatorForSeq2Seq", "DataCollatorForLanguageModeling"))
_SETS_UP = {"get_peft_model", "load_dataset", "SFTTrainer", "SFTConfig", "LoraConfig", "map"}
_SETS_UP |= {"filter", "select", "shard", "sort", "add_column", "concatenate_datasets"}
_CHANGES = {"add_tokens", "add_special_tokens", "resize_token_embeddings", "requires_grad_"}
_CHANGES |= {"add_adapter", "load_adapter", "merge_and_unload", "add_callback", "register_buffer"}
"""Methods of models, tokenizers and trainers after which another training runs."""
_HARMLESS = {"pad_token", "padding_side", "pad_token_id", "use_cache", "pretraining_tp"}
_HARMLESS |= {"generation_config"}
_DRAWS = {"train_size", "seed"}
_LOADS = {"path", "name", "split", "data_files", "streaming", "num_proc", "token", "cache_dir"}
"""Arguments of `load_dataset` that are taken, or change no row."""
_ANSWERS = re.compile(r"(assistant|model|Assistant:)(<\|[a-z_]+\|>)?\s*$")
"""The end of what the prompt of inference ends in: the answers begin behind it."""
_FILE_OF_HUB = re.compile(
    r"https://huggingface\.co/datasets/([^/]+/[^/]+)/(?:raw|resolve)/main/(.+)"
)


class Trained(Exception):
    """The training was reached: what follows does not matter."""


def read_script(path: Path, text: str) -> Theirs:
    """What a script trains: the model and the rows that reach the trainer, and its settings."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        _refuse_kind(path, re.findall(r"([\w.]+)\(", text))
        raise RecipeError(f"not Python: {error}", where=str(path)) from error
    calls = [_name(n.func) for n in ast.walk(tree) if isinstance(n, ast.Call)]
    trainer = _refuse_kind(path, calls)
    script = Script(tree, path)
    theirs = Theirs(path, {}, tool="unsloth" if "unsloth" in _imports(tree) else "trl")
    with contextlib.suppress(Trained, RecursionError):
        script.run(script.known(tree.body))
    script.report(theirs)
    if trainer:
        theirs.values["trainer"] = trainer
    return theirs


def _imports(tree: ast.AST) -> set[str]:
    nodes = [n for n in ast.walk(tree) if isinstance(n, ast.Import | ast.ImportFrom)]
    named = [n.module or "" for n in nodes if isinstance(n, ast.ImportFrom)]
    named += [each.name for n in nodes if isinstance(n, ast.Import) for each in n.names]
    return {name.partition(".")[0] for name in named}


def _refuse_kind(path: Path, calls: list[str]) -> str:
    """Refuse another kind of training; the name of a trainer of ours that is not `SFTTrainer`."""
    kinds = table("kinds")
    trainers = [n.rpartition(".")[2] for n in calls if n.endswith("Trainer") and "Patch" not in n]
    used = " ".join(dict.fromkeys(f"{name}(" for name in calls))
    found = [
        (kind, match[0])
        for part, texts in (("trainers", trainers), ("calls", [used]))
        for kind, row in kinds.items()
        for text in texts
        if part in row and (match := re.search(row[part], text))
    ]
    if not trainers and not any(name.endswith("get_peft_model") for name in calls):
        found.append(("inference", "no trainer is made"))
    if not found and re.search("TrlParser|HfArgumentParser", used):
        found.append(("library", "its settings are options"))
    others = {"DPOTrainer", "KTOTrainer", "RewardTrainer"} & set(trainers)
    ours = {"SFTTrainer", "UnslothTrainer", *others} & set(trainers)
    if not found and trainers and not ours:
        found.append(("library", trainers[0]))
    if found:
        raise other_kind(found[0][0], found[0][1].strip("("), path)
    return ours.pop() if ours == others and len(ours) == 1 else ""


def _name(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_name(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


class Script:
    """Follows assignments and calls; functions only where they make rows, and ``main``."""

    def __init__(self, tree: ast.Module, path: Path) -> None:
        self.path = path
        self.names: dict[str, Any] = {}
        self.functions = {n.name: n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)}
        classes = [n for n in ast.walk(tree) if isinstance(n, ast.ClassDef)]
        idle = list(map(_body, ast.parse("".join(tool_table("unsloth")["callbacks"])).body))
        self.idle = {n.name for n in classes if _body(n) in idle}
        self.trainers: list[Thing] = []
        self.lost: list[tuple[str, str]] = []
        self.noted: list[tuple[str, str]] = []

    def known(self, body: list[ast.stmt]) -> list[ast.stmt]:
        """Statements, with those that are known by their text as what they come to."""
        steps = [n for n in body if not isinstance(n, ast.Import | ast.ImportFrom)]
        steps = [n for n in steps if not isinstance(n, ast.Expr) or isinstance(n.value, ast.Call)]
        dumped = [ast.dump(n) for n in steps]
        for entry in (each for each in table("functions") if "code" in each):
            wanted = [ast.dump(n) for n in ast.parse(entry["code"]).body]
            for at in range(len(dumped)):
                if dumped[at : at + len(wanted)] == wanted:
                    self.noted += entry["notes"].items()
                    steps[at : at + len(wanted)] = ast.parse(entry["is"]).body
                    return steps
        return steps

    def run(self, body: list[ast.stmt]) -> None:
        for node in body:
            if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
                target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
                self._assign(target, self.value(node.value))
            elif isinstance(node, ast.Expr):
                self.value(node.value)
            elif isinstance(node, ast.If):
                taken = self.value(node.test)
                if _name(getattr(node.test, "left", node.test)) == "__name__":
                    taken = True
                if not isinstance(taken, Unknown):
                    self.run(node.body if taken else node.orelse)
                elif any(self._touches(each) for each in node.body + node.orelse):
                    self.lost.append((f"if {ast.unparse(node.test)}", "only running it would tell"))
                    self.run(node.body)
                else:
                    self._forget(node)
            elif isinstance(node, ast.Try | ast.With):
                self.run(node.body)
            elif isinstance(node, ast.FunctionDef):  # the last one so far of its name
                self.functions[node.name] = node
            elif isinstance(node, ast.For | ast.While | ast.AugAssign):
                if self._touches(node):
                    line = ast.unparse(node).split("\n")[0]
                    self.lost.append((line, "what is trained is changed again and again"))
                self._forget(node)

    def _forget(self, node: ast.stmt) -> None:
        for each in ast.walk(node):
            if isinstance(each, ast.Name | ast.Attribute) and isinstance(each.ctx, ast.Store):
                self._assign(each, Unknown(ast.unparse(each)))

    def _touches(self, node: ast.stmt) -> bool:
        calls = (each for each in ast.walk(node) if isinstance(each, ast.Call))
        return any(_name(each.func).rpartition(".")[2] in _SETS_UP for each in calls)

    def _assign(self, target: ast.expr, value: Any) -> None:
        if isinstance(target, ast.Name):
            self.names[target.id] = value
        elif isinstance(target, ast.Tuple):
            many = isinstance(value, list | tuple) and len(value) == len(target.elts)
            for place, each in enumerate(target.elts):
                self._assign(each, value[place] if many else Unknown(ast.unparse(each)))
        elif isinstance(target, ast.Attribute):
            owner, root = self.value(target.value), self.names.get(_name(target).split(".")[0])
            if isinstance(owner, Thing) and owner.kind == "config":
                owner.values[target.attr] = value
            elif (
                isinstance(root, Thing)
                and root.kind != "rows"
                and not (_HARMLESS & {*_name(target).split(".")})
            ):
                why = "here the model and its tokenizer are as their files say"
                self.lost.append((f"{ast.unparse(target)} = ...", why))

    def value(self, node: ast.expr) -> Any:
        if isinstance(node, ast.Name):
            return self.names.get(node.id, Unknown(node.id))
        if isinstance(node, ast.Call):
            return self._call(node)
        if isinstance(node, ast.List | ast.Tuple):
            return [self.value(each) for each in node.elts]
        if isinstance(node, ast.Dict) and all(isinstance(k, ast.Constant) for k in node.keys):
            pairs = zip(node.keys, node.values, strict=True)
            return {k.value: self.value(v) for k, v in pairs if isinstance(k, ast.Constant)}
        if isinstance(node, ast.Attribute):
            if ast.unparse(node) == "Path(__file__).parent":
                return str(self.path.absolute().parent)
            if _name(node.value) == "torch":
                return f"torch.{node.attr}"
            owner = self.value(node.value)
            if isinstance(owner, Thing) and owner.kind == "tokenizer":
                known = {"eos_token": Text((None,)), "tokenizer": owner}
                return known.get(node.attr, Unknown(ast.unparse(node)))
        if isinstance(node, ast.Subscript):
            owner, key = self.value(node.value), self.value(node.slice)
            if isinstance(owner, Thing) and owner.kind == "rows" and isinstance(key, str):
                return self._part(owner, key)
            if isinstance(owner, Column) and not isinstance(key, str):  # of several rows
                return owner
            if owner == "ROW" and isinstance(key, str):
                return self.names.get("MADE", {}).get(key, Column(key))
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            inner = self.value(node.operand)
            return inner if isinstance(inner, Unknown) else not inner
        if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
            sides = [self.value(node.left), self.value(node.right)]
            if isinstance(node.op, ast.Div) and all(isinstance(side, str) for side in sides):
                return "/".join(sides)
            plain = [side.of if isinstance(side, Share) else side for side in sides]
            if all(isinstance(side, int | float) for side in plain):
                with contextlib.suppress(ZeroDivisionError, OverflowError):
                    found = _ARITHMETIC[type(node.op)](*plain)
                    return Share(found) if Share in map(type, sides) else found
        if isinstance(node, ast.FormattedValue):
            return self.value(node.value)
        if isinstance(node, ast.JoinedStr) or (
            isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add)
        ):
            sides = node.values if isinstance(node, ast.JoinedStr) else [node.left, node.right]
            if (text := _joined(map(self.value, sides))) is not None:
                return text
        if isinstance(node, ast.ListComp) and len(node.generators) == 1:
            many = self.value(node.generators[0].iter)
            if isinstance(many, Thing) and many.kind == "rows":
                if isinstance(node.elt, ast.Call) and _name(node.elt.func) in self.functions:
                    more = self._rows_made(node.elt.func)
                    return many.but(columns={**many.values["columns"], **more})
                inner = self._row_of(many, node.generators[0].target)
                return many.with_column("text", inner.value(node.elt))
            self._bind(node.generators[0].target, many)
            return [self.value(node.elt)]
        with contextlib.suppress(ValueError, TypeError, SyntaxError, MemoryError):
            return ast.literal_eval(node)
        return Unknown(ast.unparse(node))

    def _call(self, node: ast.Call) -> Any:
        full = _name(node.func)
        name = full.rpartition(".")[2] or getattr(node.func, "attr", "")
        words = {k.arg: self.value(k.value) for k in node.keywords if k.arg}
        for each in (k.value for k in node.keywords if not k.arg):
            more = self.value(each)
            words |= more if isinstance(more, dict) else {}
        args = [self.value(each) for each in node.args]
        owner = self.value(node.func.value) if isinstance(node.func, ast.Attribute) else None
        if isinstance(owner, Thing):
            found = self._method(owner, name, args, words, node)
            if found is not None:
                return found
        if name == "from_pretrained":
            first = args[0] if args else words.get("model_name", Unknown("no model is named"))
            if re.search(r"Tokenizer|Processor", full):
                return Thing("tokenizer", {"name": first})
            found = Thing("model", {**words, "model_name": first})
            return [found, Thing("tokenizer", {"name": first})] if "Fast" in full else found
        if name == "get_peft_model":
            config = args[1] if len(args) > 1 else words.get("peft_config")
            inner = config.values if isinstance(config, Thing) else {}
            base = args[0] if args else words.get("model")
            kept = {k: v for k, v in words.items() if k not in ("model", "peft_config")}
            known = base.values if isinstance(base, Thing) else {}
            return Thing("model", {**known, **inner, **kept, "adapters": True})
        if name == "dict" or (name == "str" and args and isinstance(args[0], str)):
            return dict(words) if name == "dict" else args[0]
        if name.endswith(("Config", "TrainingArguments")):
            plain = tool_table("trl")["transformers"] if name == "TrainingArguments" else {}
            return Thing("config", {**plain, **words})
        if name == "load_dataset" or full == "Dataset.from_json":
            places = ("path", "name") if name == "load_dataset" else ("data_files",)
            named = {"path": "json", **dict(zip(places, args, strict=False)), **words}
            return Thing("rows", {"source": named, "columns": {}})
        if name == "len" and args and isinstance(args[0], Thing) and args[0].kind == "rows":
            return Share(1.0)
        if name in _PASSING and len(args) == 1 and isinstance(args[0], Thing | Share | list):
            many = args[0] if isinstance(args[0], list) else [args[0]]
            sets = [each for each in many if isinstance(each, Thing) and each.kind == "rows"]
            if len(many) > 1 and len(sets) == len(many):
                return sets[0].but(more=sets[1:])
            return many[0] if many else Unknown(ast.unparse(node))
        if name in ("standardize_sharegpt", "standardize_data_formats"):
            return args[0] if args else Unknown(ast.unparse(node))
        if name == "get_chat_template" and args:
            named = words.get("chat_template", args[1] if len(args) > 1 else "chatml")
            return Thing("tokenizer", {"template": named})
        if name == "UnslothVisionDataCollator":
            return Thing("collator", {"resize": "min", **words})
        if name == "train_on_responses_only":
            return self._responses_only(args[0] if args else words.get("trainer"), words)
        if name.endswith("Trainer") and "Patch" not in name:
            for key in [k for k in node.keywords if k.arg == "formatting_func"]:
                made, rows = self._rows_made(key.value), words.get("train_dataset")
                if isinstance(rows, Thing):
                    del words["formatting_func"]
                    words["train_dataset"] = rows.but(columns=made)
            self.trainers.append(Thing("trainer", words))
            return self.trainers[-1]
        if name == "apply_chat_template":
            return _chat(args, words, node)
        if name == "format" and isinstance(_text(owner), Text):
            return _format(_text(owner), args, words)
        if name in ("removeprefix", "strip") and isinstance(owner, Chat):
            return owner
        if name in _CONSTANT:
            return _CONSTANT[name]
        if name == "zip":
            return tuple(args)
        if full == "json.loads" and args and isinstance(args[0], Column):
            return Made(f"{{{{ {args[0].name} }}}}")
        if full in self.functions and name == "main":
            self.run(self.functions[full].body)
        return Unknown(ast.unparse(node))

    def _responses_only(self, trainer: Any, words: dict[str, Any]) -> Any:
        part = words.get("response_part", "assistant")
        behind = re.fullmatch(r"<\|start\|>assistant(.+)", part) if isinstance(part, str) else None
        if behind is not None and isinstance(trainer, Thing):
            trainer.values["train_behind"] = behind[1]
        elif not isinstance(part, str) or not _ANSWERS.search(part):
            why = "what trains of an answer begins behind more than its header"
            self.lost.append((f"response_part={part!r}", why))
        if isinstance(trainer, Thing):
            trainer.values["train_on_responses_only"] = True
        return trainer

    def _method(
        self, owner: Thing, name: str, args: list[Any], words: dict[str, Any], node: ast.Call
    ) -> Any:
        if owner.kind == "trainer" and name == "train":
            raise Trained
        if owner.kind == "tokenizer" and name == "apply_chat_template":
            return _chat(args, words, node)
        if owner.kind != "rows":
            made = {_name(each.func) for each in node.args if isinstance(each, ast.Call)}
            if name == "add_callback" and made & self.idle:
                return owner
            if name in _CHANGES:
                what = f"{ast.unparse(node.func)}(...)"
                self.lost.append((what, "it may change what is trained"))
            return None
        held = owner.values
        if name == "map":
            more = self._rows_made(node.args[0] if node.args else None)
            return owner.but(columns={**held["columns"], **more})
        if name == "sample" and args and isinstance(args[0], Share):
            return owner.but(share=args[0].of)
        if name == "train_test_split" and isinstance(words.get("test_size"), int | float):
            return owner.but(held_out=words["test_size"])
        size = words.get("train_size")
        if name == "train_test_split" and isinstance(size, int | float) and {*words} <= _DRAWS:
            return owner.but(**{"most" if isinstance(size, int) else "epochs": size, "drawn": True})
        if name in ("shuffle", "remove_columns", "with_format", "to_iterable_dataset"):
            return owner.but(shuffled=name == "shuffle" or held.get("shuffled"))
        if name == "rename_column" and len(args) == 2 and isinstance(args[0], str):
            return owner.with_column(str(args[1]), held["columns"].get(args[0], Column(args[0])))
        if name == "select" and node.args:
            part = re.fullmatch(r"range\((\d+)\)", ast.unparse(node.args[0]))
            if part and held.get("shuffled"):  # so many, drawn
                return owner.but(most=int(part[1]))
            if part and "[" not in str(held["source"].get("split", "train")):
                split = f"{held['source'].get('split', 'train')}[:{part[1]}]"
                return owner.but(source={**held["source"], "split": split})
        return owner.but(lost=f".{name}({', '.join(map(ast.unparse, node.args))})"[:60])

    def _part(self, rows: Thing, key: str) -> Thing:
        if "held_out" in rows.values:
            return rows.but(part=key)
        if "drawn" in rows.values and key == "train":
            return rows.but(drawn=False)
        if key in rows.values["columns"] or key in ("conversations", "messages", "text"):
            return rows.with_column("text", rows.values["columns"].get(key, Column(key)))
        if "split" in rows.values["source"] or "lost" in rows.values:
            return rows.but(lost=rows.values.get("lost", f"[{key!r}]"))
        return rows.but(source={**rows.values["source"], "split": key})

    def _rows_made(self, node: ast.expr | None) -> dict[str, Any]:
        function = self.functions.get(node.id) if isinstance(node, ast.Name) else None
        for known in table("functions"):
            body = ast.parse(known.get("def", "pass")).body[0]
            whole = [ast.dump(function.args), *_body(function)] if function else []
            if isinstance(body, ast.FunctionDef) and whole == [ast.dump(body.args), *_body(body)]:
                return {key: Made(text) for key, text in known["makes"].items()}
        inner = Script(ast.Module([], []), self.path)
        taker = node if isinstance(node, ast.Lambda) else function
        if taker is not None and taker.args.args:
            inner.names = {**self.names, taker.args.args[0].arg: "ROW"}
        if isinstance(node, ast.Lambda):
            made = inner.value(node.body)
        elif function is not None and function.args.args:
            made = inner.returned(function.body)
        else:
            made = Unknown("its function is not in the script")
        if isinstance(made, list) and len(made) == 1:
            made = {"text": made[0]}
        if isinstance(made, dict):
            batched = {k: v for k, v in made.items() if isinstance(v, list) and len(v) == 1}
            columns = {k: v[0] for k, v in batched.items() if not isinstance(v[0], dict)}  # no turn
            return {**made, **columns}
        return {"*": Unknown(getattr(node, "id", "a function"))}

    def _row_of(self, rows: Thing, target: ast.expr) -> "Script":
        inner = Script(ast.Module([], []), self.path)
        inner.names = {**self.names, "MADE": dict(rows.values["columns"])}
        inner._bind(target, "ROW")
        return inner

    def returned(self, body: list[ast.stmt]) -> Any:
        """What a function that makes a row gives back."""
        for node in body:
            if isinstance(node, ast.Return) and node.value is not None:
                return self.value(node.value)
            if isinstance(node, ast.For):
                self._bind(node.target, self.value(node.iter))
                self.returned(node.body)
            elif isinstance(node, ast.Assign):
                target = node.targets[0]
                if isinstance(target, ast.Subscript) and self.value(target.value) == "ROW":
                    self.names.setdefault("MADE", {})[self.value(target.slice)] = self.value(
                        node.value
                    )
                else:
                    self._assign(target, self.value(node.value))
            elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
                called = node.value
                if _name(called.func).endswith(".append") and called.args:
                    held = self.names.get(_name(called.func).partition(".")[0])
                    if isinstance(held, list):
                        held.append(self.value(called.args[0]))
            elif not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
                return Unknown(ast.unparse(node).split("\n")[0])
        return self.names.get("MADE", Unknown("nothing"))

    def _bind(self, target: ast.expr, values: Any) -> None:
        if isinstance(target, ast.Tuple) and isinstance(values, tuple):
            for each, value in zip(target.elts, values, strict=False):
                self._assign(each, value)
        else:
            self._assign(target, values)

    def report(self, theirs: Theirs) -> None:
        theirs.lost += self.lost
        theirs.noted += self.noted
        if not self.trainers:
            models = [v for v in self.names.values() if isinstance(v, Thing) and v.kind == "model"]
            theirs.values |= {"model_name": models[-1].values["model_name"]} if models else {}
            theirs.lost.append(("the script", "the training is set up where it cannot be followed"))
            return
        if len(self.trainers) > 1:
            theirs.lost.append(("two trainers", "two trainings, one after the other"))
        trainer = dict(self.trainers[0].values)
        model, rows = trainer.pop("model", None), trainer.pop("train_dataset", None)
        values: dict[str, Any] = {"model_name": model} if isinstance(model, str) else {}
        for each in (model, trainer.pop("peft_config", None), trainer.pop("args", None)):
            if isinstance(each, Thing):
                values |= each.values
                if {"r", "lora_alpha"} & each.values.keys():
                    values["adapters"] = True
        tokenizer = trainer.pop("tokenizer", trainer.pop("processing_class", None))
        quantised = values.pop("quantization_config", trainer.pop("quantization_config", None))
        values |= quantised.values if isinstance(quantised, Thing) else {}
        if isinstance(collator := trainer.get("data_collator"), Thing):
            for key in sorted(collator.values.keys() - {"resize"}):
                theirs.lost.append((key, f"the collator's {key} is not known here"))
            trainer |= {"data_collator": None, "sees": True, "resize": collator.values["resize"]}
        values |= trainer
        if theirs.tool == "unsloth" and isinstance(model, Thing):
            base = model.values.get("max_seq_length", 2048)
            if isinstance(base, int) and isinstance(values.get("max_seq_length", base), int):
                values["max_seq_length"] = min(base, values.get("max_seq_length", base))
                if values.pop("max_length", None) is not None:
                    theirs.noted.append(("max_length", "the model's max_seq_length wins there"))
        if isinstance(self.names.get("tokenizer"), Thing):
            tokenizer = self.names["tokenizer"]
        if isinstance(tokenizer, Thing) and "template" in tokenizer.values:
            values["chat_template"] = tokenizer.values["template"]
        values["rows"] = _rows(rows, values, theirs)
        more = rows.values.get("more", []) if isinstance(rows, Thing) else []
        if more:
            values["more_rows"] = [_rows(each, dict(values), theirs) for each in more]
            shares = [1.0, *(each.values.get("share", -1) for each in more)]
            if max(shares[1:]) > 0:
                if min(shares) < 0 or "max_steps" not in values:
                    theirs.lost.append(("rows", "several data sets, in shares of one of them"))
                every = [values["rows"], *values["more_rows"]]
                for source, share in zip(every, shares, strict=True):
                    source["weight"] = round(share / sum(shares), 6)
        given = values.pop("eval_dataset", None)
        if isinstance(rows, Thing) and "held_out" in rows.values and "part" in rows.values:
            values["held_out"] = rows.values["held_out"]
        if isinstance(given, Thing) and given.values.get("part") != "test":
            values["eval_rows"] = _rows(given, values, theirs)
        for key, held in values.items():
            value = _plain(held)
            parts = value if isinstance(value, list) else [value]
            if unclear := [part.expression for part in parts if isinstance(part, Unknown)]:
                theirs.unclear[key] = unclear[0]
            elif not isinstance(value, Thing):
                theirs.values[key] = value


def _body(node: ast.stmt) -> list[str]:
    return [ast.dump(each) for each in getattr(node, "body", ())]


def _chat(args: list[Any], words: dict[str, Any], node: ast.Call) -> Any:
    turns = args[0] if args else words.pop("conversation", None)
    tools = words.pop("tools", None) in (None, [], Column("tools"))
    asks = words.pop("tokenize", False) or words.pop("add_generation_prompt", False)
    if asks or words or not tools:
        return Unknown(ast.unparse(node))
    if isinstance(turns, Thing) and turns.kind == "rows":
        return turns.with_column("text", Chat(turns.values["columns"].get("text")))
    return Chat(turns)


def _plain(value: Any) -> Any:
    if isinstance(value, Text) and all(isinstance(part, str) for part in value.parts):
        return "".join(value.parts)
    return Unknown(str(value)) if isinstance(value, Text | Chat | Column) else value


def _text(value: Any) -> Any:
    return Text((value,)) if isinstance(value, str | Column) else value


def _joined(values: Iterable[Any]) -> Text | None:
    """Texts and columns as one text; None where something else is among them."""
    texts = [_text(value) for value in values]
    if not all(isinstance(text, Text) for text in texts):
        return None
    return Text(tuple(part for text in texts for part in text.parts))


def _format(text: Text, args: list[Any], words: dict[str, Any]) -> Any:
    whole = "".join(part for part in text.parts if isinstance(part, str))
    places = re.split(r"\{(\w*)\}", whole.replace("{{", "\0").replace("}}", "\1"))
    parts: list[Any] = [each.replace("\0", "{").replace("\1", "}") for each in places]
    for number, name in enumerate(places[1::2]):
        place = int(name) if name.isdigit() else number
        parts[2 * number + 1] = words.get(name, args[place] if place < len(args) else None)
    return _joined(parts) or Unknown("format")


def _apart(value: Any, images: set[str]) -> Any:
    """Turns whose parts say where images are; the columns that hold them."""
    if isinstance(value, list):
        return [_apart(each, images) for each in value]
    if not isinstance(value, dict):
        return value
    if value.get("type") == "image" and isinstance(column := value.get("image"), Column):
        images.add(column.name)
        return {"type": "image"}
    return {key: _apart(each, images) for key, each in value.items()}


def _json(value: Any) -> str | None:
    """A template of turns or tools, as JSON; None where they cannot be followed."""
    if isinstance(value, Made):
        return value.template
    if isinstance(value, list | dict):
        found = [_json(each) for each in (value.values() if isinstance(value, dict) else value)]
        texts = [each for each in found if each is not None]
        if len(texts) < len(found):
            return None
        if isinstance(value, list):
            return f"[{', '.join(texts)}]"
        pairs = zip(value, texts, strict=True)
        return "{" + ", ".join(f"{json.dumps(key)}: {each}" for key, each in pairs) + "}"
    if isinstance(value, Column | Text):
        parts = _text(value).parts
        if not all(isinstance(p, str) or getattr(p, "name", "").isidentifier() for p in parts):
            return None
        texts = [p.name if isinstance(p, Column) else json.dumps(p) for p in parts]
        whole = texts[0] if len(texts) == 1 else f"({' ~ '.join(texts)})"
        return f"{{{{ {whole} | tojson }}}}"
    if value is None or isinstance(value, str | int | float):
        text = json.dumps(value, ensure_ascii=False)
        return None if re.search(r"\{[{%#]", text) else text
    return None


def _rows(rows: Any, values: dict[str, Any], theirs: Theirs) -> dict[str, Any]:
    """The source that reaches the trainer, as ours; what cannot be followed is lost."""
    if not isinstance(rows, Thing) or rows.kind != "rows":
        theirs.lost.append(("train_dataset", "its rows are made where they cannot be followed"))
        return {"path": "data/train.jsonl"}
    if "lost" in rows.values:
        theirs.lost.append((f"rows{rows.values['lost']}", "it chooses or changes rows"))
    named = rows.values["source"]
    head = {"column_names": named.get("column_names"), "skiprows": 1}  # its names, by others
    known = _LOADS | head.keys() if named.items() >= head.items() else _LOADS
    if strange := ", ".join(f"{key}=..." for key in named if key not in known):
        theirs.lost.append((f"load_dataset({strange})", "rows read in a way of their own"))
    files = named.get("data_files")
    paths = next(iter(files.values())) if isinstance(files, dict) and len(files) == 1 else files
    source: dict[str, Any] = {"path": named.get("path")}
    if paths is not None:
        plain = [paths] if isinstance(paths, str) else paths
        if named.get("path") in ("json", "csv", "parquet", "text") and len(plain) == 1:
            there = _FILE_OF_HUB.fullmatch(str(plain[0]))
            source = {"path": there[1], "files": [there[2]]} if there else {"path": plain[0]}
        else:
            source["files"] = plain
    if rows.values.get("drawn"):
        theirs.lost.append(("train_test_split", "it chooses or changes rows"))
    source |= {"subset": named.get("name") or None, "split": named.get("split")}
    source |= {"max_samples": rows.values.get("most"), "epochs": rows.values.get("epochs")}
    source = {k: v for k, v in source.items() if v is not None and (k, v) != ("split", "train")}
    unclear = [v for v in source.values() if isinstance(v, Unknown)]
    if unclear:
        theirs.lost.append((f"load_dataset({unclear[0].expression})", "only running it would tell"))
        return {"path": "data/train.jsonl"}
    made = dict(rows.values["columns"])
    columns = values.get("dataset_text_field", "text")
    function = values.pop("formatting_func", None)
    if "*" in made or function is not None:
        name = getattr(made.get("*", function), "expression", "a function")
        theirs.lost.append((f"map({name})", "rows are made by a function that cannot be followed"))
        return source
    turns = {key: _json(made[key]) for key in ("prompt", "completion", "tools") if key in made}
    pairs = {"prompt", "completion"} <= {*turns} and None not in turns.values()
    if pairs and theirs.tool == "trl" and columns not in made:
        turns |= {key: f"{{# #}}{text}" for key, text in turns.items() if "{{" not in str(text)}
        return {**source, "format": "prompt_completion", "columns": turns, "shape": "chat"}
    shape = made.get(columns, made.get("messages", made.get("conversations")))
    if shape is None and made:
        theirs.lost.append((f"map({', '.join(made)})", "rows are made that are no texts or turns"))
    source |= _shape(shape, made, theirs) if shape is not None else {}
    if isinstance(where := made.get("where"), Made):
        source["columns"]["where"] = where.template
    return source


def _shape(shape: Any, made: dict[str, Any], theirs: Theirs) -> dict[str, Any]:
    if isinstance(shape, Chat):
        turns = shape.turns
        if isinstance(turns, Column):
            turns = made.get(turns.name, turns)
        if isinstance(turns, Column):
            kind = "messages" if turns.name == "messages" else "sharegpt"
            made_of = {"format": kind, "shape": "chat"}
            if turns.name in ("messages", "conversations"):
                return made_of
            return {**made_of, "columns": {"conversations": turns.name}}
        shape = turns
    if isinstance(shape, list) and len(shape) == 1 and isinstance(shape[0], list):
        shape = shape[0]
    images: set[str] = set()
    shape = _apart(shape, images)
    turns = _json(shape) if isinstance(shape, list | Made) else None
    if turns is not None and len(images) < 2:
        columns = {"messages": turns, **dict(zip(["images"], images, strict=False))}
        return {"format": "messages", "columns": columns, "shape": "chat"}
    if isinstance(shape, Text | Column):
        parts = _text(shape).parts
        shown = [f"{{{{ {p.name} }}}}" if isinstance(p, Column) else p or "" for p in parts]
        if theirs.tool == "unsloth" and parts[-1] is not None:
            theirs.values["end_texts"] = False
        literal = "".join(part for part in parts if isinstance(part, str))
        known = all(part is None or isinstance(part, str | Column) for part in parts)
        if known and None not in parts[:-1] and not re.search(r"\{[{%#]", literal):
            return {
                "format": "template",
                "columns": {"completion": "".join(shown)},
                "shape": "text",
            }
    theirs.lost.append(("map(...)", "rows are made in a way that cannot be followed"))
    return {}
