"""What ``model.frozen`` names stays as it is, bit for bit, and the rest trains."""

from safetensors.torch import load_file


def test_the_named_weights_stay(project):
    extra = (
        "training.gradient_checkpointing=true",
        "training.gradient_checkpointing_kwargs={use_reentrant: true}",
        "kernels=true",
    )
    given = ("r.yaml", "lora=null", 'model.frozen=["embed_tokens","0"]', "training.max_steps=2")
    project.sft(*given, *extra, "--output-dir", "a").well()
    before = load_file(project.root / "m/model.safetensors")
    after = load_file(project.root / "a/final/model.safetensors")
    moved = {name for name, value in after.items() if not value.equal(before[name].to(value.dtype))}
    assert moved == {
        name for name in after if "embed_tokens" not in name and ".layers.0." not in name
    }


def test_frozen_goes_with_full_fine_tuning_and_does_not_change(project):
    said = project.sft("r.yaml", "model.frozen=[0]")
    assert said.code == 2
    assert "frozen anyway" in said.err
    given = ("r.yaml", "lora=null", "model.frozen=[0]", "training.max_steps=2")
    assert project.sft(*given, "--output-dir", "a", "training.save_steps=1").code == 0
    said = project.sft("--resume", "a/checkpoint-1", "model.frozen=[1]")
    assert said.code == 1
    assert "model.frozen" in said.err
