"""Where values come from, which place wins, and what is written down about it."""

import pytest
import yaml

from trainkit.errors import RecipeError
from trainkit.recipe import (
    InvalidRecipe,
    check_files,
    dump_resolved,
    load_recipe,
    read_chat_template,
)
from trainkit.recipe.load import DEFAULT, TRAINKIT_DEFAULT, TRANSFORMERS_DEFAULT

FULL = """\
name: demo
model: {name_or_path: m}
data:
  train:
    - a.jsonl#500
    - {path: b.jsonl, weight: 2}
  max_length: 512
lora:
  r: 8
kernels: true
training:
  learning_rate: 1e-5
  hub_token: hf_secret
  eval_strategy: no
"""


def test_each_value_says_where_it_was_given(load):
    loaded = load(
        FULL.removesuffix("\n"),
        ["training.weight_decay=0.1", "data.max_length=256"],
        {"--deepspeed": "zero3", "--output-dir": "out", "--replace-kernel": None},
    )
    expected = {
        "name": "recipe.yaml:1",
        "data.train": "recipe.yaml:4",
        "data.max_length": "override",
        "data.packing": DEFAULT,
        "lora.r": "recipe.yaml:9",
        "lora.alpha": DEFAULT,
        "kernels": "recipe.yaml:10",
        "parallel.shard": "--deepspeed",
        "training.learning_rate": "recipe.yaml:12",
        "training.weight_decay": "override",
        "training.output_dir": "--output-dir",
        "training.logging_steps": TRAINKIT_DEFAULT,
        "training.max_grad_norm": TRANSFORMERS_DEFAULT,
    }
    assert {key: loaded.origins[key] for key in expected} == expected
    recipe = loaded.recipe
    assert (recipe.data.max_length, recipe.parallel.shard, recipe.training["output_dir"]) == (
        256,
        "zero3",
        "out",
    )
    assert recipe.training["logging_steps"] == 1
    assert "max_grad_norm" not in recipe.training, "transformers' defaults are left to transformers"
    assert loaded.source_text == FULL


def test_sources_may_be_paths_mappings_or_one_of_them(load):
    first, second = load(FULL).recipe.data.train
    assert (first.path, first.max_samples, first.weight) == ("a.jsonl", 500, None)
    assert (second.path, second.max_samples, second.weight) == ("b.jsonl", None, 2.0)
    for one in ("x.jsonl", "{path: x.jsonl}"):
        (source,) = load(f"model: {{name_or_path: m}}\ndata: {{train: {one}}}\n").recipe.data.train
        assert source.path == "x.jsonl"
    (odd,) = load("model: {name_or_path: m}\ndata: {train: ['a#b.jsonl']}\n").recipe.data.train
    assert odd.path == "a#b.jsonl"


@pytest.mark.parametrize(
    ("text", "value"), [("null", None), ("20", 20), ("1%", 0.01), ("0.5 %", 0.005), ("0.02", 0.02)]
)
def test_max_dropped_is_a_count_or_a_share(load, text, value):
    data = f"{{train: [a], max_dropped: {text}}}"
    assert load(f"model: {{name_or_path: m}}\ndata: {data}\n").recipe.data.max_dropped == value


def test_a_recipe_is_frozen(load):
    recipe = load().recipe
    with pytest.raises(ValueError, match="frozen"):
        recipe.data.max_length = 3


def test_the_name_is_the_files_without_one(load):
    assert load().name == "recipe"
    assert load(FULL).name == "demo"


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("training.learning_rate=1e-4", "training.learning_rate", 1e-4),
        ("lora=null", "lora", None),
        ("lora.r=4", "lora.r", 4),
        ("data.train=[x.jsonl,y.jsonl]", "data.train", ["x.jsonl", "y.jsonl"]),
        ("data.train=x/*.jsonl", "data.train", ["x/*.jsonl"]),
        ("kernels={rope: false}", "kernels.rope", False),
        ("kernels.rope=false", "kernels.rope", False),
        ("kernels=false", "kernels", False),
        ("deepspeed=zero1", "parallel.shard", "zero1"),
        (
            "training.lr_scheduler_kwargs.min_lr=1e-6",
            "training.lr_scheduler_kwargs",
            {"min_lr": 1e-6},
        ),
        ("generation_eval.data=h.jsonl", "generation_eval.data", ["h.jsonl"]),
        ("training={seed: 7}", "training.seed", 7),
        ("model.name_or_path=a=b", "model.name_or_path", "a=b"),
    ],
)
def test_overrides_win_and_leave_the_rest(load, override, key, value):
    changed = {row.key: row for row in load(FULL, [override]).values()}
    assert changed[key].value == value
    assert changed[key].origin == "override"
    section = key.partition(".")[0]
    for other in load(FULL).values():
        if not (other.key.startswith(section) or other.is_derived):
            assert changed[other.key].value == other.value
    if section == "training":
        assert changed["training.hub_token"].value == "hf_secret"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("learning_rate", "section.key=value"),
        ("=3", "section.key=value"),
        ("a..b=3", "section.key=value"),
        ("configs/x.yaml", "--config"),
        ("lora=[", "not valid YAML"),
        ("data.train.path=x", "data.train is a list"),
        ("name.x=3", "name is a single value"),
        ("training.lerning_rate=1", "did you mean training.learning_rate"),
        ("base=other.yaml", "base"),
    ],
)
def test_bad_overrides_are_named(load, override, message):
    with pytest.raises(RecipeError) as caught:
        load(FULL, [override])
    assert message in str(caught.value)
    assert f"override {override!r}" in str(caught.value)


def test_the_last_override_wins(load):
    assert load(FULL, ["data.max_length=3", "data.max_length=4"]).recipe.data.max_length == 4


@pytest.mark.parametrize(
    ("kernels", "flag", "value", "origin"),
    [
        ("true", None, True, "recipe.yaml:3"),
        ("true", False, False, "--no-replace-kernel"),
        ("false", True, True, "--replace-kernel"),
        ("{rope: false}", True, {"rope": False}, "recipe.yaml:3"),
        ("{rope: false}", False, False, "--no-replace-kernel"),
    ],
)
def test_replace_kernel_turns_on_and_off(load, kernels, flag, value, origin):
    text = f"model: {{name_or_path: m}}\ndata: {{train: [a]}}\nkernels: {kernels}\n"
    loaded = load(text, cli={"--replace-kernel": flag})
    assert loaded.recipe.kernels == value
    assert loaded.origins["kernels.rope" if isinstance(value, dict) else "kernels"] == origin


def test_pretrain_trains_every_token(load):
    loaded = load(cli={"--pretrain": True})
    assert (loaded.recipe.data.mask, loaded.origins["data.mask"]) == ("none", "--pretrain")
    assert load(cli={"--pretrain": None}).recipe.data.mask == "assistant"


def test_a_recipe_builds_on_another(write_recipe, tmp_path):
    (tmp_path / "shared").mkdir()
    write_recipe(
        "model: {name_or_path: m, dtype: float32}\ndata: {train: [a, b]}\nlora: {r: 4}\n"
        "training: {seed: 1, max_steps: 5}\n",
        "shared/base.yaml",
    )
    write_recipe("base: shared/base.yaml\ntraining: {seed: 2}\nlora: null\n", "middle.yaml")
    path = write_recipe("base: middle.yaml\ndata: {train: [c]}\n", "top.yaml")
    loaded = load_recipe(path)
    recipe = loaded.recipe
    assert recipe.model.dtype == "float32"
    assert [source.path for source in recipe.data.train] == ["c"]
    assert recipe.lora is None
    assert (recipe.training["seed"], recipe.training["max_steps"]) == (2, 5)
    assert loaded.origins["model.dtype"] == "base.yaml:1"
    assert loaded.origins["training.seed"] == "middle.yaml:2"
    assert loaded.origins["data.train"] == "top.yaml:2"
    # The base's adapters are gone; ones that are asked for again do not remember them.
    anew = load_recipe(path, ["lora.alpha=3"])
    assert (anew.recipe.lora.r, anew.origins["lora.r"]) == (16, DEFAULT)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("base: recipe.yaml\n", "comes back to"),
        ("x: 1\nbase: gone.yaml\n", "no recipe at"),
        ("x: 1\nbase: [a]\n", "base must be one recipe file"),
    ],
)
def test_a_bad_base_is_told_with_its_line(load, text, message):
    with pytest.raises(RecipeError, match=message) as caught:
        load(text)
    assert caught.value.where.endswith(f"recipe.yaml:{text.count(chr(10))}")


def test_an_error_in_a_base_names_the_base(write_recipe):
    write_recipe("model: {name_or_path: m}\ndata: {train: [a]}\nlora: {r: 0}\n", "base.yaml")
    path = write_recipe("base: base.yaml\n")
    with pytest.raises(InvalidRecipe, match=r"base\.yaml:3: lora\.r"):
        load_recipe(path)


def test_the_resolved_recipe_loads_to_the_same_values(load, write_recipe):
    loaded = load(FULL, ["kernels.rope=false"], {"--deepspeed": "zero2"})
    text = dump_resolved(loaded)
    again = load_recipe(write_recipe(text, "resolved.yaml"))
    first = {row.key: row.value for row in loaded.values()}
    second = {row.key: row.value for row in again.values()}
    assert second.pop("training.hub_token") == "<redacted>"
    del first["training.hub_token"]
    assert second == first
    # A reader of YAML 1.1 sees the same: `no` and 1e-05 are what they were.
    plain = yaml.safe_load(text)
    assert plain["training"]["eval_strategy"] == "no"
    assert plain["training"]["learning_rate"] == 1e-5
    for line in text.splitlines()[1:]:
        assert line.endswith(":") or "  # " in line, line


def test_a_derived_accumulation_is_not_written_down_as_given(load, write_recipe):
    text = dump_resolved(
        load("global_batch_size: 8\nmodel: {name_or_path: m}\ndata: {train: [a]}\n")
    )
    assert "gradient_accumulation_steps" not in text
    assert load_recipe(write_recipe(text, "resolved.yaml")).recipe.global_batch_size == 8


def test_secrets_are_left_out_wherever_they_hide(load):
    text = FULL + "  lr_scheduler_kwargs: {api_key: k-123, min_lr: 1e-6}\n"
    written = dump_resolved(load(text, ["training.push_to_hub=false"]))
    assert "hf_secret" not in written
    assert "hub_token: <redacted>" in written
    assert "k-123" not in written
    assert "min_lr: 1.0e-06" in written
    assert "include_num_input_tokens_seen: 'no'" in written, "no secret, whatever its name"


def test_only_what_was_given(load):
    keys = [row.key for row in load(FULL).values(only_given=True)]
    assert keys == [
        "name", "model.name_or_path", "data.train", "data.max_length", "lora.r", "kernels",
        "training.learning_rate", "training.hub_token", "training.eval_strategy",
    ]  # fmt: skip


def test_missing_files_are_told_before_anything_slow(load, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here.jsonl").write_text("{}\n")
    text = (
        "model:\n  name_or_path: ./gone\ndata:\n  train:\n    - here.jsonl\n    - gone.jsonl#5\n"
        "    - '*.jsonl'\n    - '*.parquet'\n    - org/dataset\n    - hf://org/dataset\n"
        "generation_eval:\n  data: [asked.jsonl]\n"
    )
    with pytest.raises(InvalidRecipe) as caught:
        check_files(load(text))
    found = [(p.where.rpartition(":")[2], p.what) for p in caught.value.problems]
    assert found == [
        ("6", f"data.train: there is no file {tmp_path}/gone.jsonl"),
        ("8", f"data.train: no file matches {tmp_path}/*.parquet"),
        ("12", f"generation_eval.data: there is no file {tmp_path}/asked.jsonl"),
        ("2", f"model.name_or_path: there is no model at {tmp_path}/gone"),
    ]


def test_a_tracker_that_is_not_installed_is_named_before_anything_is_loaded(
    load, tmp_path, monkeypatch
):
    text = "model: {{name_or_path: m}}\ndata: {{train: [org/data]}}\ntraining: {{report_to: {}}}\n"
    check_files(load(text.format("tensorboard")))
    (tmp_path / "codecarbon").mkdir()  # what the tracker itself might have left here
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(InvalidRecipe, match=r"recipe\.yaml:3: .*codecarbon is not installed"):
        check_files(load(text.format("codecarbon")))


def test_a_chat_template_is_jinja_or_a_file_of_it(load, tmp_path):
    path = tmp_path / "template.jinja"
    given = f"model: {{name_or_path: m}}\ndata: {{train: {tmp_path}, chat_template: {path}}}\n"
    with pytest.raises(InvalidRecipe, match=r"recipe\.yaml:2: data\.chat_template: .*template"):
        check_files(load(given))
    path.write_text("{{ messages }}")
    check_files(load(given))
    assert read_chat_template(str(path)) == "{{ messages }}"
    assert read_chat_template("{{ bos_token }}") == "{{ bos_token }}"
    assert read_chat_template(None) is None
    path.write_text(" \n")
    with pytest.raises(RecipeError, match="it is empty"):  # and not the tokenizer's own
        read_chat_template(str(path))


def test_hub_names_are_left_to_the_hub(load, tmp_path):
    (tmp_path / "a.jsonl").write_text("{}\n")
    for name in ("gpt2", "Qwen/Qwen2.5-0.5B"):
        check_files(load(f"model: {{name_or_path: {name}}}\ndata: {{train: {tmp_path}/a.jsonl}}\n"))


@pytest.mark.parametrize("choice", ["zero1", "zero2", "zero3", "zero3_offload"])
def test_presets_are_found_from_anywhere(load, tmp_path, monkeypatch, choice):
    monkeypatch.chdir(tmp_path)
    assert load(cli={"--deepspeed": choice}).recipe.parallel.shard == choice
