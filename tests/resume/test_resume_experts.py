"""Models whose files name weights otherwise than they run: experts, one by one."""

import torch
from project import make_project
from safetensors.torch import load_file
from transformers import MixtralConfig, MixtralForCausalLM

from trainkit.train.checkpoints import read_weights


def make_experts(vocab_size=32):
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 2}
    return MixtralForCausalLM(MixtralConfig(vocab_size=vocab_size, **sizes, **heads))


def test_weights_are_taken_from_files_with_other_names(tmp_path):
    model = make_experts()
    model.save_pretrained(tmp_path)
    names = load_file(tmp_path / "model.safetensors").keys()
    assert not names <= model.state_dict().keys()
    wanted = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    read_weights(model, tmp_path)
    found = model.state_dict()
    assert all(torch.equal(found[name], value) for name, value in wanted.items())


def test_a_run_goes_on_and_ends_with_the_experts_of_its_checkpoint(tmp_path, tiny_tokenizer):
    """Stopped and continued, and with its best model loaded last, which is not the newest."""
    model = tmp_path / "experts"
    make_experts(len(tiny_tokenizer)).save_pretrained(model)
    tiny_tokenizer.save_pretrained(model)
    (tmp_path / "project").mkdir()
    project = make_project(tmp_path / "project", model)
    words = ["--config", "r.yaml", "lora=null", "training.max_steps=4", "training.learning_rate=1"]
    words += ["model.dtype=float32", "training.load_best_model_at_end=true"]
    words += [
        "training.eval_strategy=steps",
        "training.eval_steps=2",
        "training.greater_is_better=false",
    ]
    assert project.sft(*words, "--output-dir", "whole").code == 0
    assert project.sft(*words, "--output-dir", "parts", stop_at=2).code == 130
    assert project.sft("--resume", "parts").code == 0
    ends = []
    for run in ("whole", "parts"):
        folder = project.root / run
        ends.append(load_file(folder / "final" / "model.safetensors"))
    best = load_file(project.root / "whole" / "checkpoint-2" / "model.safetensors")
    last = load_file(project.root / "whole" / "checkpoint-4" / "model.safetensors")
    for name, value in best.items():
        assert not name.endswith("proj.weight") or not torch.equal(value, last[name])
        assert torch.equal(ends[0][name], value)
        assert torch.equal(ends[1][name], value)
    assert project.rates("whole") == project.rates("parts")
