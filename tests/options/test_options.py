"""Each section is defined once, its names are those of the tables, and its errors say the rule."""

import ast
from pathlib import Path

import pytest

import trainkit
from trainkit.errors import RecipeError
from trainkit.options import DataSection, Fp8Options, LoraOptions, ModelOptions, Section, Source
from trainkit.options.data import ROLES, ROW_FORMATS
from trainkit.options.model import DTYPES, LORA_OPS, OPS, QUANTIZED
from trainkit.options.parallel import SHARDS
from trainkit.options.training import DEFAULT_OBJECTIVE, OBJECTIVE_NAMES
from trainkit.recipe import InvalidRecipe, Recipe, load_recipe

PACKAGE = Path(trainkit.__file__).parent
BASE = "model: {name_or_path: m}\ndata: {train: [a.jsonl]}\n"


def sections(of=Section):
    for section in of.__subclasses__():
        yield section
        yield from sections(section)


def test_no_class_elsewhere_repeats_a_section():
    """A twin would have its own defaults and rules, and be copied to key by key."""
    own = {
        section.__name__: set(section.model_fields)
        for section in sections()
        if section is not Recipe and section.__module__.startswith("trainkit.options")
    }
    for path in PACKAGE.rglob("*.py"):
        if path.parent.name == "options" or PACKAGE / "cli" in path.parents:
            continue  # a command's options have no defaults: what is not given is not said
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                names = {
                    item.target.id
                    for item in node.body
                    if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
                }
                for section, keys in own.items():
                    assert len(names & keys) < 4, f"{path}: {node.name} repeats {section}"


def test_names_are_those_of_the_tables():
    import torch

    from trainkit.data.formats import FORMATS
    from trainkit.data.messages import ROLES as KNOWN_ROLES
    from trainkit.lora.fused import OPS as FUSED
    from trainkit.models.linears import LINEARS
    from trainkit.models.loading import TORCH_DTYPES
    from trainkit.models.proof.plan import WHY_NOTHING
    from trainkit.objectives import OBJECTIVES
    from trainkit.parallel import STRATEGIES

    assert DEFAULT_OBJECTIVE in OBJECTIVE_NAMES
    assert set(OBJECTIVE_NAMES) == set(OBJECTIVES)
    assert set(ROW_FORMATS) == set(FORMATS)
    assert ROLES == KNOWN_ROLES
    assert tuple(STRATEGIES) == SHARDS
    assert set(QUANTIZED) == {name for name, kind in LINEARS.items() if kind.packs}
    assert {name: getattr(torch, name) for name in DTYPES} == TORCH_DTYPES
    assert FUSED == LORA_OPS
    assert set(WHY_NOTHING) == set(OPS)


def problem_of(text, tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(BASE + text)
    with pytest.raises((InvalidRecipe, RecipeError)) as caught:
        load_recipe(path)
    return str(caught.value)


MISSPELT = {
    "objective: sf": "sft",
    "kernels: {rms_nrom: true}": "rms_norm",
    "lora: {}\nkernels: {lora_mpl: false}": "lora_mlp",
    "lora: {quantize: nf5}": "nf4",
    "lora: {adapter_dtype: float23}": "float32",
    "parallel: {shard: zero_2}": "zero2",
    "generation_eval: {data: {path: b.jsonl, format: mesages}}": "messages",
    "generation_eval: {data: {path: b.jsonl, format: chatml}}": "messages",
    "generation_eval: {data: {path: b.jsonl, roles: [asistant]}}": "assistant",
    "generation_eval: {data: {path: b.jsonl, roles: [human]}}": "user",
}


@pytest.mark.parametrize("text", MISSPELT)
def test_a_misspelt_name_is_refused_with_its_line_and_the_nearest(text, tmp_path):
    said = problem_of(text, tmp_path)
    line = 3 + text.count("\n")
    assert f"recipe.yaml:{line}:" in said
    assert f"did you mean {MISSPELT[text]}?" in said


def test_kernels_of_adapters_are_switched_in_a_recipe(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(BASE + "lora: {}\nkernels: {lora_mlp: false}\n")
    assert load_recipe(path).recipe.kernels == {"lora_mlp": False}
    said = problem_of("kernels: {lora_mlp: true}", tmp_path)
    assert "recipe.yaml:3: lora_mlp is a kernel of adapters" in said


IN_FP8 = {  # what follows `model: {name_or_path: m, `: what is said of it
    "fp8: yes}": "write model.fp8: true",
    "fp8: ALL}": "write model.fp8: all",
    "fp8: null}": "write model.fp8: false",
    "fp8: 0.01}": "write model.fp8: {loss_budget: 0.01}",
    "fp8: [down_proj]}": "must be true, false, all, or a section",
    "fp8: {loss_budgte: 1}}": "loss_budget",
    "fp8: {loss_budget: 1.5}}": "must be below 1",
    "fp8: {min_size: 8}}": "must be at least 16",
    "fp8: true, init: random}": "what fp8 costs is measured on trained weights",
    "dtype: auto}\nlora: {quantize: fp8, quantize_experts: false}": "set lora.quantize: nf4",
    "dtype: auto}\nlora: {quantize: int8, use_dora: true}": "they are int8 codes",
    "dtype: auto}\nlora: {quantize: fp8, quantize_skip: [out_proj]}": "model.fp8 says it of fp8",
    "dtype: auto}\nlora: {quantize: int8, quantize_head: true}": "what nf4 pack",
    "dtype: auto}\nlora: {quantize_skip: [out_proj]}": "lora.quantize is not set",
    "add_tokens: [a]}\nlora: {quantize: nf4, quantize_head: true}": "what trains whole",
    "fp8: true}\nlora: {}": "set lora.quantize: fp8",
    "fp8: all}\nlora: {quantize: nf4}": "lora.quantize is nf4",
    "fp8: all}\ntraining: {torch_compile: true}": "which torch.compile does not take",
}


@pytest.mark.parametrize("text", IN_FP8)
def test_fp8_that_cannot_be_is_refused_with_its_line(text, tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(f"data: {{train: [a.jsonl]}}\nmodel: {{name_or_path: m, {text}\n")
    with pytest.raises((InvalidRecipe, RecipeError)) as caught:
        load_recipe(path)
    assert IN_FP8[text] in str(caught.value)
    assert "recipe.yaml:" in str(caught.value)


def test_fp8_in_every_spelling(tmp_path):
    path = tmp_path / "recipe.yaml"
    start = "data: {train: [a.jsonl]}\nmodel: {name_or_path: m"

    def given(text, *overrides):
        path.write_text(f"{start}{text}}}\n")
        return Fp8Options.of(load_recipe(path, overrides).recipe.model.fp8)

    assert given("") is None
    assert given(", fp8: false") is None
    assert given(", fp8: true") == Fp8Options()
    assert given(", fp8: all") == Fp8Options(loss_budget="all")
    assert given(", fp8: {skip: [lm_head]}") == Fp8Options(skip=["lm_head"])
    assert given(", fp8: true", "model.fp8.loss_budget=0.01") == Fp8Options(loss_budget=0.01)
    assert given("", "model.fp8=all").loss_budget == "all"
    with pytest.raises(RecipeError, match="single value"):
        given(", fp8: all", "model.fp8.skip=[lm_head]")


REFUSED_IN_PYTHON = [
    (lambda: LoraOptions(r=0), "lora.r: 0 must be at least 1"),
    (lambda: LoraOptions(ranks=8), "lora.ranks: LoraOptions has no ranks"),
    (lambda: LoraOptions(init_lora_weights="eva"), "needs a pass over the data"),
    (lambda: ModelOptions("m", dtype="bf16"), "did you mean bfloat16?"),
    (lambda: ModelOptions(), "ModelOptions needs name_or_path"),
    (lambda: Source("a#3", max_samples=2), "already says how many samples"),
    (lambda: Source("a").replace(epochs=0), "must be above 0"),
    (lambda: DataSection(train=[{"path": "a", "format": "alpacca"}]), "did you mean alpaca?"),
]


@pytest.mark.parametrize(("make", "message"), REFUSED_IN_PYTHON)
def test_python_code_is_told_the_same_rules(make, message):
    with pytest.raises(RecipeError) as caught:
        make()
    assert message in str(caught.value)


def test_a_file_whose_name_has_the_mark_is_that_file(tmp_path):
    assert Source(str(tmp_path / "a#3")).max_samples == 3
    (tmp_path / "a#3").touch()
    assert Source(str(tmp_path / "a#3")).max_samples is None


def test_sections_travel_between_processes():
    import pickle

    source = Source("a.jsonl#5", roles=("user",))
    assert (
        pickle.loads(pickle.dumps(source))
        == source
        == Source("a.jsonl", max_samples=5, roles=["user"])
    )
