"""Runs on rows with images, as a user types them: against plain transformers, ranks, resumption."""

import json

import pytest
import torch
import yaml
from commands import trainkit, trainkit_each
from pictures import EVERYTHING, QWEN3_5, Family, make_image, make_model_directory, write_rows
from resume.record import record
from tiny import chat_lines

STEPS = 4
RATIOS = {"vision": 0.1, "projector": 4.0}


def write_recipe(folder, model_type="qwen2_5_vl", **changes):
    directory = folder / model_type
    if not directory.exists():
        directory.mkdir()
        make_model_directory(model_type, directory)
    if not (folder / "rows.jsonl").exists():
        write_rows(folder, 16)
    recipe = {
        "model": {"name_or_path": model_type, "dtype": "float32"},
        "data": {"train": ["rows.jsonl"], "max_length": 512, "cache_dir": "cache"},
        "kernels": True,
        "training": {
            "learning_rate": 1e-3,
            "lr_scheduler_type": "constant",
            "per_device_train_batch_size": 2,
            "max_steps": STEPS,
            "logging_steps": 1,
            "weight_decay": 0.0,
            "max_grad_norm": 0,
            "use_cpu": True,
        },
    }
    for key, value in changes.items():
        section, _, name = key.partition("__")
        if name:
            recipe.setdefault(section, {})[name] = value
        else:
            recipe[section] = value
    (folder / "r.yaml").write_text(yaml.safe_dump(recipe))
    return directory


def sft(folder, *words, **options):
    said = trainkit(folder, "sft", "--config", "r.yaml", *words, **options)
    assert said is None or said.code == 0, said.err
    return said


def weights(folder):
    from safetensors.torch import load_file

    (file,) = (folder / "final").glob("*model.safetensors")
    return load_file(file)


def losses(folder, name="loss"):
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [row[name] for row in rows if name in row]


def apart(first, second, skip=()):
    """The largest difference of weights, as a share of how far they can be."""
    assert first.keys() == second.keys()
    names = [name for name in first if not any(part in name for part in skip)]
    return max((first[name] - second[name]).abs().max().item() for name in names)


NEWER = ["qwen3_5", "gemma4", "internvl"]


@pytest.mark.sample("qwen3_5", "gemma4")
@pytest.mark.parametrize("model_type", ["qwen2_5_vl", "qwen3_vl", "idefics3", "mistral3", *NEWER])
def test_a_run_trains_what_a_plain_loop_trains(model_type, tmp_path):
    """Unpacked rows in order: the processor's pixels, plain transformers, torch's AdamW.

    Each part at its rate.
    """
    folder = tmp_path / "run"
    folder.mkdir()
    write_recipe(
        folder,
        model_type,
        model__train=EVERYTHING,
        model__lr_ratios=RATIOS,
        data__packing=False,
        training__train_sampling_strategy="sequential",
        training__optim="adamw_torch",
    )
    said = sft(folder, "-o", "run")
    parts = json.loads((folder / "run/kernels.json").read_text())["parts"]
    rates = {part: each["learning_rate"] for part, each in parts.items()}
    assert rates == {"text": 1e-3, "vision": pytest.approx(1e-4), "projector": 4e-3}
    assert f"vision {parts['vision']['parameters']:,} weights at 0.0001, projector" in said.err
    plain = Family(model_type, tmp_path / "plain", folder)
    model = plain.plain().train()
    # Weights that no image and no text reaches stay as they are.
    groups = {1e-3: [], 1e-4: [], 4e-3: []}
    for name, parameter in model.named_parameters():
        projectors = ("merger", "connector", "projector", "embed_vision")
        is_projector = any(part in name for part in projectors)
        groups[4e-3 if is_projector else 1e-4 if "vis" in name else 1e-3].append(parameter)
    optimizer = torch.optim.AdamW(
        [{"params": each, "lr": rate} for rate, each in groups.items()], weight_decay=0.0
    )
    found = []
    for step in range(STEPS):
        samples = [plain.data[2 * step + place] for place in (0, 1)]
        batches = [plain.plain_batch(sample) for sample in samples]
        count = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches)
        total = 0.0
        for batch in batches:
            labels = batch.pop("labels")
            logits = model(**batch, use_cache=False).logits
            loss = torch.nn.functional.cross_entropy(
                logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum"
            )
            (loss / count).backward()
            total += loss.item() / count
        found.append(total)
        optimizer.step()
        optimizer.zero_grad()
    assert losses(folder / "run") == pytest.approx(found, rel=2e-5)
    # Adam turns rounding into steps where a gradient is next to nothing: most weights are the same.
    theirs = {name: each.detach() for name, each in model.state_dict().items()}
    mine = plain.plain(folder / "run/final").state_dict()
    moved = torch.cat([(mine[name] - theirs[name]).abs().flatten() for name in theirs])
    # A delta rule in fp32 is ten times as far off as what else there is.
    assert float(moved.quantile(0.99)) < (1e-5 if model_type in QWEN3_5 else 2e-6)
    before = plain.plain().state_dict()
    for part in ("vis", "lm_head"):
        names = [name for name in mine if part in name and mine[name].dim() > 1]
        assert any(not torch.equal(mine[name], before[name]) for name in names), part


def test_the_tower_stays_unless_it_is_to_train(tmp_path):
    directory = write_recipe(tmp_path)
    sft(tmp_path, "-o", "run")
    from safetensors.torch import load_file

    before, after = load_file(directory / "model.safetensors"), weights(tmp_path / "run")
    same = {name for name in before if torch.equal(before[name], after[name])}
    assert same == {name for name in before if "visual" in name}
    write_recipe(tmp_path, model__train=["projector"])
    said = sft(tmp_path, "-o", "projector")
    assert "frozen" in said.err
    after = weights(tmp_path / "projector")
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved == {name for name in before if "merger" in name}


IN_PARTS = [
    ("qwen2_5_vl", {"model__train": EVERYTHING, "model__lr_ratios": RATIOS, "kernels": False}),
    ("gemma3", {}),
    ("idefics3", {"lora": {"r": 4, "vision": True}}),
    *((each, {"model__train": EVERYTHING}) for each in NEWER),
]

WAYS_OF = {"qwen2_5_vl": ["none", "apart", "fsdp2"], "gemma3": ["zero3"], "idefics3": ["fsdp2"]}
WAYS_OF |= {"qwen3_5": ["zero3"], "gemma4": ["fsdp2"], "internvl": ["none"]}
"""All but the first are spread one way each: a start takes seconds."""
WAYS = {"apart": "training.ddp_find_unused_parameters=false"}


@pytest.mark.sample("full", "frozen", "lora")
@pytest.mark.parametrize(("model_type", "given"), IN_PARTS, ids=["full", "frozen", "lora", *NEWER])
def test_two_ranks_train_what_one_does(model_type, given, tmp_path):
    """Also where a rank has no image: rows alternate, so that one of them never has any.

    Where weights are sharded it waits for a part of the tower's even if that is frozen, in
    evaluations, too.
    """
    make_image(30, 40).save(tmp_path / "a.png")
    lines = []
    for number in range(2 * STEPS):
        user = {"role": "user", "content": f"Number {number}?"}
        row = {"messages": [user, {"role": "assistant", "content": f"It is {number}."}]}
        lines.append(json.dumps(row if number % 2 else {**row, "images": ["a.png"]}))
    (tmp_path / "rows.jsonl").write_text("\n".join(lines) + "\n")
    write_recipe(
        tmp_path,
        model_type,
        data__packing=False,
        data__eval=["rows.jsonl"],
        training__train_sampling_strategy="sequential",
        training__eval_strategy="steps",
        training__eval_steps=STEPS,
        training__per_device_eval_batch_size=1,
        **given,
    )
    sft(tmp_path, "-o", "one")
    for name in WAYS_OF[model_type]:
        way = WAYS.get(name, f"parallel.shard={name}")
        alone = "training.per_device_train_batch_size=1"
        sft(tmp_path, "-o", name, alone, way, num_ranks=2)
        assert losses(tmp_path / name) == pytest.approx(losses(tmp_path / "one"), rel=1e-5)
        one, two = (losses(tmp_path / each, "eval_loss") for each in ("one", name))
        assert one == pytest.approx(two, rel=1e-5)
        # Adam turns rounding into steps where a gradient is next to nothing.
        assert apart(weights(tmp_path / "one"), weights(tmp_path / name)) < 2e-4


@pytest.mark.sample("full")
@pytest.mark.parametrize("lora", [None, {"r": 4}], ids=["full", "lora"])
def test_a_killed_run_goes_on_to_the_same_bytes(lora, tmp_path):
    write_recipe(
        tmp_path,
        **({"lora": lora} if lora else {"model__train": EVERYTHING}),
        model__lr_ratios={"text": 0.5} if lora else RATIOS,
        training__save_strategy="steps",
        training__save_steps=2,
        training__per_device_train_batch_size=1,
    )
    sft(tmp_path, "-o", "whole")
    assert trainkit(tmp_path, "sft", "--config", "r.yaml", "-o", "killed", kill_at=3) is None
    trainkit(tmp_path, "sft", "--resume", "killed").well()
    assert record(tmp_path / "killed") == record(tmp_path / "whole")


def test_changed_images_are_another_run(tmp_path):
    write_recipe(tmp_path, training__save_strategy="steps", training__save_steps=2)
    sft(tmp_path, "-o", "run")
    make_image(44, 20, seed=77).save(tmp_path / "shots/0-0.png")
    said = trainkit(tmp_path, "sft", "--resume", "run", "training.max_steps=6")
    assert said.code == 1
    assert "--allow-changed data" in said.err


@pytest.mark.sample("gemma4")
@pytest.mark.parametrize("model_type", ["qwen2_5_vl", "idefics3", "mistral3", *NEWER])
def test_adapters_are_merged_and_everything_loads_in_plain_transformers(model_type, tmp_path):
    from peft import PeftModel

    folder = tmp_path / "run"
    folder.mkdir()
    write_recipe(folder, model_type, lora={"r": 4, "alpha": 64, "vision": True})
    assert "adapters see images" in sft(folder, "-o", "run").err
    trainkit(folder, "merge", "run/final", "merged").well()
    files = {path.name for path in (folder / "merged").iterdir()}
    assert {"preprocessor_config.json", "processor_config.json", "tokenizer.json"} <= files
    assert (folder / "run/final/preprocessor_config.json").exists()
    family = Family(model_type, tmp_path / "plain", folder)
    batch = family.plain_batch(family.data[0])
    del batch["labels"]
    with torch.no_grad():
        base = family.plain().eval()
        before = base(**batch).logits
        model = PeftModel.from_pretrained(base, folder / "run/final").eval()
        adapted = model(**batch).logits
        merged = family.plain(folder / "merged").eval()(**batch).logits
        exact = {name: each.double() for name, each in batch.items() if each.is_floating_point()}
        rounding = (adapted - model.double()(**batch | exact).logits).abs().max()
    # Merged weights are rounded and summed in another order: each moves about what fp32 is off.
    torch.testing.assert_close(merged, adapted, rtol=0, atol=4 * float(rounding))
    assert (adapted - before).abs().max() > 1000 * rounding


UNTRIED = {
    "data.streaming=true": "streamed samples have none",
    "training.torch_compile=true": "training.torch_compile",
}


def test_what_was_never_tried_with_images_is_refused(tmp_path):
    write_recipe(tmp_path, kernels=False)
    (tmp_path / "text.jsonl").write_text(chat_lines([("a", "b")]))
    commands = [["sft", "r.yaml", words] for words in UNTRIED]
    parts = ["sft", "r.yaml", "model.train=[vision]"]
    *untried, adapted, text = trainkit_each(
        tmp_path, [*commands, [*parts, "lora.r=4"], [*parts, "data.train=[text.jsonl]"]]
    )
    for (words, why), said in zip(UNTRIED.items(), untried, strict=True):
        assert why in said.err
        assert words.partition("=")[0] in said.err
    assert "model.train" in adapted.err
    assert "no row has any" in text.err
    assert [said.code for said in (*untried, adapted, text)] == [2] * 4


def test_a_dry_run_and_the_looks_at_data_know_images(tmp_path):
    write_recipe(tmp_path)
    said = sft(tmp_path, "--dry-run")
    assert "ready to train" in said.err
    said = trainkit(tmp_path, "data", "stats", "-c", "r.yaml")
    assert " images in " in said.out
    said = trainkit(tmp_path, "data", "check", "-c", "r.yaml")
    assert "none trained" in said.out
    said = trainkit(tmp_path, "data", "preview", "-c", "r.yaml", "--html", "p.html", "--json")
    rows = [json.loads(line) for line in said.out.splitlines()]
    images = [image for row in rows for image in row.get("images", ())]
    assert images
    assert images[0].keys() == {"path", "height", "width", "tokens"}
    assert "data:image/jpeg;base64," in (tmp_path / "p.html").read_text()
