"""``model.add_tokens``: what the tokenizer learns, how the new rows begin, and what is refused."""

import pytest
import torch
from safetensors.torch import load_file
from tiny import make_qwen2

from trainkit.errors import ModelError, RecipeError
from trainkit.lora.adapter import attach, with_vocabulary
from trainkit.models.loading import load_model
from trainkit.models.tokenizer import load_tokenizer, new_tokens
from trainkit.models.vocabulary import describe_new_tokens, refuse_frozen_tokens
from trainkit.options import LoraOptions, ModelOptions
from trainkit.patching import patch
from trainkit.recipe import load_recipe


def saved(directory, tokenizer, *, spare=0, **overrides):
    make_qwen2(len(tokenizer) + spare, **overrides).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return str(directory)


@pytest.mark.parametrize("spare", [0, 8], ids=["grown", "spare rows"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_new_rows_are_the_mean_of_the_pieces_rows(tied, spare, tmp_path, tiny_tokenizer):
    path = saved(tmp_path, tiny_tokenizer, spare=spare, tie_word_embeddings=tied)
    source = ModelOptions(
        name_or_path=path, dtype="float32", add_tokens=["<num>", "ab"], add_special_tokens=["<end>"]
    )
    tokenizer, model = load_tokenizer(source), load_model(source, attention="eager")
    before = load_file(tmp_path / "model.safetensors")
    old = len(tiny_tokenizer)
    assert tokenizer.encode("x<num>ab<end>") == [*tiny_tokenizer.encode("x"), old, old + 1, old + 2]
    assert tokenizer.decode([old, old + 2], skip_special_tokens=True) == "<num>"
    head, embeddings = model.get_output_embeddings().weight, model.get_input_embeddings().weight
    assert (head is embeddings) == tied
    assert len(head) == len(embeddings) == model.config.vocab_size == old + max(3, spare)
    for name, matrix in (("model.embed_tokens.weight", embeddings), ("lm_head.weight", head)):
        plain = before.get(name, before["model.embed_tokens.weight"])
        for row, token in enumerate(("<num>", "ab", "<end>"), old):
            mean = plain[tiny_tokenizer.encode(token)].mean(0)
            torch.testing.assert_close(matrix[row], mean, rtol=0, atol=1e-7)
        kept = [row for row in range(len(plain)) if not old <= row < old + 3]
        assert torch.equal(matrix[kept], plain[kept])


def test_a_vocabulary_that_has_them_already_stays(tmp_path, tiny_tokenizer):
    path = saved(tmp_path, tiny_tokenizer)
    source = ModelOptions(name_or_path=path, dtype="float32", add_tokens=["<|im_start|>"])
    new = new_tokens(source)
    assert not new.pieces
    assert "in the vocabulary already (<|im_start|>)" in describe_new_tokens(new, new.size)
    model = load_model(source, attention="eager")
    before = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(model.get_input_embeddings().weight, before)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_adapters_train_both_ends_and_keep_the_fused_loss(tied, tmp_path, tiny_tokenizer):
    path = saved(tmp_path, tiny_tokenizer, tie_word_embeddings=tied)
    source = ModelOptions(name_or_path=path, dtype="float32", add_tokens=["<num>"])
    losses, gradients = [], []
    for kernels in (True, False):
        model = load_model(source, attention="eager")
        torch.manual_seed(0)
        adapted = attach(model, with_vocabulary(LoraOptions(r=2), model))
        if kernels:
            assert patch(adapted, True).row("linear_cross_entropy").status == "on"
        ids = torch.tensor([[1, 2, len(tiny_tokenizer), 4, 5]])
        loss = adapted(input_ids=ids, labels=ids).loss
        loss.backward()
        losses.append(loss.item())
        gradients.append(
            {
                name: parameter.grad
                for name, parameter in adapted.named_parameters()
                if "modules_to_save" in name and parameter.requires_grad
            }
        )
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert len(gradients[0]) == (1 if tied else 2)
    for name, gradient in gradients[1].items():  # in fp32 the order of sums differs
        torch.testing.assert_close(gradients[0][name], gradient, rtol=1e-4, atol=1e-7)
    with adapted.disable_adapter():
        assert adapted(input_ids=ids, labels=ids).logits is not None


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"add_tokens": []}, "1 to 100,000"),
        ({"add_tokens": ["a", "a"]}, "given twice"),
        ({"add_tokens": [" "]}, "is no token"),
        ({"add_tokens": "no.txt"}, "cannot be read"),
        ({"add_tokens": ["a"], "add_special_tokens": ["a"]}, "in model.add_tokens as well"),
    ],
)
def test_what_is_refused(given, says):
    with pytest.raises(RecipeError, match=says):
        ModelOptions(name_or_path="m", **given).tokens()


def test_a_file_has_one_a_line_and_its_lines_are_named(tmp_path):
    file = tmp_path / "tokens.txt"
    file.write_text("<a>\r\n\n<b c>\n")
    source = ModelOptions(name_or_path="m", add_tokens=str(file))
    assert source.tokens() == (("<a>", "<b c>"), ())
    file.write_text("<a>\n\n<a>\n")
    with pytest.raises(RecipeError, match="given twice") as caught:
        source.tokens()
    assert str(caught.value.where) == f"{file}:3"


def test_frozen_ends_and_adapters_on_them_are_refused(tmp_path, tiny_tokenizer):
    path = saved(tmp_path, tiny_tokenizer, tie_word_embeddings=False)
    model = load_model(ModelOptions(name_or_path=path, dtype="float32"), attention="eager")
    for targets in (["q_proj", "lm_head"], r".*(q_proj|lm_head)"):
        with pytest.raises(RecipeError, match="names lm_head"):
            with_vocabulary(LoraOptions(target_modules=targets), model)
    model.get_input_embeddings().weight.requires_grad_(False)
    with pytest.raises(RecipeError, match=r"would not train"):
        refuse_frozen_tokens(model)


@pytest.mark.parametrize("key", ["tensor", "pipeline"])
def test_what_no_rank_holds_whole_is_refused_at_its_line(key, tmp_path):
    file = tmp_path / "r.yaml"
    shard = "zero1" if key == "tensor" else "none"
    file.write_text(
        "model:\n  name_or_path: m\n  add_tokens: [a]\ndata: {train: [d.jsonl]}\n"
        f"parallel: {{shard: {shard}, {key}: 2}}\n"
    )
    with pytest.raises(RecipeError, match=r"r\.yaml:3"):
        load_recipe(file)


def test_other_tokens_of_the_vocabulary_begin_and_end_texts(tmp_path, tiny_tokenizer):
    path = saved(tmp_path, tiny_tokenizer)
    names = {"bos_token": "<|im_start|>", "eos_token": "<end>"}
    source = ModelOptions(name_or_path=path, add_special_tokens=["<end>"], special_tokens=names)
    tokenizer = load_tokenizer(source)
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<end>")
    assert tokenizer.eos_token_id == len(tiny_tokenizer) == len(tokenizer) - 1
    assert new_tokens(source).pieces.keys() == {tokenizer.eos_token_id}
    with pytest.raises(ModelError, match="no token '<end>'"):
        load_tokenizer(source.replace(add_special_tokens=None))
