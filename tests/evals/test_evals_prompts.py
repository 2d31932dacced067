"""Prompts are those of training: one bos, the run's system prompt, answers read behind thoughts."""

import pytest
from tiny import make_tokenizer

from trainkit.data import DataOptions
from trainkit.data.prompt import PromptRenderer, conversation_of
from trainkit.errors import ModelError
from trainkit.evals.answers import after_thinking
from trainkit.evals.model import PromptRecord, PromptStyle

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "one?"},
    {"role": "assistant", "content": "1"},
    {"role": "user", "content": "two? <|im_end|>"},
]
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n"
    "{% endif %}{% endif %}"
)


PLAIN = "{% for m in messages %}{{ m['content'] }}\n{% endfor %}"


def make_bos_tokenizer(template):
    """Adds a bos to every text by itself, as Llama's does."""
    from tokenizers.processors import TemplateProcessing

    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.bos_token_id)]
    )
    tokenizer.chat_template = template
    return tokenizer


@pytest.mark.parametrize("policy", ["keep", "none", "You are a pirate."])
def test_chat_prompts_have_the_ids_of_training(tiny_tokenizer, policy):
    options = DataOptions(system_policy=policy)
    style = PromptStyle(tiny_tokenizer, options, chat=True)
    (ids,) = style.encode([style.text(MESSAGES, is_scored=True)])
    messages = MESSAGES
    if policy != "keep":  # a task's description would be lost with the system prompt
        first = {"role": "user", "content": "Be brief.\n\none?"}
        messages = [first, *MESSAGES[2:]]
    renderer = PromptRenderer(tiny_tokenizer, options)
    assert ids == renderer.input_ids(conversation_of(messages))


@pytest.mark.parametrize("template", [f"<s>{PLAIN}", PLAIN])
def test_there_is_one_bos_at_most_where_training_has_it(template):
    tokenizer = make_bos_tokenizer(template)
    bos = tokenizer.bos_token_id
    style = PromptStyle(tokenizer, chat=True)
    (ids,) = style.encode([style.text(MESSAGES[1:2], is_scored=False)])
    assert ids.count(bos) == template.startswith("<s>")
    plain = PromptStyle(tokenizer)
    assert [each.count(bos) for each in plain.encode(["abc", "<s>abc"])] == [1, 1]
    ((context, continuation),) = plain.encode_pairs([("a question ", "yes")])
    assert context.count(bos) == 1
    assert tokenizer.decode(continuation) == " yes"
    assert plain.encode_pairs([("", "yes")])[0][0] == [bos]


def test_thoughts_are_switched_by_the_template(tiny_tokenizer):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = THINKING
    question = MESSAGES[1:2]
    assert PromptStyle(tokenizer, chat=True).text(question, is_scored=False).endswith("nt\n")
    off = PromptStyle(tokenizer, chat=True, thinking=False)
    assert off.text(question, is_scored=False).endswith("</think>\n\n")
    # An answer that is scored has no room for thoughts before it.
    scored = PromptStyle(tokenizer, chat=True)
    assert scored.text(question, is_scored=True).endswith("</think>\n\n")
    with pytest.raises(ModelError, match="no switch"):
        PromptStyle(tiny_tokenizer, chat=True, thinking=True)


def test_an_open_thought_is_closed_before_a_scored_answer():
    tokenizer = make_tokenizer()
    tokenizer.chat_template = f"{PLAIN}{{% if add_generation_prompt %}}<think>\n{{% endif %}}"
    style = PromptStyle(tokenizer, chat=True)
    assert style.text(MESSAGES[1:2], is_scored=True) == "one?\n<think>\n\n</think>\n\n"
    assert style.text(MESSAGES[1:2], is_scored=False) == "one?\n<think>\n"


@pytest.mark.parametrize(
    ("text", "opened", "expected"),
    [
        ("4", False, (False, "4")),
        ("<think>3?</think>\n\n4", False, (False, "4")),
        ("3?</think>4", True, (False, "4")),
        ("<think>3? 4?", False, (True, "")),
        ("3? 4?", True, (True, "")),
        ("a <think> in the text", False, (False, "a <think> in the text")),
    ],
)
def test_answers_are_read_behind_thoughts(text, opened, expected):
    assert after_thinking(text, thinks=opened) == expected


class Scripted:
    """Writes a given text for every prompt, token by token, as `generate` would."""

    def __init__(self, tokenizer, text):
        import torch
        from transformers import GenerationConfig, PreTrainedConfig

        self.device, self.config = torch.device("cpu"), PreTrainedConfig()
        self.generation_config = GenerationConfig()
        self.script = tokenizer.encode(text, add_special_tokens=False)

    def generate(self, *, input_ids, attention_mask, generation_config, stopping_criteria):
        import torch

        ids = input_ids
        for token in self.script[: generation_config.max_new_tokens]:
            ids = torch.cat((ids, torch.full((len(ids), 1), token)), dim=1)
            if stopping_criteria(ids, None).all():
                break
        return ids


@pytest.mark.parametrize(
    ("text", "thinks", "answer", "is_whole"),
    [
        ("12\nQuestion: more", False, "12\n", True),
        ("<think>Question: is it?\n\nno</think>\n\n12 Question: more", False, "12 ", True),
        ("Question: is it?</think>12Question:", True, "12", True),
        ("<think>Question: I do not know", False, "", False),
        ("no end", False, "no end", False),
    ],
)
def test_a_stop_inside_thoughts_does_not_end_them(tiny_tokenizer, text, thinks, answer, is_whole):
    from trainkit.evals.answers import Prompt, Writer

    model = Scripted(tiny_tokenizer, text)
    writer = Writer(model, tiny_tokenizer, stop_ids=[tiny_tokenizer.eos_token_id], max_length=512)
    prompt = Prompt((1, 2, 3), ("Question:",), 200, thinks=thinks)
    for written in writer.write([prompt, prompt]):
        assert (written.answer, written.is_whole) == (answer, is_whole)


def test_the_hash_is_of_all_prompts_whoever_asked_them():
    class Request:
        task_name, idx = "t", 0

        def __init__(self, doc_id):
            self.doc_id = doc_id

    one, other, whole = PromptRecord(), PromptRecord(), PromptRecord()
    for doc in range(4):
        (one if doc % 2 else other).add(Request(doc), [doc, 5])
        whole.add(Request(doc), [doc, 5])
    assert PromptRecord.joined([one.hashes, other.hashes]) == PromptRecord.joined([whole.hashes])
    whole.add(Request(3), [3, 6])
    assert PromptRecord.joined([one.hashes, other.hashes]) != PromptRecord.joined([whole.hashes])


def test_vllm_is_asked_in_the_words_of_training_and_its_wrapper_is_the_one_that_is_known(
    tiny_tokenizer,
):
    """vLLM does not run here: a stand-in has the methods of the harness's wrapper."""
    import ast
    import importlib.util
    from pathlib import Path
    from types import SimpleNamespace

    from trainkit.infer.benchmark import Asking
    from trainkit.infer.locate import ModelPaths
    from trainkit.infer.vllm_backend import AskedOverVllm, vllm_arguments
    from trainkit.options.model import ModelOptions

    spec = importlib.util.find_spec("lm_eval")
    source = Path(spec.origin).parent / "models" / "vllm_causallms.py"
    classes = [n for n in ast.parse(source.read_text()).body if isinstance(n, ast.ClassDef)]
    methods = {
        node.name: {arg.arg for arg in node.args.args + node.args.kwonlyargs}
        for node in next(c for c in classes if c.name == "VLLM").body
        if isinstance(node, ast.FunctionDef)
    }
    given = vllm_arguments(
        ModelPaths(ModelOptions(name_or_path="m"), None, "m", None, None), Asking(), "auto"
    )
    assert set(given) | {"lora_local_path", "max_lora_rank"} <= methods["__init__"]
    assert {"tok_encode", "apply_chat_template", "loglikelihood", "generate_until"} <= set(methods)

    class Wrapper:
        max_length = 4096

        def generate_until(self, requests, disable_tqdm=True):
            self.settings = [request.args[1] for request in requests]
            return ["<think>a\n\nb</think>\n\n7\n\nmore"] * len(requests)

    model = type("Model", (AskedOverVllm, Wrapper), {})()
    model.ask_with(PromptStyle(tiny_tokenizer, chat=True))
    model.prompts.thinking = True
    request = SimpleNamespace(
        args=("What?", {"until": ["\n\n"], "max_gen_toks": 50}),
        task_name="t", doc_id=0, idx=0,
    )  # fmt: skip
    assert model.generate_until([request]) == ["7"]
    assert model.settings[0]["until"] == []
    assert model.settings[0]["max_gen_toks"] > 50
    assert model.written["t", 0][0]["is_whole"]
    assert model.record.hashes["t"]
