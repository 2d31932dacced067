"""NEFTune and LoRA+ as a recipe asks for them: what they do to a run, and what is left of it."""

import json

import pytest
import torch
from lab import Lab
from project import make_project, project
from resume.record import record
from safetensors.torch import load_file

__all__ = ["project"]

LORA_PLUS = 16
ALPHA = 5.0
START = ("--config", "r.yaml", "training.save_steps=1", "training.max_steps=4", "-o")
BOTH = (f"training.neftune_noise_alpha={ALPHA}", f"lora.lora_plus_ratio={LORA_PLUS}")


def inputs_of_layers(trainer, found):
    """What the first layer gets, next to what the embedding's weights say, by mode."""
    model = trainer.model
    embedding, tokens = model.get_input_embeddings(), []
    embedding.register_forward_pre_hook(lambda _, args: tokens.append(args[0]))

    def note(layer, args, kwargs):
        states = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        plain = torch.nn.functional.embedding(tokens[-1], embedding.weight)
        found.setdefault(layer.training, []).append((states - plain).detach().clone())

    model.model.layers[0].register_forward_pre_hook(note, with_kwargs=True)


def test_the_noise_is_that_of_the_paper_and_in_training_alone(tiny_tokenizer, tmp_path):
    """Uniform in +-alpha / sqrt(tokens * hidden size), arXiv:2310.05914; none is left behind."""
    lab = Lab(tiny_tokenizer, tmp_path)
    trainer = lab.trainer("noisy", neftune_noise_alpha=ALPHA, max_steps=3, save_strategy="no")
    found = {}
    inputs_of_layers(trainer, found)
    trainer.train()
    trainer.evaluate()
    assert len(found[True]) == 3
    spread, bounds = [], []
    for noise in found[True]:
        bound = ALPHA / (noise.shape[1] * noise.shape[2]) ** 0.5
        assert noise.abs().max() <= bound * (1 + 1e-3)  # a sum in fp32 rounds
        spread.append((noise / bound).flatten())
        bounds.append(noise)
    # Of n numbers the standard deviation is known to 1/sqrt(2n), here below 1%.
    assert torch.cat(spread).std() == pytest.approx(3**-0.5, rel=0.05)
    assert torch.cat(spread).mean().abs() < 0.02
    assert not torch.equal(bounds[0][0, 0], bounds[1][0, 0]), "every step draws its own"
    assert all(torch.count_nonzero(noise) == 0 for noise in found[False])
    embedding = trainer.model.get_input_embeddings()
    assert not hasattr(embedding, "neftune_noise_alpha")


@pytest.fixture(scope="module")
def runs(tmp_path_factory, tiny_llama):
    """Plain, with both, and with both but killed in step 3 and continued."""
    lab = make_project(tmp_path_factory.mktemp("methods"), tiny_llama)
    for name, given in {"plain": (), "whole": BOTH}.items():
        lab.sft(*START, name, *given).well()
    assert lab.sft(*START, "parts", *BOTH, kill_at=3) is None
    lab.sft("--resume", "parts").well()
    return lab.root


def adapters(run, step):
    return load_file(run / f"checkpoint-{step}" / "adapter_model.safetensors")


def test_b_learns_at_the_ratio_and_a_at_the_rate(runs, project):
    """B begins at 0, so its first update is the rate times the same direction, with any ratio."""
    project.sft(*START, "fast", f"lora.lora_plus_ratio={LORA_PLUS}").well()
    slow, fast = adapters(runs / "plain", 1), adapters(project.root / "fast", 1)
    later = adapters(project.root / "fast", 2)
    assert slow.keys() == fast.keys()
    for name in slow:
        if ".lora_B." in name:
            assert slow[name].abs().max() > 0
            torch.testing.assert_close(fast[name], LORA_PLUS * slow[name], rtol=1e-5, atol=1e-9)
        else:  # without B there is no gradient for A, and then AdamW moves it by the rate at most
            assert torch.equal(fast[name], slow[name])
            assert 0 < (later[name] - fast[name]).abs().max() <= 1e-2 * 1.01
    rates = [json.loads(line) for line in (project.root / "fast/metrics.jsonl").open()]
    assert rates[0]["learning_rate"] == pytest.approx(1e-2), "the log has the recipe's rate"


def test_modules_that_are_saved_whole_learn_at_the_ratio(project):
    saved = ("lora.modules_to_save=[embed_tokens]",)
    own = (*saved, "lora.saved_lr_ratio=0.25")
    for name, given in {"one": saved, "own": own}.items():
        assert project.sft(*START, name, *given).code == 0
    assert project.sft(*START, "parts", *own, kill_at=3) is None
    assert project.sft("--resume", "parts").code == 0
    assert record(project.root / "parts") == record(project.root / "own")
    refused = project.sft("--resume", "own", "lora.saved_lr_ratio=0.5", "training.max_steps=5")
    assert "lora.saved_lr_ratio: 0.25 -> 0.5" in refused.err
    at_one, at_own = (adapters(project.root / name, 1) for name in ("one", "own"))
    base = load_file(project.root / "m/model.safetensors")["model.embed_tokens.weight"].float()
    for name, value in at_one.items():
        if "embed_tokens" in name:
            moves = [each.float() - base for each in (value, at_own[name])]
            assert moves[0].abs().max() > 0
            torch.testing.assert_close(moves[1], 0.25 * moves[0], rtol=0, atol=4e-4)  # bf16
        else:
            assert torch.equal(at_own[name], value)


def test_a_continued_run_draws_the_same_noise_and_keeps_the_rates(runs):
    assert record(runs / "parts") == record(runs / "whole")
    assert record(runs / "whole")["final"] != record(runs / "plain")["final"]


def test_the_merged_model_is_the_adapter_over_the_plain_base(runs):
    from commands import trainkit
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    trainkit(runs, "merge", "whole", "-o", "merged", "--dtype", "float32").well()
    base = AutoModelForCausalLM.from_pretrained(runs / "m", dtype=torch.float32)
    embedding = base.get_input_embeddings().weight.detach().clone()
    wanted = PeftModel.from_pretrained(base, runs / "whole/final").eval()
    merged = AutoModelForCausalLM.from_pretrained(runs / "merged", dtype=torch.float32).eval()
    assert torch.equal(merged.get_input_embeddings().weight, embedding), "noise was saved"
    ids = torch.arange(40)[None]
    with torch.no_grad():
        # Both are fp32; only the order of sums differs.
        torch.testing.assert_close(
            merged(input_ids=ids).logits, wanted(input_ids=ids).logits, rtol=1e-4, atol=1e-4
        )


def test_packed_rows_say_how_much_weaker_their_noise_is(project):
    arguments = ("--config", "r.yaml", BOTH[0], "data.packing=true", "data.max_length=512")
    said = project.sft(*arguments, "--dry-run")
    assert "training.neftune_noise_alpha: the noise is alpha" in said.err
    assert "neftune" not in project.sft("--config", "r.yaml", BOTH[0], "--dry-run").err


def test_json_is_alone_on_stdout_whatever_libraries_print(project):
    """Each row of the log as in metrics.jsonl, the summary, and the run; text stays on stderr."""
    said = project.sft("--config", "r.yaml", "training.max_steps=2", "-o", "told", "--json").well()
    rows = [json.loads(line) for line in said.out.splitlines()]
    written = [json.loads(line) for line in (project.root / "told/metrics.jsonl").open()]
    assert [row for row in rows if "step" in row] == written
    assert rows[-2]["state"] == "done"
    assert rows[-1] == {"run": "told"} or rows[-1]["run"].endswith("/told")
    again = project.sft("--resume", "told", "--json")
    assert json.loads(again.out)["run"].endswith("told")
    assert "step 2/2" in said.err
