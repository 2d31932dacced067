"""The chat templates of published.yaml, and tokenizers with the tokens that they need."""

import re
from dataclasses import dataclass
from pathlib import Path

import yaml
from oracle import byte_level
from tokenizers import AddedToken

TAG = re.compile(r"\{% (?:end)?generation %\}")


@dataclass(frozen=True)
class Published:
    """A template with generation tags, and the tokens it needs.

    Attributes:
        tagged: Jinja text.
        eos: ends a turn, or a text.
        tokens: further special tokens.
        texts: further tokens that are not special.
        stops: what the model's generation_config stops at, besides eos.
        thoughts: whether it prints thinking that comes in a field of its own.
    """

    tagged: str
    eos: str = "</s>"
    tokens: tuple[str, ...] = ()
    texts: tuple[str, ...] = ()
    stops: tuple[str, ...] = ()
    thoughts: bool = False

    def tokenizer(self, make=byte_level):
        """A tokenizer with these tokens and the template as published."""
        tokenizer = make()
        special = dict.fromkeys((self.eos, *self.tokens))
        tokenizer.add_tokens([AddedToken(t, special=True, normalized=False) for t in special])
        tokenizer.add_tokens([AddedToken(t, normalized=False) for t in self.texts])
        tokenizer.eos_token = self.eos
        tokenizer.chat_template = TAG.sub("", self.tagged)
        return tokenizer


_ROWS = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
PUBLISHED = {name: Published(**row) for name, row in _ROWS.items()}
