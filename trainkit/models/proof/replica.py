"""A small model of the same classes and settings, on which proofs and checks run.

It has the model's own configuration with fewer layers, and random weights. So it can be made
however the model itself is held: sharded, quantised, adapted, on the meta device.
"""

import copy
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from trainkit.auto_class import FAILURES, empty_model
from trainkit.errors import PatchError
from trainkit.models.linears import kind_of
from trainkit.models.swap import plain_class
from trainkit.options.vision import VISION
from trainkit.parallel.parameters import made_whole, where_it_computes

_PER_TOKEN = re.compile(
    r"(num_experts_per_tok(en)?|moe_top_?k|moe_k|num_selected_experts|top_k_experts)"
)

VOCABULARY, CPU_VOCABULARY = 32_768, 4096
"""The most tokens that a replica knows. The truth of an output layer of 150,000, in fp64, took 37
GiB of a GPU next to a 7B in 4 bits, which trains in 8; on a CPU it takes minutes."""

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""How many there are: the function is the same, and a replica has few."""

_PLACES = ("layer_idx", "layer_id", "layer_index", "layer_number", "layer_num", "block_idx", "idx")
Signature = tuple[Any, ...]


def outermost(model: nn.Module) -> PreTrainedModel:
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            return module
    raise PatchError(f"{type(model).__name__} holds no Hugging Face model")


def signature(module: nn.Module) -> Signature:
    """What makes two modules the same function, but for their weights.

    Adapted and quantised linear layers count as the linear layers they stand for.
    """
    module = unwrapped(module)
    own = vars(module).items()
    plain = sorted(
        (name, value if isinstance(value, bool | int | float | str) else _named(value))
        for name, value in own
        if (isinstance(value, bool | int | float | str) or _named(value))
        and name not in (*_PLACES, *_EXPERTS, "training", "gradient_checkpointing")
        and not name.startswith("_")
    )
    children = tuple(
        (name, "linear" if is_linear(child) else signature(child))
        for name, child in module.named_children()
    )
    return (plain_class(module), tuple(plain), children)


def code_signature(module: nn.Module) -> Signature:
    """What makes two modules run the same lines: numbers may differ, as multipliers by depth do."""
    own = sorted(
        (name, value)
        for name, value in vars(module).items()
        if isinstance(value, bool | str)
        and name not in ("training", "gradient_checkpointing")
        and not name.startswith("_")
    )
    names = tuple(name for name, _ in module.named_children())
    return (plain_class(module), "code", tuple(own), names)


def _named(value: Any) -> str:
    """Of a function that a module holds, its name: activations may be given as such."""
    is_function = callable(value) and not isinstance(value, nn.Module | type)
    return getattr(value, "__qualname__", "") if is_function else ""


def is_linear(module: nn.Module) -> bool:
    """Whether it is a linear layer, plain, packed or adapted."""
    return kind_of(unwrapped(module)) is not None


def unwrapped(module: nn.Module) -> nn.Module:
    """What an adapter, or peft's ``modules_to_save``, lies on."""
    for name in ("base_layer", "original_module"):
        inner = getattr(module, name, None)
        if isinstance(inner, nn.Module):
            return inner
    return module


def replica_of(config: Any, *, trust_remote_code: bool = False) -> PreTrainedModel:
    """The replica of a model of which there is a configuration alone; two layers at least."""
    model = empty_model(config, trust_remote_code=trust_remote_code)
    if num_layers_needed(model) is None:
        raise PatchError(f"{type(model).__name__} has no list of its layers")
    return make_replica(model, CPU_VOCABULARY, few_experts=True, least_layers=2)


def make_replica(
    model: nn.Module,
    vocabulary: int | None = None,
    *,
    few_experts: bool = False,
    least_layers: int = 1,
) -> PreTrainedModel:
    """The plain model: a layer of each kind, random weights, in the model's dtype and place."""
    causal_lm: Any = outermost(model)
    if all(each.is_meta for each in (*causal_lm.parameters(), *causal_lm.buffers())):
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        dtype = torch.float32
    else:
        device, dtype = where_it_computes(causal_lm)
    needed = num_layers_needed(causal_lm)
    needed = None if needed is None else max(needed, least_layers)
    config = with_layers(copy.deepcopy(causal_lm.config), needed)
    text = config.get_text_config()
    config.use_cache = text.use_cache = False
    shorten_tower(config)
    if few_experts:
        _cut_experts(text)
    most = CPU_VOCABULARY if device.type == "cpu" else VOCABULARY
    text.vocab_size = min(text.vocab_size, vocabulary or most, most)
    if (getattr(text, "pad_token_id", None) or 0) >= text.vocab_size:
        text.pad_token_id = 0
    config._attn_implementation = "sdpa" if causal_lm._supports_sdpa else "eager"
    drawing = torch.random.fork_rng([device] if device.type == "cuda" else [])
    with made_whole(), drawing, device:
        torch.manual_seed(0)
        replica: PreTrainedModel = plain_class(causal_lm)(config)
        for name, parameter in replica.named_parameters():
            # Norms begin at one and biases at zero: that would hide much.
            if parameter.dim() == 1 or name.endswith("bias"):
                parameter.data += 0.1 * torch.randn_like(parameter)
    with suppress(*FAILURES):  # not every class has experts; grouped products take no fp64
        replica.set_experts_implementation("eager")
    # What adapters freeze gets no gradient here either: those of embeddings and head, in two
    # dtypes, would take more memory than a 4-bit base.
    if not any(p.requires_grad for end in _ends(causal_lm) for p in end.parameters()):
        for end in _ends(replica):
            end.requires_grad_(False)
    return cast(replica, dtype).eval()


def shorten_tower(config: Any) -> None:
    """Leave two layers in what sees, the others being like them."""
    vision = getattr(config, "vision_config", None) if config.model_type in VISION else None
    for name in ("depth", "num_hidden_layers"):
        if isinstance(getattr(vision, name, None), int):
            setattr(vision, name, min(getattr(vision, name), 2))


_GROUPS = ("n_group", "num_expert_groups")


def _cut_experts(config: Any) -> None:
    """Twice as many as a token may go to, a whole number of groups of two at least."""
    names = [name for name in _EXPERTS if isinstance(getattr(config, name, None), int)]
    chosen = [
        value
        for name, value in vars(config).items()
        if isinstance(value, int) and re.fullmatch(_PER_TOKEN, name)
    ]
    groups = max([getattr(config, name, None) or 1 for name in _GROUPS])
    if chosen and names:
        number = -(-max(2 * max(chosen), 2 * groups, 4) // groups) * groups
        for name in names:
            setattr(config, name, min(getattr(config, name), number))


def with_layers(config: Any, num_layers: int | None) -> Any:
    """The configuration with so many layers; lists of one value a layer are cut with them."""
    text = config.get_text_config()
    before = getattr(text, "num_hidden_layers", None)
    if num_layers is None or not isinstance(before, int) or num_layers >= before:
        return config
    for name, value in list(vars(text).items()):
        if isinstance(value, list | tuple) and len(value) == before:
            setattr(text, name, value[:num_layers])
    text.num_hidden_layers = num_layers
    return config


def num_layers_needed(model: Any) -> int | None:
    """How many of the first layers show every kind; None where no list of layers is found."""
    number = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == number:
            found: dict[Signature, int] = {}
            for index, layer in enumerate(module):
                found.setdefault(signature(layer), index)
            return max(found.values()) + 1
    return None


def _ends(model: Any) -> Iterator[nn.Module]:
    for end in (model.get_input_embeddings(), model.get_output_embeddings()):
        if end is not None:
            yield end


def cast(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """Parameters only: the rotary tables stay in fp32, as from_pretrained leaves them."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def known(tokens: Mapping[str, Tensor], replica: PreTrainedModel) -> dict[str, Tensor]:
    size = replica.config.get_text_config().vocab_size
    return {key: ids.where(ids < 0, ids % size) for key, ids in tokens.items()}
