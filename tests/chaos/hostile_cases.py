"""Files that want to do harm: each case puts them in place and says what is then typed.

A case gets a folder with a tiny model ``m``, rows ``d.jsonl``, a recipe ``r.yaml`` (LoRA) and two
stopped runs, ``run`` and ``zero``, all its own. Whatever runs code leaves a file ``canary``.
"""

import json
import os
import shutil
import struct
import zipfile
from pathlib import Path

CASES = {}
SFT = ("sft", "r.yaml", "--output-dir", "out")
DEEP = "[" * 100_000
CONVERSATION = {
    "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
}


class Evil:
    """Touches the canary when it is unpickled."""

    def __init__(self, root):
        self.command = f"touch {root}/canary"

    def __reduce__(self):
        return os.system, (self.command,)


def case(function):
    CASES[function.__name__] = function
    return function


def cases(**given):
    """A case for each keyword: one function, called with that value."""

    def many(function):
        for name, value in given.items():
            CASES[f"{function.__name__}_{name}"] = lambda root, value=value: function(root, value)
        return function

    return many


# -- models and tokenizers ------------------------------------------------------------------------


def change_json(path, **values):
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def safetensors(path, header, body=bytes(32), length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + body)


@cases(
    parent="../m/model.safetensors", absolute="/etc/passwd", device="/dev/zero", number=3, deep=None
)
def index_of_weights(root, shard):
    (root / "m/model.safetensors").rename(root / "m/other.safetensors")
    index = {"metadata": {}, "weight_map": {"model.norm.weight": shard}}
    text = DEEP if shard is None else json.dumps(index)
    (root / "m/model.safetensors.index.json").write_text(text)
    return SFT


@cases(
    long=({}, 2**62),
    deep=(DEEP.encode(), None),
    huge={"w": {"dtype": "F32", "shape": [2**40, 2**20], "data_offsets": [0, 2**62]}},
    negative={"w": {"dtype": "F32", "shape": [-8], "data_offsets": [0, -32]}},
    words={"w": {"dtype": "F32", "shape": "x", "data_offsets": [0, "32"]}},
)
def header_of_weights(root, header):
    header, length = header if isinstance(header, tuple) else (header, None)
    safetensors(root / "m/model.safetensors", header, length=length)
    return SFT


@cases(
    deep=DEEP,
    list="[]",
    escape='{"model_type": "\\u001b]0;x\\u0007"}',
    number='{"model_type": 3}',
    cut='{"model_type": "llama"',
)
def config_of_a_model(root, text):
    (root / "m/config.json").write_text(text)
    return SFT


@cases(huge=10**9, negative=-64, word="64", zero=0)
def width_of_a_model(root, value):
    change_json(root / "m/config.json", hidden_size=value)
    return SFT


@case
def code_beside_a_model(root):
    (root / "m/evil.py").write_text(f"open({str(root / 'canary')!r}, 'w')")
    auto_map = dict.fromkeys(("AutoConfig", "AutoModelForCausalLM"), "evil.X")
    change_json(root / "m/config.json", auto_map=auto_map, model_type="evil")
    return SFT


@case
def code_beside_a_tokenizer(root):
    (root / "m/evil.py").write_text(f"open({str(root / 'canary')!r}, 'w')")
    values = {"auto_map": {"AutoTokenizer": ["evil.X", "evil.X"]}, "tokenizer_class": "X"}
    change_json(root / "m/tokenizer_config.json", **values)
    return SFT


@cases(zip=True, legacy=False)
def pickled_weights(root, as_zip):
    import torch

    (root / "m/model.safetensors").unlink()
    path = root / "m/pytorch_model.bin"
    torch.save({"w": Evil(root)}, path, _use_new_zipfile_serialization=as_zip)
    return SFT


@cases(deep=DEEP, model='{"model": {"type": "BPE", "vocab": {"\\u001b[2J": -1}, "merges": [3]}}')
def tokenizer_file(root, text):
    (root / "m/tokenizer.json").write_text(text)
    return SFT


@cases(
    division="{{ 1 // 0 }}",
    overflow="{% for i in range(10**30) %}{% endfor %}",
    memory="{{ 'a' * 10**13 }}",
    power="{{ 9 ** 9 ** 9 }}",
    recursion="{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    classes="{{ ''.__class__.__mro__[1].__subclasses__() }}",
    globals="{{ cycler.__init__.__globals__.os.popen('touch canary') }}",
    include="{% include '/etc/passwd' %}",
    escape="{{ raise_exception('\x1b]0;title\x07\x1b[2J') }}",
    syntax="{% if %}",
    format="{{ '{0.__class__}'.format(3) }}{{ '%999999999999d' % 1 }}",
)
def template(root, text):
    for name in ("tokenizer_config.json", "chat_template.jinja"):
        path = root / "m" / name
        if name.endswith(".jinja"):
            path.write_text(text)
        else:
            change_json(path, chat_template=text)
    return SFT


# -- adapters -------------------------------------------------------------------------------------


def adapter(root):
    """A copy of the stopped run's adapter."""
    newest = max((root / "run").glob("checkpoint-*"))
    names = ("adapter_config.json", "adapter_model.safetensors", "base_fingerprint.json")
    (root / "a").mkdir()
    for name in names:
        if (newest / name).exists():
            shutil.copy(newest / name, root / "a")
    (root / "p.jsonl").write_text(json.dumps({"prompt": "hello"}) + "\n")
    return root / "a"


GENERATE = ("generate", "a", "--base-model", "m", "--prompts", "p.jsonl", "--out", "o.jsonl")


@case
def pickled_adapter(root):
    import torch

    folder = adapter(root)
    (folder / "adapter_model.safetensors").unlink()
    torch.save({"w": Evil(root)}, folder / "adapter_model.bin")
    return GENERATE


@cases(
    deep=DEEP,
    library='{"peft_type": "LORA", "auto_mapping": {"parent_library": "evil"}, "r": "x"}',
    kind='{"peft_type": "\\u001b[2J"}',
    numbers='{"peft_type": "LORA", "r": -5, "target_modules": 7}',
    list="[]",
)
def adapter_config(root, text):
    (adapter(root) / "adapter_config.json").write_text(text)
    return GENERATE


@cases(long=({}, 2**62), deep=(DEEP.encode(), None))
def header_of_an_adapter(root, header):
    safetensors(adapter(root) / "adapter_model.safetensors", header[0], length=header[1])
    return GENERATE


@case
def adapter_merged(root):
    folder = adapter(root)
    (folder / "adapter_config.json").write_text(DEEP)
    return "merge", "a", "merged", "--base-model", "m"


# -- data -----------------------------------------------------------------------------------------


@cases(
    deep=DEEP,
    deep_inside='{"messages": ' + DEEP,
    number='{"messages": ' + "9" * 50_000 + "}",
    cut=json.dumps(CONVERSATION)[:-5],
    nothing="",
)
def rows(root, text):
    (root / "d.jsonl").write_text(text)
    return SFT


@case
def rows_in_one_deep_array(root):
    (root / "d.json").write_text(DEEP)
    return (*SFT, "data.train=[d.json]")


@cases(parquet=b"PAR1" + bytes(64) + b"PAR1", gz=b"\x1f\x8b\x08" + bytes(40), zst=b"(\xb5/\xfd\xff")
def packed_rows(root, content):
    suffix = {b"P": "parquet", b"\x1f": "jsonl.gz", b"(": "jsonl.zst"}[content[:1]]
    (root / f"d2.{suffix}").write_bytes(content)
    return (*SFT, f"data.train=[d2.{suffix}]")


@case
def link_to_a_device(root):
    (root / "d2.jsonl").symlink_to("/dev/null")
    return (*SFT, "data.train=[d2.jsonl]")


# -- recipes --------------------------------------------------------------------------------------


@cases(
    python="model: !!python/object/apply:os.system ['touch canary']",
    laughs="".join(
        f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" if n else "a0: &a0 [1]\n"
        for n in range(12)
    ),
    loop="model: &m {name_or_path: *m}",
    escape='model: {name_or_path: "\\x1b]0;x\\a\\e[2J"}',
    control="model: \x07",
)
def recipe(root, text):
    (root / "r.yaml").write_text(text)
    return SFT


@cases(
    stage='{"zero_optimization": {"stage": "\\u001b[2J"}}',
    universal='{"zero_optimization": {"stage": 1}, "checkpoint": {"load_universal": true}}',
    writer='{"zero_optimization": {"stage": 1}, "checkpoint": {"writer": {"type": "FAST"}}}',
    monitor='{"csv_monitor": {"enabled": true, "output_path": "canary"}}',
    board='{"tensorboard": {"enabled": true, "output_path": "canary", "job_name": "x"}}',
    profiler='{"flops_profiler": {"enabled": true, "profile_step": 2, "output_file": "canary"}}',
    nebula='{"nebula": {"enabled": true, "persistent_storage_path": "canary"}}',
)
def deepspeed_file(root, text):
    (root / "ds.json").write_text(text)
    return (*SFT, "--deepspeed", "ds.json")


# -- checkpoints: altered by somebody who also writes the manifest again ---------------------------


def vouch(checkpoint):
    """Write the manifest again over what is there now."""
    from trainkit.checkpoint.whole.manifest import Manifest, hash_files, list_files, read_manifest

    metadata = read_manifest(checkpoint).metadata
    files = tuple(hash_files(checkpoint, list_files(checkpoint)))
    (checkpoint / "manifest.json").write_bytes(Manifest(files, metadata).to_bytes())


def newest(root, run):
    return max((root / run).glob("checkpoint-*"), key=lambda path: int(path.name[11:]))


def replaced(root, run, pattern, content):
    import torch

    folder = newest(root, run)
    (path,) = list(folder.glob(pattern))[:1]
    if content is Evil:
        torch.save(Evil(root), path)
    elif content == "inside":
        state = torch.load(path, weights_only=False)
        torch.save({**state, "more": Evil(root)}, path)
    elif content == "bomb":
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as bomb:
            bomb.writestr("archive/data.pkl", bytes(50_000_000))
    else:
        path.write_text(content)
    vouch(folder)
    return "sft", "--resume", run


@cases(
    **{path.partition(".")[0]: path for path in ("optimizer.pt", "scheduler.pt", "rng_state.pth")}
)
def pickle_of_a_checkpoint(root, name):
    return replaced(root, "run", name, Evil)


@cases(evil=Evil, inside="inside", bomb="bomb")
def optimizer_of_a_checkpoint(root, content):
    return replaced(root, "run", "optimizer.pt", content)


@cases(evil=Evil, inside="inside")
def shard_of_the_model(root, content):
    return replaced(root, "zero", "global_step*/*model_states.pt", content)


@cases(evil=Evil, inside="inside", bomb="bomb")
def shard_of_the_optimizer(root, content):
    return replaced(root, "zero", "global_step*/*optim_states.pt", content)


@case
def latest_elsewhere(root):
    import torch

    (root / "elsewhere").mkdir()
    for name in ("mp_rank_00_model_states.pt", "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"):
        torch.save(Evil(root), root / "elsewhere" / name)
    return replaced(root, "zero", "latest", "../../elsewhere")


@cases(deep=DEEP, list="[]", words='{"global_step": "x", "log_history": 3}', empty="")
def state_of_a_checkpoint(root, text):
    return replaced(root, "run", "trainer_state.json", text)


@cases(deep=DEEP, metadata='{"schema_version": 1, "metadata": 3, "files": []}')
def manifest(root, text):
    (newest(root, "run") / "manifest.json").write_text(text)
    shutil.rmtree(root / "run/checkpoint-2")
    return "sft", "--resume", "run"


@case
def manifest_that_leads_out(root):
    folder = newest(root, "run")
    content = json.loads((folder / "manifest.json").read_text())
    content["metadata"]["step"] = "\x1b[2J"
    from trainkit.checkpoint.whole.manifest import FileEntry, Manifest

    files = tuple(FileEntry(**entry) for entry in content["files"])
    text = Manifest(files, content["metadata"]).to_bytes()
    (folder / "manifest.json").write_bytes(text)
    return "sft", "--resume", "run"


@case
def checkpoint_with_a_link(root):
    folder = newest(root, "run")
    (folder / "scheduler.pt").unlink()
    (folder / "scheduler.pt").symlink_to("/etc/passwd")
    shutil.rmtree(root / "run/checkpoint-2")
    return "sft", "--resume", "run"


@cases(
    status=("status.json", DEEP),
    changes=("changes.jsonl", DEEP + "\n{}\n"),
    recipe=("recipe.yaml", "a: " + DEEP),
    words=("status.json", '{"state": 3, "resumed_at_steps": "x", "last_step": []}'),
)
def record_of_a_run(root, given):
    (root / "run" / given[0]).write_text(given[1])
    return "sft", "--resume", "run"


def home(folder: Path, *sources: Path) -> Path:
    """A folder of its own for one case."""
    for source in sources:
        if source.is_dir():
            shutil.copytree(source, folder / source.name, symlinks=True)
        else:
            shutil.copy(source, folder)
    return folder
