"""What a way to spread a run does not go with is refused with the recipe, and by itself is not."""

import pytest

from trainkit.errors import RecipeError
from trainkit.recipe import load_recipe

RECIPE = "model: {name_or_path: m, dtype: bfloat16}\ndata: {train: [d.jsonl], max_length: 96}\n"
FSDP2, ROWS = {"shard": "fsdp2"}, {"sequence": 2}
PRODUCTS = {"shard": "zero1", "tensor": 2}
ROUTERS = "the routers of all layers have one loss"
STAGE = ["lora.r=4", "parallel.pipeline=2"]
TILES = ["model.mlp_chunk_tokens=4096"]
REFUSED = [
    (FSDP2, ["model.dtype=float16"], "fsdp2"),
    (FSDP2, ["training.fp16=true"], "fsdp2"),
    (FSDP2, ["training.optim=adafactor"], "fsdp2"),
    (FSDP2, ["training.optim=paged_adamw_8bit"], "fsdp2"),
    (FSDP2, ["training.torch_compile=true"], "fsdp2"),
    (FSDP2, ["training.torch_compile_mode=default"], "fsdp2"),
    (FSDP2, ["training.torch_compile_backend=inductor"], "fsdp2"),
    (FSDP2, ["training.save_only_model=true", "training.load_best_model_at_end=true",
             "data.eval=[e.jsonl]", "training.eval_strategy=steps"], "fsdp2"),
    (ROWS, ["model.attn_implementation=sdpa"], "attn_implementation(.|\n)*sequence"),
    (ROWS, ["training.torch_compile=true"], "torch_compile(.|\n)*sequence"),
    (ROWS, ["data.packing=true", "data.max_length=95"], "max_length(.|\n)*sequence"),
    (ROWS, ["model.fp8=true"], "sequence"),
    (ROWS, ["model.router_z_loss=0.1"], "router_z_loss(.|\n)*sequence"),
    (PRODUCTS, ["lora.r=4"], "lora(.|\n)*adapter"),
    (PRODUCTS, ["training.torch_compile=true"], "compiled"),
    (PRODUCTS, ["model.fp8=true"], "fp8"),
    ({"tensor": 2, "shard": "zero3"}, [], "zero1 only"),
    ({"pipeline": 2}, ["model.router_aux_loss=1"], f"model.router_aux_loss.*{ROUTERS}"),
    ({"pipeline": 2}, ["model.router_z_loss=1"], f"model.router_z_loss.*{ROUTERS}"),
    ({"schedule": "zbv"}, [*STAGE, "recompute={every: 1, offload: true}"], "recompute.offload"),
    ({"schedule": "zbv"}, [*STAGE, "lora.offload_activations=true", "recompute=full"],
     "lora.offload_activations"),
    *(({"shard": shard}, ["lora.quantize=int8"], "lora.quantize.*whole numbers")
      for shard in ("zero1", "zero2", "zero3", "zero3_offload", "fsdp2")),
    *((spread, TILES, "tile") for spread in ({"shard": "zero3"}, FSDP2, PRODUCTS, {"pipeline": 2})),
    ({}, [*TILES, "recompute=selective"], "tile"),
    ({}, [*TILES, "training.torch_compile=true"], "tile"),
]  # fmt: skip


@pytest.mark.parametrize(("spread", "words", "what"), REFUSED)
def test_what_does_not_go_together_is_refused_with_the_recipe(spread, words, what, tmp_path):
    recipe = tmp_path / "r.yaml"
    recipe.write_text(RECIPE)
    given = [f"parallel.{key}={value}" for key, value in spread.items()]
    with pytest.raises(RecipeError, match=what):
        load_recipe(recipe, [*given, *words])
    if spread.get("shard") != "zero3":
        load_recipe(recipe, words if spread else words[1:])
