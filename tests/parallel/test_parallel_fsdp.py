"""FSDP2 as a recipe asks for it: numbers, files, resumes, and what it refuses."""

import json
import shutil

import pytest
from project import make_uneven, sft
from ranks import run_ranks
from safetensors.torch import load_file

from trainkit.parallel.matrix import SHARDED_OPTIMIZERS

RECIPE = """\
model: {name_or_path: m, dtype: bfloat16}
data: {train: [d.jsonl], eval: [d.jsonl], max_length: 128, packing: true, cache_dir: cache}
kernels: true
generation_eval: {data: [d.jsonl], max_samples: 2, max_new_tokens: 4}
global_batch_size: 8
training: {learning_rate: 1e-3, per_device_train_batch_size: 2, max_steps: 4, logging_steps: 1,
  save_steps: 2, save_total_limit: 9, eval_strategy: steps, eval_steps: 2,
  gradient_checkpointing: true, load_best_model_at_end: true}
"""
OWN_HEAD = ("model.name_or_path=own_head", "kernels=false")
KINDS = {
    "full": [],
    "lora": ["lora.r=4"],
    "nf4": ["lora={r: 4, quantize: nf4, quantize_head: true}", *OWN_HEAD],
}


@pytest.fixture(scope="module")
def project(tmp_path_factory, tiny_qwen2, tiny_llama):
    root = make_uneven(tmp_path_factory.mktemp("project"), tiny_qwen2, RECIPE, d=range(48))
    (root / "own_head").symlink_to(tiny_llama)
    return root


@pytest.fixture(scope="module")
def trained(project):
    """Runs by kind and strategy, each made once on two ranks."""

    def get(kind, shard):
        run = project / f"{kind}-{shard}"
        if not run.exists():
            words = ["--config", "r.yaml", "--output-dir", run.name, *KINDS[kind]]
            sft(project, *words, f"parallel.shard={shard}", num_ranks=2)
        return run

    return get


def numbers(run, key):
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row[key] for row in rows if key in row]


@pytest.mark.sample("full", "nf4")
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_writes_what_ddp_writes(kind, trained):
    """bf16, packed, checkpointed, evaluated: only the order of fp32 sums differs.

    Gradients are summed over micro-batches first and ranks second, or the other way round; a
    rounding of a bf16 weight apart, 2**-8, moves a loss of 5 by less than 1e-3 in four steps.
    """
    ours, ddp = trained(kind, "fsdp2"), trained(kind, "none")
    for key in ("loss", "grad_norm", "eval_loss"):
        assert numbers(ours, key) == pytest.approx(numbers(ddp, key), rel=1e-3), key
    assert numbers(ours, "num_trained_tokens") == numbers(ddp, "num_trained_tokens")
    for folder in ("final", "checkpoint-2"):
        state = {"optimizer.pt", "sharded_state"}
        here, there = ({path.name for path in (run / folder).iterdir()} for run in (ours, ddp))
        assert here ^ there <= state
        for path in (ddp / folder).glob("*.safetensors"):
            found, wanted = load_file(ours / folder / path.name), load_file(path)
            assert {name: value.dtype for name, value in found.items()} == {
                name: value.dtype for name, value in wanted.items()
            }
            for name, value in wanted.items():
                assert (found[name].float() - value.float()).abs().max() < 2e-3, name
        for name in ("config.json", "adapter_config.json", "generation_config.json"):
            if (ddp / folder / name).exists():
                assert (ours / folder / name).read_bytes() == (ddp / folder / name).read_bytes()
    assert (ours / "generation_eval.json").exists()


@pytest.mark.sample("full-*")
@pytest.mark.parametrize(("kind", "num_ranks"), [("full", 2), ("full", 4), ("lora", 2), ("nf4", 2)])
def test_a_run_goes_on_exactly_and_on_another_number_of_ranks(kind, num_ranks, trained, project):
    run = trained(kind, "fsdp2")
    again = project / f"{kind}-again-{num_ranks}"
    shutil.copytree(run, again)
    consent = ["--allow-changed", "num_ranks"] if num_ranks != 2 else []
    sft(project, "--resume", f"{again.name}/checkpoint-2", *consent, num_ranks=num_ranks)
    for key in ("loss", "grad_norm"):
        exact = pytest.approx(numbers(run, key), rel=1e-4) if consent else numbers(run, key)
        assert numbers(again, key) == exact, key
    if not consent:
        (found,) = (load_file(path) for path in (again / "final").glob("*.safetensors"))
        (wanted,) = (load_file(path) for path in (run / "final").glob("*.safetensors"))
        assert all(bool((found[name] == wanted[name]).all()) for name in wanted)


def test_every_optimizer_that_it_takes_trains_as_on_whole_weights():
    for found in run_ranks("parallel.fsdp_cases:steps_of", optims=[*SHARDED_OPTIMIZERS]):
        assert not {optim: far for optim, far in found.items() if far > 1e-5}


def test_one_process_may_shard_too(project):
    sft(
        project,
        *("--config", "r.yaml", "--output-dir", "alone", "parallel.shard=fsdp2"),
        *("training.max_steps=2", "generation_eval=null"),
        num_ranks=1,
    )
    assert (project / "alone/checkpoint-2/sharded_state").is_dir()


def test_a_bf16_model_keeps_fp32_masters_and_its_own_dtype():
    for found in run_ranks("parallel.fsdp_cases:what_a_bf16_model_computes_with"):
        assert found == {
            "seen": [[1811, "torch.bfloat16", "torch.bfloat16"]],
            "loss": "torch.float32",
            "held": ["torch.float32"],
            "saved": ["torch.bfloat16"],
            "tied": True,
        }


@pytest.mark.parametrize(("kind", "lora"), [("qwen2", False), ("llama", True)])
def test_a_rank_reads_its_part_of_the_weights_and_holds_no_more(kind, lora, request):
    """The bits of a model that was loaded whole; a weight's first rank may have a row more."""
    model = str(request.getfixturevalue(f"tiny_{kind}"))
    found = run_ranks("parallel.fsdp_cases:a_load_in_parts", model=model, lora=lora)
    for rank in found:
        assert not rank["different"]
        assert rank["same"]
        assert rank["before"] == rank["adapters"]
        assert rank["read"] < 0.52 * (rank["all"] - rank["adapters"])
        assert rank["held"] < 0.52 * rank["all"]
    assert sum(rank["read"] for rank in found) == found[0]["all"] - found[0]["adapters"]


def test_weights_of_every_family_are_read_in_parts_to_the_bit(tmp_path):
    """Files whose tensors have other names than the model's are loaded whole."""
    case = "parallel.fsdp_cases:families_in_parts"
    (found,) = run_ranks(case, world_size=1, folder=str(tmp_path))
    assert {name: is_equal for name, is_equal in found.items() if not is_equal} == {
        "qwen2_vl": None
    }


def test_a_packed_base_is_gathered_byte_by_byte(tiny_qwen2):
    """Also in layers whose other weights are all in half precision."""
    case = "parallel.fsdp_cases:packed_weights_through_a_copy_that_rounds"
    for wrong in run_ranks(case, model=str(tiny_qwen2)):
        assert len(wrong) == 7
        assert not any(wrong.values()), wrong


def test_a_weight_that_keeps_a_dtype_of_its_own_stays_whole_or_is_refused():
    case = "parallel.fsdp_cases:a_weight_that_stays_in_fp32"
    name = "model.layers.0.input_layernorm.weight"
    for whole in run_ranks(case, is_trained=False):
        assert whole == [name]
    for said in run_ranks(case, is_trained=True):
        assert name in said
        assert "zero3" in said
