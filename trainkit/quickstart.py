"""Make the quickstart's model, tokenizer and conversations: seeded, offline, in seconds.

Writes ``quickstart/model`` (a tiny Qwen2 with random weights and its tokenizer),
``quickstart/train.jsonl`` and ``quickstart/held_out.jsonl``; for preferences also
``quickstart/pairs.jsonl`` and ``quickstart/rated.jsonl``. Two runs write the same bytes.

The task is one that half a million weights can truly learn in two minutes, and that no model can
answer without reading the conversation: recall who the system prompt says you are, recall the
names of pets given some turns ago, repeat some words, reverse some words. In English and Chinese.

The *facts* that decide an answer (a persona, a pet with its name, the words to repeat) belong to
one split by their hash: the names and the words of a held-out question are familiar, but their
combination was never seen in training. A model that learned answers by heart fails.

    python -m trainkit.quickstart
"""

from __future__ import annotations

import hashlib
import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

Message = dict[str, str]
Drawn = TypeVar("Drawn")

NUM_TRAIN = 9000
NUM_HELD_OUT = 100
NUM_COMPARED = 300
# One combination of facts in this many is kept for the held-out split.
HELD_OUT_SHARE = 8
# Pets a user tells of in one conversation.
MOST_PETS = 2
# More than the corpus needs: training stops when every word is one token.
VOCAB_SIZE = 1024


CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


Language = SimpleNamespace
LANGUAGES: list[Language] = json.loads(
    Path(__file__).with_suffix(".json").read_text(encoding="utf-8"),
    object_hook=lambda row: Language(**row),
)
"""The words and sentences of each; ``{}`` fields are filled in by the skills."""


class ConversationMaker:
    """Draws conversations of one split."""

    def __init__(self, seed: int, *, held_out: bool) -> None:
        self._random = random.Random(f"quickstart-{seed}-{held_out}")
        self._held_out = held_out

    def conversation(self) -> list[Message]:
        """A conversation of two to six exchanges, with a persona two times out of three."""
        language = self._random.choice(LANGUAGES)
        messages: list[Message] = []
        persona: dict[str, str] = {}
        if self._random.random() < 2 / 3:
            persona = self._draw(lambda: self._persona(language), lambda drawn: [*drawn.values()])
            messages.append({"role": "system", "content": language.persona.format(**persona)})
        pets: dict[str, str] = {}
        for _ in range(self._random.randint(2, 6)):
            question, answer = self._exchange(language, persona, pets)
            messages.append({"role": "user", "content": question})
            messages.append({"role": "assistant", "content": answer})
        return messages

    def _exchange(
        self, language: Language, persona: dict[str, str], pets: dict[str, str]
    ) -> tuple[str, str]:
        skills = ["repeat", "reverse"]
        skills += ["ask_persona"] * 2 if persona else []
        skills += ["ask_pet"] * 2 if pets else []
        skills += ["tell_pet"] if len(pets) < MOST_PETS else []
        match self._random.choice(skills):
            case "repeat":
                return self._repeat(language)
            case "reverse":
                return self._reverse(language)
            case "ask_persona":
                question, answer = self._random.choice(language.persona_questions)
                return question, answer.format(**persona)
            case "ask_pet":
                thing = self._random.choice(list(pets))
                answer = language.statement_answer.format(thing=thing, name=pets[thing])
                return language.statement_question.format(thing=thing), answer
            case _:
                return self._tell_pet(language, pets)

    def _draw(self, draw: Callable[[], Drawn], facts: Callable[[Drawn], list[str]]) -> Drawn:
        while True:
            drawn = draw()
            digest = hashlib.sha256("|".join(facts(drawn)).encode()).digest()
            if (digest[0] % HELD_OUT_SHARE == 0) == self._held_out:
                return drawn

    def _persona(self, language: Language) -> dict[str, str]:
        return {
            "name": self._random.choice(language.names),
            "job": self._random.choice(language.jobs),
            "city": self._random.choice(language.cities),
        }

    def _tell_pet(self, language: Language, pets: dict[str, str]) -> tuple[str, str]:
        def draw() -> tuple[str, str]:
            thing = self._random.choice([thing for thing in language.things if thing not in pets])
            others = [name for name in language.names if name not in pets.values()]
            return thing, self._random.choice(others)

        thing, name = self._draw(draw, lambda drawn: ["pet", *drawn])
        pets[thing] = name
        return (
            language.statement.format(thing=thing, name=name),
            language.statement_reply.format(thing=thing, name=name),
        )

    def _words(self, language: Language, skill: str, most: int) -> list[str]:
        return self._draw(
            lambda: self._random.sample(language.words, self._random.randint(2, most)),
            lambda drawn: [skill, *drawn],
        )

    def _repeat(self, language: Language) -> tuple[str, str]:
        words = language.joiner.join(self._words(language, "repeat", 3))
        return language.repeat.format(words=words), language.repeat_answer.format(words=words)

    def _reverse(self, language: Language) -> tuple[str, str]:
        words = self._words(language, "reverse", 2)
        question = language.reverse.format(words=language.joiner.join(words))
        return question, language.reverse_answer.format(words=language.joiner.join(reversed(words)))


def train_tokenizer(conversations: list[list[Message]], vocab_size: int) -> Any:
    """A byte-level BPE of the corpus with a ChatML template; Chinese is split by character."""
    from trainkit.parallel.launch import quieten_imports

    quieten_imports()
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            # One character, one piece: else a whole sentence without spaces becomes one token.
            pre_tokenizers.Split(Regex(r"[\u4e00-\u9fff]"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=specials,
        show_progress=False,
    )
    texts = (m["content"] for conversation in conversations for m in conversation)
    core.train_from_iterator(["system", "user", "assistant", *texts], trainer)
    return chatml_tokenizer(core)


def chatml_tokenizer(core: Any) -> Any:
    """What transformers makes of a byte-level BPE, with a ChatML template and its tokens."""
    from tokenizers import decoders
    from transformers import PreTrainedTokenizerFast

    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=["<|im_start|>"],
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


SETTINGS: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    # Conversations are short: a small base turns every pair of dimensions within them.
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
    # About 1/sqrt(hidden_size). The usual 0.02 is for wide models: at this width attention starts
    # flat, and the loss waits on a plateau for longer than this training lasts.
    "initializer_range": 0.08,
    "bos_token_id": None,
}
"""Of a text model that learns in two minutes."""


def make_model(vocab_size: int, seed: int) -> Any:
    """A random Qwen2 of two layers: one to look back a token, one to copy what was found there."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(seed)
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=vocab_size,
            max_position_embeddings=1024,
            tie_word_embeddings=True,
            **SETTINGS,
        )
    )


def write_conversations(path: Path, conversations: list[list[Message]]) -> None:
    lines = (json.dumps({"messages": each}, ensure_ascii=False) for each in conversations)
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")


def make_conversations(num_conversations: int, seed: int, *, held_out: bool) -> list[list[Message]]:
    maker = ConversationMaker(seed, held_out=held_out)
    unique: dict[str, list[Message]] = {}
    while len(unique) < num_conversations:
        conversation = maker.conversation()
        unique[json.dumps(conversation, ensure_ascii=False)] = conversation
    return list(unique.values())


def write_answers(output: Path, conversations: list[list[Message]]) -> None:
    """Pairs of a right and a wrong answer, and answers marked as right or wrong.

    A wrong answer is that to another conversation.
    """
    pairs, rated = [], []
    for place, (*prompt, answer) in enumerate(conversations):
        others = conversations[place + 1 :] + conversations[:place]
        wrong = next(each[-1] for each in others if each[-1] != answer)
        if place < NUM_COMPARED:
            pairs.append({"prompt": prompt, "chosen": [answer], "rejected": [wrong]})
        else:
            said = answer if place % 2 else wrong
            rated.append({"prompt": prompt, "completion": [said], "label": bool(place % 2)})
    files: dict[str, list[dict[str, Any]]] = {"pairs": pairs, "rated": rated}
    for name, rows in files.items():
        lines = [json.dumps(row, ensure_ascii=False) for row in rows]
        (output / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def make_assets(output: Path, seed: int = 0) -> None:
    """Write the model, the tokenizer and both splits into ``output``, replacing what is there."""
    train = make_conversations(NUM_TRAIN, seed, held_out=False)
    held_out = make_conversations(NUM_HELD_OUT, seed, held_out=True)
    output.mkdir(parents=True, exist_ok=True)
    write_conversations(output / "train.jsonl", train)
    write_conversations(output / "held_out.jsonl", held_out)
    write_answers(output, train[: 2 * NUM_COMPARED])

    tokenizer = train_tokenizer(train, VOCAB_SIZE)
    model = make_model(len(tokenizer), seed)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    # The model last: train.sh takes its config.json for a sign that everything is there.
    tokenizer.save_pretrained(output / "model")
    model.save_pretrained(output / "model")
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    sys.stderr.write(
        f"{output}: {len(train)} conversations to train on, {len(held_out)} held out, "
        f"a model of {num_parameters:,} parameters, a vocabulary of {len(tokenizer)}\n"
    )


if __name__ == "__main__":
    make_assets(Path("quickstart"))
