"""Replacement of leaves in an unmodified diffusers model, whose own `forward` runs, and its reversal.

Every module must be of a class that is known to work on parts of images. A module that might read beyond its part is
refused by name.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from diffusers import ControlNetModel, UNet2DConditionModel
from torch import nn

from ...data.errors import UsageError
from ..families import transformer_of
from ..families.transformer import Transformer

# Classes whose forward treats tokens (or rows) one by one, or only calls its children; transformers name their own.
_POINTWISE = {
    *(
        "Linear",
        "Float8Linear",
        "LoRACompatibleLinear",
        "LayerNorm",
        "RMSNorm",
        "FP32LayerNorm",
        "SiLU",
        "GELU",
        "GEGLU",
        "Dropout",
    ),
    *("Identity", "ModuleList", "Sequential", "Timesteps", "TimestepEmbedding", "PixArtAlphaTextProjection", "Tanh"),
    *("FeedForward", "BasicTransformerBlock", "Transformer2DModel", "ResnetBlock2D", "Downsample2D", "Attention"),
    *("UNet2DConditionModel", "DownBlock2D", "CrossAttnDownBlock2D", "UpBlock2D", "CrossAttnUpBlock2D"),
    *("UNetMidBlock2DCrossAttn", "CombinedTimestepTextProjEmbeddings", "AdaLayerNormZero", "AdaLayerNormContinuous"),
    "ControlNetModel",
}
UNetLike = UNet2DConditionModel | ControlNetModel
_SWAPPED = {"Conv2d", "GroupNorm", "Attention", "Upsample2D", "Timesteps"}


class Swap(ABC):
    """Puts other leaves into one model, until `undo`.

    Args:
        model: model, modified in place; nothing is changed if it is refused.
        what, instead, models: as in `check_model`.

    Raises:
        UsageError: the model is refused, as in `check_model`.
    """

    def __init__(self, model: nn.Module, what: str, instead: str, models: Sequence[str]) -> None:
        self._undo: list[tuple[nn.Module, str, nn.Module]] = []
        check_model(model, what, instead, models)
        if isinstance(model, UNetLike):
            self.swap_unet(model)
        else:
            transformer = transformer_of(model)
            assert transformer is not None, "every model that is allowed is a U-Net or a family's transformer"
            self.swap_transformer(model, transformer)

    @abstractmethod
    def swap_unet(self, model: UNetLike) -> None:
        """Put the leaves into a U-Net, or into a ControlNet."""

    @abstractmethod
    def swap_transformer(self, model: Any, transformer: Transformer) -> None:
        """Put the leaves into a transformer, at the places that its family defines."""

    def put(self, parent: nn.Module, name: str, leaf: Any) -> None:
        """Replace a child module of `parent` by a leaf, or an attribute that is no module by another value."""
        self._undo.append((parent, name, getattr(parent, name)))
        # ModuleList names its children by number, and setattr takes that.
        setattr(parent, name, leaf)

    def wrap(self, parent: nn.Module, name: str | None, leaf: Callable[..., Any], *arguments: Any) -> None:
        """Replace a module within `parent` by a leaf, which takes the module and these arguments; None: nothing."""
        if name is not None:
            where, _, attribute = name.rpartition(".")
            own = parent.get_submodule(where)
            self.put(own, attribute, leaf(getattr(own, attribute), *arguments))

    def undo(self) -> None:
        """Put every original module back."""
        for parent, name, module in reversed(self._undo):
            setattr(parent, name, module)
        self._undo.clear()


def parent_of(modules: dict[str, nn.Module], name: str) -> tuple[nn.Module, str]:
    """Return the parent of a module and the module's attribute name there, given its name in the model."""
    parent, _, attribute = name.rpartition(".")
    return modules[parent], attribute


def check_model(model: nn.Module, what: str, instead: str, models: Sequence[str]) -> None:
    """Refuse a model with a module that might read beyond a part of an image.

    Args:
        model: unmodified model.
        what: name of the engine or option that runs it on parts of images.
        instead: what users can do instead.
        models: names of the supported model classes.

    Raises:
        UsageError: the model is refused; the message names the class or the module, and `instead`.
    """

    def refusal(problem: str) -> UsageError:
        return UsageError(f"{what} cannot run this model: {problem}; {instead}")

    if type(model).__name__ not in models:
        raise refusal(f"{type(model).__name__} is not one of {', '.join(models)}")
    dtypes = sorted({str(parameter.dtype).removeprefix("torch.") for parameter in model.parameters()})
    if len(dtypes) > 1:
        raise refusal(f"its weights have several dtypes ({', '.join(dtypes)})")
    for name, problem in _problems(model):
        raise refusal(f"module {name or type(model).__name__} ({type(model.get_submodule(name)).__name__}) {problem}")


def _problems(model: Any) -> Iterator[tuple[str, str]]:
    transformer = transformer_of(model)
    attention: Mapping[str, str] = {} if transformer is None else transformer.attention
    positions = None if transformer is None else transformer.positions
    known = _POINTWISE | _SWAPPED | attention.keys() | (set() if transformer is None else transformer.known_classes)
    for name, module in model.named_modules():
        kind = type(module).__name__
        if kind not in known:
            yield name, "is not known to work on parts of images"
        elif kind == "Conv2d" and not _is_known_conv(module) and not name.startswith("pos_embed"):
            yield name, f"is neither 1 x 1 nor 3 x 3 with padding 1 and stride 1 or 2: {module.extra_repr()}"
        elif kind == "ResnetBlock2D" and (module.upsample is not None or module.downsample is not None):
            yield name, "changes the resolution inside a residual block"
        elif kind == "Upsample2D" and (module.use_conv_transpose or not module.use_conv or module.norm is not None):
            yield name, "up-samples in another way than nearest neighbours and a convolution"
        elif kind in ("UpBlock2D", "CrossAttnUpBlock2D") and getattr(module, "s1", None) is not None:
            yield name, "uses FreeU, which filters whole images; turn it off first (disable_freeu)"
        elif kind == "Attention" or kind in attention:
            if getattr(module, "is_cross_attention", False) and not name.endswith("attn2"):
                yield name, "attends to the text where other models attend to the image (only_cross_attention)"
            yield from ((name, problem) for problem in _attention_problems(module, attention.get(kind)))
        elif kind == "PatchEmbed" and not (
            module.flatten and not module.layer_norm and (positions or module.pos_embed_max_size)
        ):
            yield name, "embeds positions in another way than SD3"
    if isinstance(model, UNetLike):
        if model.config["encoder_hid_dim_type"] is not None:
            yield "", f"has encoder_hid_dim_type {model.config['encoder_hid_dim_type']}"
        if model.config["class_embed_type"] is not None or model.config["addition_embed_type"] not in (
            None,
            "text_time",
        ):
            yield "", "has conditions besides timestep, text and SDXL's added time ids"


def _is_known_conv(conv: nn.Conv2d) -> bool:
    same = (conv.dilation, conv.groups, conv.padding_mode) == ((1, 1), 1, "zeros")
    pointwise = (conv.kernel_size, conv.stride, conv.padding) == ((1, 1), (1, 1), (0, 0))
    square = conv.kernel_size == (3, 3) and conv.padding == (1, 1) and conv.stride in ((1, 1), (2, 2))
    return same and (pointwise or square)


def _attention_problems(attention: Any, processor: str | None) -> Iterator[str]:
    # Not all classes have all of these.
    if any(getattr(attention, name, None) is not None for name in ("group_norm", "spatial_norm", "norm_cross")):
        yield "has a norm of its own over all tokens"
    if getattr(attention, "residual_connection", False) or getattr(attention, "rescale_output_factor", 1) != 1:
        yield "adds a residual or rescales its output"
    kind, is_own = type(attention.processor).__name__, type(attention).__name__ != "Attention"
    # diffusers' own `Attention` does not show whether its projections have been unfused again; its processor does.
    if kind.startswith("Fused") or (is_own and attention.fused_projections):
        yield f"has fused projections ({kind}); undo them first (unfuse_qkv_projections)"
    elif kind not in ("AttnProcessor", "AttnProcessor2_0", processor):
        yield f"has the processor {kind}"
