"""More files that want to do harm: numbers, names and archives beyond every measure."""

import gzip
import json

from chaos.hostile_cases import (
    DEEP,
    GENERATE,
    SFT,
    adapter,
    case,
    cases,
    change_json,
    newest,
    vouch,
)


@cases(
    layers=("num_hidden_layers", 10**9),
    digits=("vocab_size", 10**400),
)
def number_of_a_model(root, given):
    change_json(root / "m/config.json", **dict([given]))
    return SFT


@cases(huge=10**30)
def end_token(root, value):
    (root / "m/generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    return SFT


@cases(list="[]", deep=DEEP, cache='{"cache_implementation": "../../x"}', torn='{"a": ')
def settings_of_answers(root, text):
    (root / "m/generation_config.json").write_text(text)
    return SFT


@cases(number=[{"name": "default", "template": 3}], text=[{"name": "default", "template": [1]}])
def templates_of_a_tokenizer(root, value):
    (root / "m/chat_template.jinja").unlink(missing_ok=True)
    change_json(root / "m/tokenizer_config.json", chat_template=value)
    return SFT


@cases(huge=10**12)
def added_token(root, number):
    path = root / "m/tokenizer.json"
    content = json.loads(path.read_text())
    content["added_tokens"].append({**content["added_tokens"][0], "id": number, "content": "<x>"})
    path.write_text(json.dumps(content))
    return SFT


@cases(huge=10**40)
def length_of_a_tokenizer(root, value):
    change_json(root / "m/tokenizer_config.json", model_max_length=value)
    return (*SFT, "data.max_length=null")


@cases(
    messages="{{ messages.__class__.__mro__ }}",
    lipsum="{{ lipsum.__globals__['os'].popen('touch canary') }}",
)
def attribute_in_a_template(root, text):
    (root / "m/chat_template.jinja").write_text(text)
    change_json(root / "m/tokenizer_config.json", chat_template=text)
    return SFT


@case
def bomb_of_one_row(root):
    """A hundred megabytes in one line, packed into a hundred kilobytes."""
    with gzip.open(root / "d2.jsonl.gz", "wb", 1) as file:
        file.write(b'{"messages": "')
        for _ in range(100):
            file.write(b"a" * 1_000_000)
    return (*SFT, "data.train=[d2.jsonl.gz]")


@cases(
    merge="".join(
        f"a{n}: &a{n} {{<<: [*a{n - 1}, *a{n - 1}], k{n}: 1}}\n" if n else "a0: &a0 {k: 1}\n"
        for n in range(40)
    ),
    device="data: {train: [/dev/zero]}\nmodel: {name_or_path: m}",
)
def words_of_a_recipe(root, text):
    (root / "r.yaml").write_text(text)
    return SFT


@cases(digits=10**400)
def rank_of_an_adapter(root, value):
    change_json(adapter(root) / "adapter_config.json", r=value)
    return GENERATE


@case
def pattern_of_an_adapter(root):
    change_json(adapter(root) / "adapter_config.json", target_modules="(.*)*(.*)*(.*)*x")
    return GENERATE


@cases(rank="rank_pattern", alpha="alpha_pattern")
def pattern_of_an_adapter_that_is_merged(root, key):
    change_json(adapter(root) / "adapter_config.json", **{key: {"(.*)*(.*)*(.*)*x": 4}})
    return "merge", "a", "merged", "--base-model", "m"


@case
def checkpoint_that_is_a_link(root):
    folder = newest(root, "run")
    folder.rename(root / "elsewhere")
    folder.symlink_to(root / "elsewhere")
    (root / "elsewhere/scheduler.pt").write_bytes(b"x")
    vouch(root / "elsewhere")
    return "sft", "--resume", str(folder)


@case
def folder_of_a_checkpoint_that_is_a_link(root):
    folder = newest(root, "zero")
    (inner,) = folder.glob("global_step*")
    inner.rename(root / "elsewhere")
    inner.symlink_to(root / "elsewhere")
    return "sft", "--resume", str(folder)
