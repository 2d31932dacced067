"""``trainkit sft`` as a user types it, on a tiny model: the run directory, resuming, stopping."""

import json
import re
import shutil
from pathlib import Path

import pytest
from commands import trainkit
from safetensors.torch import load_file, save_file

from trainkit.checkpoint.weights.base_fingerprint import check_fingerprint
from trainkit.errors import CheckpointError

RUN_FILES = {
    "README.md", "command.sh", "data.json", "environment.json", "kernels.json", "log_history.json",
    "metrics.jsonl", "recipe.yaml", "report.html", "resolved.yaml", "status.json", "final", "logs",
    "plots",
}  # fmt: skip
RECIPE = """\
model: {{name_or_path: "{model}", dtype: float32}}
data: {{train: ["{data}"], eval: ["{data}"], max_length: 256, max_dropped: 10%,
       cache_dir: "{cache}"}}
kernels: true
generation_eval: {{data: ["{data}"], max_new_tokens: 8, max_samples: 2}}
training: {{learning_rate: 1e-2, per_device_train_batch_size: 2, max_steps: 6, save_steps: 2}}
"""


@pytest.fixture
def project(tmp_path, tiny_qwen2):
    """A directory as a user has it: a recipe, a messages file with dirt, a model elsewhere."""
    rows = []
    for number in range(40):
        rows += [
            {"role": "user", "content": f"Say the number {number}."},
            {"role": "assistant", "content": f"It is {number}, 你好."},
        ]
    data = tmp_path / "my data.jsonl"
    lines = [json.dumps({"messages": rows[start : start + 4]}) for start in range(0, 80, 4)]
    lines.insert(3, "{broken")
    data.write_text("\n".join(lines), encoding="utf-8")
    recipe = tmp_path / "small.yaml"
    cache = tmp_path / "cache"
    recipe.write_text(RECIPE.format(model=tiny_qwen2, data=data.name, cache=cache))
    return tmp_path


def sft(project, *arguments, **options):
    return trainkit(project, "sft", *arguments, **options)


def status(run):
    return json.loads((run / "status.json").read_text())


def test_a_recipe_and_a_messages_file_become_a_model_and_a_record(project):
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    code, out, err = sft(project, "--config", "small.yaml", "training.max_steps=8", pictures=True)
    assert code == 0, err
    run = Path(out.splitlines()[-1])
    assert run.parent == project / "train_model"
    assert {path.name for path in run.iterdir()} >= RUN_FILES
    assert status(run)["state"] == "done"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in rows if "loss" in row]
    assert len(losses) == 8
    way = json.loads((run / "start.json").read_text())
    assert sum(way["stages"].values()) == pytest.approx(way["seconds"], abs=0.01)
    stages = ["imports", "data", "record", "model", "kernels", "trainer", "first step"]
    assert list(way["stages"]) == stages
    assert losses[-1] < losses[0]
    dropped = [json.loads(line) for line in (run / "dropped.jsonl").read_text().splitlines()]
    # Once as a training row, once as an evaluation row; two questions are read from above it.
    assert [(row["line"], row["reason"]) for row in dropped] == [(4, "bad_json")] * 2
    model, info = AutoModelForCausalLM.from_pretrained(run / "final", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert (
        type(model).__name__
        == json.loads((run / "final" / "config.json").read_text())["architectures"][0]
    )
    tokenizer = AutoTokenizer.from_pretrained(run / "final")
    assert tokenizer.chat_template
    stops = GenerationConfig.from_pretrained(run / "final").eos_token_id
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") in stops
    answers = json.loads((run / "generation_eval.json").read_text())
    assert answers["num_total"] == 4
    report = (run / "report.html").read_text(encoding="utf-8")
    assert "<svg" in report
    assert not re.search(r'(src|href)="http', report)
    assert "1 rows dropped" in err
    told = " ".join(err.split())
    for what in ("training", "evaluation"):
        assert re.search(rf"{what} data: 1 of \d+ rows are dropped bad_json: 1, the first is", told)
    assert "each dropped row has its line in" in told
    summary = json.loads((run / "data.json").read_text())
    assert [summary[part]["dropped"]["bad_json"]["rows"] for part in ("train", "eval")] == [1, 1]


def test_two_ranks_with_zero3_from_the_command_line(project):
    given = ("--config", "small.yaml", "--deepspeed", "zero3", "--replace_kernel")
    code, out, err = sft(project, *given, num_ranks=2, launch=True, is_plain=True)
    assert code == 0, err
    run = Path(out.splitlines()[-1])
    assert {"rank0.log", "rank1.log"} <= {path.name for path in (run / "logs").iterdir()}
    assert json.loads((run / "generation_eval.json").read_text())["num_total"] == 4
    assert status(run)["state"] == "done"


def test_lora_leaves_an_adapter_that_plain_peft_loads(project, tiny_qwen2):
    from huggingface_hub import ModelCard
    from transformers import AutoModelForCausalLM

    base = project / "base"
    shutil.copytree(tiny_qwen2, base)
    options = ["lora.r=4", "generation_eval=null", f"model.name_or_path={base}"]
    code, out, err = sft(project, "--config", "small.yaml", *options)
    assert code == 0, err
    final = Path(out.splitlines()[-1]) / "final"
    assert (final / "adapter_model.safetensors").exists()
    assert not (final / "model.safetensors").exists()
    card = ModelCard.load(final / "README.md")
    assert card.data.library_name == "peft"
    assert "More Information Needed" not in card.text
    assert "## Recipe" in card.text
    assert not list(final.parent.glob("checkpoint-*/README.md")), "they have no card to be read"
    model = AutoModelForCausalLM.from_pretrained(final)
    adapters = [p for name, p in model.named_parameters() if "lora_B" in name]
    assert adapters
    assert all(bool(p.any()) for p in adapters)
    # Wherever the adapter goes on from, it goes on over its own base.
    tensors = load_file(base / "model.safetensors")
    tensors = {name: tensor * 1.01 for name, tensor in tensors.items()}
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    saved = [final, *final.parent.glob("checkpoint-*")]
    assert len(saved) > 2
    for directory in saved:
        with pytest.raises(CheckpointError, match=r"model\.safetensors was changed"):
            check_fingerprint(directory, base)
    code, _, err = sft(project, "--resume", str(final.parent / "checkpoint-4"))
    assert code != 0
    assert "base.model.safetensors: " in err


def test_bad_input_is_one_message_and_exit_code_2(project):
    change = ("training.dataloader_drop_last=true", "training.per_device_train_batch_size=500")
    code, out, err = sft(project, "--config", "small.yaml", *change)
    assert code == 2
    assert "training.dataloader_drop_last: true leaves out what does not fill a batch" in err
    assert "Traceback" not in err
    assert not out
    assert not (project / "train_model").exists()
