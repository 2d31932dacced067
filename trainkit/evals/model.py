"""A loaded model as the harness asks it: scores and answers, on one rank or several."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from trainkit.data.render.template import THINK_OPEN
from trainkit.errors import ModelError
from trainkit.evals.answers import Prompt, Writer, room_for
from trainkit.evals.likelihood import Pair, Scorer
from trainkit.evals.prompts import AskedAsTrained, PromptStyle

MAX_NEW_TOKENS = 256
"""Where a task does not say; the harness's own."""


@dataclass(frozen=True)
class Ranks:
    """Several processes with a copy of the model each; what they exchange is small and on the CPU.

    Attributes:
        rank: of this process.
        size: how many there are.
        gather: a value of every rank, on every rank.
    """

    rank: int = 0
    size: int = 1
    gather: Callable[[Any], list[Any]] = lambda value: [value]


class TrainedModel(AskedAsTrained, TemplateLM):
    """A loaded model for `lm_eval.evaluate`.

    Args:
        model: a transformers or peft model in evaluation mode, not wrapped by an engine.
        prompts: how conversations and texts become token ids.
        stop_ids: tokens that end an answer.
        max_length: tokens the model takes.
        batch_size: rows at once; None chooses by tokens.
        max_new_tokens: of an answer, in place of the task's own.
        shares_beginnings: see `Scorer`.
        ranks: this process among others.
    """

    def __init__(
        self,
        model: Any,
        prompts: PromptStyle,
        *,
        stop_ids: Sequence[int],
        max_length: int,
        batch_size: int | None = None,
        max_new_tokens: int | None = None,
        shares_beginnings: bool = True,
        ranks: Ranks | None = None,
    ) -> None:
        super().__init__()
        self.tokenizer = prompts.tokenizer
        self.ask_with(prompts)
        self._model = model
        self._max_length = max_length
        self._max_new_tokens = max_new_tokens
        self._ranks = ranks or Ranks()
        self._rank, self._world_size = self._ranks.rank, self._ranks.size
        self._device = torch.device("cpu")  # of what the harness gathers
        pad = prompts.tokenizer.pad_token_id
        self._scorer = Scorer(
            model,
            max_length=max_length,
            pad_id=int(pad if pad is not None else prompts.prefix_id),
            batch_size=batch_size,
            shares_beginnings=shares_beginnings,
        )
        self._writer = Writer(
            model,
            prompts.tokenizer,
            stop_ids=stop_ids,
            max_length=max_length,
            batch_size=batch_size,
        )

    @property
    def num_truncated(self) -> int:
        """Prompts that lost their beginning because the context is too short."""
        return self._scorer.num_truncated + self._writer.num_truncated

    # -- prompts ------------------------------------------------------------------------------

    @property
    def tokenizer_name(self) -> str:
        """A name for the harness's cache, which is not used."""
        return str(self.prompts.tokenizer.name_or_path).replace("/", "__")

    @property
    def eot_token_id(self) -> int:
        return int(self.prompts.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text without context."""
        return self.prompts.prefix_id

    # -- requests -----------------------------------------------------------------------------

    def loglikelihood(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """How likely each continuation is, and whether greedy decoding would write it."""
        del disable_tqdm
        pairs = self.encode_pairs(requests)
        return self._loglikelihood_tokens([(("", ""), *pair) for pair in pairs])

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        pairs = [Pair(tuple(context), tuple(answer)) for _, context, answer in requests]
        scored = self._scorer.score(pairs)
        if any(math.isnan(each.log_probability) for each in scored):
            raise ModelError(
                "the model scores with numbers that are not finite",
                where=self.tokenizer_name,
                fix="try --dtype float32 or bfloat16",
            )
        return [(each.log_probability, each.is_greedy) for each in scored]

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        """The log-probability of whole texts, in windows of the model's context."""
        del disable_tqdm
        pairs: list[Pair] = []
        owners: list[int] = []
        for number, request in enumerate(requests):
            ids = self.prompts.encode([request.args[0]])[0]
            self.record.add(request, ids)
            windows = get_rolling_token_windows(
                token_list=ids,
                prefix_token=self.prefix_token_id,
                max_seq_len=self._max_length,
                context_len=1,
            )
            for context, answer in map(make_disjoint_window, windows):
                pairs.append(Pair(tuple(context), tuple(answer)))
                owners.append(number)
        sums = [0.0] * len(requests)
        for owner, scored in zip(owners, self._scorer.score(pairs), strict=True):
            sums[owner] += scored.log_probability
        return sums

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Answers, read behind their thoughts and up to the first text that ends them."""
        del disable_tqdm
        ids = self.prompts.encode([request.args[0] for request in requests])
        eos = self.prompts.tokenizer.decode([self.eot_token_id], skip_special_tokens=False)
        todo = []
        for request, own in zip(requests, ids, strict=True):
            self.record.add(request, own)
            todo.append(self._prompt(request.args[0], own, request.args[1], str(eos)))
        answers = self._writer.write(todo)
        for request, answer in zip(requests, answers, strict=True):
            self.note_written(request, answer.text, is_whole=answer.is_whole)
        return [answer.answer for answer in answers]

    def _prompt(self, text: str, ids: list[int], settings: Mapping[str, Any], eos: str) -> Prompt:
        plain = dict(normalize_gen_kwargs(dict(settings), MAX_NEW_TOKENS))
        stops = handle_stop_sequences(plain.pop("until", None), eos=eos)
        max_new_tokens = int(plain.pop("max_gen_toks"))
        plain.pop("max_length", None)
        opens = text.rstrip().endswith(THINK_OPEN)
        thinks = opens or bool(self.prompts.thinking)
        room = room_for(max_new_tokens, thinks=thinks, max_length=self._max_length)
        return Prompt(tuple(ids), tuple(stops), self._max_new_tokens or room, plain, opens)

    # -- ranks --------------------------------------------------------------------------------

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """As if all ranks had as many requests: the harness would fill up, which nobody needs."""
        return torch.stack([torch.as_tensor(tensor)] * self._ranks.size)

    def gather_object(self, obj: Any, dst: int = 0) -> list[Any] | None:
        """A value of every rank, on one of them."""
        found = self._ranks.gather(obj)
        return found if self._rank == dst else None

    def barrier(self) -> None:
        """Wait for nobody: the ranks meet when they gather what they found."""
