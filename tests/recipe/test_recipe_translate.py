"""Other tools' recipes: every key of theirs has a line, and what comes out loads."""

import json
from pathlib import Path

import pytest
import yaml
from rare_keys import RARE

from trainkit.cli.app import main
from trainkit.errors import RecipeError
from trainkit.recipe import load_recipe
from trainkit.recipe.show.reference import key_references
from trainkit.recipe.translate.draft import Draft
from trainkit.recipe.translate.translate import TOOLS, translate

EXAMPLES = [
    json.loads(line)
    for line in (Path(__file__).parent / "published_examples.jsonl").read_text().splitlines()
]


def written(folder, example):
    """An example as a user has it: a file of the tool's kind."""
    if "arguments" in example:
        file = folder / "theirs.sh"
        file.write_text(example["arguments"])
        return file
    file = folder / "theirs.yaml"
    file.write_text(yaml.safe_dump(example["values"], sort_keys=False))
    return file


def recipe_of(folder, text):
    file = folder / "ours.yaml"
    file.write_text(text)
    return load_recipe(file).recipe


def test_there_are_enough_examples():
    assert len(EXAMPLES) >= 15
    assert {example["tool"] for example in EXAMPLES} == set(TOOLS)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda each: each["source"].rpartition("/")[2])
def test_a_published_example_loads_and_every_key_has_a_line(tmp_path, example):
    found = translate(written(tmp_path, example))
    assert found.tool == example["tool"]
    recipe = recipe_of(tmp_path, found.text)
    assert recipe.model.name_or_path not in ("MODEL", "")
    every_key_has_a_line(example.get("values", {}), found)


def every_key_has_a_line(theirs, found):
    said = [line.theirs for line in found.lines]
    for key, value in theirs.items():
        if value not in (None, "", {}):
            own = [each for each in said if each.startswith(key) or f" {key}" in each]
            assert own, f"no line says what became of {key}"


def values_of(tmp_path, tool, **theirs):
    file = tmp_path / "theirs.yaml"
    file.write_text(yaml.safe_dump(theirs))
    return recipe_of(tmp_path, translate(file, tool).text)


class TestMeaning:
    """The value that each tool's key comes to."""

    def test_axolotl(self, tmp_path):
        recipe = values_of(
            tmp_path,
            "axolotl",
            base_model="m",
            adapter="qlora",
            load_in_4bit=True,
            lora_r=64,
            lora_alpha=16,
            datasets=[{"path": "a.jsonl", "type": "alpaca"}, {"path": "b", "split": "train[:9]"}],
            micro_batch_size=3,
            evals_per_epoch=4,
            saves_per_epoch=2,
            num_epochs=5,
            train_on_inputs=True,
            test_datasets=[{"path": "c.jsonl"}],
        )
        assert (recipe.lora.r, recipe.lora.alpha, recipe.lora.quantize) == (64, 16, "nf4")
        assert [source.format for source in recipe.data.train] == ["alpaca", "auto"]
        assert recipe.data.train[1].split == "train[:9]"
        assert recipe.data.mask == "none"
        assert not recipe.data.packing, "axolotl packs where sample_packing says so"
        assert recipe.training["eval_steps"] == 0.05
        assert recipe.training["save_steps"] == 0.1
        assert recipe.training["per_device_train_batch_size"] == 3

    def test_llama_factory_reads_its_dataset_info(self, tmp_path):
        (tmp_path / "data").mkdir()
        (tmp_path / "data/dataset_info.json").write_text(
            json.dumps(
                {
                    "mine": {
                        "file_name": "x.json",
                        "formatting": "sharegpt",
                        "columns": {"messages": "dialog"},
                        "tags": {"role_tag": "role"},
                    },
                    "hub": {"hf_hub_url": "a/b", "columns": {"prompt": "q", "response": "a"}},
                }
            )
        )
        recipe = values_of(
            tmp_path,
            "llamafactory",
            model_name_or_path="m",
            stage="sft",
            dataset="mine, hub",
            max_samples=7,
            lora_rank=4,
            lora_dropout=0.1,
        )
        mine, hub = recipe.data.train
        assert (mine.path, mine.format) == ("data/x.json", "messages")
        assert mine.columns == {"messages": "dialog"}
        assert (hub.path, hub.format, hub.max_samples) == ("a/b", "alpaca", 7)
        assert hub.columns == {"instruction": "q", "output": "a"}
        assert (recipe.lora.r, recipe.lora.alpha) == (4, 8), "LLaMA-Factory's alpha is twice r"
        assert recipe.training["gradient_checkpointing"] is True

    def test_trl(self, tmp_path):
        file = tmp_path / "run.sh"
        file.write_text(
            "accelerate launch --num_processes 2 \\\n sft.py --model_name_or_path m \\\n"
            "  --dataset_name d --use_peft=true --load_in_4bit --lora_target_modules q_proj v_proj"
            " --eval_strategy steps --bf16  # as in the readme\n"
        )
        found = translate(file)
        recipe = recipe_of(tmp_path, found.text)
        assert recipe.lora.target_modules == ["q_proj", "v_proj"]
        assert (recipe.lora.dropout, recipe.lora.quantize) == (0.05, "nf4")
        assert recipe.data.eval[0].split == "test"
        assert recipe.training["learning_rate"] == 2e-5
        assert any("trains every token" in line.note for line in found.lines)

    def test_a_script_is_read_and_never_run(self, tmp_path):
        file = tmp_path / "train.py"
        file.write_text(
            f"open({str(tmp_path / 'ran')!r}, 'w')\n"
            "from unsloth import FastLanguageModel\n"
            "length = 4096\n"
            "model, tokenizer = FastLanguageModel.from_pretrained(\n"
            "    'unsloth/m', max_seq_length=length, load_in_4bit=True, token=os.environ['T'])\n"
            "model = FastLanguageModel.get_peft_model(model, r=8, lora_alpha=4,\n"
            "    target_modules=['q_proj', 'v_proj'], use_gradient_checkpointing='unsloth')\n"
            "data = load_dataset('d', split='train')\n"
            "trainer = SFTTrainer(model=model, train_dataset=data, packing=True,\n"
            "    args=SFTConfig(max_steps=steps(), learning_rate=2e-4, seed=3407))\n"
            "trainer = train_on_responses_only(trainer, response_part='x')\n"
        )
        found = translate(file)
        recipe = recipe_of(tmp_path, found.text)
        assert not (tmp_path / "ran").exists()
        assert found.tool == "unsloth"
        assert recipe.model.name_or_path == "unsloth/m"
        assert recipe.data.max_length == 4096
        assert recipe.data.packing
        assert (recipe.lora.r, recipe.lora.alpha, recipe.lora.quantize) == (8, 4, "nf4")
        assert recipe.training["seed"] == 3407
        unclear = [line.theirs for line in found.lines if "only the script knows" in line.note]
        assert unclear == ["token: os.environ['T']", "max_steps: steps()"]

    def test_adapters_that_are_off_leave_no_section(self, tmp_path):
        recipe = values_of(
            tmp_path, "trl", model_name_or_path="m", dataset_name="d", lora_r=8, lora_alpha=2
        )
        assert recipe.lora is None

    def test_what_trainkit_refuses_is_left_out_by_name(self, tmp_path):
        file = tmp_path / "theirs.yaml"
        file.write_text("base_model: m\noptimizer: adopt_adamw\nlr_scheduler: rex\nadapter: lora\n")
        found = translate(file)
        left = {line.theirs: line.note for line in found.lines if line.kind == "left out"}
        assert any(each.startswith("optimizer") for each in left), left
        assert any(each.startswith("lr_scheduler") for each in left), left
        assert recipe_of(tmp_path, found.text).training.get("optim") is None

    def test_secrets_are_not_shown(self, tmp_path):
        file = tmp_path / "theirs.yaml"
        file.write_text("base_model: m\nadapter: lora\nhub_token: hf_secret\n")
        found = translate(file)
        assert "hf_secret" not in found.text + str(found.lines)


MODEL = {"axolotl": "base_model", "unsloth": "model_name"}


@pytest.mark.parametrize(("tool", "theirs", "key", "value"), RARE, ids=str)
def test_rare_keys_mean_what_they_mean_there(tmp_path, tool, theirs, key, value):
    theirs = {MODEL.get(tool, "model_name_or_path"): "m", **theirs}
    file = tmp_path / "theirs.yaml"
    file.write_text(yaml.safe_dump(theirs))
    found = translate(file, tool)
    recipe = recipe_of(tmp_path, found.text)
    section, _, name = key.rpartition(".")
    given = getattr(recipe, section) if section else recipe
    assert (given[name] if isinstance(given, dict) else getattr(given, name)) == value
    every_key_has_a_line(theirs, found)


def test_no_two_lines_say_one_key_of_ours(tmp_path):
    """What a later key of theirs sets is not said of the earlier one any more."""
    file = tmp_path / "run.sh"
    file.write_text("trl sft --model_name_or_path m --dataset_name d --use_peft --lora_r 32")
    lines = translate(file).lines
    assert [line.theirs for line in lines if "lora.r: " in line.ours] == ["lora_r: 32"]
    (peft,) = [line.ours for line in lines if line.theirs == "use_peft: true"]
    assert peft == "lora.alpha: 32, lora.dropout: 0.05"
    file = tmp_path / "theirs.yaml"  # a value with commas of its own
    theirs = {"model_name_or_path": "m", "report_to": ["wandb", "mlflow"], "use_swanlab": True}
    file.write_text(yaml.safe_dump({**theirs, "finetuning_type": "full"}))
    lines = translate(file, "llamafactory").lines
    said = [line.theirs for line in lines if "training.report_to: " in line.ours]
    assert said == ["use_swanlab: true"]


def test_columns_and_names_of_a_data_set_are_kept_or_named(tmp_path):
    file = tmp_path / "theirs.yaml"
    written_out = {"field_instruction": "q", "field_output": "a", "format": "[INST] {x}"}
    strange = {"path": "b", "message_property_mappings": {"role": "who", "content": "text"}}
    sets = [{"path": "a.jsonl", "type": written_out}, strange]
    file.write_text(yaml.safe_dump({"base_model": "m", "adapter": "lora", "datasets": sets}))
    found = translate(file)
    source = recipe_of(tmp_path, found.text).data.train[0]
    assert (source.format, source.columns) == ("alpaca", {"instruction": "q", "output": "a"})
    (note,) = [line.note for line in found.lines if line.theirs.startswith("datasets")]
    assert "its format" in note
    assert "who and text are not read" in note


def test_what_is_refused_only_together_is_left_out_by_name(tmp_path):
    """Such a refusal has no line in the file; it stopped the translation."""
    file = tmp_path / "theirs.yaml"
    theirs = {"model_name_or_path": "m", "optim_target_modules": "all", "use_peft": False}
    file.write_text(yaml.safe_dump(theirs))
    found = translate(file, "trl")
    left = [line.theirs for line in found.lines if line.kind == "left out"]
    assert any(each.startswith("optim_target_modules") for each in left)
    assert recipe_of(tmp_path, found.text)


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("a.yaml", "rl: dpo\nbase_model: m\nadapter: lora\n", "preference learning"),
        ("a.yaml", "stage: ppo\nfinetuning_type: lora\n", "not supervised"),
        ("a.yaml", "x: 1\n", "not clear which tool"),
        ("a.json", "[1, 2]", "mapping"),
        ("a.json", "{", "not JSON"),
        ("a.py", "def f(:", "not Python"),
        ("a.txt", "'open", "not a command line"),
        ("a.txt", "hello", "neither YAML"),
    ],
)
def test_what_cannot_be_read_is_refused(tmp_path, name, text, says):
    file = tmp_path / name
    file.write_text(text)
    with pytest.raises(RecipeError, match=says):
        translate(file)


def test_every_row_sets_keys_that_exist(tmp_path):
    known = {entry.key for entry in key_references()}
    for tool in TOOLS.values():
        for key, row in tool.rows.items():
            draft = Draft(tool.name, tmp_path, {key: "1"})
            try:
                row(draft, key, "1")
            except (TypeError, ValueError, AttributeError):  # wants another kind of value
                continue
            for ours in draft.values:
                assert ours in known, f"{tool.name}: {key} sets {ours}"
        for ours in tool.defaults:
            assert ours in known, f"{tool.name}: {ours}"


def test_the_command_prints_the_lines(tmp_path, capsys):
    file = tmp_path / "theirs.yaml"
    file.write_text("base_model: m\nadapter: lora\nlora_r: 4\nwandb_entity: e\n")
    target = tmp_path / "ours.yaml"
    assert main(["new", "--from", str(file), "-o", str(target), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["tool"] == "axolotl"
    kinds = {line["theirs"]: line["kind"] for line in told["lines"]}
    assert kinds["wandb_entity: e"] == "left out"
    assert load_recipe(target).recipe.lora.r == 4
    assert main(["new", "--from", str(file), "-o", str(target)]) == 2
    assert "not overwritten" in capsys.readouterr().err
