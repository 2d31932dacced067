"""An adapter merges into the base it was trained over: its weights, its vocabulary."""

import json
import shutil

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny import make_qwen2, make_tokenizer
from transformers import AutoModelForCausalLM

from trainkit.checkpoint.merge.merge import MergeOptions, merge_adapter
from trainkit.checkpoint.weights.adapter import read_adapter
from trainkit.checkpoint.weights.base_fingerprint import FILE_NAME, fingerprint, write_fingerprint
from trainkit.errors import CheckpointError

VOCAB = 40


def write_base(directory, *, seed=0, dtype=torch.float32, **options):
    make_qwen2(VOCAB, seed=seed).to(dtype).save_pretrained(directory, **options)
    return directory


def write_adapter(base, directory, *, resize_to=None, **options):
    model = AutoModelForCausalLM.from_pretrained(base)
    if resize_to is not None:
        model.resize_token_embeddings(resize_to)
    torch.manual_seed(1)
    wrapped = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"], **options))
    with torch.no_grad():
        for parameter in wrapped.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    wrapped.save_pretrained(directory)
    return wrapped.eval()


def merge(adapter, base, target, **options):
    told = []
    done = merge_adapter(read_adapter(adapter), base, target, MergeOptions(**options), told.append)
    return done, told


def test_digest_knows_weights_and_not_how_they_are_stored(tmp_path):
    plain = fingerprint(write_base(tmp_path / "a"))
    assert fingerprint(write_base(tmp_path / "shards", max_shard_size="30KB")) == plain
    assert fingerprint(write_base(tmp_path / "bf16", dtype=torch.bfloat16)) == plain
    assert fingerprint(write_base(tmp_path / "other", seed=1)) != plain
    tensors = AutoModelForCausalLM.from_pretrained(tmp_path / "a").state_dict()
    (tmp_path / "bin").mkdir()
    torch.save(tensors, tmp_path / "bin" / "pytorch_model.bin")
    assert fingerprint(tmp_path / "bin") == plain


def test_base_with_other_weights_is_refused(tmp_path):
    base = write_base(tmp_path / "base")
    other = write_base(tmp_path / "other", seed=1)
    write_adapter(base, tmp_path / "adapter")
    assert write_fingerprint(tmp_path / "adapter")
    merge(tmp_path / "adapter", base, tmp_path / "merged", verify=False)
    assert json.loads((tmp_path / "merged" / "merge.json").read_text())["is_base_of_training"]
    with pytest.raises(CheckpointError, match="other weights than the base"):
        merge(tmp_path / "adapter", other, tmp_path / "wrong", verify=False)
    assert not (tmp_path / "wrong").exists()
    _, told = merge(tmp_path / "adapter", other, tmp_path / "asked", verify=False, any_base=True)
    assert "shapes only" in told[0]


def test_adapter_without_a_fingerprint_merges_with_a_note(tmp_path):
    base = write_base(tmp_path / "base")
    write_adapter(base, tmp_path / "adapter")
    _, told = merge(tmp_path / "adapter", base, tmp_path / "merged", verify=False)
    assert "shapes only" in told[0]
    assert (
        json.loads((tmp_path / "merged" / "merge.json").read_text())["is_base_of_training"] is None
    )


def test_base_that_cannot_be_read_leaves_no_fingerprint(tmp_path):
    base = write_base(tmp_path / "base")
    write_adapter(base, tmp_path / "adapter")
    shutil.rmtree(base)
    assert not write_fingerprint(tmp_path / "adapter")
    assert not write_fingerprint(tmp_path)  # no adapter at all
    assert not (tmp_path / "adapter" / FILE_NAME).exists()


@pytest.mark.parametrize("text", ["[]", "{}", '{"sha256": 3}', "{"])
def test_damaged_fingerprint(tmp_path, text):
    base = write_base(tmp_path / "base")
    write_adapter(base, tmp_path / "adapter")
    (tmp_path / "adapter" / FILE_NAME).write_text(text)
    with pytest.raises(CheckpointError):
        merge(tmp_path / "adapter", base, tmp_path / "merged", verify=False)


@pytest.mark.parametrize(
    "options", [{}, {"modules_to_save": ["embed_tokens"]}], ids=["frozen", "trained"]
)
def test_resized_vocabulary(tmp_path, options):
    """peft saves a resized embedding whole, and next to a trained one its start values."""
    base = write_base(tmp_path / "base")
    model = write_adapter(base, tmp_path / "adapter", resize_to=VOCAB + 7, **options)
    done, _ = merge(tmp_path / "adapter", base, tmp_path / "merged")
    assert done.parity.num_same == 4
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    ids = torch.arange(VOCAB + 7)[None]
    with torch.inference_mode():
        ours, theirs = merged(ids).logits, model(ids).logits
    assert ours.shape[-1] == VOCAB + 7
    # Float32; base and update are added in another order.
    assert (ours - theirs).abs().max() <= 1e-5


@pytest.mark.parametrize("patterns", [5, ["q_proj"], {"(": 3}])
def test_patterns_that_are_none(tmp_path, patterns):
    base = write_base(tmp_path / "base")
    write_adapter(base, tmp_path / "adapter")
    path = tmp_path / "adapter" / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "rank_pattern": patterns}))
    with pytest.raises(CheckpointError, match="patterns are damaged"):
        read_adapter(tmp_path / "adapter")


@pytest.mark.parametrize("way", ["copied", "converted", "from-the-cache"])
def test_all_templates_of_a_tokenizer_travel(tmp_path, way):
    """Rows with tools are trained with the one called tool_use; without it they are served others.

    The hub's cache has links into its blobs.
    """
    from transformers import AutoTokenizer

    from trainkit.checkpoint.weights.companions import carry_companions, copy_companions

    tokenizer, templates = make_tokenizer(), {"default": "a", "tool_use": "b", "rag": "c"}
    tokenizer.chat_template = templates
    source, target = tmp_path / "models--a--b" / "snapshots" / "1f", tmp_path / "target"
    target.mkdir()
    tokenizer.save_pretrained(source)
    (source / "config.json").write_text("{}")
    if way == "from-the-cache":
        blobs = source.parents[1] / "blobs"
        blobs.mkdir()
        for number, path in enumerate(sorted(source.rglob("*.*"))):
            path.rename(blobs / f"{number:040x}")
            path.symlink_to(blobs / f"{number:040x}")
    if way == "converted":
        carry_companions(source, target, {}, {})
    else:
        copy_companions((source,), target)
    assert AutoTokenizer.from_pretrained(target).chat_template == templates


def test_how_a_base_reads_images_travels_with_what_is_trained_from_it(tmp_path):
    """Into checkpoints and ``final/``, and on into what is merged or exported; no code with it."""
    from trainkit.checkpoint.weights.companions import PROCESSORS, copy_companions
    from trainkit.train.checkpoints import remember_origin

    base, final, merged = (tmp_path / name for name in ("base", "final", "merged"))
    for directory in (base, final, merged):
        directory.mkdir()
    for name in PROCESSORS:
        settings = {"image_mean": [0.5], "auto_map": {"AutoImageProcessor": "code.Mine"}}
        (base / name).write_text(json.dumps(settings))
    remember_origin(final, base)
    copy_companions((final, base), merged)
    for directory in (final, merged):
        for name in PROCESSORS:
            assert json.loads((directory / name).read_text()) == {"image_mean": [0.5]}
    remember_origin(final, tmp_path / "on" / "the" / "hub")  # nothing there, and no harm
