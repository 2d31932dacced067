"""The parts of a model that see images: which train, and how they are called.

A rank whose batch has no image would not call the tower, and its gradients would wait for one that
never comes; so would the other ranks, for its part of a sharded weight. Where tower or projector
train or weights are sharded, such a batch shows them the smallest image there is and takes none of
its features: the same modules run everywhere, and their gradients are zeros.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map
from transformers import PreTrainedModel

from trainkit.auto_class import without_adapters
from trainkit.errors import ModelError
from trainkit.models.attention import NAME, OF_IMAGES, register
from trainkit.models.attention.pattern import Documents
from trainkit.models.frozen import outside_text
from trainkit.models.linears import num_weights
from trainkit.models.swap import subclass_of
from trainkit.options.vision import VISION, tile_tokens, why_unserved

_OF_ROWS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
"""What says where documents are in a row, and would be taken for where images are in the tower."""

_BOUNDS = "cu_seqlens"
"""As transformers' towers call where images begin and end."""


def choose_parts(model: PreTrainedModel, train: Sequence[str]) -> dict[str, nn.Parameter]:
    outside, chosen = outside_text(model), set[int]()
    for part in train:
        if part != "text":
            refuse_no_parts(model, f"model.train: {part}")
            chosen |= set(map(id, parts_of(model)[part]))
    for name, parameter in model.named_parameters():
        is_trained = id(parameter) in chosen if name in outside else "text" in train
        if not is_trained:
            parameter.requires_grad_(False)
    return {name: each for name, each in outside.items() if id(each) not in chosen}


def refuse_no_parts(model: PreTrainedModel, value: str) -> None:
    model_type = model.config.model_type
    if model_type not in VISION:
        raise ModelError(
            f"{value} names a part of a model that sees images: {model_type}: "
            f"{why_unserved(model_type)}",
            where=value.partition(":")[0],
            fix="remove it",
        )


def parts_of(model: Any) -> dict[str, list[nn.Parameter]]:
    """The parameters of projector, tower and text model, adapters with them, in this order."""
    inner = without_adapters(model).base_model
    family, found, taken = VISION.get(inner.config.model_type), {}, set[nn.Parameter]()
    modules: dict[str, list[Any]] = {"text": [model]}
    if family is not None:
        seeing = {"projector": family.projector, "vision": (family.tower,)}
        modules = {part: [*map(inner.get_submodule, seeing[part])] for part in seeing} | modules
    for part, those in modules.items():
        every = dict.fromkeys(each for module in those for each in module.parameters())
        found[part] = [each for each in every if each not in taken]
        taken |= every.keys()
    return found


def ratio_by_part(
    model: Any, ratios: Mapping[Any, float]
) -> Callable[[nn.Parameter], float | None]:
    """Each parameter's learning rate over the recipe's, where its part has one of its own.

    Raises:
        ModelError: a part is not there, or nothing of it trains.
    """
    known: dict[nn.Parameter, float] = {}
    parts = parts_of(model) if ratios else {}
    for part, ratio in ratios.items():
        if part != "text":
            refuse_no_parts(without_adapters(model), f"model.lr_ratios: {part}")
        trained = [each for each in parts[part] if each.requires_grad]
        if not trained:
            raise ModelError(
                f"nothing of the {part} trains, so it has no learning rate",
                where=f"model.lr_ratios.{part}",
                fix="remove it",
            )
        known |= dict.fromkeys(trained, ratio)
    return known.get


def describe_parts(
    model: Any, ratios: Mapping[Any, float], learning_rate: float
) -> dict[str, dict[str, float]]:
    """The parts of which something trains: how many ``parameters``, at which ``learning_rate``."""
    sizes = {
        part: sum(num_weights(each) for each in parameters if each.requires_grad)
        for part, parameters in reversed(parts_of(model).items())
    }
    return {
        part: {"parameters": size, "learning_rate": learning_rate * ratios.get(part, 1.0)}
        for part, size in sizes.items()
        if size
    }


class Sight:
    """Hooks on a model that is trained on rows with images.

    Attributes:
        is_everywhere: every batch calls the modules that see, where they train; set when training
            begins, since what is proved before looks at tokens alone.
        is_sharded: ranks hold parts of weights, so batches of evaluations do, too, trained or not.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.family = VISION[model.config.model_type]
        self.config = model.config
        self.base = base = model.base_model
        self.is_everywhere = self.is_sharded = self._is_blank = False
        implementation = str(self.config.get_text_config()._attn_implementation)
        if self.ahead and implementation not in (NAME, "sdpa", "eager"):
            raise ModelError(
                f"image tokens see one another, and attention {implementation} has no such mask",
                where="model.attn_implementation",
                fix="set it to auto",
            )
        tower = base.get_submodule(self.family.tower)
        attend_in_tower(tower, by_bounds=True)
        for module in tower.modules():
            if type(module) is nn.Conv3d and module.padding == (0, 0, 0) and module.groups == 1:
                module.__class__ = subclass_of(nn.Conv3d, _PatchProduct)
        self._inner: Callable[..., Any] = base.get_image_features
        features = functools.partial(self._features)  # `generate` reads the signature
        base.get_image_features = functools.update_wrapper(features, self._inner)
        base.register_forward_pre_hook(self._before, with_kwargs=True)
        base.sight = self

    @property
    def trains(self) -> bool:
        """Whether something that sees images has gradients, adapters included."""
        parts = map(self.base.get_submodule, (self.family.tower, *self.family.projector))
        return any(each.requires_grad for part in parts for each in part.parameters())

    def _before(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        self._is_blank = False
        if kwargs.get("pixel_values") is not None:
            return (args, {**kwargs, "attention_mask": self._masks(kwargs)}) if self.ahead else None
        learns = module.training and torch.is_grad_enabled()
        if not self.is_everywhere or not (self.is_sharded or (learns and self.trains)):
            return None
        self._is_blank = True
        device = next(self.base.parameters()).device
        blank = {name: each.to(device) for name, each in self.blank.items()}
        if self.family.positions == "mrope" and kwargs.get("position_ids") is None:
            tokens = kwargs["input_ids"]  # else they would be looked for in the blank image
            places = torch.arange(tokens.shape[1], device=tokens.device)
            blank["position_ids"] = places.expand(tokens.shape)
        return args, {**kwargs, **blank}

    @property
    def ahead(self) -> bool:
        """Whether the tokens of an image see one another in some layer."""
        return sees_ahead(self.config)

    def _masks(self, kwargs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """(B, 1, S, S) for each kind of layer: what is before, and in some all of one's own image.

        As transformers composes them for one document; windows cut both.
        """
        tokens, config = kwargs["input_ids"], self.config.get_text_config()
        is_image = tokens == self.config.image_token_id
        begins = is_image & ~nn.functional.pad(is_image, (1, 0))[:, :-1]
        image = begins.cumsum(1) * is_image
        place = torch.arange(tokens.shape[1], device=tokens.device)
        back = place[:, None] - place
        same = (image[:, :, None] == image[:, None]) & is_image[:, :, None]
        reach = torch.ones_like(same)
        bounds, given = kwargs.get("cu_seq_lens_q"), kwargs.get("attention_mask")
        if bounds is not None:
            numbers = Documents(bounds, 0).numbers(*tokens.shape)
            reach = numbers[:, :, None] == numbers[:, None]
        elif given is not None:
            reach = reach & given[:, None].bool()
        window = config.sliding_window
        near = reach if window is None else reach & (back < window)
        found = {}
        for kind, seen in (("full_attention", reach), ("sliding_attention", near)):
            forth = same | (back >= 0) if kind in self.family.sees_ahead else back >= 0
            found[kind] = (seen & forth)[:, None]
        if config._attn_implementation != "eager":
            return found
        dtype = self.base.dtype
        least = torch.finfo(dtype).min
        return {
            name: torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, least)
            for name, mask in found.items()
        }

    def _features(self, *args: Any, **kwargs: Any) -> Any:
        given = {name: value for name, value in kwargs.items() if name not in _OF_ROWS}
        if self.trains:
            found = self._inner(*args, **given)
        else:
            found = self._read_only(args, given)
        if self._is_blank:
            for name in ("pooler_output", "deepstack_features"):  # a tensor, or some, in some
                if getattr(found, name, None) is not None:
                    setattr(found, name, tree_map(lambda each: each[:0], getattr(found, name)))
        return found

    @torch.no_grad()
    def _read_only(self, args: tuple[Any, ...], given: dict[str, Any]) -> Any:
        """Features of parts that do not train, in their weights' own 16 bits where these are its.

        Autocast would widen each LayerNorm, whose result the next product rounds again.
        """
        parts = list(map(self.base.get_submodule, (self.family.tower, *self.family.projector)))
        (first, *others) = {each.dtype for part in parts for each in part.parameters()}
        kind = next(parts[0].parameters()).device.type
        if others or not torch.is_autocast_enabled(kind) or first != torch.get_autocast_dtype(kind):
            return self._inner(*args, **given)

        def narrow(value: Any) -> Any:
            is_wide = isinstance(value, torch.Tensor) and value.is_floating_point()
            return value.to(first) if is_wide else value

        with torch.autocast(kind, enabled=False):
            return self._inner(*map(narrow, args), **tree_map(narrow, given))

    @functools.cached_property
    def blank(self) -> Mapping[str, torch.Tensor]:
        """The smallest image, as the image processor would give it."""
        return blank_images(self.config)


class _PatchProduct(nn.Conv3d):
    """A convolution over one patch a row is a product, which is 20 times as fast."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[2:] != self.kernel_size:
            return super().forward(x)
        found = nn.functional.linear(x.flatten(1), self.weight.flatten(1), self.bias)
        return found[:, :, None, None, None]


def sees_ahead(config: Any) -> bool:
    """Whether the tokens of an image see one another in some layer."""
    family = VISION.get(config.model_type)
    # None in Gemma 4's small models, whose attention is causal throughout.
    both_ways = getattr(config.get_text_config(), "use_bidirectional_attention", False)
    return family is not None and bool(family.sees_ahead) and both_ways is not None


def attend_in_tower(tower: nn.Module, *, by_bounds: bool) -> None:
    """Have a tower attend by SDPA, whatever the text model does: it has no documents.

    ``by_bounds`` has towers whose images are one sequence attend to all in one call. Image by image
    cuDNN would make a plan for each new size of an image, which takes longer than attending.
    """
    register()
    modules: list[Any] = [module for module in tower.modules() if hasattr(module, "config")]
    has_bounds = any(_BOUNDS in inspect.signature(each.forward).parameters for each in modules)
    for module in modules:
        module.config._attn_implementation = OF_IMAGES if by_bounds and has_bounds else "sdpa"


def blank_images(config: Any, num_tokens: int = 1) -> dict[str, torch.Tensor]:
    """Images of about so many tokens, as the image processor gives them; at least the smallest."""
    kind, vision = VISION[config.model_type].processor, config.vision_config
    patch = vision.patch_size
    if kind == "patches":
        rows, columns = _near_square(num_tokens)
        merge = vision.spatial_merge_size
        values = 3 * vision.temporal_patch_size * patch**2
        grid = torch.tensor([[1, rows * merge, columns * merge]])
        return {
            "pixel_values": torch.zeros(rows * columns * merge**2, values),
            "image_grid_thw": grid,
        }
    if kind == "pooled":
        side = min(math.isqrt(num_tokens), _MOST_POOLED)
        count, edge = max(num_tokens // side**2, 1), side * vision.pooling_kernel_size
        places = torch.cartesian_prod(torch.arange(edge), torch.arange(edge))
        return {
            "pixel_values": torch.zeros(count, edge**2, 3 * patch**2),
            "image_position_ids": places.expand(count, -1, -1),
        }
    if kind == "rows":
        side = patch * config.spatial_merge_size
        most = (vision.image_size // side) ** 2
        # Of one token, transformers loses the axis.
        rows, columns = _near_square(max(min(num_tokens, most), 2))
        count, size = max(num_tokens // most, 1), (rows * side, columns * side)
        return {
            "pixel_values": torch.zeros(count, 3, *size),
            "image_sizes": torch.tensor([size] * count),
        }
    side = vision.image_size
    tall, wide = side if isinstance(side, list | tuple) else (side, side)
    each = config.mm_tokens_per_image if kind == "fixed" else tile_tokens(config)
    pixels = torch.zeros(max(int(num_tokens // each), 1), 3, tall, wide)
    return {"pixel_values": pixels[:, None] + 1 if kind == "tiles" else pixels}


def loss_of_a_small_image(model: Any) -> torch.Tensor | float:
    """Of what a tower makes of one, with gradients; 0.0 without one that takes every size."""
    family = VISION.get(model.config.model_type)
    if family is None or family.processor not in ("patches", "rows", "pooled"):
        return 0.0
    if model.config.vision_config is None:  # of Gemma 4 there are models without
        return 0.0
    given = blank_images(model.config, num_tokens=6)
    generator = torch.Generator().manual_seed(0)
    drawn = torch.rand(given["pixel_values"].shape, generator=generator)
    given["pixel_values"] = drawn.to(model.dtype)
    given = {name: each.to(model.device) for name, each in given.items()}
    seen = model.base_model.get_image_features(**given, return_dict=True)
    return sum(each.square().mean() for each in features_of(seen))


def features_of(seen: Any) -> list[torch.Tensor]:
    """What goes into the text model of what `get_image_features` returns."""
    found = tree_leaves([seen.pooler_output, getattr(seen, "deepstack_features", None)])
    return [each for each in found if isinstance(each, torch.Tensor)]


_MOST_POOLED = 16
"""Rows and columns of an image of Gemma 4, which takes 280 tokens at most."""


def _near_square(count: int) -> tuple[int, int]:
    rows = math.isqrt(count)
    return rows, count // rows
