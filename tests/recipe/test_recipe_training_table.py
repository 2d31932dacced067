"""Every field of TrainingArguments acts, has one value, or is set elsewhere; none does nothing."""

import dataclasses
import json
import re
import types
from enum import Enum, EnumMeta
from pathlib import Path
from typing import Union, get_args, get_origin, get_type_hints

import pytest
from transformers import TrainingArguments

from trainkit.options import optimizers as table
from trainkit.options.optimizers import OPTIMIZERS, OURS, SERVED
from trainkit.recipe import training
from trainkit.recipe.keys import REMOVED
from trainkit.recipe.training import EVERY, FIELDS, check_training, complete_training

# The fields of the oldest and the newest transformers that are supported.
SUPPORTED = {
    version: Path(__file__).with_name(f"training_fields_{version}.txt").read_text().split()
    for version in ("5.17", "5.23")
}
IS_NEWEST = set(SUPPORTED["5.23"]) <= {each.name for each in dataclasses.fields(TrainingArguments)}
FIXED = [name for name, row in FIELDS.items() if row.fixed]
ACTS = {name: row for name, row in FIELDS.items() if not row.fixed}
BOUNDED = [name for name, row in ACTS.items() if {row.at_least, row.above} != {None}]


def problem(**training):
    found = check_training(training)
    assert len(found) == 1, found
    _, what, fix = found[0]
    return f"{what}; {fix}"


def test_the_table_has_every_field_of_both_versions():
    rows = json.loads(Path(training.__file__).with_suffix(".json").read_text())
    assert set().union(*SUPPORTED.values()) == set(rows)
    newer = {name for name, row in rows.items() if "since" in row}
    assert newer == set(SUPPORTED["5.23"]) - set(SUPPORTED["5.17"])


@pytest.mark.skipif(not IS_NEWEST, reason="the table is of the newest")
def test_a_row_is_the_field_of_the_installed_version():
    """One that a new transformers adds or changes fails here until somebody has read of it."""
    real = {field.name: field for field in dataclasses.fields(TrainingArguments) if field.init}
    assert list(EVERY) == list(real)
    for name, field in real.items():
        default, row = field.default, EVERY[name]
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        ours = row.default if row.theirs is ... else row.theirs
        assert ours == json.loads(json.dumps(default)), name
        assert row.accepts(row.default) or row.fixed, name


@pytest.mark.skipif(not IS_NEWEST, reason="the table is of the newest")
@pytest.mark.parametrize("name", ACTS)
def test_a_type_is_that_of_the_installed_version(name):
    """Values of every kind are taken exactly where transformers' annotation has that kind."""
    hint = get_type_hints(TrainingArguments)[name]
    kinds = set(EVERY[name].type.split("|")) - {"false"}
    assert kinds == {KINDS[part] for part in _members(hint) if part in KINDS}, hint


KINDS = {str: "str", int: "int", float: "float", bool: "bool", dict: "dict", list: "list"}
KINDS |= {type(None): "null"}


def _members(hint):
    if get_origin(hint) in (Union, types.UnionType):
        return {part for each in get_args(hint) for part in _members(each)}
    if isinstance(hint, type) and issubclass(hint, Enum):
        return {str}
    return {get_origin(hint) or hint}


def test_a_field_without_a_row_is_refused():
    assert check_training({"new_in_transformers": 5.0}) == [("new_in_transformers", None, None)]


@pytest.mark.parametrize("name", FIXED)
def test_a_field_with_one_value_refuses_every_other(name):
    value, reason = FIELDS[name].default, FIELDS[name].fixed
    assert check_training({name: value}) == []
    other = not value if isinstance(value, bool) else ["loss"] if value == [] else "other"
    assert reason in problem(**{name: other})


def test_defaults_are_accepted_so_that_a_resolved_recipe_is_one():
    defaults = {name: row.default for name, row in ACTS.items()}
    assert check_training(complete_training(defaults)) == []


@pytest.mark.parametrize("name", BOUNDED)
@pytest.mark.parametrize("value", [-5, -0.5, float("nan"), float("inf"), 10**39])
def test_numbers_that_mean_nothing_are_refused(name, value):
    assert check_training({name: value}), f"{name}: {value}"


@pytest.mark.parametrize("name", ["learning_rate", "weight_decay", "max_grad_norm"])
def test_what_is_no_count_is_not_bounded_as_one(name):
    assert check_training({name: 2.0**31 + 1}) == []
    assert "at most 2147483647" in problem(save_steps=2**31)


def test_every_number_has_bounds():
    numbers = {name for name, row in ACTS.items() if re.search("int|float", row.type)}
    assert numbers == set(BOUNDED)


@pytest.mark.parametrize(
    ("training", "said"),
    [
        ({"max_steps": 0}, "must be at least 1, or -1"),
        ({"warmup_steps": 3, "lr_scheduler_type": "constant"}, "does nothing without a schedule"),
        ({"lr_scheduler_kwargs": {"a": 1}, "lr_scheduler_type": "constant"}, "takes arguments"),
        ({"warmup_steps": 1.5}, "a share of all steps below 1, or a whole number"),
        ({"seed": 2**32}, "at most 4294967295"),
        ({"adam_beta2": 1.0}, "below 1"),
        ({"train_sampling_strategy": "batch_rebalance"}, "does nothing here; .*group_by_length"),
        ({"train_sampling_strategy": "randon"}, "one of random, .*; did you mean random"),
        ({"optim": "adamm"}, "one of adamw_torch.*; did you mean adamw_torch"),
        ({"log_level": "quiet"}, "must be one of detail"),
        ({"include_num_input_tokens_seen": "nonpadding"}, "did you mean non_padding"),
        ({"ddp_backend": "ncll"}, "did you mean nccl"),
        ({"torch_compile_backend": "induktor"}, "did you mean inductor"),
        ({"torch_compile_mode": "max-autotun"}, "did you mean max-autotune"),
        ({"debug": "underflow"}, "must be one of underflow_overflow"),
        ({"debug": ["tpu_metrics_debug"]}, "does not train on TPUs"),
        ({"accelerator_config": {"split_batches": True}}, "split_batches does nothing here"),
        ({"accelerator_config": "file.json"}, "must be a mapping"),
        ({"accelerator_config": {"gradient_accumulation_kwargs": {"num_steps": 2}}}, "sync_each"),
        ({"gradient_checkpointing_kwargs": {"reentrant": True}}, "did you mean use_reentrant"),
        ({"optim_target_modules": "all-linear"}, "does nothing without training.optim galore"),
        ({"optim_args": "amsgrad=true"}, "amsgrad does nothing with adamw_torch"),
        ({"optim": "sgd", "optim_args": "momentom=0.9"}, "it takes momentum"),
        ({"optim": "sgd", "optim_args": "nesterov=true"}, "nesterov does nothing without momentum"),
        ({"optim": "sgd", "optim_args": "momentum=0.9,momentum=0.8"}, "momentum is said twice"),
        ({"optim": "ademamix", "optim_args": "beta1=0.8", "adam_beta1": 0.9}, "say the same"),
        ({"optim": "adamw_torch_8bit", "optim_args": "bf16_stochastic_round=1"}, "master_weights"),
        ({"dataloader_prefetch_factor": 4}, "does nothing without training.dataloader_num_w"),
        ({"liger_kernel_config": {"rope": False}}, "does nothing without training.use_liger"),
        ({"hub_model_id": "me/x"}, "does nothing without training.push_to_hub"),
        ({"hub_strategy": "end"}, "does nothing without training.push_to_hub"),
        ({"torch_compile": False, "torch_compile_mode": "default"}, "training.torch_compile: true"),
    ],
)
def test_words_are_held_against_what_is_known(training, said):
    assert re.search(said, problem(**training))


@pytest.mark.parametrize(
    "training",
    [
        {"accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": True}}},
        {"optim": "sgd", "optim_args": "momentum=0.9, nesterov=true"},
        {"debug": "underflow_overflow"},
        {"max_steps": -1},
        {"warmup_steps": 0.1},
        {"save_steps": 0.25},
        {"include_num_input_tokens_seen": True},
        {"optim": "flat_adamw"},
        {"optim": "muon", "optim_args": "momentum=0.9"},
    ],
)
def test_what_makes_sense_is_accepted(training):
    assert check_training(training) == []


WRONG = {
    float: ("fast", "nan", "-1", ""),
    int: ("1.5", "-1", "many"),
    bool: ("maybe", "2"),
    str: ("x",),
}


@pytest.mark.parametrize(
    "row", [r for r in OPTIMIZERS.values() if r.arguments], ids=lambda r: r.name
)
def test_no_argument_of_an_optimizer_takes_a_value_of_another_kind(row):
    for argument in row.arguments:
        for value in WRONG[argument.kind]:
            said = problem(optim=row.name, optim_args=f"{argument.name}={value}")
            assert f"{argument.name}={value}: {argument.name} must be" in said


@pytest.mark.parametrize("row", [OPTIMIZERS[name] for name in SERVED], ids=lambda row: row.name)
def test_a_beta_that_an_optimizer_does_not_have_is_refused(row):
    for field in ("adam_beta1", "adam_beta2", "adam_epsilon"):
        found = check_training({"optim": row.name, field: 0.5})
        assert [what for _, what, _ in found] == (
            [] if field in row.reads else [f"training.{field} does nothing with {row.name}"]
        )


@pytest.mark.parametrize(
    ("theirs", "said"),
    [
        ("adamw", "write adamw_torch_fused, which is the same"),
        ("ao_adamw_8bit", "write adamw_torch_8bit, which is the same"),
        ("paged_adamw", "write paged_adamw_32bit, which is the same"),
        ("lion_pytorch", "write lion_32bit, which is the same"),
        ("torch.optim.SGD", "write sgd, which is the same"),
        ("bitsandbytes.optim.PagedAdamW8bit", "write paged_adamw_8bit, which is the same"),
        ("torchao.optim.AdamW4bit", "write adamw_torch_4bit, which is the same"),
        ("dion", "it is not served; the nearest is muon"),
        ("came_pytorch", "it is not served; the nearest is adamw_torch_fused"),
    ],
)
def test_another_tools_optimizer_is_answered_with_ours(theirs, said):
    assert problem(optim=theirs).endswith(said)


def test_what_is_named_for_another_tools_optimizer_is_served():
    names = {*table._SERVED_AS.values(), *(n.split()[0] for n in table._NEAR.values())}
    assert names <= set(SERVED)
    assert not set(table._SERVED_AS) & set(table._NEAR)


def test_no_advice_for_an_old_field_leads_to_a_refused_one():
    for name, advice in REMOVED.items():
        for target in re.findall(r"write (\w+):", advice):
            assert target in ACTS, f"{name}: {advice}"


def test_the_choices_of_the_table_are_transformers_own():
    from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK
    from transformers.training_args import trainer_log_levels

    assert set(ACTS["log_level"].choices) == set(trainer_log_levels)
    assert {*ACTS["report_to"].choices} == {*INTEGRATION_TO_CALLBACK, "all", "none"}
    for field in dataclasses.fields(TrainingArguments):
        row, hint = EVERY[field.name], get_type_hints(TrainingArguments)[field.name]
        enums = [each for each in (hint, *get_args(hint)) if isinstance(each, EnumMeta)]
        listed = [each.value for enum in enums for each in enum] or field.metadata.get("choices")
        if listed and field.name in ACTS:
            ours = {*row.choices, *(row.without or {})} - set(OURS)
            assert set(listed) == ours, field.name


def test_what_an_optimizer_takes_is_what_transformers_reads():
    from transformers import trainer_optimizer

    source = Path(trainer_optimizer.__file__).read_text(encoding="utf-8")
    for name, row in OPTIMIZERS.items():
        assert row.is_ours or all(f'"{each.name}"' in source for each in row.arguments), name
