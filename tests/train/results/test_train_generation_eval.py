"""Greedy answers: batched and left-padded as alone, compared word for word."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from trainkit.data.prompt import conversation_of
from trainkit.train.generation_eval import evaluate_answers

CONVERSATIONS = [
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "a much longer question than the other ones"},
        {"role": "assistant", "content": "one"},
        {"role": "user", "content": "and?"},
        {"role": "assistant", "content": "two"},
    ],
    [{"role": "user", "content": "你好"}, {"role": "assistant", "content": "三"}],
]


def conversations(rows=CONVERSATIONS):
    return [conversation_of(messages) for messages in rows]


@pytest.fixture(scope="module")
def model_and_tokenizer(tiny_qwen2):
    tokenizer = AutoTokenizer.from_pretrained(tiny_qwen2)
    model = AutoModelForCausalLM.from_pretrained(tiny_qwen2).eval()
    # Fresh weights attend evenly and answer any prompt alike; large ones tell prompts apart.
    with torch.no_grad():
        for weight in model.model.layers.parameters():
            weight.mul_(8 if weight.dim() == 2 else 1)
    return model, tokenizer


def answers_alone(model, tokenizer, max_new_tokens):
    """The plain way: one prompt at a time, no padding, the template straight from transformers."""
    given = []
    for messages in CONVERSATIONS:
        for turn, message in enumerate(messages):
            if message["role"] == "assistant":
                prompt = tokenizer.apply_chat_template(
                    messages[:turn], add_generation_prompt=True, return_tensors="pt"
                )["input_ids"]
                output = model.generate(
                    prompt,
                    attention_mask=torch.ones_like(prompt),
                    max_new_tokens=max_new_tokens,
                    do_sample=False,
                    eos_token_id=tokenizer.eos_token_id,
                    pad_token_id=tokenizer.pad_token_id,
                )
                new = output[0, prompt.shape[1] :]
                given.append(tokenizer.decode(new, skip_special_tokens=True))
    return given


@pytest.mark.parametrize("batch_size", [1, 2, 8])
def test_batches_give_the_answers_of_single_prompts(model_and_tokenizer, batch_size):
    model, tokenizer = model_and_tokenizer
    result = evaluate_answers(
        model, tokenizer, conversations(), max_new_tokens=8, batch_size=batch_size
    )
    assert [(row.conversation, row.turn) for row in result.rows] == [(0, 2), (0, 4), (1, 1)]
    assert [row.expected for row in result.rows] == ["one", "two", "三"]
    assert [row.given for row in result.rows] == answers_alone(model, tokenizer, 8)
    assert result.accuracy == 0.0


def test_an_answer_is_exact_but_for_space_at_its_ends(model_and_tokenizer):
    model, tokenizer = model_and_tokenizer
    given = answers_alone(model, tokenizer, 8)
    copy = json.loads(json.dumps(CONVERSATIONS))
    # The last turns: earlier ones are in the prompts and would change what follows.
    copy[0][4]["content"] = f" {given[1].strip()}\n"
    copy[1][1]["content"] = given[2] + "x"
    result = evaluate_answers(model, tokenizer, conversations(copy), max_new_tokens=8, batch_size=4)
    assert [row.is_exact for row in result.rows] == [False, True, False]
    stored = json.loads(json.dumps(result.to_dict()))
    assert (stored["num_exact"], stored["num_total"]) == (1, 3)


def test_a_stop_token_ends_an_answer(model_and_tokenizer):
    model, tokenizer = model_and_tokenizer
    every_token = range(len(tokenizer))
    result = evaluate_answers(
        model,
        tokenizer,
        conversations(),
        max_new_tokens=8,
        batch_size=4,
        stop_token_ids=tuple(every_token),
    )
    assert all(len(row.given) <= 1 for row in result.rows)


def test_nothing_asked_is_nothing_right(model_and_tokenizer):
    model, tokenizer = model_and_tokenizer
    result = evaluate_answers(model, tokenizer, [], max_new_tokens=8, batch_size=4)
    assert (result.accuracy, result.num_total) == (0.0, 0)
