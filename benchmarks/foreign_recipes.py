"""Translates every example of clones of other tools' repositories, held to the tools' parsers.

    python benchmarks/foreign_recipes.py CLONES [--list]

CLONES holds axolotl, LLaMA-Factory, trl, notebooks and ms-swift. "Wrong" is a translated recipe
with a number that is not the tool's own for the example, by axolotl's schema, LLaMA-Factory's and
TRL's dataclasses, or the keywords of the calls before a script's training.
"""

import ast
import collections
import contextlib
import json
import re
import shlex
import sys
import tempfile
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import yaml

from trainkit.errors import RecipeError
from trainkit.recipe import load_recipe
from trainkit.recipe.translate.draft import tool_table
from trainkit.recipe.translate.engine import translate


def examples(clones: Path) -> Iterator[tuple[str, Path, str | None]]:
    """The tool, the file, and the text of a command that is inside another file."""
    for file in sorted((clones / "axolotl/examples").rglob("*.y*ml")):
        yield "axolotl", file, None
    for file in sorted((clones / "LLaMA-Factory/examples").rglob("*.*")):
        if file.suffix in (".yaml", ".sh") and "accelerate" not in file.parts:
            yield "LLaMA-Factory", file, None
    for file in sorted((clones / "trl").rglob("*.*")):
        if file.suffix == ".md" or (file.suffix == ".py" and "scripts" in file.parts):
            text = file.read_text(encoding="utf-8")
            yield from (("TRL", file, each) for each in commands(text, file.suffix == ".py"))
            if file.suffix == ".py" and "examples" in file.parts and "Trainer(" in text:
                yield "TRL", file, None
    for file in sorted((clones / "trl/examples/notebooks").glob("*.ipynb")):
        yield "TRL", file, None
    for file in sorted((clones / "notebooks/python_scripts").glob("*.py")):
        if not file.name.startswith(("AMD-", "Kaggle-", "HuggingFace Course-")):
            yield "Unsloth", file, None
    for file in sorted((clones / "ms-swift/examples").rglob("*.*")):
        if file.suffix in (".sh", ".yaml") and "accelerate" not in file.parts:
            yield "ms-swift", file, None


def commands(text: str, is_code: bool) -> list[str]:
    """Commands that train, in fenced blocks or in a script's first comment."""
    if is_code:
        text = ast.get_docstring(ast.parse(text)) or ""
        blocks = text.split("\n\n")
    else:
        blocks = re.findall(r"```(?:bash|shell|sh)?\n(.*?)```", text, re.S)
    pattern = r"\s*(\w+=\S+ )*(hf jobs|accelerate|python|trl (?!env|vllm)|torchrun|uv run)"
    found = []
    for block in blocks:
        joined = re.sub(r"^[$#].*|^\s*\w[\w ,.:]*:$", "", block, flags=re.M)
        lines = re.sub(r"\\\s*\n", " ", joined).split("\n")
        found += [line.strip() for line in lines if re.match(pattern, line) and "--" in line]
    return found


def outcome(file: Path, command: str | None) -> tuple[str, str, Any]:
    """translated, refused or kind; the reason; the recipe."""
    with tempfile.TemporaryDirectory() as folder:
        if command is not None:
            given = Path(folder) / "command.sh"
            given.write_text(command, encoding="utf-8")
            root = next(place for place in file.parents if (place / "docs").is_dir())
            with contextlib.chdir(root):
                return _outcome(given, Path(folder))
        return _outcome(file, Path(folder))


def _outcome(file: Path, folder: Path) -> tuple[str, str, Any]:
    try:
        found = translate(file)
    except RecipeError as error:
        what = error.what
        if what.startswith("this is "):
            return "another kind", re.sub(r"^this is | \(.*|, which.*", "", what), None
        if "not the same" in what or "would not train" in what:
            return "refused", what.partition(": ")[2], None
        return "not one training", what, None
    target = folder / "ours.yaml"
    target.write_text(found.text, encoding="utf-8")
    return "translated", "", load_recipe(target).recipe


# -- their own numbers ----------------------------------------------------------------------------


def theirs(tool: str, file: Path, command: str | None) -> dict[str, Any]:
    """Our keys with the values that the tool's own code gives them, as far as it says."""
    if tool == "axolotl":
        return axolotl(yaml.safe_load(file.read_text(encoding="utf-8")))
    if tool == "LLaMA-Factory" and file.suffix == ".yaml":
        given = yaml.safe_load(file.read_text(encoding="utf-8"))
        return llamafactory(given) if "model_name_or_path" in given else llamafactory_v1(given)
    if tool == "ms-swift":
        return swift(file)
    if tool == "TRL" and command is not None:
        return trl(shlex.split(command))
    if tool == "Unsloth":
        return unsloth(file.read_text(encoding="utf-8"))
    return {}


def quantized(given: dict[str, Any], four: str, eight: str) -> str | None:
    """What a frozen base is kept in, by two switches."""
    return "nf4" if given.get(four) else "int8" if given.get(eight) else None


_SHARED = ["learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "seed"]
_SHARED += ["max_grad_norm", "max_steps", "gradient_accumulation_steps", "lr_scheduler_type"]
_SHARED += ["per_device_train_batch_size", "per_device_eval_batch_size", "num_train_epochs"]


def axolotl(given: dict[str, Any]) -> dict[str, Any]:
    """By its schema; what its builders make of it is written down here once more."""
    from axolotl.utils.schemas.config import AxolotlInputConfig

    fields = {name: f.default for name, f in AxolotlInputConfig.model_fields.items()}
    cfg = {name: None if "Undefined" in repr(v) else v for name, v in fields.items()}
    cfg |= {key: value for key, value in given.items() if value is not None}
    micro = int(cfg["micro_batch_size"])
    steps = cfg.get("gradient_accumulation_steps")
    if given.get("batch_size") and not given.get("gradient_accumulation_steps"):
        steps = int(given["batch_size"]) // micro
    warmup = cfg.get("warmup_steps")
    if warmup is None:
        warmup = cfg["warmup_ratio"] if cfg.get("warmup_ratio") is not None else 0.03
        if cfg.get("warmup_ratio") is None and cfg.get("max_steps"):
            warmup = min(int(0.03 * cfg["max_steps"]), 100)
    warmup = 2 if warmup == 1 else warmup
    whole = cfg.get("train_on_inputs") or cfg.get("pretraining_dataset")
    found = {
        "training.learning_rate": float(cfg["learning_rate"]),
        "training.per_device_train_batch_size": micro,
        "training.gradient_accumulation_steps": steps,
        "training.per_device_eval_batch_size": cfg.get("eval_batch_size") or micro,
        "training.num_train_epochs": float(cfg["num_epochs"]),
        "training.max_steps": cfg.get("max_steps") or -1,
        "training.weight_decay": float(cfg["weight_decay"] or 0),
        "training.warmup_steps": warmup,
        "training.seed": cfg.get("seed") or 42,
        "data.max_length": int(str(cfg["sequence_len"]).replace("_", "")),
        "data.packing": bool(cfg.get("sample_packing")),
        "training.gradient_checkpointing": bool(cfg.get("gradient_checkpointing")),
        "lora.quantize": quantized(cfg, "load_in_4bit", "load_in_8bit"),
        "is_lora": bool(cfg.get("adapter")),
        "is_sharded": bool(cfg.get("fsdp") or cfg.get("fsdp_config") or cfg.get("deepspeed")),
        "data.mask": "none" if whole else "assistant",
    }
    if int(cfg.get("tensor_parallel_size") or 1) > 1 and cfg.get("fsdp_config"):
        ranks = int(cfg.get("dp_shard_size") or 1) * int(cfg.get("dp_replicate_size") or 1)
        ranks *= found.pop("training.gradient_accumulation_steps")
        found["global_batch_size"] = micro * ranks
    if cfg["optimizer"] in ("muon", "adamw_torch_4bit") or cfg.get("load_in_8bit"):
        found["is_sharded"] = False  # optimizers that only whole weights fit, and codes in int8
    sharding = cfg.get("fsdp_config") or {}
    for key in ("activation_checkpointing", "fsdp_activation_checkpointing"):
        found["training.gradient_checkpointing"] |= bool(sharding.get(key))
    if not cfg.get("cosine_min_lr_ratio"):
        named = cfg["lr_scheduler"]
        found["training.lr_scheduler_type"] = str(getattr(named, "value", named))
        if found["training.lr_scheduler_type"] == "constant":
            found.pop("training.warmup_steps")
    if found["lora.quantize"]:
        packs = cfg.get("quantize_moe_experts") or cfg.get("llama4_linearized_experts")
        found["lora.quantize_experts"] = bool(packs)
    if cfg.get("adapter"):
        found |= {
            "lora.r": cfg["lora_r"],
            "lora.alpha": cfg["lora_alpha"],
            "lora.dropout": float(cfg["lora_dropout"] or 0) * (not cfg.get("rl")),
        }
    return found


def llamafactory(given: dict[str, Any]) -> dict[str, Any]:
    """By its dataclasses and transformers'."""
    from llamafactory.hparams.data_args import DataArguments
    from llamafactory.hparams.finetuning_args import FinetuningArguments
    from transformers import HfArgumentParser, TrainingArguments

    given = {key: value for key, value in given.items() if value is not None}
    if given.get("stage") not in (None, "sft", "pt", "dpo"):
        return {}
    parser = HfArgumentParser([DataArguments, FinetuningArguments])  # type: ignore[arg-type]
    data, tuning = parser.parse_dict(given, allow_extra_keys=True)
    import dataclasses

    args = {f.name: f.default for f in dataclasses.fields(TrainingArguments)} | given
    found = {f"training.{name}": args[name] for name in _SHARED}
    if tuning.galore_layerwise or tuning.apollo_layerwise:
        found["training.max_grad_norm"] = 0.0  # nothing is left to clip after the backward pass
    found |= {
        "training.warmup_steps": args.get("warmup_steps") or args.get("warmup_ratio") or 0,
        "data.max_length": data.cutoff_len,
        "data.packing": bool(given.get("stage") == "pt" if data.packing is None else data.packing),
        "is_lora": tuning.finetuning_type in ("lora", "oft"),
        "training.gradient_checkpointing": not given.get("disable_gradient_checkpointing", False),
        "data.mask": "none" if tuning.stage == "pt" or data.train_on_prompt else "assistant",
        "is_sharded": bool(given.get("deepspeed") or given.get("fsdp")),
    }
    if tuning.stage == "dpo":
        found |= {"objective": "dpo", "preference.beta": tuning.pref_beta}
        found["preference.loss"] = tuning.pref_loss
    info = json.loads((CLONES[0] / "LLaMA-Factory/data/dataset_info.json").read_text("utf-8"))
    named = [info.get(each.strip(), {}) for each in str(given.get("dataset", "")).split(",")]
    if any("images" in each.get("columns", {}) for each in named):
        limits = {"image_max_pixels": 768 * 768, "image_min_pixels": 32 * 32}
        found["pixels"] = [given.get(key, limit) for key, limit in limits.items()]
    if tuning.finetuning_type == "oft":
        found["lora.peft"] = {"peft_type": "oft", "oft_block_size": tuning.oft_block_size}
    if tuning.finetuning_type == "lora":
        found |= {
            "lora.r": tuning.lora_rank,
            "lora.alpha": tuning.lora_alpha,
            "lora.dropout": 0.0 if tuning.stage == "dpo" else tuning.lora_dropout,
        }
        bits = given.get("quantization_bit")
        found["lora.quantize"] = {4: "nf4", 8: "int8"}.get(bits)
    return found


def defaults_of(*files: Path) -> dict[str, Any]:
    """The defaults of dataclasses, by their syntax trees."""
    found: dict[str, Any] = {}
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
                continue
            value = node.value
            if isinstance(value, ast.Call):
                value = next((k.value for k in value.keywords if k.arg == "default"), None)
            with contextlib.suppress(ValueError):
                found[node.target.id] = None if value is None else ast.literal_eval(value)
    return found


def llamafactory_v1(given: dict[str, Any]) -> dict[str, Any]:
    """By its dataclasses' defaults."""
    code = CLONES[0] / "LLaMA-Factory/src/llamafactory/v1/config/training_args.py"
    args = {**defaults_of(code), **given}
    peft = given.get("peft_config") or {}
    found = {
        "training.learning_rate": args["learning_rate"],
        "training.per_device_train_batch_size": args["micro_batch_size"],
        "training.num_train_epochs": args["num_train_epochs"],
        "training.max_steps": args["max_steps"] or -1,
        "training.gradient_checkpointing": args["enable_activation_checkpointing"],
        "training.seed": args["seed"],
        "data.max_length": args["cutoff_len"],
        "is_lora": peft.get("name") == "lora",
    }
    if not given.get("optim_config"):
        found["training.weight_decay"] = 0.01  # torch's own
    if found["is_lora"]:
        found |= {"lora.r": peft["r"], "lora.alpha": peft["lora_alpha"]}
    return found


def swift(file: Path) -> dict[str, Any]:
    """By its dataclasses' defaults, what its own code sets where nobody does, and the command."""
    code = CLONES[0] / "ms-swift/swift"
    names = ("sft_args", "tuner_args", "base_args/base_args", "base_args/data_args")
    files = [code / f"arguments/{name}.py" for name in (*names, "base_args/template_args")]
    args = defaults_of(*files, code / "trainers/arguments.py")
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".yaml":
        args |= yaml.safe_load(text)
    else:
        variables = dict(re.findall(r"^(\w+)=(\d+)$", text, re.M))
        text = re.sub(r"\$\{?(\w+)\}?", lambda m: variables.get(m[1], m[0]), text)
        for key, value in re.findall(r"--(\w+)[ =]([^-\s][^\s]*)", text):
            args[key] = value
            with contextlib.suppress(yaml.YAMLError):
                args[key] = yaml.safe_load(value.strip("'\""))
        named = re.findall(r"[ =](\S+\.yaml)", text)
        if config := args.get("config") or (named[0] if named else None):
            given = yaml.safe_load((CLONES[0] / "ms-swift" / config).read_text(encoding="utf-8"))
            args = {**args, **given}
            text += str(given)
    counts = re.findall(r"[\w.-]+/[\w.-]+(?::\w+)?#(\d+)", text)
    full = args["tuner_type"] == "full"
    found = {
        "training.learning_rate": float(args["learning_rate"] or (1e-5 if full else 1e-4)),
        "training.per_device_train_batch_size": args["per_device_train_batch_size"],
        "training.num_train_epochs": args.get("num_train_epochs", 3.0),
        "training.weight_decay": args["weight_decay"],
        "training.lr_scheduler_type": args["lr_scheduler_type"],
        "training.warmup_steps": args.get("warmup_steps") or args["warmup_ratio"],
        "training.adam_beta2": args.get("adam_beta2", 0.95),
        "data.packing": args["packing"],
        "is_lora": not full,
        "is_sharded": bool(args.get("deepspeed") or args.get("fsdp")),
    }
    launcher = CLONES[0] / "ms-swift" / str(args.get("config_file"))
    by_accelerate = launcher.is_file() and "FSDP" in launcher.read_text(encoding="utf-8")
    found["is_sharded"] |= by_accelerate
    if "LaTeX_OCR" in text and (limit := re.search(r"^MAX_PIXELS=(\d+)", text, re.M)):
        found["pixels"] = {"shortest_edge": 4 * 28**2, "longest_edge": int(limit[1])}
    if counts and not args.get("streaming"):
        found["counts"] = [int(count) for count in counts]
    if args["use_galore"]:
        gap = args["galore_update_proj_gap"] * (1 + args["galore_optim_per_parameter"])
        numbers = f"rank={args['galore_rank']},update_proj_gap={gap},scale={args['galore_scale']}"
        found["training.optim_args"] = f"{numbers},proj_type={args['galore_proj_type']}"
    if not args.get("fsdp") and not by_accelerate:  # whose file may say so itself
        found["training.gradient_checkpointing"] = args["gradient_checkpointing"]
    if args["max_length"]:
        found["data.max_length"] = args["max_length"]
    if args["tuner_type"] == "bone":
        found["lora.peft"] = {"peft_type": "miss", "r": args["reft_rank"]}
    elif args["tuner_type"] == "boft":
        found["lora.peft"] = {"peft_type": "boft"}  # whose defaults are peft's
    elif not full:
        found |= {"lora.r": args["lora_rank"], "lora.alpha": args["lora_alpha"]}
        found["lora.dropout"] = args["lora_dropout"] * ("rlhf_type" not in args)
        found["lora.quantize"] = {4: "nf4", 8: "int8"}.get(args.get("quant_bits"))
    return found


CLONES: list[Path] = []


def trl(tokens: list[str]) -> dict[str, Any]:
    """By its parser."""
    from transformers import HfArgumentParser
    from trl import DPOConfig, KTOConfig, ModelConfig, RewardConfig, ScriptArguments, SFTConfig
    from trl.experimental.orpo import ORPOConfig

    configs = {"sft": SFTConfig, "dpo": DPOConfig, "kto": KTOConfig, "reward": RewardConfig}
    configs["orpo"] = ORPOConfig
    start = next(n for n, t in enumerate(tokens) if t.endswith(".py") or t in configs)
    goal = next((name for name in configs if name in tokens[start]), "sft")
    config: Any = configs[goal]
    parser = HfArgumentParser([ScriptArguments, config, ModelConfig])  # type: ignore[arg-type]
    words = [*tokens[start + 1 :], "--output_dir", "x", "--use_cpu", "--bf16", "false"]
    _, args, model, _ = parser.parse_args_into_dataclasses(words, return_remaining_strings=True)
    found = {f"training.{name}": getattr(args, name) for name in _SHARED}
    schedule = args.lr_scheduler_type
    found["training.lr_scheduler_type"] = str(getattr(schedule, "value", schedule))
    found |= {
        "training.warmup_steps": args.warmup_steps,
        "data.max_length": args.max_length,
        "data.packing": getattr(args, "packing", False),
        "objective": goal,
        "training.gradient_checkpointing": args.gradient_checkpointing,
        "is_lora": model.use_peft,
        "is_sharded": any("zero" in t or "fsdp" in t for t in tokens[:start]),
    }
    if "sft_vlm" in tokens[start]:  # which sets none itself
        found |= {"data.max_length": 8192, "data.truncation": "error"}
    if goal in ("dpo", "kto", "orpo"):
        found["preference.beta"] = args.beta
    if model.use_peft:
        found |= {
            "lora.r": model.lora_r,
            "lora.alpha": model.lora_alpha,
            "lora.dropout": model.lora_dropout * (goal == "sft"),
        }
        found["lora.quantize"] = quantized(vars(model), "load_in_4bit", "load_in_8bit")
    return found


def unsloth(text: str) -> dict[str, Any]:
    """By the keywords, as written, of the calls before the first ``train()``."""
    before = text.split(".train()")[0]
    whole = ("per_device_train_batch_size", "gradient_accumulation_steps", "seed", "max_steps")
    names = dict.fromkeys(whole, int) | {"learning_rate": float, "weight_decay": float}
    found: dict[str, Any] = {}
    for name, kind in names.items():
        given = re.findall(rf"^\s+{name}\s*=\s*([-\d.e]+)", before, re.M)
        if given:
            found[f"training.{name}"] = kind(given[-1])
    rates = re.findall(r"embedding_learning_rate\s*=\s*([-\d.e]+)", before)
    if rates:
        found["lora.saved_lr_ratio"] = float(rates[-1]) / found["training.learning_rate"]
    for theirs_, ours, kind in (("r", "lora.r", int), ("lora_alpha", "lora.alpha", int)):
        given = re.findall(rf"^\s+{theirs_}\s*=\s*(\d+)\s*,", before, re.M)
        if given:
            found[ours] = kind(given[0])
    four = re.findall(r"load_in_4bit\s*=\s*(True|False)", before)
    if four and "load_in_16bit" not in before:
        found["lora.quantize"] = "nf4" if four[0] == "True" else None
    base = re.findall(r'from_pretrained\(\s*(?:model_name\s*=\s*)?"([^"]+)"', before)
    if base:
        found["model.name_or_path"] = base[0]
    found["data.mask"] = "assistant" if "train_on_responses_only(" in before else "none"
    if "UnslothVisionDataCollator(" in before:
        found["adapts_tower"] = re.search(r"finetune_vision_layers\s*=\s*True", before) is not None
    sets = re.findall(r'^[^#\n]*load_dataset\(\s*"([^"]+)"', before, re.M)
    if len(sets) == 1 and sets[0] not in ("json", "csv"):
        found["path"] = sets[0]
    return found


def ours(recipe: Any, key: str) -> Any:
    """A value of a recipe; of ``training``, transformers' default where nobody says so."""
    from transformers import TrainingArguments

    if key == "is_lora":
        return recipe.lora is not None
    if key == "is_sharded":
        return recipe.parallel.shard != "none"
    if key == "counts":  # drawn, or more than there are
        many: dict[Any, int] = {}
        for each in tool_table("swift")["data_sets"].values():
            name = Path(each.get("path") or each["file"]).name
            many |= {(name, None): each.get("rows", 0)}
            many |= {(name, part): its.get("rows") for part, its in each.get("parts", {}).items()}
        drawn = [s for s in recipe.data.train if s.max_samples or s.epochs != 1]
        return [s.max_samples or round(s.epochs * many[Path(s.path).name, s.subset]) for s in drawn]
    if key == "pixels":
        held = recipe.data.images
        return [held.max_pixels, held.min_pixels] if held.max_pixels else held.processor.get("size")
    if key == "adapts_tower":
        return "visual" in str(recipe.lora.target_modules)
    if key == "path":
        return recipe.data.train[0].path
    section, _, name = key.partition(".")
    if not name:
        return getattr(recipe, key)
    if section == "training":
        value = recipe.training.get(name, getattr(TrainingArguments, name, None))
        return False if name == "gradient_checkpointing" and value is None else value
    held = getattr(recipe, section)
    return None if held is None else getattr(held, name)


def differ(recipe: Any, wanted: dict[str, Any]) -> list[str]:
    """The keys whose values are not theirs."""
    wrong = []
    for key, given in wanted.items():
        mine, value = ours(recipe, key), given
        if key == "training.lr_scheduler_type":
            mine, value = (str(getattr(each, "value", each)) for each in (mine, given))
        same = mine == value
        with contextlib.suppress(TypeError, ValueError):
            same = abs(float(mine) - float(value)) < 1e-12
        if not same:
            wrong.append(f"{key}: {mine} for {value}")
    return wrong


def main() -> None:
    """Print the rows of docs/benchmarks/foreign.jsonl, and why what is refused is."""
    clones, lists = Path(sys.argv[1]).resolve(), "--list" in sys.argv
    sys.path[:0] = [str(clones / "axolotl/src"), str(clones / "LLaMA-Factory/src")]
    for name in ("omegaconf", "addict"):
        sys.modules.setdefault(name, MagicMock(__spec__=ModuleSpec(name, None)))
    CLONES.append(clones)
    counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    reasons: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for tool, file, command in examples(clones):
        result, why, recipe = outcome(file, command)
        checked = {}
        if recipe is not None:
            try:
                checked = theirs(tool, file, command)
            except Exception as error:
                print(f"not checked: {file.name}: {type(error).__name__}: {error}", file=sys.stderr)
            wrong = differ(recipe, checked)
            counts[tool]["checked"] += bool(checked)
            counts[tool]["wrong"] += bool(wrong)
            why = "; ".join(wrong)
        counts[tool][result] += 1
        for part in why.split("; ") if result != "translated" else []:
            reasons[f"{tool}: {result}"][re.sub(r"^.*? \(|\)$", "", part)[:90]] += 1
        if lists or (recipe is not None and why):
            print(tool, file.relative_to(clones), result, why[:300], sep=" | ")
    columns = ("translated", "wrong", "checked", "refused", "another kind", "not one training")
    for tool, count in counts.items():
        files = sum(count[c] for c in ("translated", "refused", "another kind", "not one training"))
        row = {"bench": "foreign", "tool": tool, "files": files, **{c: count[c] for c in columns}}
        print(json.dumps(row))
    for name, found in reasons.items():
        print(f"\n{name}")
        for why, number in found.most_common(40):
            print(f"  {number:4} {why}")


if __name__ == "__main__":
    main()
