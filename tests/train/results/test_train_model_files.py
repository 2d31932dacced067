"""Damaged, missing and unfitting model files are named as what they are, before anything slow."""

import json
import pickle
import shutil

import pytest
from safetensors.torch import load_file, save_file
from tiny import TABLES, make_qwen2, make_tokenizer
from transformers import AutoConfig, PreTrainedConfig, Qwen2Config

from trainkit.data import DataOptions, Ledger, Source, prepare
from trainkit.errors import DataError, ModelError
from trainkit.models.attention.packable import skeleton_of
from trainkit.models.loading import load_model
from trainkit.models.tokenizer import check_exists, explained, load_config, load_tokenizer
from trainkit.options import ModelOptions
from trainkit.train.fit import context_warning


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A model in shards, and one in a single file; each with its tokenizer."""
    root = tmp_path_factory.mktemp("models")
    tokenizer = make_tokenizer()
    model = make_qwen2(len(tokenizer))
    for name, size in (("single", "1GB"), ("shards", "100KB")):
        model.save_pretrained(root / name, max_shard_size=size)
        tokenizer.save_pretrained(root / name)
    return root


@pytest.fixture
def load(saved, tmp_path):
    """Copy a model, damage it, and load it as a run does."""

    def load(kind, damage=lambda directory: None):
        directory = tmp_path / kind
        shutil.copytree(saved / kind, directory)
        damage(directory)
        source = ModelOptions(str(directory), dtype="float32")
        check_exists(source)
        load_config(source)
        load_tokenizer(source)
        return load_model(source, attention="sdpa")

    return load


def cut(name, keep):
    def damage(directory):
        file = sorted(directory.glob(name))[0]
        file.write_bytes(file.read_bytes()[:keep])

    return damage


def put(name, content):
    return lambda directory: (directory / name).write_bytes(content)


def without(*names):
    def damage(directory):
        for file in [file for name in names for file in directory.glob(name)]:
            file.unlink()

    return damage


class Attack:
    def __reduce__(self):
        return print, ("code ran",)


INDEX = "model.safetensors.index.json"


def edit_index(change):
    def damage(directory):
        index = json.loads((directory / INDEX).read_text())
        change(index)
        (directory / INDEX).write_text(json.dumps(index))

    return damage


def swap_homes(index):
    homes = index["weight_map"]
    first = next(iter(homes))
    homes[first] = next(home for home in homes.values() if home != homes[first])


def bad_header(directory):
    file = directory / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[8:12] = b"\xff\x00{["
    file.write_bytes(data)


def lose_a_tensor(directory):
    file = directory / "model.safetensors"
    tensors = load_file(file)
    tensors.pop("model.layers.1.mlp.up_proj.weight")
    save_file(tensors, file, metadata={"format": "pt"})


def other_shape(directory):
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"intermediate_size": 96}))


def of_config(**values):
    def damage(directory):
        config = json.loads((directory / "config.json").read_text())
        (directory / "config.json").write_text(json.dumps(config | values))

    return damage


def twice(directory):
    text = (directory / "config.json").read_text().rstrip().removesuffix("}")
    (directory / "config.json").write_text(text + ', "rms_norm_eps": 1.0}')


def as_llama(bias):
    """Whose layers have no bias; its files have."""

    def damage(directory):
        of_config(model_type="llama")(directory)
        stored = load_file(directory / "model.safetensors")
        for name in stored:
            if name.endswith("bias"):
                stored[name].fill_(bias)
        save_file(stored, directory / "model.safetensors", {"format": "pt"})

    return damage


def test_biases_of_zeros_may_be_left_over(load):
    assert type(load("single", as_llama(0.0))).__name__ == "LlamaForCausalLM"


def only_an_adapter(directory):
    (directory / "config.json").unlink()
    (directory / "adapter_config.json").write_text("{}")


def pickled(directory):
    (directory / "model.safetensors").unlink()
    (directory / "pytorch_model.bin").write_bytes(pickle.dumps(Attack()))


LONGER = b"\x02" + bytes(7) + b"{}..."
TOKENIZER = ("tokenizer*", "vocab*", "merges*", "special_tokens*", "chat_template*")
DAMAGES = {
    "other type": ("single", as_llama(0.5), "k_proj.bias, and LlamaForCausalLM"),
    "a key twice": ("single", twice, "a key appears twice"),
    "dropout": ("single", of_config(attention_dropout=5), "attention_dropout is 5"),
    "weights cut": ("single", cut("model.safetensors", -100), "was cut"),
    "weights cut early": ("single", cut("model.safetensors", 5), "was cut"),
    "weights empty": ("single", cut("model.safetensors", 0), "was cut"),
    "weights longer": ("single", put("model.safetensors", LONGER), "was cut"),
    "header": ("single", bad_header, "header of the safetensors file is damaged"),
    "git lfs": ("single", put("model.safetensors", b"version https://git-lfs"), "Git LFS pointer"),
    "a page": ("single", put("model.safetensors", b"<html></html>" * 9), "was cut, or is no"),
    "no weights": ("single", without("model.safetensors"), "cannot be loaded"),
    "a tensor less": ("single", lose_a_tensor, "1 weights of the model are in none of its files"),
    "other shapes": ("single", other_shape, "cannot be loaded"),
    "shard cut": ("shards", cut("model-*.safetensors", -1), "was cut"),
    "shard missing": ("shards", without("model-00002*"), "is missing"),
    "index no json": ("shards", put(INDEX, b"{"), "not JSON"),
    "index a list": ("shards", put(INDEX, b"[]"), "not a JSON object"),
    "index deep": ("shards", put(INDEX, b"[" * 100_000), "not JSON"),
    "index empty": ("shards", put(INDEX, b"{}"), "no weight_map"),
    "index numbers": ("shards", put(INDEX, b'{"weight_map": {"a": 1}}'), "shard 1 is missing"),
    "index swapped": ("shards", edit_index(swap_homes), "where it is not"),
    "a pickle": ("single", pickled, "are a pickle, which may hold code"),
    "config cut": ("single", cut("config.json", 50), "not JSON"),
    "config a list": ("single", put("config.json", b"[]"), "not a JSON object"),
    "config empty": ("single", put("config.json", b"{}"), "cannot be loaded"),
    "config unknown": ("single", put("config.json", b'{"model_type": "nope"}'), "cannot be loaded"),
    "config numbers": ("single", put("config.json", b'{"model_type": 5}'), "cannot be loaded"),
    "no config": ("single", without("config.json"), "cannot be loaded"),
    "tokenizer cut": ("single", cut("tokenizer.json", -50), "tokenizer cannot be loaded"),
    "tokenizer a list": ("single", put("tokenizer.json", b"[]"), "tokenizer cannot be loaded"),
    "tokenizer empty": ("single", put("tokenizer.json", b"{}"), "tokenizer cannot be loaded"),
    "no tokenizer": ("single", without(*TOKENIZER), "tokenizer"),
    "an adapter": ("single", only_an_adapter, "this is an adapter"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_named(load, capsys, name):
    kind, damage, what = DAMAGES[name]
    with pytest.raises(ModelError, match=what) as error:
        load(kind, damage)
    assert kind in error.value.where
    assert error.value.fix
    assert "code ran" not in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["single", "shards"])
def test_whole_models_load(load, kind):
    assert load(kind).config.model_type == "qwen2"


ROPE = {
    "none": (None, 512),
    "llama3": ({"rope_type": "llama3", "factor": 8.0}, 512),
    "yarn": ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}, 2048),
    "old yarn": ({"type": "yarn", "factor": 4.0}, 2048),
    "linear": ({"rope_type": "linear", "factor": 2.0}, 1024),
    "longrope": (
        {"rope_type": "longrope", "factor": 32.0, "original_max_position_embeddings": 16},
        512,
    ),
}


@pytest.mark.parametrize("name", ROPE)
def test_a_length_beyond_the_context_is_told(name):
    scaling, context = ROPE[name]
    full = scaling and {"rope_theta": 10000.0, "low_freq_factor": 1.0, **scaling}
    config = Qwen2Config(max_position_embeddings=512)
    config.rope_parameters = full
    assert context_warning(config, context) is None
    said = context_warning(config, context + 1)
    for part in (f"data.max_length {context + 1}", f"{context} tokens", f"max_length={context}"):
        assert part in said


def test_a_run_directory_is_no_model(tmp_path):
    (tmp_path / "status.json").write_text("{}")
    with pytest.raises(ModelError, match=r"run directory(.|\n)*/final, or(.|\n)*trainkit merge"):
        check_exists(ModelOptions(str(tmp_path)))


@pytest.mark.parametrize(
    "values", [{"num_key_value_heads": 0}, {"pad_token_id": 10**6}], ids=[*"kp"]
)
def test_sizes_that_no_model_can_be_built_of_are_for_its_loader_to_say(values, saved, tmp_path):
    config = json.loads((saved / "single" / "config.json").read_text())
    assert skeleton_of(AutoConfig.for_model(**config | values)) is None


def test_a_directory_has_no_revisions(tiny_qwen2):
    """One that is called as the hub's model hid that another revision was asked for."""
    with pytest.raises(ModelError, match="revision 'v2' has no effect"):
        check_exists(ModelOptions(str(tiny_qwen2), revision="v2"))


@pytest.mark.parametrize("kind", TABLES)
def test_a_table_of_positions_is_a_limit(kind):
    config = AutoConfig.for_model(kind, vocab_size=99, **TABLES[kind])
    assert context_warning(config, 16) is None
    with pytest.raises(ModelError, match="context of 16 tokens"):
        context_warning(config, 17)
    own_code = PreTrainedConfig(n_positions=16, auto_map={"AutoModelForCausalLM": "own.Model"})
    with pytest.raises(ModelError, match="context of 16 tokens"):
        context_warning(own_code, 17)
    with pytest.raises(ModelError, match="the teacher's context of 16 tokens"):
        context_warning(config, 17, "the teacher")


def test_a_tokenizer_larger_than_the_embedding_is_named(tmp_path):
    tokenizer = make_tokenizer()
    size = len(tokenizer)
    tokenizer.add_tokens(["<new>"])
    file = tmp_path / "a.jsonl"
    rows = [{"text": "plain"}, {"text": "a <new> word"}]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def run(count):
        options = DataOptions(num_embeddings=count, cache_dir=str(tmp_path / f"cache{count}"))
        return prepare([Source(str(file))], tokenizer, options, ledger=Ledger())

    with pytest.raises(DataError, match=rf"'<new>' the id {size} .*line 2.*has {size} rows"):
        run(size)
    assert len(run(size + 1)) == 2


def test_a_damaged_shard_of_the_hubs_cache_is_named(saved, tmp_path, monkeypatch):
    """The libraries find it by a name, and say of no file that it was cut."""
    shutil.copytree(saved / "shards", tmp_path / "copy")
    cut("*-00002-*", 5000)(tmp_path / "copy")
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: tmp_path / "copy")
    named = pytest.raises(ModelError, match=r"copy/model-00002-.*: it was cut")
    with named, explained(ModelOptions("someone/model"), "model"):
        load_file(next((tmp_path / "copy").glob("*-00002-*")))
