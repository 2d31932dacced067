"""vLLM in the harness's own wrapper, with prompts in the words that training used."""

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from trainkit.checkpoint.weights.adapter import read_adapter
from trainkit.data import DataOptions
from trainkit.errors import RecipeError
from trainkit.evals.answers import after_thinking, room_for
from trainkit.evals.model import MAX_NEW_TOKENS, AskedAsTrained, PromptStyle
from trainkit.infer.benchmark import Asking, uses_chat
from trainkit.infer.locate import ModelPaths, training_options
from trainkit.models.tokenizer import load_tokenizer


def vllm_arguments(paths: ModelPaths, asking: Asking, dtype: str) -> dict[str, Any]:
    """What the harness's wrapper is given.

    An adapter is named there and not merged; its rank is said, since vLLM refuses larger ones than
    it was told.
    """
    arguments: dict[str, Any] = {
        "pretrained": paths.model,
        "revision": paths.source.revision,
        "trust_remote_code": paths.source.trust_remote_code,
        "tokenizer": paths.tokenizer,
        "dtype": dtype,
        "batch_size": asking.batch_size or "auto",
        "max_gen_toks": asking.max_new_tokens or MAX_NEW_TOKENS,
    }
    if paths.adapter is not None:
        adapter = read_adapter(paths.adapter, with_peft=True)  # checked; vLLM reads it once more
        arguments["lora_local_path"] = str(paths.adapter)
        arguments["max_lora_rank"] = max(int(adapter.config.get("r", 16)), 8)
    return arguments


def vllm_model(paths: ModelPaths, asking: Asking, dtype: str) -> tuple[Any, bool]:
    """The model, and whether it is asked with its chat template."""
    from importlib.util import find_spec

    if find_spec("vllm") is None:
        raise RecipeError(
            "vLLM is not installed", where="--backend vllm", fix="pip install vllm, or leave it out"
        )
    from lm_eval.models.vllm_causallms import VLLM

    tokenizer = load_tokenizer(paths.at(paths.tokenizer))
    chat = uses_chat(asking, paths, tokenizer)
    options = DataOptions(**training_options(paths.run))
    prompts = PromptStyle(tokenizer, options, chat=chat, thinking=asking.thinking)
    kind = type("TrainedVllm", (AskedOverVllm, VLLM), {})
    model = kind(**vllm_arguments(paths, asking, dtype))
    model.ask_with(prompts)
    model._max_new_tokens = asking.max_new_tokens
    return model, chat


class AskedOverVllm(AskedAsTrained):
    """Goes before the harness's wrapper: prompts, and answers read behind thoughts."""

    num_truncated = 0
    max_length: int
    _max_new_tokens: int | None = None

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = True) -> Any:
        """As the wrapper does; prompts are noted."""
        self.encode_pairs(requests)
        return super().loglikelihood(requests, disable_tqdm=disable_tqdm)  # type: ignore[misc]

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = True) -> list[str]:
        """As the wrapper does; a text that ends an answer does not end the thoughts before it."""
        changed_requests = []
        for request in requests:
            text, settings = request.args[:2]
            self.record.add(request, self.tok_encode(text))
            args = (text, self._settings(settings))
            changed_requests.append(SimpleNamespace(args=args, arguments=args))
        texts = super().generate_until(changed_requests, disable_tqdm=disable_tqdm)  # type: ignore[misc]
        answers = []
        for request, text in zip(requests, texts, strict=True):
            opened = request.args[0].rstrip().endswith("<think>")
            is_thinking, answer = after_thinking(text, thinks=opened)
            for stop in _stops(request.args[1]) if self.prompts.thinking else ():
                answer = answer.partition(stop)[0]
            self.note_written(request, text, is_whole=not is_thinking)
            answers.append(answer)
        return answers

    def _settings(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        changed = dict(settings)
        own = int(changed.get("max_gen_toks", MAX_NEW_TOKENS))
        room = room_for(own, thinks=bool(self.prompts.thinking), max_length=self.max_length)
        changed["max_gen_toks"] = self._max_new_tokens or room
        if self.prompts.thinking:
            changed["until"] = []
        return changed


def _stops(settings: Mapping[str, Any]) -> list[str]:
    until = settings.get("until") or []
    return [until] if isinstance(until, str) else [stop for stop in until if stop]
