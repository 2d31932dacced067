"""Other tools' recipes become the same training, or a refusal that names what it is."""

import json
import re
from pathlib import Path

import pytest
import yaml

from trainkit.cli.app import main
from trainkit.data.formats import parse_row
from trainkit.data.messages import RowError
from trainkit.errors import RecipeError
from trainkit.recipe import load_recipe
from trainkit.recipe.keys import key_references
from trainkit.recipe.training import FIELDS
from trainkit.recipe.translate.draft import TOOLS, known_keys, table, tool_table
from trainkit.recipe.translate.engine import translate

RECIPES = yaml.safe_load((Path(__file__).parent / "foreign_recipes.yaml").read_text())
RARE = yaml.safe_load((Path(__file__).parent / "rare_keys.yaml").read_text())
SCRIPTS = yaml.safe_load((Path(__file__).parent / "foreign_scripts.yaml").read_text())


@pytest.fixture(autouse=True)
def beside(tmp_path, monkeypatch):
    """Files that recipes name; a run starts beside them."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data/dataset_info.json").write_text(json.dumps(SCRIPTS["info"]))
    (tmp_path / "data/mine.json").write_text('[{"q": "1", "a": "2"}, {"q": "1", "a": "2"}]')
    zero3 = {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 3}}
    (tmp_path / "zero3.yaml").write_text(yaml.safe_dump(zero3))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def written(folder, values):
    file = folder / "theirs.yaml"
    file.write_text(yaml.safe_dump(values, sort_keys=False))
    return file


def recipe_of(folder, text):
    file = folder / "ours.yaml"
    file.write_text(text)
    return load_recipe(file).recipe


def value_of(recipe, key):
    found = recipe
    for part in key.split("."):
        if isinstance(found, list):
            found = found[int(part)]
        else:
            found = found.get(part) if isinstance(found, dict) else getattr(found, part)
    return found


def test_there_are_enough_of_every_tool_and_kind():
    assert len(RECIPES) >= 50
    assert {each["tool"] for each in RECIPES} | {"unsloth"} == set(TOOLS)


@pytest.mark.parametrize("each", RECIPES, ids=lambda each: f"{each['tool']}: {each['name']}")
def test_a_recipe_is_the_same_training_or_refused(tmp_path, each):
    file = tmp_path / "theirs.sh"
    if "yaml" in each:
        file = written(tmp_path, each["yaml"])
    else:
        file.write_text(each["command"])
    if "is" not in each:
        with pytest.raises(RecipeError, match=each.get("kind") or each["lost"]) as refusal:
            translate(file)
        assert ("trainkit would not train the same" in refusal.value.what) == ("lost" in each)
        return
    found = translate(file)
    assert found.tool == tool_table(each["tool"])["tool"]
    recipe = recipe_of(tmp_path, found.text)
    assert {key: value_of(recipe, key) for key in each["is"]} == each["is"]
    assert not any(line.kind == "lost" for line in found.lines)
    said = " ".join(line.theirs for line in found.lines)
    for key, value in each.get("yaml", {}).items():
        if value not in (None, False, {}):
            assert key in said, f"no line says what became of {key}"
    if "says" in each:
        assert each["says"] in " ".join(line.note for line in found.lines)


@pytest.mark.parametrize(("tool", "theirs", "key", "value"), RARE, ids=str)
def test_rare_keys_mean_what_they_mean_there(tmp_path, tool, theirs, key, value):
    names = {"axolotl": "base_model", "unsloth": "model_name"}
    file = written(tmp_path, {names.get(tool, "model_name_or_path"): "m", **theirs})
    recipe = recipe_of(tmp_path, translate(file, tool, lossy=True).text)
    assert value_of(recipe, key) == value


def test_pairs_and_ratings_of_the_hub_are_read_as_ms_swift_does():
    sets = tool_table("swift")["data_sets"]
    pairs = sets["hjh0119/shareAI-Llama3-DPO-zh-en-emoji"]
    row = {"question": "q\ufe0f", "answer_zh": "[1]", "answer_en": "e"}
    found = parse_row(row, "preference", pairs["columns"]).conversations
    said = [[(turn.role, turn.content) for turn in each.messages] for each in found]
    assert said == [[("user", "q"), ("assistant", text)] for text in ("[1]", "e")]
    rated = sets["AI-ModelScope/ultrafeedback-binarized-preferences-cleaned-kto"]
    row = {"prompt": "q", "completion": "a", "label": False, "source": "not read"}
    found = parse_row(row, "rated", rated["columns"])
    assert [turn.content for turn in found.conversations[0].messages] == ["q", "a"]
    assert found.first == 1


ALPACA = "Below.\n\n### Instruction:\n{}\n\n### Response:\n{}"

SCRIPT = SCRIPTS["script"]


class TestScripts:
    """The model that is trained and the rows that reach the trainer; nothing is run."""

    def translated(self, tmp_path, text, name="train.py"):
        file = tmp_path / name
        file.write_text(text)
        return translate(file)

    def test_the_base_that_is_trained_and_its_rows(self, tmp_path):
        found = self.translated(tmp_path, SCRIPT)
        recipe = recipe_of(tmp_path, found.text)
        assert not (tmp_path / "ran").exists()
        assert found.tool == "Unsloth"
        assert recipe.model.name_or_path == "unsloth/m"
        assert (recipe.lora.r, recipe.lora.alpha, recipe.lora.quantize) == (8, 16, None)
        (source,) = recipe.data.train
        assert source.path == "a.jsonl"
        text = ALPACA.format("{{ instruction }}", "{{ output }}")
        assert source.columns == {"completion": text}
        assert (recipe.data.mask, recipe.data.max_length) == ("none", 4096)
        assert recipe.training["warmup_steps"] == 5
        assert recipe.training["seed"] == 3407
        assert recipe.training["per_device_train_batch_size"] == 4, "Unsloth's own default"
        assert recipe.training["weight_decay"] == 0.001
        longer = SCRIPT.replace("max_steps=60", "max_steps=60, max_length=9, max_seq_length=8192")
        recipe = recipe_of(tmp_path, self.translated(tmp_path, longer).text)
        assert recipe.data.max_length == 4096, "the model's limits the configuration's"
        plain = SCRIPT.replace("SFTConfig(", "TrainingArguments(").replace("seed=3407, ", "")
        recipe = recipe_of(tmp_path, self.translated(tmp_path, plain).text)
        given = recipe.training.get("per_device_train_batch_size", 8)
        assert (given, recipe.training.get("seed", 42)) == (8, 42), "transformers' defaults"

    def test_a_notebook_reads_as_its_code(self, tmp_path):
        cells = [
            {"cell_type": "markdown", "source": ["# hello"]},
            {"cell_type": "code", "source": ["!pip install unsloth\n", "x = 1\n"]},
            {"cell_type": "code", "source": SCRIPT},
        ]
        cells += [{"cell_type": "code", "source": "f(a=1 b=2)"}]  # behind the training
        found = self.translated(tmp_path, json.dumps({"cells": cells}), "train.ipynb")
        assert recipe_of(tmp_path, found.text).model.name_or_path == "unsloth/m"
        cells[1]["source"] = "f(a=1 b=2)"
        with pytest.raises(RecipeError, match="not Python"):
            self.translated(tmp_path, json.dumps({"cells": cells}), "train.ipynb")

    def test_conversations_and_their_mask(self, tmp_path):
        pairs = 'for q, a in zip(examples["instruction"], examples["output"])'
        chat = SCRIPT.replace(pairs, 'for turns in examples["conversations"]')
        rendered = "tokenizer.apply_chat_template(turns, tokenize=False)"
        chat = chat.replace("prompt.format(q, a) + EOS", rendered)
        masked = "trainer = train_on_responses_only(trainer)\ntrainer.train()"
        chat = chat.replace("trainer.train()", masked)
        recipe = recipe_of(tmp_path, self.translated(tmp_path, chat).text)
        assert recipe.data.train[0].format == "sharegpt"
        assert recipe.data.mask == "assistant"

    def test_a_mixture_in_shares_and_rows_that_are_held_out(self, tmp_path):
        mixed = SCRIPT.replace("rows = rows.map(make, batched=True)", SCRIPTS["shares"])
        first, second = recipe_of(tmp_path, self.translated(tmp_path, mixed).text).data.train
        turns = '[{"role": "user", "content": {{ q | tojson }}}, {"role": "assistant", "content": '
        assert first.columns == {"messages": turns + "{{ a | tojson }}}]"}
        assert (first.path, first.weight) == ("a.jsonl", 0.75)
        assert (second.path, second.format, second.weight) == ("hub/chats", "sharegpt", 0.25)
        joined = 'rows = concatenate_datasets([rows, load_dataset("b/c", split="train[:9]")])'
        both = SCRIPT.replace("rows = rows.map(make, batched=True)", joined)
        first, second = recipe_of(tmp_path, self.translated(tmp_path, both).text).data.train
        assert (second.path, second.split, second.weight) == ("b/c", "train[:9]", None)
        drawn = SCRIPT.replace("rows.map(make", "rows.shuffle(seed=1).select(range(7)).map(make")
        (source,) = recipe_of(tmp_path, self.translated(tmp_path, drawn).text).data.train
        assert (source.split, source.max_samples) == ("train", 7)
        split = SCRIPT.replace(
            "trainer = SFT", "rows = rows.train_test_split(test_size=9)\ntrainer = SFT"
        ).replace("train_dataset=rows", 'train_dataset=rows["train"], eval_dataset=rows["test"]')
        assert recipe_of(tmp_path, self.translated(tmp_path, split).text).data.eval == 9
        alone = split.replace(', eval_dataset=rows["test"]', "")
        assert recipe_of(tmp_path, self.translated(tmp_path, alone).text).data.eval == 9

    def test_turns_that_a_function_makes_of_columns(self, tmp_path):
        (source,) = recipe_of(tmp_path, self.translated(tmp_path, SCRIPTS["calls"]).text).data.train
        assert source.format == "prompt_completion"
        row = {"q": 'a "b"', "f": "x", "a": '{"y": [1]}', "input": "not read"}
        found = parse_row(row, source.format, source.columns)
        assert [turn.content for turn in found.messages] == ['Q: a "b"', ""]
        assert found.messages[1].tool_calls[0]["arguments"] == {"y": [1]}
        assert found.tools == ({"name": "x"},)

    def test_a_function_that_is_known_by_its_text(self, tmp_path):
        merges = table("functions")[0]["def"].replace("def f", "def mine")
        known = SCRIPT.replace("def make(", f"{merges}def make(").replace(
            "(make, batched", "(mine, batched"
        )
        (source,) = recipe_of(tmp_path, self.translated(tmp_path, known).text).data.train
        turns = [
            {"role": "user", "content": "q", "thinking": None},
            {"role": "assistant", "content": "a", "thinking": "why"},
        ]
        theirs: dict = {}
        exec(merges, theirs)
        wanted = theirs["mine"]({"messages": [dict(turn) for turn in turns]})["messages"]
        found = parse_row({"messages": turns}, source.format, source.columns)
        assert [turn.content for turn in found.messages] == [turn["content"] for turn in wanted]
        other = known.replace(r"\n</think>\n", r"\n</think>")
        with pytest.raises(RecipeError, match="cannot be followed"):
            self.translated(tmp_path, other)

    def test_statements_that_are_known_by_their_text(self, tmp_path):
        code = next(each["code"] for each in table("functions") if "code" in each)
        known = SCRIPT.replace("trainer =", f"{code}rows = dataset\ntrainer =", 1)
        found = self.translated(tmp_path, known)
        data = recipe_of(tmp_path, found.text).data
        (source,) = data.train
        assert (source.path, source.split) == ("unsloth/OpenMathReasoning-mini", "cot")
        assert data.chat_template.startswith("{% if messages[0].role == 'system' %}")
        assert "counts its keys" in " ".join(line.note for line in found.lines)
        row = {"problem": "p", "generated_solution": "<think>\nwhy\n</think>\nso "}
        given = {"reasoning_start": "<start_working_out>", "reasoning_end": "<end_working_out>"}
        given |= {
            "solution_start": "<SOLUTION>",
            "solution_end": "</SOLUTION>",
            "system_prompt": "",
        }
        theirs = code[code.index("def format_dataset") : code.index("dataset['Messages']")]
        exec(theirs, given)
        for answer in ("5", "-1e3"):
            full = {**row, "expected_answer": answer}
            made = parse_row(full, source.format, source.columns).messages
            wanted = given["format_dataset"](full)
            assert [turn.content for turn in made[1:]] == [turn["content"] for turn in wanted[1:]]
        for answer in ("nan", "1_0", "x"):
            with pytest.raises(RowError, match="where"):
                parse_row({**row, "expected_answer": answer}, source.format, source.columns)
        with pytest.raises(RecipeError, match="here the model and its tokenizer"):
            self.translated(tmp_path, known.replace("max_seq_length / 2", "max_seq_length / 3"))

    def test_a_part_of_the_rows_that_is_drawn(self, tmp_path):
        drawn = SCRIPT.replace(
            "rows = rows.map",
            "rows = rows.train_test_split(train_size=0.25, seed=1)['train']\nrows = rows.map",
        )
        (source,) = recipe_of(tmp_path, self.translated(tmp_path, drawn).text).data.train
        assert (source.epochs, source.max_samples) == (0.25, None)
        found = self.translated(tmp_path, drawn.replace("0.25", "9"))
        (source,) = recipe_of(tmp_path, found.text).data.train
        assert (source.epochs, source.max_samples) == (1.0, 9)
        with pytest.raises(RecipeError, match="train_test_split"):
            self.translated(tmp_path, drawn.replace("['train']", "['test']"))
        with pytest.raises(RecipeError, match="train_test_split"):
            self.translated(tmp_path, drawn.replace("seed=1", "shuffle=False"))

    def test_the_function_that_a_name_stands_for_where_rows_are_mapped(self, tmp_path):
        text = f"{SCRIPT}\ndef make(examples):\n    return {{'text': open(examples)}}\n"
        (source,) = recipe_of(tmp_path, self.translated(tmp_path, text).text).data.train
        assert "{{ instruction }}" in source.columns["completion"]

    def test_adapters_by_a_named_configuration(self, tmp_path):
        named = SCRIPT.replace("model, r=8,", "model, peft_config=LoraConfig(r=4), ")
        assert recipe_of(tmp_path, self.translated(tmp_path, named).text).lora.r == 4

    def test_a_template_next_to_the_script(self, tmp_path):
        named = 'SFTConfig(chat_template_path=str(Path(__file__).parent / "mine.jinja"), '
        beside = SCRIPT.replace("SFTConfig(", named)
        recipe = recipe_of(tmp_path, self.translated(tmp_path, beside).text)
        assert recipe.data.chat_template == str(tmp_path / "mine.jinja")

    def test_an_embedding_that_trains_whole_at_its_own_rate(self, tmp_path):
        whole = SCRIPT.replace('["q_proj"]', '["q_proj", "lm_head"]').replace(
            "packing=False,\n    args=SFTConfig(",
            "packing=False,\n    args=UnslothTrainingArguments(embedding_learning_rate=2e-5, ",
        )
        lora = recipe_of(tmp_path, self.translated(tmp_path, whole).text).lora
        assert (lora.target_modules, lora.modules_to_save) == (["q_proj"], ["lm_head"])
        assert lora.saved_lr_ratio == pytest.approx(0.1)

    def test_rows_of_a_file_that_other_calls_read(self, tmp_path):
        rows = 'load_dataset("json", data_files="a.jsonl", split="train")'
        made = SCRIPT.replace(rows, 'Dataset.from_json("b.json")')
        (source,) = recipe_of(tmp_path, self.translated(tmp_path, made).text).data.train
        assert (source.path, source.columns["completion"][:6]) == ("b.json", "Below.")
        url = "https://huggingface.co/datasets/a/b/raw/main/c.csv"
        read = f'load_dataset("csv", data_files={{"train": "{url}"}}, column_names=["instruction", '
        csv = SCRIPT.replace(rows, read + '"output"], skiprows=1)["train"]')
        (source,) = recipe_of(tmp_path, self.translated(tmp_path, csv).text).data.train
        assert (source.path, source.files) == ("a/b", ["c.csv"])

    def test_the_kind_of_a_model_that_no_trainer_trains(self, tmp_path):
        loop = SCRIPT.partition("trainer = ")[0].replace("unsloth/m", "unsloth/diffusion-m")
        with pytest.raises(RecipeError, match="diffusion model"):
            self.translated(tmp_path, loop)

    def test_what_trains_of_an_answer(self, tmp_path):
        part = "trainer = train_on_responses_only(trainer, response_part={!r})\ntrainer.train()"
        for header in ("<|im_start|>assistant\n", "<|turn>model\n"):
            text = SCRIPT.replace("trainer.train()", part.format(header))
            with pytest.raises(RecipeError, match="texts that no chat template rendered"):
                self.translated(tmp_path, text)
        longer = SCRIPT.replace("trainer.train()", part.format("<|im_start|>assistant\n<think>"))
        with pytest.raises(RecipeError, match="begins behind more than its header"):
            self.translated(tmp_path, longer)

    def test_texts_without_an_end_and_answers_behind_a_text(self, tmp_path):
        found = self.translated(tmp_path, SCRIPT.replace("(q, a) + EOS", "(q, a)"))
        assert not recipe_of(tmp_path, found.text).data.end_texts
        part = "<|start|>assistant<|channel|>final<|message|>"
        chats = SCRIPT.replace("rows = rows.map(make, batched=True)\n", "").replace(
            "trainer.train()", f"train_on_responses_only(trainer, response_part={part!r})"
        )
        data = recipe_of(tmp_path, self.translated(tmp_path, chats).text).data
        assert (data.train_behind, data.mask) == ("<|channel|>final<|message|>", "assistant")
        sees = chats.replace("rows = load", "AutoModelForImageTextToText()\nrows = load")
        assert self.translated(tmp_path, sees)  # a model that sees, over rows without images

    def test_images_that_a_function_puts_into_turns(self, tmp_path):
        script = SCRIPTS["sees"]
        recipe = recipe_of(tmp_path, self.translated(tmp_path, script).text)
        (source,) = recipe.data.train
        row = {"image": {"bytes": b"x", "path": None}, "text": 'a "b"', "other": 1}
        found = parse_row(row, source.format, source.columns, images=True).messages
        assert [turn.content for turn in found] == ["Write it.\ufdd0", 'a "b"']
        assert found[0].images == (b"x",)
        images = recipe.data.images
        assert (images.multiple_of, images.max_width, recipe.data.mask) == (32, 512, "none")
        assert recipe.lora.quantize == "nf4", "its tower keeps 16 bits there, too"
        adapted = "model.visual.blocks.1.attn.qkv model.language_model.layers.0.mlp.up_proj"
        left = "model.visual.merger.linear_fc1 model.visual.patch_embed.proj lm_head"
        for name in (adapted + " " + left).split():
            assert bool(re.fullmatch(recipe.lora.target_modules, name)) == (name in adapted)
        alone = script.replace("finetune_vision_layers=True", "finetune_vision_layers=False")
        recipe = recipe_of(tmp_path, self.translated(tmp_path, alone).text)
        assert (recipe.lora.target_modules, recipe.lora.vision) == ("all-linear", False)
        whole = script.replace("(model, tokenizer)", '(model, tokenizer, resize="max")')
        recipe = recipe_of(tmp_path, self.translated(tmp_path, whole).text)
        assert (recipe.data.images.multiple_of, recipe.data.images.max_width) == (32, None)
        for old, new, says in SCRIPTS["unseen"]:
            with pytest.raises(RecipeError, match=says):
                self.translated(tmp_path, script.replace(old, new))

    def test_a_trainer_of_preferences(self, tmp_path):
        rows = SCRIPT.replace("rows = rows.map(make, batched=True)\n", "")
        found = self.translated(tmp_path, rows.replace("SFT", "DPO").replace("packing=False,", ""))
        recipe = recipe_of(tmp_path, found.text)
        assert (recipe.objective, recipe.data.train[0].format) == ("dpo", "preference")

    @pytest.mark.parametrize(("old", "new", "says"), SCRIPTS["refused"])
    def test_what_cannot_be_the_same_is_refused(self, tmp_path, old, new, says):
        with pytest.raises(RecipeError, match=says):
            self.translated(tmp_path, SCRIPT.replace(old, new))


@pytest.mark.parametrize(("name", "text", "says"), SCRIPTS["unread"])
def test_what_cannot_be_read_is_refused(tmp_path, name, text, says):
    file = tmp_path / name
    if text is not None:
        file.write_text(text)
    with pytest.raises(RecipeError, match=says):
        translate(file)


def test_keys_behind_a_file_are_over_it(tmp_path):
    values = {"model_name_or_path": "m", "template": "default", "finetuning_type": "full"}
    written(tmp_path, {**values, "dataset": "mine", "learning_rate": 1e-4})
    file = tmp_path / "run.sh"
    file.write_text("llamafactory-cli train theirs.yaml learning_rate=3e-5 cutoff_len=99")
    recipe = recipe_of(tmp_path, translate(file, lossy=True).text)
    assert (recipe.training["learning_rate"], recipe.data.max_length) == (3e-5, 99)


def test_a_patch_of_a_trainer_is_none(tmp_path):
    file = tmp_path / "train.py"
    file.write_text(SCRIPT.replace("trainer = SFT", "PatchDPOTrainer()\ntrainer = SFT"))
    assert recipe_of(tmp_path, translate(file).text).objective == "sft"


def test_with_lossy_what_is_lost_leads(tmp_path, capsys):
    values = {
        "base_model": "m",
        "learning_rate": 1e-5,
        "lisa_n_layers": 4,
        "gptq": True,
    }  # of all weights
    values["datasets"] = [{"path": "a/b", "type": "alpaca"}]
    file, target = written(tmp_path, values), tmp_path / "ours.yaml"
    assert main(["new", "--from", str(file), "-o", str(target)]) == 2
    assert "LISA" in capsys.readouterr().err
    assert not target.exists()
    assert main(["new", "--from", str(file), "--lossy", "-o", str(target)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "lost (2)"
    assert load_recipe(target).recipe.model.name_or_path == "m"


@pytest.mark.parametrize("follows", ["--learning_rate 1e-3", ""])
def test_a_comment_between_the_lines_of_a_command_ends_it(follows, tmp_path):
    """What follows is a command of its own to a shell; nothing need follow."""
    file = tmp_path / "run.sh"
    file.write_text(
        f"trl sft --model_name_or_path m \\\n  --dataset_name d \\\n  # its rate\n{follows}\n"
    )
    if follows:
        with pytest.raises(RecipeError, match="a comment between the lines"):
            translate(file)
    else:
        translate(file)


def test_the_command_prints_the_lines(tmp_path, capsys):
    values = {"base_model": "m", "learning_rate": 1e-5, "wandb_entity": "e", "hub_token": "hf_x"}
    values["datasets"] = [{"path": "a/b", "type": "alpaca"}]
    file, target = written(tmp_path, values), tmp_path / "ours.yaml"
    assert main(["new", "--from", str(file), "--lossy", "-o", str(target), "--json"]) == 0
    told = capsys.readouterr().out
    assert "hf_x" not in told + target.read_text()
    kinds = {line["theirs"]: line["kind"] for line in json.loads(told)["lines"]}
    assert kinds["wandb_entity: e"] == "left out"
    assert kinds["axolotl's default"] == "added"
    assert main(["new", "--from", str(file), "--lossy", "-o", str(target)]) == 2
    assert "not overwritten" in capsys.readouterr().err


@pytest.mark.parametrize("name", TOOLS)
def test_a_tool_s_table_names_what_there_is(name):
    """A typo in a data file would be a key that is silently of no effect."""
    rows = tool_table(name)
    ours = {entry.key for entry in key_references()} | {f"training.{field}" for field in FIELDS}
    for key, word in rows["keys"].items():
        assert "." not in word or word in ours, f"{key}: {word}"
    assert set(rows["training"]) <= {*FIELDS, "*"}
    assert {kind for _, kind in rows["kinds"]} <= set(table("kinds"))
    assert set(rows.get("templates", {}).values()) <= set(table("templates"))
    assert rows["defaults"].keys() <= known_keys(name) | set(FIELDS)
    own = table(f"tools/{name}")
    refused = [key for keys in own.get("refused", {}).values() for key in keys]
    idle = {key for keys in own.get("idle", {}).values() for key in keys}
    assert len({*refused}) == len(refused)
    assert not idle & {*refused}
    assert not rows["idle"].keys() & rows["refused"].keys()
