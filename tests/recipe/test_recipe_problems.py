"""Every mistake in a recipe is told with its line, its rule and the way out."""

import pytest

from trainkit.errors import RecipeError
from trainkit.recipe.keys import FOREIGN, REMOVED, places, sections
from trainkit.recipe.load import load_recipe
from trainkit.recipe.training import EVERY

BASE = "model: {name_or_path: m}\ndata: {train: [a.jsonl]}\n"


@pytest.mark.parametrize(
    ("line", "what", "fix"),
    [
        # misspelt
        ("modle: {name_or_path: m}", "unknown key modle", "model"),
        ("lora: {target_module: x}", "unknown key lora.target_module", "lora.target_modules"),
        ("training: {lerning_rate: 1}", "unknown key training.lerning_rate", "learning_rate"),
        ("learning-rate: 1", "unknown key learning-rate", "training.learning_rate"),
        ("training: {per_device_batch_size: 1}", "unknown key", "per_device_train_batch_size"),
        ("cutof_len: 1", "unknown key cutof_len", "LLaMA-Factory's name for data.max_length"),
        # out of place
        ("learning_rate: 1e-5", "misplaced at the top level", "training.learning_rate"),
        ("max_length: 5", "misplaced at the top level", "data.max_length"),
        ("training: {max_length: 5}", "misplaced under training", "data.max_length"),
        ("training: {packing: true}", "misplaced under training", "data.packing"),
        ("training: {global_batch_size: 8}", "misplaced under training", "global_batch_size"),
        ("lora: {learning_rate: 1}", "misplaced under lora", "training.learning_rate"),
        ("lora: {dtype: float32}", "misplaced under lora", "model.dtype"),
        # set another way
        ("training: {deepspeed: zero2}", "not set there", "`deepspeed: zero2` at the left margin"),
        ("training: {resume_from_checkpoint: x}", "not set there", "--resume"),
        ("training: {fsdp: full_shard}", "not set there", "shard: fsdp2"),
        ("training: {local_rank: 0}", "not set there", "launcher"),
        ("training: {do_eval: true}", "not set there", "data.eval"),
        # gone from transformers
        ("training: {warmup_ratio: 0.03}", "warmup_ratio was removed", "warmup_steps: 0.03"),
        ("warmup_ratio: 0.03", "warmup_ratio was removed", "warmup_steps: 0.03"),
        ("training: {logging_dir: x}", "logging_dir was removed", "run directory"),
        ("training: {overwrite_output_dir: true}", "was removed", "never overwrites"),
        ("training: {group_by_length: true}", "was removed", "train_sampling_strategy"),
        ("training: {evaluation_strategy: steps}", "was removed", "eval_strategy: steps"),
        ("training: {no_cuda: true}", "was removed", "use_cpu: true"),
        # other tools' names
        ("cutoff_len: 4096", "LLaMA-Factory's name for data.max_length", "data.max_length: 4096"),
        ("sequence_len: 4096", "axolotl's name for data.max_length", "data.max_length: 4096"),
        ("max_seq_length: 4096", "name for data.max_length", "data.max_length: 4096"),
        ("micro_batch_size: 2", "axolotl's", "training.per_device_train_batch_size: 2"),
        ("lora_rank: 8", "LLaMA-Factory's", "lora.r: 8"),
        ("lora_r: 8", "TRL's name for lora.r", "lora.r: 8"),
        ("lora_alpha: 8", "name for lora.alpha", "lora.alpha: 8"),
        ("lora: {lora_alpha: 8}", "peft's name for lora.alpha", "lora.alpha: 8"),
        ("model_name_or_path: x", "name for model.name_or_path", "model.name_or_path: x"),
        ("base_model: x", "axolotl's name for model.name_or_path", "model.name_or_path: x"),
        ("finetuning_type: lora", "LLaMA-Factory's name for lora", "`lora:` section"),
        ("sample_packing: true", "axolotl's name for data.packing", "data.packing: true"),
        ("num_epochs: 3", "axolotl's", "training.num_train_epochs: 3"),
        ("use_liger_kernel: true", "transformers' name for kernels", "kernels: true"),
        ("flash_attn: fa2", "name for model.attn_implementation", "auto"),
        ("load_in_4bit: true", "name for lora.quantize", "nf4"),
        (
            "training: {lr: 1}",
            "torch's name for training.learning_rate",
            "training.learning_rate: 1",
        ),
        ("template: qwen", "it has no key here", "chat template"),
        ("lora_target: all", "name for lora.target_modules", "`all-linear`, the default"),
        ("early_stopping_patience: 3", "axolotl's name", "early_stopping: {patience"),
        ("training: {early_stopping_patience: 3}", "axolotl's name", "early_stopping: {patience"),
        ("unfrozen_parameters: [x]", "axolotl's name", "trains the last eight layers"),
        # wrong values
        ("training: {learning_rate: '1e-5'}", "'1e-5' must be a number", "without quotes"),
        ("training: {learning_rate: fast}", "'fast' must be a number", None),
        ("training: {learning_rate: -1}", "must be 0 or more", None),
        ("training: {learning_rate: .nan}", "must be 0 or more", None),
        ("training: {learning_rate: .inf}", "must be finite", None),
        ("training: {learning_rate: null}", "must be a number", None),
        ("training: {max_steps: 1e3}", "must be a whole number", "write 1000"),
        ("training: {max_steps: true}", "must be a whole number", None),
        ("training: {fp16: yes}", "'yes' must be true or false", None),
        ("training: {bf16: 1}", "1 must be true or false", None),
        ("training: {seed: 1.5}", "must be a whole number", None),
        ("training: {optim: adamw_torch_fussed}", "must be one of", "adamw_torch_fused"),
        ("training: {lr_scheduler_type: cosin}", "must be one of linear, cosine", "cosine"),
        ("training: {save_strategy: false}", "must be one of", None),
        ("training: {per_device_train_batch_size: 0}", "must be at least 1", None),
        ("training: {num_train_epochs: 0}", "must be above 0", None),
        ("training: {report_to: [1]}", "[1] must be one of azure_ml", None),
        ("training: {report_to: tensorbord}", "'tensorbord' must be one of", "tensorboard"),
        ("training: {report_to: [wandb, mlflo]}", "'mlflo' must be one of", "mlflow"),
        (
            "training: {gradient_checkpointing_kwargs: {use_reentrent: true}}",
            "'use_reentrent' must be one of",
            "use_reentrant",
        ),
        ("training: {optim_args: foreach}", "'foreach' must be name=value", None),
        ("lora: true", "lora: True must be a section", "lora: {} for its defaults"),
        ("lora: false", "lora: False must be a section", "lora: null"),
        ("training: {bf16: true, fp16: true}", "are both on", "keep one"),
        ("training: {disable_tqdm: false}", "cannot be changed", "remove it"),
        ("training: [a]", "training: must be a mapping", None),
        ("lora: {r: 0}", "lora.r: 0 must be at least 1", None),
        ("lora: {r: '8'}", "lora.r: '8' must be a whole number", "without quotes"),
        ("lora: {dropout: 1}", "must be below 1", None),
        ("lora: {quantize: int4}", "must be one of", None),
        ("kernels: {ropee: true}", "no op 'ropee'", None),
        ("kernels: fast", "'fast' must be true or false", None),
        ("kernels: yes", "must be true or false", "write true"),
        ("deepspeed: 2", "parallel.shard: 2 must be text", None),
        ("global_batch_size: 0", "must be at least 1", None),
        ("name: a/b", "may hold letters", None),
        ("generation_eval: {data: [], max_new_tokens: 3}", "must not be empty", None),
        ("generation_eval: {max_new_tokens: 3}", "generation_eval.data is missing", "add"),
        # rules across keys
        ("training: {metric_for_best_model: accuracy}", "not measured", "loss/SOURCE"),
        ("training: {eval_strategy: steps}", "data.eval is empty", "data.eval"),
        ("training: {eval_steps: 5}", "data.eval is empty", "data.eval"),
        ("training: {load_best_model_at_end: true}", "data.eval is empty", "data.eval"),
        ("training: {metric_for_best_model: loss}", "data.eval is empty", "data.eval"),
        ("training: {eval_delay: 2}", "data.eval is empty", "data.eval"),
        ("training: {save_strategy: best}", "data.eval is empty", "remove save_strategy"),
        ("lora: {saved_lr_ratio: 4}", "saved whole, and none is", "lora.modules_to_save"),
    ],
)
def test_one_mistake_one_message(problems_of, line, what, fix):
    ((where, said, advice),) = problems_of(f"{BASE}{line}\n")
    assert where == 3
    assert what in said
    if fix is not None:
        assert fix in advice


@pytest.mark.parametrize("evaluated", ["eval_steps: 2", "eval_strategy: steps, logging_steps: 2"])
def test_of_every_evaluation_there_is_a_model_to_load(load, problems_of, evaluated):
    """transformers takes any multiple, and ends with the last model where the best has none."""
    text = "model: {name_or_path: m}\ndata: {train: [a], eval: [b]}\ntraining:\n"
    text += f"  {{load_best_model_at_end: true, {evaluated}, save_steps: SAVED}}\n"
    ((where, said, advice),) = problems_of(text.replace("SAVED", "4"))
    assert where == 4
    assert "evaluated every 2 steps and saved every 4" in said
    assert "save_steps: 2" in advice
    for served in ("2", "4, save_strategy: best"):
        load(text.replace("SAVED", served))


@pytest.mark.parametrize(
    ("data", "what", "fix"),
    [
        ("{train: [{pth: a}]}", "unknown key data.train[0].pth", "path"),
        (
            "{train: [{path: a, max_sample: 3}]}",
            "unknown key data.train[0].max_sample",
            "max_samples",
        ),
        ("{train: [a, {path: b, max_samples: 0}]}", "data.train[1].max_samples: 0 must be", None),
        ("{train: [{path: a#5, max_samples: 3}]}", "already says how many", "remove"),
        ("{train: [3]}", "data.train[0]: 3 must be a section", None),
        ("{train: [{path: a, format: nope}]}", "data.train[0].format: 'nope' must be one of", None),
        ("{train: [a], format: nope}", "data.format: 'nope' must be one of", None),
        ("{train: [a], format: sharegtp}", "must be one of", "sharegpt"),
        ("{train: [a], format: Alpaca}", "must be one of", "alpaca"),
        ("{train: [a], format: chatml}", "must be one of", "messages"),
        ("{train: [a], format: pretokenized}", "must be one of", "tokens"),
        ("{train: [{path: a, weight: 0}]}", "every source has weight 0", "above 0"),
        ("{train: [{path: a, weight: .inf}]}", "data.train[0].weight: inf", None),
        ("{train: [{path: a, epochs: .nan}]}", "data.train[0].epochs: nan", None),
        ("{train: [a], eval: [{path: b, weight: 2}]}", "data.eval[0].weight has no", "max_samples"),
        ("{train: [a], eval: [{path: b, epochs: 2}]}", "data.eval[0].epochs has no", "max_samples"),
        ("{train: []}", "data.train: must not be empty", None),
        ("{train: 3}", "data.train: 3 must be a list", None),
        ("{eval: [a]}", "data.train is missing", "add data.train"),
        ("{train: [a], mask: assitant}", "must be one of", "assistant"),
        ("{train: [a], max_length: 2k}", "'2k' must be a whole number", None),
        ("{train: [a], max_length: 2048.0}", "must be a whole number", "write 2048"),
        ("{train: [a], max_dropped: 5 percent}", "a count such as 20, a share", None),
        ("{train: [a], max_dropped: 120%}", "a count such as 20, a share", None),
        ("{train: [a], max_dropped: -1}", "a count such as 20, a share", None),
        ("{train: [a], max_dropped: true}", "a count such as 20, a share", None),
        ("[a.jsonl]", "data: must be a section", None),
        ("{train: null}", "data.train: None must be a list", "data.train: [FILE]"),
    ],
)
def test_mistakes_in_the_data_section(problems_of, data, what, fix):
    found = problems_of(f"model: {{name_or_path: m}}\n\ndata: {data}\n")
    where, _, advice = next(row for row in found if what in row[1])
    assert where == 3
    if fix is not None:
        assert fix in advice


def test_all_problems_come_together_in_the_order_of_the_lines(problems_of):
    found = problems_of(
        "model: {name_or_path: m, dtype: bf16}\n"
        "data:\n"
        "  train: [a.jsonl]\n"
        "  cutoff_len: 512\n"
        "training:\n"
        "  learning_rate: fast\n"
        "  lerning_rate: 1e-5\n"
        "lora: {r: 0}\n"
    )
    assert [line for line, _, _ in found] == [1, 4, 6, 7, 8]


def test_missing_sections_name_the_file(problems_of):
    found = problems_of("name: x\n")
    assert [what for _, what, _ in found] == ["model is missing", "data is missing"]
    assert all("recipe.yaml" in str(where) for where, _, _ in found)


def test_a_model_given_as_a_name_is_told_how(problems_of):
    ((where, what, fix),) = problems_of("model: Qwen/Qwen2-0.5B\ndata: {train: [a]}\n")
    assert where == 1
    assert "must be a section" in what
    assert fix == "write model: {name_or_path: Qwen/Qwen2-0.5B}"


def test_an_override_is_named_in_its_error(problems_of):
    ((where, what, _),) = problems_of(BASE, ["training.learning_rate=fast"])
    assert where == "override 'training.learning_rate=fast'"
    assert "'fast' must be a number" in what


def test_rules_between_sections(problems_of):
    cases = {
        "kernels: true\ntraining: {use_liger_kernel: true}\n": (
            4,
            "training.use_liger_kernel: trainkit's kernels and Liger's replace the same modules",
        ),
        "lora: {r: 4}\nparallel: {shard: zero1, tensor: 2}\n": (3, "lora: with parallel.tensor"),
        "global_batch_size: 10\ntraining: {per_device_train_batch_size: 4}\n": (
            3,
            "not a multiple",
        ),
    }
    for text, (line, message) in cases.items():
        ((where, what, fix),) = problems_of(BASE + text)
        assert (where, message in what, bool(fix)) == (line, True, True), text


def test_a_random_model_has_nothing_to_quantize(problems_of):
    text = "model: {name_or_path: m, init: random}\ndata: {train: [a]}\nlora: {quantize: nf4}\n"
    ((where, what, _),) = problems_of(text)
    assert where == 3
    assert "no weights to quantize" in what


def test_the_tables_point_at_keys_that_exist():
    known = {
        f"{section}.{name}" if section else name
        for section, names in sections().items()
        for name in names
    }
    assert {entry.target for entry in FOREIGN.values() if entry.target} <= known
    assert not set(REMOVED) & set(EVERY), "transformers has this field again"
    for fix in REMOVED.values():
        assert fix.format(value=1)


def test_foreign_names_are_no_keys_where_they_are_told_apart():
    # A name that is a key of ours would never reach the table at its right place.
    for name in FOREIGN:
        for place in places(name):
            section = place.rpartition(".")[0]
            assert section in ("generation_eval", "training", "distill.on_policy"), place


@pytest.mark.parametrize(
    ("short", "full"), [("bf16", "bfloat16"), ("fp16", "float16"), ("FP32", "float32")]
)
def test_short_names_of_dtypes_are_told_in_full(problems_of, short, full):
    text = f"model: {{name_or_path: m, dtype: {short}}}\ndata: {{train: [a.jsonl]}}\n"
    ((_, _, advice),) = problems_of(text)
    assert advice == f"did you mean {full}?"


@pytest.mark.parametrize(
    "line",
    [
        "data: {train: ['https://me:pass-1@example.org/rows.jsonl']}",
        "model: {name_or_path: hf_abcdefghijklmnopqrstuvwxyz012345}",
        "training: {lr_scheduler_kwargs: {a: 'sk_live_abcdefghijklmnop'}}",
        "data: {train: ['https://<redacted>@example.org/rows.jsonl']}",
    ],
)
def test_a_recipe_that_its_record_could_not_hold_is_refused(tmp_path, line):
    """The record leaves a secret out: a resumed run would have read something else."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"{line}\n")
    with pytest.raises(RecipeError, match="holds a secret") as caught:
        load_recipe(recipe)
    assert "pass-1" not in str(caught.value)
    assert "recipe.yaml:1" in str(caught.value)
