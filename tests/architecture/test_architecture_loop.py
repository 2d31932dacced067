"""The loop is ours: nobody inherits transformers' Trainer, or asks a strategy for its kind."""

import ast
import functools
import re
from pathlib import Path

ROOT = Path(__file__).parents[2] / "trainkit"
FILES = sorted(ROOT.rglob("*.py"))


@functools.cache
def trees():
    """By path, parsed by the first test that asks: each worker of a run collects this file."""
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in FILES}


PRIVATE = {
    "_last_lr": "a schedule's rates of the step, which a continued run may have to correct",
    "_foreach_norm": "the norms of many tensors at once; there is no other name for it",
    "_foreach_copy_": "many copies at once, likewise",
    "_foreach_mul_": "many products at once, likewise",
    "_non_persistent_buffers_set": "which buffers a module does not save is said nowhere else",
    "_current_graph_task_id": "whether a backward pass runs is said nowhere else",
    "_cdata": "where storage is, for the peaks of fake tensors",
    "_pcontext": "torchrun's agent has the processes of its ranks there alone",
    "_start_workers": "of torchrun's agent: a rank that was killed must be named",
    "_monitor_workers": "likewise",
    "_shutdown": "likewise",
    "_get_init_p2p_neighbors_ops": "torch before 2.13 has a rank meet itself",
    "_zero3_consolidated_16bit_state_dict": "DeepSpeed's only way to whole weights in memory",
    "_copy_recovery_script": "DeepSpeed would put a script that unpickles beside its shards",
    "_hf_deepspeed_config_weak_ref": "what transformers shards models by as it loads them",
    "_initialize_params": "DeepSpeed's reading of its file, without what it would start",
    "_replace_module": "AutoTP's splitting in place, without its own choice of layers",
    "_partition_sizes": "how AutoTP has cut a layer",
    "_all_gather_shards": "AutoTP's way back to whole weights",
    "_init_tp_mesh_device": "AutoTP's group of ranks",
    "_set_fp32_optimizer_param_groups": "DeepSpeed's own groups, as its state's layout needs them",
    "_clear_fp32_optimizer_param_groups": "and back; ZeRO does both around its own saves",
    "_get_hf_tp_plan": "the plan of a class, as AutoTP reads it",
}
"""Private names of others that ``train`` and ``parallel`` use, and why."""

KINDS = re.compile(
    r"\.(runs_steps|places_weights|shards_weights|shards_optimizer|reads_own_weights|reshards)\b"
    r"|isinstance\([^)]*\b(Engine|DeepSpeed|Fsdp2|Pipeline|TensorParallel)\b"
    r"|type\([a-z_.]*engine\)|engine\.__class__"
)
"""Questions about the kind of an engine."""


def test_no_class_is_a_trainer():
    for path, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                bases = {ast.unparse(base).rpartition(".")[2] for base in node.bases}
                assert "Trainer" not in bases, f"{path}: {node.name}"


def test_nobody_asks_a_strategy_which_one_it_is():
    for path in FILES:
        assert "parallel" in path.parts or not KINDS.search(path.read_text(encoding="utf-8")), path


def private_names(tree):
    """Attributes of others, and names that are imported, that begin with one underscore."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and re.match(r"_[a-z]", node.attr):
            owner = node.value
            if not (isinstance(owner, ast.Name) and owner.id in ("self", "cls")):
                yield node.attr
        if isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("trainkit"):
            yield from (each.name for each in node.names if each.name.startswith("_"))


def names_of_ours():
    """Private names that are defined here: functions, classes, and attributes of ``self``."""
    for tree in trees().values():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                yield node.name
            elif isinstance(node, ast.AnnAssign | ast.Assign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                for each in (inner for target in targets for inner in ast.walk(target)):
                    if isinstance(each, ast.Name):
                        yield each.id
                    elif isinstance(each, ast.Attribute) and isinstance(each.value, ast.Name):
                        yield from [each.attr] if each.value.id in ("self", "cls") else []


def overridden(tree, ours):
    """Private methods of a class of others that one of ours replaces, and calls."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and not {ast.unparse(b) for b in node.bases} <= ours:
            yield from re.findall(r"super\(\)\.(_[a-z]\w*)", ast.unparse(node))


def test_what_is_private_to_others_is_listed_with_its_reason():
    ours, found = {*names_of_ours(), "_exit"}, set()  # os._exit is no secret
    for path, tree in trees().items():
        if path.relative_to(ROOT).parts[0] in ("train", "parallel"):
            found |= ({*private_names(tree)} - ours) | {*overridden(tree, ours)}
            words = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant))
            found |= PRIVATE.keys() & set(words)  # set for a while by `changed`
    assert found == PRIVATE.keys()
