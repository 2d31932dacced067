"""Conversations of every kind, and a tokenizer that llama.cpp loads."""

import json

TEMPLATE = """\
{%- if tools %}{{ '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{ messages[0].content + '\\n' }}{% endif %}
{{- '# Tools' }}{% for tool in tools %}{{ '\\n' + (tool | tojson) }}{% endfor %}
{{- '<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if not (loop.first and message.role == 'system') %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'assistant' and message.reasoning_content and loop.last %}
{{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}{% endif %}
{{- message.content }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- (call.function.arguments | tojson) + '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and not enable_thinking %}
{{- '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}"""
TOOL = {
    "type": "function",
    "function": {"name": "look", "description": "See.", "parameters": {"type": "object"}},
}
RECIPE = """\
model: {name_or_path: base, dtype: float32}
data:
  {train: [d.jsonl], max_length: 512, cache_dir: cache, template_kwargs: {enable_thinking: false}}
lora: {r: 4, alpha: 32}
training: {learning_rate: 2e-2, per_device_train_batch_size: 4, max_steps: 12}
"""


def rows():
    for number in range(24):
        user = {"role": "user", "content": f"Say {number}, naïve 今天."}
        answer = {"role": "assistant", "content": f"It is {number}{'!' * (number % 7)}"}
        kind = number % 5
        if kind == 1:
            yield {"messages": [{"role": "system", "content": "Be short."}, user, answer]}
        elif kind == 2:
            yield {"messages": [user, answer, {"role": "user", "content": "Again"}, answer]}
        elif kind == 3:
            thought = {**answer, "reasoning_content": "Numbers."}
            yield {"messages": [user, thought, {"role": "user", "content": "Why?"}, thought]}
        elif kind == 4:
            call = {"type": "function", "function": {"name": "look", "arguments": {"at": number}}}
            turn = {"role": "assistant", "content": "", "tool_calls": [call]}
            found = {"role": "tool", "content": "found"}
            yield {"messages": [user, turn, found, answer], "tools": [TOOL]}
        else:
            yield {"messages": [user, answer]}


def merging_tokenizer():
    """Byte level by Qwen2's rule, with some merges, without which llama.cpp loads none."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    from trainkit.export.llama_process import QWEN2

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN2), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    core.train_from_iterator([json.dumps(row, ensure_ascii=False) for row in rows()], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=["<|im_start|>"],
        chat_template=TEMPLATE,
    )
