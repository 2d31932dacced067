"""Which end-of-turn tokens may be written as stop tokens of the trained model.

A token that was none before must have proved itself over the whole data set: a stop token that also
stands inside answers would cut served answers short.
"""

from collections import Counter
from collections.abc import Callable
from functools import cached_property

from transformers import PreTrainedTokenizerBase

from trainkit.data.options import DataOptions

MIN_SHARE = 0.01
"""A new stop token ends more than this share of the trained turns."""


class EndsOfTurns:
    """The tokens that end trained turns.

    Args:
        counts: how many turns each token ends.
        tokenizer, options: the data was prepared with.
    """

    def __init__(
        self, counts: Counter[str], tokenizer: PreTrainedTokenizerBase, options: DataOptions
    ) -> None:
        self.counts = Counter(dict(sorted(counts.items())))
        self._options = options
        self._eos = tokenizer.eos_token_id
        self.ids = {end: int(tokenizer.convert_tokens_to_ids(end)) for end in self.counts}

    @cached_property
    def known(self) -> tuple[str, ...]:
        """The ends that were stop tokens before."""
        stops = {*self._options.stop_token_ids, self._eos}
        return tuple(end for end, index in self.ids.items() if index in stops)

    def stops(self, num_trained_of: Callable[[int], int]) -> dict[str, int]:
        """Token and id of every end that the trained model should stop at.

        Args:
            num_trained_of: how often an id is trained, anywhere in a sample.
        """
        enough = MIN_SHARE * self.counts.total()
        found = {}
        for end, count in self.counts.items():
            index = self.ids[end]
            # Where everything is trained, an end of the user's turn proves nothing.
            alone = self._options.mask == "none" or num_trained_of(index) <= count
            if end in self.known or (count > enough and alone):
                found[end] = index
        return found
