"""Chat templates with renderers written by hand, and where tokens are by their own strings.

Nothing here uses trainkit: a renderer says for each piece of text whether the model writes it, and
a token's bytes are read off its string in the vocabulary, not off the tokenizer's offsets.
"""

import json

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)
from transformers import PreTrainedTokenizerFast

CONTROL = ("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|user|>", "<|assistant|>", "<|end|>")
CORPUS = [
    "Hello there, how are you?\n\nI'm fine 'thanks'. Numbers 123 456\n",
    "  indented code\n\tdef f(x): return x\n\n\n",
    "né 三 日本語 😀 combining e\u0301\n",
    "ASSISTANT: USER: ### Assistant:\n### User:\n",
] * 30

# -- tokenizers ---------------------------------------------------------------------------------


def _finish(core, *, rstrip=False):
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<s>", eos_token="</s>", pad_token="</s>"
    )
    tokenizer.add_tokens(
        [AddedToken(t, special=True, normalized=False, rstrip=rstrip) for t in CONTROL]
    )
    tokenizer.add_tokens([AddedToken(t, normalized=False) for t in ("<think>", "</think>")])
    return tokenizer


def byte_level(*, rstrip=False, split=True):
    """Of bytes; without splitting into words its tokens reach over every border."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    core.train_from_iterator(CORPUS, trainer)
    return _finish(core, rstrip=rstrip)


def sentencepiece(scheme):
    """As Llama 2 (``legacy``) or its successors put a blank before words."""
    core = Tokenizer(models.BPE(unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    special = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=special, show_progress=False)
    core.train_from_iterator(CORPUS, trainer)
    learnt = json.loads(core.to_str())["model"]
    merges = [tuple(merge) for merge in learnt["merges"]]
    core = Tokenizer(
        models.BPE(vocab=learnt["vocab"], merges=merges, byte_fallback=True, unk_token="<unk>")
    )
    if scheme == "legacy":
        blanks = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        core.normalizer = normalizers.Sequence(blanks)
    else:
        core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    core.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback()])
    return _finish(core)


TOKENIZERS = {
    "byte-level": byte_level,
    "blanks-taken-along": lambda: byte_level(rstrip=True),
    "no-words": lambda: byte_level(split=False),
    "legacy-prefix": lambda: sentencepiece("legacy"),
    "first-prefix": lambda: sentencepiece("first"),
}

_PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
_BYTES = {chr(byte): byte for byte in _PRINTABLE} | {
    chr(256 + place): byte for place, byte in enumerate(_OTHERS)
}


def token_ranges(tokenizer, text, ids):
    """For each token its first byte, and one past its last without blanks it takes along."""
    added = {token.content: token for token in tokenizer.added_tokens_decoder.values()}
    of_bytes = isinstance(tokenizer.backend_tokenizer.decoder, decoders.ByteLevel)
    data, place, ranges = text.encode(), 0, []
    for index in ids:
        token = tokenizer.convert_ids_to_tokens(int(index))
        if token in added:
            core = token.encode()
        elif of_bytes:
            core = bytes(_BYTES[character] for character in token)
        elif token.startswith("<0x"):
            core = bytes([int(token[3:5], 16)])
        else:
            core = token.replace("▁", " ").encode()
            if core.startswith(b" ") and not data.startswith(core, place):
                core = core[1:]  # the blank that is not in the text
        assert data.startswith(core, place), (text, token, place)
        ranges.append((place, place + len(core)))
        place += len(core)
        if token in added and added[token].rstrip:
            while data[place : place + 1].isspace():
                place += 1
    assert place == len(data)
    return ranges


# -- templates: (Jinja, pieces of (text, written by the model)) -----------------------------------

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def chatml(turns):
    pieces = []
    for role, text in turns:
        if role == "assistant":
            head = f"<|im_start|>{role}\n"
            pieces += [(head, False), (f"{text}<|im_end|>", True), ("\n", False)]
        else:
            pieces.append((f"<|im_start|>{role}\n{text}<|im_end|>\n", False))
    return pieces


def default_system(turns):
    injected = "<|im_start|>system\nBe good.<|im_end|>\n" if turns[0][0] != "system" else ""
    return [(injected, False), *chatml(turns)]


def trimmed(turns):
    return chatml([(role, text.strip()) for role, text in turns])


def dated(turns):
    return [("<s>Today is 26 Jul 2024.\n", False), *chatml(turns)]


def reminding(turns):
    first = next(text for role, text in turns if role == "user")
    return [*chatml(turns), (f"Reminder: {first}", False)]


def announced(turns):
    """The template writes before the answer; inference does not, so the model must."""
    return chatml([(r, f"Answer: {t}" if r == "assistant" else t) for r, t in turns])


INST = (
    "{{ bos_token }}{% set s = namespace(text='') %}{% for m in messages %}"
    "{% if m.role == 'system' %}{% set s.text = m.content + '\n\n' %}"
    "{% elif m.role == 'user' %}{{ '[INST] ' + s.text + m.content + ' [/INST]' }}"
    "{% set s.text = '' %}{% else %}{{ ' ' + m.content + eos_token }}{% endif %}{% endfor %}"
)


def inst(turns):
    pieces, system = [("<s>", False)], ""
    for role, text in turns:
        if role == "system":
            system = f"{text}\n\n"
        elif role == "user":
            pieces.append((f"[INST] {system}{text} [/INST]", False))
            system = ""
        else:
            pieces.append((f" {text}</s>", True))
    return pieces


VICUNA = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ 'ASSISTANT: ' + m.content + '</s>' }}"
    "{% else %}{{ 'USER: ' + m.content + ' ' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)


def vicuna(turns):
    pieces = []
    for role, text in turns:
        if role == "assistant":
            pieces += [("ASSISTANT:", False), (f" {text}</s>", True)]
        else:
            pieces.append((f"USER: {text} ", False))
    return pieces


MARKDOWN = (
    "{% for m in messages %}{{ '### ' + m.role|capitalize + ':\n' + m.content + '\n\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '### Assistant:\n' }}{% endif %}"
)


def open_ended(text):
    """Without an end-of-turn token the blanks at the end belong to nobody."""
    core = text.rstrip()
    return [(core, True), (text[len(core) :], False)]


def markdown(turns):
    pieces = []
    for role, text in turns:
        pieces.append((f"### {role.capitalize()}:\n", False))
        pieces += open_ended(text) if role == "assistant" else [(text, False)]
        pieces.append(("\n\n", False))
    return pieces


BOS_EACH = (
    "{% for m in messages %}{{ bos_token + m.role + ': ' + m.content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ bos_token + 'assistant: ' }}{% endif %}"
)


def bos_each(turns):
    pieces = []
    for role, text in turns:
        pieces.append((f"<s>{role}: ", False))
        pieces += open_ended(text) if role == "assistant" else [(text, False)]
    return pieces


STRIPPING = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% set c = m.content %}"
    "{% if not loop.last and '</think>' in c %}{% set c = c.split('</think>')[-1].lstrip('\n') %}"
    "{% endif %}{{ '<|assistant|>' + c + '<|end|>\n' }}{% else %}"
    "{{ '<|user|>' + m.content + '\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|><think>\n' }}{% endif %}"
)


def stripping(turns):
    """The prompt of inference opens the thinking; earlier turns lose theirs and are not trained."""
    pieces = []
    for place, (role, text) in enumerate(turns):
        if role != "assistant":
            pieces.append((f"<|user|>{text}\n", False))
            continue
        opened = "<think>\n" if text.startswith("<think>\n") else ""
        if opened and place < len(turns) - 1:
            pieces.append(
                (f"<|assistant|>{text.split('</think>')[-1].lstrip(chr(10))}<|end|>\n", False)
            )
            continue
        pieces += [("<|assistant|>" + opened, False), (f"{text[len(opened) :]}<|end|>", True)]
        pieces.append(("\n", False))
    return pieces


GENERATION = CHATML.replace(
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}",
    "{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}{% else %}"
    "{{ m.content + '<|im_end|>\n' }}{% endif %}",
)

TEMPLATES = {
    "chatml": (CHATML, chatml),
    "default-system": (
        "{% if messages[0].role != 'system' %}{{ '<|im_start|>system\nBe good.<|im_end|>\n' }}"
        "{% endif %}" + CHATML,
        default_system,
    ),
    "trim": (CHATML.replace("m.content", "m.content|trim"), trimmed),
    "date": ("{{ bos_token + 'Today is ' + strftime_now('%d %b %Y') + '.\n' }}" + CHATML, dated),
    "repeats-the-question": (
        CHATML.replace(
            "{% if add",
            "{% if not add_generation_prompt %}{{ 'Reminder: ' + "
            "(messages|selectattr('role', 'equalto', 'user')|first).content }}{% endif %}{% if add",
        ),
        reminding,
    ),
    "announces": (
        CHATML.replace("'\n' + m", "'\n' + ('Answer: ' if m.role == 'assistant' else '') + m"),
        announced,
    ),
    "no-prompt": (INST, inst),
    "no-prompt-no-blank": (
        INST.replace("' ' + m.content", "m.content"),
        lambda turns: [(t[1:] if trained else t, trained) for t, trained in inst(turns)],
    ),
    "vicuna": (VICUNA, vicuna),
    "markdown": (MARKDOWN, markdown),
    "bos-each-turn": (BOS_EACH, bos_each),
    "strips-thinking": (STRIPPING, stripping),
    "generation-tag": (GENERATION, chatml),
}

REFUSED = {
    "twice": CHATML.replace("+ m.content", "+ m.content + m.content"),
    "counts": CHATML.replace("'<|im_end|>", "m.content|length|string + '<|im_end|>"),
    "counts-the-last-turn": CHATML
    + "{% if not add_generation_prompt %}{{ messages[-1].content|length }}{% endif %}",
    "reverse": CHATML.replace("in messages", "in messages|reverse"),
    "last-two": CHATML.replace("in messages", "in messages[-2:]"),
    "numbered-prompt": CHATML.replace("m.role +", "m.role + loop.index|string +").replace(
        "'<|im_start|>assistant\n' }}{% endif",
        "'<|im_start|>assistant' + messages|length|string + '\n' }}{% endif",
    ),
    "silent": CHATML.replace("m.content", "('' if m.role == 'assistant' else m.content)"),
}

SOMETIMES = {
    "lower": (CHATML.replace("m.content", "m.content|lower"), str.lower),
    "one-line": (
        CHATML.replace("m.content", "m.content.split()|join(' ')"),
        lambda text: " ".join(text.split()),
    ),
    "html": (
        CHATML.replace("m.content", "m.content|replace('&', '&amp;')|replace('<', '&lt;')"),
        lambda text: text.replace("&", "&amp;").replace("<", "&lt;"),
    ),
    "cut": (CHATML.replace("m.content", "m.content[:16]"), lambda text: text[:16]),
}
"""Templates that change some texts: those must be refused, and what is left must be right."""
