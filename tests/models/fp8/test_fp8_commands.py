"""fp8 from the command line: with everything else that a recipe has, and what a run leaves."""

import json
import re
from html import unescape

import pytest
from project import RECIPE, Project, uneven_rows

KERNELS = ["kernels=true"]
PACKED = ["data.packing=true"]
FULL = ["lora=null", "model.fp8=all", "training.save_strategy=no", "training.max_steps=3"]
BASE = ["lora.quantize=fp8", "model.fp8={loss_budget: 0.000002}"]

SAME = {
    "recomputed": ["recompute=full"],
    "selectively recomputed": ["recompute=selective"],
    "recomputed with inputs on the host": ["recompute={every: 1, offload: true}"],
}
"""What leaves the numbers as they are, bit for bit."""

LIKE = {
    "without kernels": ["kernels=false"],
    "accumulated": [
        "training.per_device_train_batch_size=2",
        "training.gradient_accumulation_steps=2",
    ],
}
"""What sums in another order."""


@pytest.fixture(scope="module")
def project(tmp_path_factory, tiny_llama):
    root = tmp_path_factory.mktemp("project")
    (root / "d.jsonl").write_text(uneven_rows(range(24)), encoding="utf-8")
    (root / "m").symlink_to(tiny_llama)
    (root / "r.yaml").write_text(RECIPE)
    return Project(root)


def losses(project, *arguments):
    name = f"run{len(list(project.root.glob('run*')))}"
    said = project.sft("--config", "r.yaml", *arguments, "--output-dir", name)
    assert said.code == 0, said.err
    lines = (project.root / name / "metrics.jsonl").read_text().splitlines()
    return [row["loss"] for row in map(json.loads, lines) if "loss" in row]


@pytest.fixture(scope="module")
def plain(project):
    return losses(project, *FULL, *KERNELS, *PACKED)


@pytest.mark.sample("selectively*", "recomputed with*", *LIKE)
@pytest.mark.parametrize("variant", [*SAME, *LIKE])
def test_fp8_with_everything_else(variant, project, plain):
    changed = {**SAME, **LIKE}[variant]
    kernels = [] if "kernels=false" in changed else KERNELS
    found = losses(project, *FULL, *kernels, *PACKED, *changed)
    if variant in SAME:
        assert found == plain
    else:  # gradients differ by an order of sums, and by roundings to e4m3 that it tips over
        assert found[0] == pytest.approx(plain[0], rel=1e-3)
        assert found == pytest.approx(plain, rel=2e-2)
        assert found != plain


@pytest.fixture(scope="module")
def even(project):
    """The model with as many tokens as the tensor cores take."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(project.root / "m", dtype=torch.bfloat16)
    model.resize_token_embeddings(pad_to_multiple_of=16)
    model.save_pretrained(project.root / "m16")
    AutoTokenizer.from_pretrained(project.root / "m").save_pretrained(project.root / "m16")
    return "m16"


@pytest.mark.parametrize(
    ("over", "budget"),
    [(["lora=null", "training.save_strategy=no"], "0.9"), (["lora.quantize=fp8"], "all")],
    ids=["full", "base"],
)
def test_the_output_layer_is_judged_and_runs_like_the_others(over, budget, project, even):
    """With the loss out of its kernel, which no longer multiplies in 16 bits then."""
    first = []
    for head in ("bf16", "fp8"):
        options = [f"model.name_or_path={even}", "training.max_steps=1"]
        options += [f"model.fp8={{loss_budget: {budget}, head: {head}}}"]
        name = f"head-{over[0]}-{budget}-{head}"
        said = project.sft(
            "--config", "r.yaml", *over, *options, *KERNELS, *PACKED, "--output-dir", name
        )
        assert said.code == 0, said.err
        run = project.root / name
        first.append(json.loads((run / "metrics.jsonl").read_text().splitlines()[0])["loss"])
        record = json.loads((run / "kernels.json").read_text())
        (loss,) = [op for op in record["ops"] if op["op"] == "linear_cross_entropy"]
        assert loss["status"] == "on"
        groups = {group["group"]: group for group in record["fp8"]["groups"]}
        assert ("lm_head" in groups) == (head == "fp8")
    assert groups["lm_head"]["runs"] == "fp8"
    assert (groups["lm_head"]["loss_increase"] is None) == (budget == "all")
    assert first[0] != first[1]
    assert first[0] == pytest.approx(first[1], rel=1e-2)


@pytest.fixture(scope="module")
def adapted(project):
    """A finished run over a base that is in fp8 in part."""
    said = project.sft("--config", "r.yaml", *BASE, "training.max_steps=2", "--output-dir", "lora")
    assert said.code == 0, said.err
    return project.root / "lora", said.out + said.err


def chosen(run):
    return json.loads((run / "kernels.json").read_text())["fp8"]


def test_console_and_report_say_what_runs_in_fp8_and_what_it_costs(adapted):
    run, said = adapted
    record = chosen(run)
    runs = {group["runs"] for group in record["groups"]}
    assert runs == {"fp8", "backward in fp8"}
    share = f"{record['loss_increase'] / record['loss']:.2%} of the loss {record['loss']:.4f}"
    assert f"saves {record['saved_ms']:.3g} of {record['most_ms']:.3g} ms" in said
    assert share in said
    page = unescape((run / "report.html").read_text())
    section = page.partition("FP8</h2>")[2].partition("<h2")[0]
    assert f"Saves {record['saved_ms']:.3g} of {record['most_ms']:.3g} ms" in section
    assert share in section
    rows = re.findall(r"<tr>(.*?)</tr>", section, re.DOTALL)
    for group in record["groups"]:
        (row,) = [row for row in rows if f"<td>{group['group']}</td>" in row]
        assert f"<td>{group['runs']}</td>" in row
        assert group["reason"] in row
    (head,) = [row for row in rows if "<td>the output layer</td>" in row]
    assert "<td>16 bits</td>" in head


def test_an_adapter_answers_over_a_base_in_16_bits_and_in_fp8(adapted, project):
    import torch

    from trainkit.infer.engine import load_engine
    from trainkit.infer.locate import find_model
    from trainkit.models.fp8.base import Fp8Linear

    run, _ = adapted
    wanted = {n for g in chosen(run)["groups"] if g["runs"] == "fp8" for n in g["layers"]}
    ids = torch.arange(12)[None]
    logits = {}
    for quantize in (None, "fp8"):
        engine = load_engine(find_model(str(run)), quantize=quantize, device="cpu")
        modules = engine.model.named_modules()
        packed = {name for name, module in modules if isinstance(module, Fp8Linear)}
        names = {
            name.removeprefix("base_model.model.").removesuffix(".base_layer") for name in packed
        }
        assert names == (wanted if quantize else set())
        with torch.no_grad():
            logits[quantize] = engine.model(input_ids=ids).logits.float()
    difference = (logits["fp8"] - logits[None]).norm() / logits[None].norm()
    assert 0 < difference < 0.05  # the formats' error, 3.7% of a product

    (project.root / "q.txt").write_text("Say so.\n")
    for given, note in (["none"], False), (["fp8"], False), ([], True):
        options = [word for each in given for word in ("--quantize", each)]
        out = f"answers{len(given) and given[0]}.jsonl"
        words = ["lora", "--prompts", "q.txt", "--out", out, "--greedy", "--max-new-tokens", "3"]
        said = generate(project, *words, *options)
        assert said.code == 0, said.err
        assert ("in fp8, and answers over it in 16 bits" in said.err) == note
        assert len((project.root / out).read_text().splitlines()) == 1


def generate(project, *words):
    from commands import trainkit

    return trainkit(project.root, "generate", *words)
