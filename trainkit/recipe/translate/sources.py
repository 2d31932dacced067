"""The rows of other tools' recipes: which they are, and the prompt that is made of them."""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

import yaml

from trainkit.recipe.translate.draft import OFF, Draft, table, words
from trainkit.recipe.translate.read import beside

Rows = Mapping[str, Any]
_BUILT_IN = ("json", "csv", "parquet", "text", "arrow")


def data(draft: Draft, rows: Rows) -> None:
    """Sources, prompt and mask, as the tool at hand has them."""
    share = draft.get("eval_share")
    if share not in OFF and not draft.on("eval_sources"):
        draft.take("eval_share", {"data.eval": share if float(share) < 1 else int(share)})
    else:
        draft.take("eval_share", {})
    _READERS[rows["data"]](draft, rows)
    if "data.train" not in draft.ours:
        draft.lose("data.train", "no rows to train on are named")
        draft.ours["data.train"] = ["data/train.jsonl"]
    cut = draft.get("cut")
    if cut is not None:
        ours = rows.get("cuts", {}).get(cut)
        if ours is None:
            draft.lose("cut", "data.truncation is drop_turns, drop, error, right or left_turns")
        else:
            note = rows.get("cut_notes", {}).get(cut, "")
            draft.take("cut", {"data.truncation": ours}, note)


def template(draft: Draft, said: str, name: str, rows: Rows) -> None:
    """A chat template by its name: written out, or the tokenizer's own."""
    known = table("templates").get(rows.get("templates", {}).get(name, ""))
    base = str(draft.get("model.name_or_path"))
    if known is None:
        draft.lose(said, "a chat template that is not known here: put it into data.chat_template")
    elif known.get("own") and re.search(known["own"], base, re.I):
        draft.leave(said, "the tokenizer's own is the same")
    else:
        draft.take(said, {"data.chat_template": known["text"]})


def _columns(ours: dict[str, str], field: str, theirs: Any) -> None:
    if theirs not in (None, "", field):
        ours[field] = str(theirs)


# -- axolotl ------------------------------------------------------------------------------------


def _axolotl(draft: Draft, rows: Rows) -> None:
    if draft.on("pretraining"):
        draft.lose(
            "pretraining",
            "a hub data set that is read while it trains: download it, and `streaming: true`",
        )
    conversations, whole = False, draft.on("train_on_inputs")
    for word, target in (("sources", "data.train"), ("eval_sources", "data.eval")):
        sets = draft.get(word) or []
        made = []
        for each in sets if isinstance(sets, list) else [sets]:
            given = each if isinstance(each, dict) else {"path": each}
            source = _axolotl_source(draft, word, given, rows)
            is_chat = source[0].get("format") != "template"
            conversations |= is_chat
            made += [{**e, "roles": _SPEAKERS} for e in source] if whole and is_chat else source
        if made:
            draft.take(word, {target: made})
    raw = any(e.get("format") == "template" for e in draft.ours.get("data.train", ()))
    if whole and conversations and raw:
        draft.lose(
            "train_on_inputs", "what trains of turns and of raw prompts is not said in one way"
        )
    mask = "none" if whole and not conversations else "assistant"
    draft.take("train_on_inputs", {"data.mask": mask})
    name = str(draft.get("template", "tokenizer_default"))
    if not conversations:
        if "chat_template" in draft.given:
            draft.leave("template", "no rows of these sources are rendered by it")
    elif name == "jinja":
        draft.take(
            "template template_text", {"data.chat_template": str(draft.get("template_text"))}
        )
    elif name.startswith("tokenizer_default"):
        draft.take("template", {})
    else:
        template(draft, "template", name, rows)


def _axolotl_source(
    draft: Draft, word: str, given: Mapping[str, Any], rows: Rows
) -> list[dict[str, Any]]:
    """One entry of ``datasets``."""
    kind = given.get("type") or "chat_template"
    path, files = str(given.get("path")), words(given.get("data_files"))
    source: dict[str, Any] = {"path": path}
    if given.get("split") not in (None, "train"):
        source["split"] = given["split"]
    if given.get("name"):
        source["subset"] = given["name"]
    taken = {"path", "split", "name", "type", "data_files", "ds_type", "conversation"}
    columns: dict[str, str] = {}
    prompt = _own_prompt(kind) if isinstance(kind, dict) else rows["prompts"].get(str(kind))
    if prompt is not None:
        field = given.get("field")
        source["format"] = "template"
        columns = {
            key: text.replace("{{ text }}", "{{ %s }}" % (field or "text"))
            for key, text in prompt.items()
        }
        taken |= {"field"} | ({"roles"} if kind == "alpaca" else set())
    elif str(kind) == "chat_template":
        names = given.get("message_property_mappings") or {}
        role = given.get("message_field_role") or names.get("role") or "role"
        text = given.get("message_field_content") or names.get("content") or "content"
        if (role, text) not in (("role", "content"), ("from", "value")):
            draft.lose(word, f"turns with {role} and {text}: rename them to role and content")
        field = given.get("field_messages", "messages")
        source["format"] = "sharegpt" if role == "from" else "messages"
        _columns(columns, "conversations" if role == "from" else "messages", field)
        taken |= {"field_messages", "message_property_mappings", "message_field_role"}
        taken |= {"message_field_content", "roles", "roles_to_train", "drop_system_message"}
        trained = [_ROLES.get(name, name) for name in words(given.get("roles_to_train"))]
        if trained not in ([], ["assistant"]):
            source["roles"] = trained
        if given.get("train_on_eos", "turn") == "turn":
            taken |= {"train_on_eos"}
        if given.get("field_thinking") in ("thinking", "reasoning_content", "reasoning"):
            taken |= {"field_thinking", "template_thinking_key"}
        if given.get("chat_template") in (None, "tokenizer_default", draft.get("template")):
            taken |= {"chat_template"}
        if given.get("drop_system_message"):
            draft.take(word, {"data.system_policy": "none"})
    else:
        draft.lose(word, f"rows of type {kind}, which are not known here")
    strange = {key for key, value in given.items() if value not in OFF} - taken
    if strange:
        draft.lose(word, f"{', '.join(sorted(strange))} of a data set has no counterpart")
    if columns:
        source["columns"] = columns
    if files and path in _BUILT_IN:
        return [{**source, "path": file} for file in files]
    if files:
        source["files"] = files
    return [source]


_SPEAKERS = ["system", "user", "assistant", "tool"]
_ROLES = {"gpt": "assistant", "model": "assistant", "human": "user"}


def _own_prompt(kind: Mapping[str, Any]) -> dict[str, str]:
    """A prompt that is written out, with the names of its columns."""
    names = {
        part: "{{{{ {} }}}}".format(kind.get(f"field_{part}", part))
        for part in ("instruction", "input", "output", "system")
    }
    system = kind.get("system_prompt") or ""
    system = kind.get("system_format", "{system}").replace("{system}", system) if system else ""

    def filled(text: str) -> str:
        return re.sub(r"\{(instruction|input|output|system)\}", lambda m: names[m[1]], text)

    whole = str(kind.get("format") or "{instruction} {input}")
    without = str(kind.get("no_input_format") or "{instruction}")
    given = names["input"].strip("{} ")
    text = f"{{% if {given} %}}{filled(whole)}{{% else %}}{filled(without)}{{% endif %}}"
    return {"prompt": system + text, "completion": names["output"]}


# -- LLaMA-Factory ------------------------------------------------------------------------------


def _llamafactory(draft: Draft, rows: Rows) -> None:
    is_plain = draft.get("stage") == "pt"
    folder = str(draft.get("dataset_dir", "data"))
    place = beside(draft.folder / "x", f"{folder}/dataset_info.json")
    info = json.loads(place.read_text(encoding="utf-8")) if place else {}
    for word, target in (("sources", "data.train"), ("eval_sources", "data.eval")):
        names = words(draft.get(word))
        made = [_llamafactory_source(draft, word, name, info, folder) for name in names]
        if names:
            named = f"{word} max_samples" if word == "sources" else word
            draft.take(named, {target: [each for each in made if each]})
    draft.said.add("dataset_dir")
    if draft.get("mix_strategy", "concat") != "concat":
        draft.lose(
            "mix_strategy interleave_probs", "rows of sources are drawn by turns until one ends"
        )
    mask = (
        "none"
        if draft.on("train_on_inputs")
        else "last_assistant"
        if draft.on("mask_history")
        else "assistant"
    )
    draft.take("stage train_on_inputs mask_history", {"data.mask": "none" if is_plain else mask})
    packs = (
        draft.on("packing")
        or draft.on("neat_packing")
        or (is_plain and draft.get("packing") is None)
    )
    note = ""
    if packs and is_plain:
        note = (
            "it joins all texts and cuts them every cutoff_len tokens; here whole ones are packed"
        )
    elif packs and not draft.on("neat_packing"):
        note = "there packed rows see each other"
    draft.take("packing neat_packing", {"data.packing": packs}, note)
    if draft.on("pissa"):
        turns = draft.get("pissa_iter", 16)
        name = "pissa" if turns == -1 else f"pissa_niter_{turns}"
        draft.take("pissa pissa_iter", {"lora.init_lora_weights": name})
    name = draft.get("template")
    if is_plain or name is None:
        draft.take("template enable_thinking", {})
    elif name in ("qwen3", "qwen3_5", "glm4_moe", "hunyuan", "deepseekr1"):
        draft.lose(
            "template", "it trains the empty thought that it puts before answers without one"
        )
    else:
        template(draft, "template", str(name), rows)
        if re.search(r"chatml|qwen|gemma", str(name)):
            note = "it also trains the line break behind the end of an answer"
            draft.take("template", {}, note)
        draft.take("enable_thinking", {})


def _llamafactory_source(
    draft: Draft, word: str, name: str, info: Mapping[str, Any], folder: str
) -> dict[str, Any]:
    """A name that ``dataset_info.json`` explains."""
    found = info.get(name)
    if found is None:
        draft.lose(word, f"no {folder}/dataset_info.json says what {name} is")
        return {"path": name}
    if found.get("ranking"):
        draft.lose(word, f"{name} compares answers")
    if found.get("hf_hub_url"):
        source: dict[str, Any] = {"path": found["hf_hub_url"], "name": name}
        if found.get("subset"):
            source["subset"] = found["subset"]
        if found.get("split", "train") != "train":
            source["split"] = found["split"]
    elif found.get("file_name"):
        source = {"path": f"{folder}/{found['file_name']}"}
    else:
        draft.lose(word, f"{name} is neither a file nor a data set of the hub")
        return {"path": name}
    if found.get("folder") or found.get("num_samples"):
        draft.lose(word, f"the folder or the number of samples of {name}")
    columns = {str(k): str(v) for k, v in (found.get("columns") or {}).items()}
    ours: dict[str, str] = {}
    if draft.get("stage") == "pt":
        source["format"] = "text"
        _columns(ours, "text", columns.get("prompt", "instruction"))
    elif found.get("formatting", "alpaca") == "alpaca":
        source["format"] = "alpaca"
        for theirs, field in (
            ("prompt", "instruction"),
            ("query", "input"),
            ("response", "output"),
        ):
            _columns(ours, field, columns.get(theirs, field))
        for field in ("system", "history", "tools"):
            _columns(ours, field, columns.get(field))
    else:
        tags = found.get("tags") or {}
        turns = (tags.get("role_tag", "from"), tags.get("content_tag", "value"))
        is_openai = found["formatting"] == "openai" or turns == ("role", "content")
        source["format"] = "messages" if is_openai else "sharegpt"
        if not is_openai and turns != ("from", "value"):
            draft.lose(word, f"turns of {name} with {' and '.join(turns)}")
        field = columns.get(
            "messages", "messages" if found["formatting"] == "openai" else "conversations"
        )
        _columns(ours, "messages" if is_openai else "conversations", field)
        for field in ("system", "tools"):
            _columns(ours, field, columns.get(field))
    if any(columns.get(each) for each in ("images", "videos", "audios")):
        draft.lose(word, f"{name} has images or sound")
    if ours:
        source["columns"] = ours
    most = draft.get("max_samples")
    if most and word == "sources":
        _first_rows(draft, source, int(most))
    return source


def _first_rows(draft: Draft, source: dict[str, Any], most: int) -> None:
    """The first rows of a source: a hub data set's split says so; of a file they may be all."""
    if "name" in source:
        source["split"] = f"{source.get('split', 'train')}[:{most}]"
        return
    file = beside(draft.folder / "x", source["path"])
    if file is not None and file.stat().st_size < 2**26:
        text = file.read_text(encoding="utf-8")
        count = len(json.loads(text)) if text.lstrip().startswith("[") else text.count("\n") + 1
        if count <= most:
            return
    source["max_samples"] = most
    draft.take("max_samples", {}, f"the first {most} rows there; here as many, drawn by the seed")


def _llamafactory_v1(draft: Draft, rows: Rows) -> None:
    for word, target in (("sources", "data.train"), ("eval_sources", "data.eval")):
        name = draft.get(word)
        file = beside(draft.folder / "x", str(name)) if name else None
        if name and (file is None or file.suffix not in (".yaml", ".yml")):
            draft.take(word, {target: [{"path": str(name)}]})
            continue
        made = []
        for label, each in (
            yaml.safe_load(file.read_text(encoding="utf-8")) if file else {}
        ).items():
            kind = _CONVERTERS.get(each.get("converter"))
            if kind is None or each.get("weight") not in (None, 1, 1.0) or each.get("streaming"):
                draft.lose(word, f"what {file} says of {label}")
            source = {"path": str(each.get("path") or each.get("hf_hub_url")), "name": label}
            if each.get("split", "train") != "train":
                source["split"] = each["split"]
            if each.get("size"):
                source["max_samples"] = each["size"]
            made.append({**source, "format": kind or "auto"})
        if made:
            draft.take(word, {target: made})
    draft.take("template", {})
    draft.ours["data.packing"] = False
    kind = draft.get("dist")
    if kind == "deepspeed":
        draft.theirs["deepspeed"] = draft.get("dist_file")
    elif kind is not None:
        draft.theirs["fsdp_config"] = {"version": 2}
    if kind not in (None, "fsdp2", "deepspeed", "fsdp"):
        draft.lose("dist", "sharding of its own")
    draft.take("dist", {})


_CONVERTERS = {"alpaca": "alpaca", "sharegpt": "sharegpt", "openai": "messages", None: "messages"}


# -- TRL and Unsloth ----------------------------------------------------------------------------


def _trl(draft: Draft, rows: Rows) -> None:
    source = dict(draft.get("rows") or {})
    if not source and draft.get("sources"):
        source = {"path": str(draft.get("sources"))}
        if draft.get("subset"):
            source["subset"] = draft.get("subset")
        if draft.get("train_split", "train") != "train":
            source["split"] = draft.get("train_split")
    shape, note = source.pop("shape", None), ""
    kind = (
        source.get("format") or rows["row_formats"].get(source.get("path")) or _seen(draft, source)
    )
    if source:
        kind = "prompt_completion" if draft.on("completion_only") else kind
        if kind is None:
            kind = "messages"
            note = "its rows are taken for conversations; data.format names others"
        source["format"] = kind
        field = draft.get("text_field", "text")
        if kind == "text" and field != "text":
            source["columns"] = {"text": field}
        if kind == "sharegpt" and source["path"].startswith("open-thoughts/"):
            source["columns"] = {"not_read": "system"}
        if shape == "text" and "prompt" not in source.get("columns", {}):
            note = "texts over max_length come in pieces here; there their end is cut off"
        draft.take("rows sources subset train_split text_field", {"data.train": [source]}, note)
    held = dict(draft.get("eval_rows") or {})
    if (
        not held
        and source
        and draft.get("eval_strategy", "no") != "no"
        and "rows" not in draft.given
    ):
        held = {**source, "split": draft.get("test_split", "test")}
    if held:
        held.pop("shape", None)
        held.setdefault("format", kind)
        draft.take("eval_rows test_split", {"data.eval": [held]})
    else:
        draft.take("eval_rows test_split", {})
    completions = kind == "prompt_completion" and draft.get("completion_only") is not False
    answers = draft.on("assistant_only") or draft.on("responses_only") or completions
    if draft.on("responses_only") and shape == "text":
        draft.lose("responses_only", "the answers of texts that no chat template rendered")
    note = (
        ""
        if not draft.on("responses_only")
        else "with the end of each answer; there the line break behind it, too"
    )
    mask = {"data.mask": "assistant" if answers else "none"}
    draft.take("assistant_only completion_only responses_only", mask, note)
    name = draft.get("template")
    if isinstance(name, str) and shape != "text":
        template(draft, "template", name, rows)
    elif name is not None and shape != "text":
        draft.lose("template", "a chat template of its own: put it into data.chat_template")
    else:
        draft.take("template", {})
    if draft.on("eos"):
        if kind in ("messages", "sharegpt"):
            draft.leave("eos", "conversations end as the chat template says")
        else:
            draft.lose("eos", "texts end in the tokenizer's own eos")
    if path := draft.get("template_text"):
        if str(path).endswith((".jinja", ".jinja2", ".j2")):
            draft.take("template_text", {"data.chat_template": str(path)})
        else:
            draft.lose(
                "template_text",
                "write that tokenizer's template into a file for data.chat_template",
            )
    draft.take("lora_seed full", {})


def _seen(draft: Draft, source: Mapping[str, Any]) -> str | None:
    """The format of the first row of a local file of lines."""
    file = beside(draft.folder / "x", str(source.get("path", "")))
    if file is None or file.suffix not in (".jsonl", ".json"):
        return None
    with file.open(encoding="utf-8") as lines:
        line = lines.readline()
    try:
        keys = set(json.loads(line))
    except ValueError:
        return "auto"
    if "messages" in keys:
        return "messages"
    if {"prompt", "completion"} <= keys:
        return "prompt_completion"
    return "text" if "text" in keys else "auto"


# -- ms-swift -----------------------------------------------------------------------------------


def _swift(draft: Draft, rows: Rows) -> None:
    on_hub = draft.on("use_hf")
    owner, slash, name = str(draft.ours.get("model.name_or_path", "")).partition("/")
    if slash and not on_hub and beside(draft.folder / "x", f"{owner}/{name}/config.json") is None:
        there = rows["owners"].get(owner)
        if there is None:
            draft.lose(
                "model.name_or_path",
                "a model of ModelScope's, whose name on the hub is not known here",
            )
        draft.ours["model.name_or_path"] = f"{there}/{name}"
    for word, target in (("sources", "data.train"), ("eval_sources", "data.eval")):
        given = draft.get(word)
        names = [given] if isinstance(given, str) else list(given or [])
        made = [_swift_source(draft, word, str(each), on_hub, rows) for each in names]
        if made:
            draft.take(word, {target: made})
    scale = str(
        draft.get("loss_scale", "all" if "pt" in draft.launcher.get("program", "") else "default")
    )
    mask = {"default": "assistant", "last_round": "last_assistant", "all": "none"}.get(scale)
    if mask is None:
        draft.lose("loss_scale", "tokens with weights of their own")
    draft.take("loss_scale", {"data.mask": mask or "assistant"})
    draft.take("use_hf", {})
    base = str(draft.ours.get("model.name_or_path"))
    longest = (n for sign, n in rows["longest"].items() if re.search(sign, base))
    if "data.max_length" not in draft.ours and (most := next(longest, None)):
        draft.take("data.max_length", {"data.max_length": most}, "the model's own longest")
    elif "data.max_length" not in draft.ours:
        draft.lose(
            "data.max_length",
            "max_length is not given: it takes the model's own longest, which trainkit wants said",
        )
    if not draft.on("training.learning_rate") and "learning_rate" not in draft.given:
        rate = 1e-5 if str(draft.get("method")) == "full" else 1e-4
        draft.take("learning_rate", {"training.learning_rate": rate})
    if "gradient_accumulation_steps" not in draft.given:
        draft.take(
            "gradient_accumulation_steps",
            {"global_batch_size": max(16, int(draft.get("per_device_train_batch_size", 1)))},
        )
    named = next((n for sign, n in rows["model_templates"].items() if re.search(sign, base)), None)
    if draft.get("template") or named:
        template(draft, "template", str(draft.get("template") or named), rows)
    elif not re.search(rows["same_template"], base):
        draft.lose(
            "template",
            f"ms-swift has a prompt of its own for {base}, which is not known here",
        )


def _swift_source(draft: Draft, word: str, given: str, on_hub: bool, rows: Rows) -> dict[str, Any]:
    """``NAME:SUBSET#COUNT`` or a file."""
    name, _, count = given.partition("#")
    name, _, subset = name.partition(":")
    known = None if on_hub else rows["data_sets"].get(name)
    is_file = (
        name.endswith((".json", ".jsonl", ".csv")) or beside(draft.folder / "x", name) is not None
    )
    source: dict[str, Any] = {"path": name} if known is None else dict(known)
    own = rows["named_rows"] if name == "swift/self-cognition" and not subset else None
    if own and re.search(own["models"], str(draft.ours.get("model.name_or_path"))):
        texts = {part: own[part] for part in ("prompt", "completion")}
        if draft.on("data.system_policy"):
            texts["prompt"] = texts["prompt"].replace(
                own["system"], draft.get("data.system_policy")
            )
        for mark in ("NAME", "AUTHOR"):
            given_name = draft.theirs.get(f"model_{mark.lower()}") or f"{{{{{mark}}}}}"
            zh, en = (([given_name] if isinstance(given_name, str) else given_name) * 2)[:2]
            done = texts["completion"].replace(f"ZH_{mark}", repr(zh))
            texts["completion"] = done.replace(f"EN_{mark}", repr(en))
        source = {"path": own["path"], "format": "template", "columns": texts}
    elif name == "swift/self-cognition":
        draft.lose(word, "rows in which model_name and model_author are put")
    elif known is None and not on_hub and not is_file:
        draft.lose(word, f"{name}, a data set of ModelScope's: download it and name its files")
    elif known is None and on_hub:
        draft.lose(word, f"{name}: what columns it has decides how ms-swift reads it")
    if subset:
        draft.lose(word, f"the part {subset} of {name}")
    if count.isdecimal():
        source["max_samples"] = int(count)
    return source


_READERS: dict[str, Callable[[Draft, Rows], None]] = {
    "axolotl": _axolotl,
    "llamafactory": _llamafactory,
    "llamafactory_v1": _llamafactory_v1,
    "trl": _trl,
    "swift": _swift,
}
