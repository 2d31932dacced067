"""Whether documents can share a row: not where a layer carries state from token to token.

Attention keeps documents apart with its mask; a recurrence or a convolution over the sequence has
none, but where a kernel takes the boundaries. What the layers are decides, not what the model is
called.
"""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from trainkit.auto_class import empty_model
from trainkit.errors import ModelError

_MIXES_BY_STATE = frozenset({"linear_attention", "mamba", "mamba2", "conv", "recurrent", "rwkv"})
"""Values of ``config.layer_types`` that are not attention."""

STATE_PARAMETERS = frozenset({"A_log", "time_decay", "time_mix_key", "dt_bias", "slope_rate"})
"""What the decay of a recurrence is called in its layer."""


def refuse_recurrent(config: PreTrainedConfig, *, apart: bool = True) -> None:
    """Refuse packing for a model whose layers carry state, before its weights are read.

    Args:
        config: of the model; a skeleton without weights is built from it.
        apart: whether the kernel that keeps documents apart in a gated delta rule may run.
    """
    skeleton = skeleton_of(config)
    if skeleton is None:
        found = _state_in_config(config)
    else:
        with kept_apart(skeleton, apart):
            found = state_of(skeleton)
    if found is not None:
        raise ModelError(
            f"{config.model_type} cannot be trained on packed rows: {found}, which carries state "
            "from one document into the next",
            where="data.packing",
            fix="set data.packing to false"
            if apart
            else "set data.packing to false, or kernels to true: in trainkit's gated_delta_rule "
            "documents are kept apart",
        )


def kept_apart(model: PreTrainedModel, wanted: bool) -> AbstractContextManager[None]:
    """Within, layers whose kernel keeps documents apart run it, before anything is proved."""
    if not wanted or state_of(model) is None:
        return nullcontext()
    from trainkit.models.proof.delta import documents_apart

    return documents_apart(model)


def state_of(model: PreTrainedModel, *, split: bool = False) -> str | None:
    """The first layer of the text model that carries state along the sequence, in words.

    Where a kernel takes the boundaries of documents it carries none from one to the next; within
    one it does, which counts where rows are ``split``.
    """
    decoder = decoder_of(model)
    apart: tuple[str, ...] = ()
    for name, module in _text_layers(decoder):
        if getattr(module, "keeps_documents_apart", False) and not split:
            apart += (f"{name}.",)
        if f"{name}.".startswith(apart):
            continue
        if isinstance(module, nn.Conv1d):
            return f"its layer {name} is a convolution over the sequence"
        own: Iterable[str] = {*module._parameters, *module._buffers}
        found = STATE_PARAMETERS.intersection(own)
        if found:
            return f"its layer {name} ({type(module).__name__}) is a recurrence"
    if apart:
        return None
    if model._is_stateful or getattr(decoder, "_is_stateful", False):
        return "it is a recurrent model"
    return _state_in_config(model.config)


def decoder_of(model: PreTrainedModel) -> PreTrainedModel:
    """The text model under the head."""
    decoder = model.get_decoder()
    return decoder if isinstance(decoder, PreTrainedModel) else model.base_model


def _text_layers(decoder: PreTrainedModel) -> Iterator[tuple[str, nn.Module]]:
    """The modules of the stack of layers: not those of towers for images or sound next to it."""
    num_layers = getattr(decoder.config.get_text_config(), "num_hidden_layers", None)
    stacks = [
        (name, module)
        for name, module in decoder.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == num_layers
    ]
    outermost = min((name.count(".") for name, _ in stacks), default=0)
    chosen = [(name, stack) for name, stack in stacks if name.count(".") == outermost]
    for prefix, stack in chosen or [("", decoder)]:
        yield from stack.named_modules(prefix=prefix)


def _state_in_config(config: PreTrainedConfig) -> str | None:
    types: list[str] = getattr(config.get_text_config(), "layer_types", None) or []
    for index, each in enumerate(types):
        if each in _MIXES_BY_STATE:
            return f"its layer {index} is of the kind {each}"
    return None


def skeleton_of(config: PreTrainedConfig) -> PreTrainedModel | None:
    """The model on the meta device: modules and shapes, no memory; None where that cannot be."""
    try:
        model: PreTrainedModel = empty_model(
            config, trust_remote_code=False, attn_implementation="eager"
        )
    except (
        NotImplementedError, RuntimeError, ValueError, KeyError, AttributeError, TypeError,
        ImportError, ArithmeticError, AssertionError,
    ):  # fmt: skip
        return None  # its own code, its packages, sizes that do not fit, values: when loaded
    return model
