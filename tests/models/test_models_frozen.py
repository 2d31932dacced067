"""``model.frozen``: which parameters a pattern names, and what is refused."""

import pytest

from trainkit.errors import ModelError, RecipeError
from trainkit.models.frozen import freeze
from trainkit.options import ModelOptions


@pytest.mark.parametrize(
    ("patterns", "kept"),
    [
        (["0"], lambda name: ".layers.0." in name),
        (["0-1"], lambda name: ".layers." in name),
        (["embed_tokens"], lambda name: "embed_tokens" in name),
        (["self_attn.q_proj"], lambda name: "q_proj" in name),
        (["model.layers.*.mlp.*"], lambda name: ".mlp." in name),
        (["*", "!1"], lambda name: ".layers.1." not in name),
        (["*", "!last-1"], lambda name: ".layers.1." not in name),
        (["last-2"], lambda name: ".layers." in name),
        (["last-1.mlp"], lambda name: ".layers.1.mlp." in name),
        (["0-1.self_attn.q_proj", "!0.self_attn"], lambda name: "1.self_attn.q_proj" in name),
        (
            ["0", "!mlp", "norm"],
            lambda name: (".layers.0." in name and "mlp" not in name) or ".norm." in name,
        ),
    ],
)
def test_what_patterns_name(tiny_llama, patterns, kept):
    model = model_of(tiny_llama)
    frozen = freeze(model, patterns)
    assert set(frozen) == {name for name, _ in model.named_parameters() if kept(name)}
    assert all(p.requires_grad != kept(name) for name, p in model.named_parameters())


def model_of(path):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path)


@pytest.mark.parametrize(
    ("patterns", "says"),
    [
        (["9"], "layers are 0-1"),
        (["last-1.mpl"], "layers are 0-1"),
        (["last-0"], "0-1"),
        (["embed"], "embed_tokens"),
        (["*"], "nothing to train"),
    ],
)
def test_what_is_refused(tiny_llama, patterns, says):
    with pytest.raises(ModelError, match=says):
        freeze(model_of(tiny_llama), patterns)


def test_forms_of_the_key():
    assert ModelOptions(name_or_path="m", frozen=7).frozen == ["7"]
    assert ModelOptions(name_or_path="m", frozen=[0, "0-3", "!mlp"]).frozen == ["0", "0-3", "!mlp"]
    with pytest.raises(RecipeError):
        ModelOptions(name_or_path="m", frozen=True)
