"""More files that want to do harm: numbers, names and archives beyond every measure."""

import bz2
import gzip
import json
import pickle
import shutil

from chaos.hostile_cases import (
    DEEP,
    GENERATE,
    SFT,
    Evil,
    adapter,
    case,
    cases,
    change_json,
    newest,
    vouch,
)


@cases(layers=("num_hidden_layers", 10**9), digits=("vocab_size", 10**400))
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


@cases(one="(?:.|.)*x", words="([a-z._0-9]+)+,")
def pattern_of_an_adapter(root, pattern):
    change_json(adapter(root) / "adapter_config.json", target_modules=pattern)
    return GENERATE


@cases(
    layers={"layer_replication": [[0, 1]] * 100_000},
    span={"layer_replication": [[0, 10**9]]},
    words={"layer_replication": [["a", 1]]},
    rank={"r": 10**8},
    ranks={"rank_pattern": {"q_proj": 10**8}},
    fraction={"r": 1e8},
    alpha={"lora_alpha": 1e30},
    alphas={"alpha_pattern": {"q_proj": 1e30}},
    word={"alpha_pattern": {"q_proj": "8"}},
    list={"alpha_pattern": [8]},
    patterns={"alpha_pattern": {f"q{number}": 8 for number in range(100_000)}},
    long={"alpha_pattern": {"q" * 10**6: 8}},
    endless={"alpha_pattern": {"(.*)*(.*)*(.*)*x": 8}},
    turns={"init_lora_weights": "pissa_niter_1000000000"},
)
def size_of_an_adapter(root, values):
    change_json(adapter(root) / "adapter_config.json", **values)
    return GENERATE


@cases(
    rank="lora: {r: 100000000}",
    turns="lora: {init_lora_weights: pissa_niter_1000000000}",
)
def endless_recipe(root, line):
    text = (root / "r.yaml").read_text().replace("lora: {r: 4, alpha: 8}", line)
    (root / "r.yaml").write_text(text)
    return SFT


@cases(answers="(a+)+,", alternatives="(?:a|aa)*,")
def endless_metric(root, pattern):
    messages = [{"role": "user", "content": "b"}, {"role": "assistant", "content": "a" * 40}]
    (root / "e.jsonl").write_text(json.dumps({"messages": messages}) + "\n")
    text = (root / "r.yaml").read_text().replace("data: {", "data: {eval: [e.jsonl], ")
    (root / "r.yaml").write_text(f"{text}generation_eval: {{metrics: [{{regex: '{pattern}'}}]}}\n")
    return SFT


@cases(layers="num_hidden_layers", experts="n_routed_experts", heads="num_attention_heads")
def count_of_a_model_with_lists(root, key):
    """Its configuration makes a list as long as the model has layers."""
    change_json(root / "m/config.json", model_type="qwen2", **{key: 10**9})
    return SFT


@case
def pattern_of_an_adapter_that_is_merged(root):
    change_json(adapter(root) / "adapter_config.json", rank_pattern={"(.*)*(.*)*(.*)*x": 4})
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


def doubling(text, times=60):
    """A normalizer that makes of one letter more than there is memory for."""
    replace = {"type": "Replace", "pattern": {"String": text}, "content": text * 2}
    return {"type": "Sequence", "normalizers": [replace] * times}


@cases(
    doubles=("normalizer", doubling("a")),
    long=("normalizer", {"type": "Replace", "pattern": {"Regex": "."}, "content": "x" * 10**7}),
)
def step_of_a_tokenizer(root, given):
    path = root / "m/tokenizer.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **dict([given])}))
    return SFT


@cases(zst="zst", bz2="bz2")
def bomb_of_one_packed_row(root, kind):
    content = b'{"messages": "' + bytes(100_000_000)
    if kind == "zst":
        import zstandard

        packed = zstandard.compress(content)
    else:
        packed = bz2.compress(content)
    (root / f"d2.jsonl.{kind}").write_bytes(packed)
    return (*SFT, f"data.train=[d2.jsonl.{kind}]")


@cases(parquet="parquet", arrow="arrow")
def type_with_a_pickle(root, kind):
    """A column of an extension type whose description is a pickle."""
    import pyarrow
    from pyarrow import parquet

    metadata = {
        b"ARROW:extension:name": b"arrow.py_extension_type",
        b"ARROW:extension:metadata": pickle.dumps(Evil(root)),
    }
    field = pyarrow.field("messages", pyarrow.int64(), metadata=metadata)
    table = pyarrow.Table.from_arrays([pyarrow.array([1, 2])], schema=pyarrow.schema([field]))
    path = root / f"d2.{kind}"
    if kind == "parquet":
        parquet.write_table(table, path)
    else:
        with pyarrow.OSFile(str(path), "wb") as sink, pyarrow.ipc.new_file(sink, table.schema) as f:
            f.write_table(table)
    return (*SFT, f"data.train=[d2.{kind}]")


@case
def arguments_in_a_pickle(root):
    """The Trainer's own file in a checkpoint that says nothing of it."""
    import torch

    torch.save(Evil(root), newest(root, "run") / "training_args.bin")
    shutil.rmtree(root / "run/checkpoint-2")
    return "sft", "--resume", "run"


@case
def metadata_of_spread_weights(root):
    """torch's own distributed checkpoint: its index is a pickle."""
    folder = root / "m"
    (folder / "model.safetensors").unlink()
    (folder / ".metadata").write_bytes(pickle.dumps(Evil(root)))
    (folder / "__0_0.distcp").write_bytes(b"x")
    return SFT
