"""Tokenizer, template and stop tokens come along with a converted model."""

import base64
import json
import shutil
from pathlib import Path

import pytest
import regex
from transformers import AutoTokenizer, GenerationConfig

from trainkit.checkpoint.convert.convert import ConvertOptions, convert_model
from trainkit.checkpoint.weights.companions import GLM4_PATTERN
from trainkit.errors import CheckpointError

SPECIALS = ["<|endoftext|>", "[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>", "<|system|>"]
SPECIALS += ["<|user|>", "<|assistant|>", "<|observation|>"]
TEMPLATE = (
    "[gMASK]<sop>{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TEXTS = [
    "Hello world, it's 12345 o'clock",
    "the theme then there",
    "  spaces   and\n\nlines \n",
    "数字 12 中文，好的！",
    "émigré 🙂 zero\u200bwidth",
    "THE'S 'll",
    "",
]


def vocabulary():
    """All bytes, then a few merged tokens, some of them reachable in more ways than one."""
    tokens = [bytes([byte]) for byte in range(256)]
    tokens += [b"th", b"he", b"the", b"er", b"ere", b"there", b" t", b" th", b" the", b"in", b"an"]
    tokens += [b"12", b"23", b"123", "中".encode(), "中文".encode(), b"\n\n", b"  "]
    tokens += [b"theme", b"ll"]
    return {token: rank for rank, token in enumerate(tokens)}


def tiktoken_encode(text, ranks):
    """tiktoken's algorithm, word for word: the whole piece, else merge the lowest rank first."""
    ids = []
    for piece in regex.findall(GLM4_PATTERN, text):
        data = piece.encode()
        if data in ranks:
            ids.append(ranks[data])
            continue
        parts = [bytes([byte]) for byte in data]
        while True:
            pairs = [
                (ranks[parts[i] + parts[i + 1]], i)
                for i in range(len(parts) - 1)
                if parts[i] + parts[i + 1] in ranks
            ]
            if not pairs:
                break
            _, at = min(pairs)
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        ids += [ranks[part] for part in parts]
    return ids


def tokenizer_config(ranks):
    return {
        "added_tokens_decoder": {
            str(len(ranks) + index): {
                "content": token,
                "lstrip": False,
                "normalized": False,
                "rstrip": False,
                "single_word": False,
                "special": True,
            }
            for index, token in enumerate(SPECIALS)
        },
        "auto_map": {"AutoTokenizer": ["tokenization_chatglm.ChatGLM4Tokenizer", None]},
        "chat_template": TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|endoftext|>",
        "pad_token": "<|endoftext|>",
        "padding_side": "left",
        "tokenizer_class": "ChatGLM4Tokenizer",
    }


def write_tiktoken(directory: Path, ranks) -> None:
    lines = [base64.b64encode(token) + b" %d\n" % rank for token, rank in ranks.items()]
    (directory / "tokenizer.model").write_bytes(b"".join(lines))
    (directory / "tokenizer_config.json").write_text(json.dumps(tokenizer_config(ranks)))


@pytest.fixture(scope="module")
def converted(chatglm_directory, tmp_path_factory):
    place = tmp_path_factory.mktemp("tokenizer")
    source = place / "source"
    source.mkdir()
    for path in chatglm_directory.iterdir():
        (source / path.name).write_bytes(path.read_bytes())
    write_tiktoken(source, vocabulary())
    (source / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [1, 2, 3], "temperature": 0.8, "do_sample": True})
    )
    convert_model(source, place / "target", "qwen2", ConvertOptions(verify=False))
    return place / "target"


@pytest.mark.parametrize("text", TEXTS)
def test_ids_are_tiktokens_own(converted, text):
    tokenizer = AutoTokenizer.from_pretrained(converted)
    ranks = vocabulary()
    assert tokenizer.encode(text, add_special_tokens=False) == tiktoken_encode(text, ranks)
    ids = tokenizer.encode(text)
    assert ids[:2] == [len(ranks) + 2, len(ranks) + 4]  # [gMASK] <sop>, as the remote code does
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_template_and_special_tokens(converted):
    tokenizer = AutoTokenizer.from_pretrained(converted)
    messages = [{"role": "user", "content": "the 12"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "[gMASK]<sop><|user|>\nthe 12<|assistant|>"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    base = len(vocabulary())
    middle = tiktoken_encode("\nthe 12", vocabulary())
    assert ids == [base + 2, base + 4, base + 7, *middle, base + 8]
    assert tokenizer.padding_side == "left"
    assert tokenizer.eos_token == "<|endoftext|>"


def test_stop_tokens_are_carried(converted):
    generation = GenerationConfig.from_pretrained(converted)
    assert generation.eos_token_id == [1, 2, 3]
    assert generation.pad_token_id == 0
    assert generation.temperature == 0.8
    config = json.loads((converted / "config.json").read_text())
    assert config["eos_token_id"] == [1, 2, 3]


@pytest.fixture
def source(glm_directory, tmp_path):
    """A GLM whose tokenizer is a vocabulary of tiktoken's."""
    source = shutil.copytree(glm_directory, tmp_path / "source")
    write_tiktoken(source, vocabulary())
    return source


def test_fast_tokenizer_is_not_rebuilt_with_qwen2_rules(source, tmp_path):
    """AutoTokenizer picks a class by model type; Qwen2's own splits digits one by one."""
    convert_model(source, tmp_path / "once", "qwen2", ConvertOptions(verify=False))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "once")
    assert tokenizer.encode("123", add_special_tokens=False) == [vocabulary()[b"123"]]
    tokenizer.save_pretrained(tmp_path / "once")  # as a training run does
    again = AutoTokenizer.from_pretrained(tmp_path / "once")
    assert again.encode("123", add_special_tokens=False) == [vocabulary()[b"123"]]
    convert_model(tmp_path / "once", tmp_path / "back", "glm", ConvertOptions(verify=False))
    back = AutoTokenizer.from_pretrained(tmp_path / "back", trust_remote_code=True)
    assert back.encode("123", add_special_tokens=False) == [vocabulary()[b"123"]]


@pytest.mark.parametrize(
    ("content", "word"),
    [(b"not a vocabulary", "not a tiktoken"), (b"YQ== 0\nYg== 2\n", "holes"), (b"\x0a\x05", "not")],
)
def test_unknown_tokenizer_model(source, tmp_path, content, word):
    (source / "tokenizer.model").write_bytes(content)
    with pytest.raises(CheckpointError, match=word):
        convert_model(source, tmp_path / "target", "qwen2", ConvertOptions(verify=False))


def test_special_tokens_that_do_not_follow_the_vocabulary(source, tmp_path):
    settings = json.loads((source / "tokenizer_config.json").read_text())
    settings["added_tokens_decoder"] = {"999": {"content": "<|x|>", "special": True}}
    (source / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(CheckpointError, match="has id 999"):
        convert_model(source, tmp_path / "target", "qwen2", ConvertOptions(verify=False))
