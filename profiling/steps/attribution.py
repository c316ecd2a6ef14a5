"""Attribution of a denoising step's recorded operators, scopes and kernels to categories. This module imports no torch.

An operator's own time (on CUDA, the time of its kernels) is charged to the outermost operator within the innermost
scope. The category follows from the name of that operator, or from the scope.
"""

from collections.abc import Iterable
from dataclasses import dataclass

CATEGORIES = {
    "linear": "linear layers",
    "attention": "scores, softmax and weighted sums, with norms of queries and keys",
    "convolution": "convolutions, also those that are matrix products",
    "group_norm": "GroupNorm, and what is fused with it",
    "stitching": "moves of data: gathers, concatenations, padding, copies, up-sampling",
    "element_wise": "activations, residual additions, LayerNorm, embeddings",
    "sampler": "all outside the model: its input, guidance, the update, the check for NaN",
    "host": "the rest of the wall time: Python and dispatch",
}
"""Categories of a step's time, each with what it includes."""

SCOPE_PREFIX = "psctl:"
STEP_SCOPE = "psctl:step "
"""Prefix of the scope of one step; the name of the side follows."""
MODEL_SCOPE = "psctl:model"
"""Scope of the whole model. The scope of a leaf module is `SCOPE_PREFIX` and a category."""

# Parts of the names of operators.
_OPERATORS = {"conv": "convolution", "attention": "attention", "group_norm": "group_norm"}
# Whole names, without the underscores around them.
_PRODUCTS = {"linear", "linear_pointwise", "addmm", "addmm_activation", "mm", "matmul", "bmm", "baddbmm"}
_MOVES = {
    *("cat", "concat", "stack", "index_select", "index", "gather", "take", "pad", "constant_pad_nd", "copy", "clone"),
    *("contiguous", "reshape", "flatten", "repeat", "repeat_interleave", "upsample_nearest2d"),
}
_VIEWS = {
    *("view", "unsafe_view", "reshape_alias", "view_as", "permute", "transpose", "t", "expand", "expand_as", "slice"),
    *("select", "narrow", "unbind", "split", "split_with_sizes", "chunk", "squeeze", "unsqueeze", "unflatten"),
    *("as_strided", "alias", "detach"),
}
# Parts of the names of Triton kernels. No operator launches Triton kernels, so others are categorised by their scope.
_MOVING_KERNELS = ("halo", "patch_move")


@dataclass(frozen=True, slots=True)
class HostSpan:
    """An operator or a scope that ran on the host. Times are in us."""

    name: str
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel on the device: when the host launched it, and how long it ran, in us."""

    name: str
    launched: float
    duration: float


@dataclass(slots=True)
class _Frame:
    """An open span: the categories of its own time and of the time inside it, and its own time so far."""

    end: float
    own: str
    inner: str
    is_scope: bool
    us: float


def attribute(spans: Iterable[HostSpan], kernels: Iterable[Kernel] | None = None) -> dict[str, float]:
    """Divide one step by category, in us.

    Args:
        spans: nested spans of one thread, including the step's own scope. Time that a scope spends outside operators
            is charged to the host, so that the sum is the length of the step.
        kernels: kernels of a CUDA device. If given, only they are counted, and the host stays at 0.
    """
    us = dict.fromkeys(CATEGORIES, 0.0)
    stack: list[_Frame] = []

    def close_until(time: float) -> None:
        while stack and stack[-1].end <= time:
            frame = stack.pop()
            if kernels is None:
                us[frame.own] += frame.us

    for event in sorted([*spans, *(kernels or ())], key=_order):
        if isinstance(event, Kernel):
            close_until(event.launched)
            us[_kernel_category(event.name, stack[-1]) if stack else "sampler"] += event.duration
            continue
        close_until(event.start)
        parent = stack[-1] if stack else None
        stack.append(_open(event, parent))
        if parent is not None:
            parent.us -= event.end - event.start
    close_until(float("inf"))
    return us


def _order(event: HostSpan | Kernel) -> tuple[float, float]:
    # If two spans start together, the longer one is the outer one; a kernel is launched inside both.
    return (event.launched, 0.0) if isinstance(event, Kernel) else (event.start, -event.end)


def _open(span: HostSpan, parent: _Frame | None) -> _Frame:
    duration = span.end - span.start
    if span.name.startswith(SCOPE_PREFIX):
        inner = span.name.removeprefix(SCOPE_PREFIX)
        if inner not in CATEGORIES:
            inner = "element_wise" if span.name == MODEL_SCOPE else "sampler"
        return _Frame(span.end, "host", inner, True, duration)
    if parent is None:
        category = "sampler"
    else:
        name = span.name.rpartition("::")[2].strip("_")
        category = _operator_category(name, parent.inner) if parent.is_scope else parent.own
    return _Frame(span.end, category, category, False, duration)


def _operator_category(name: str, scope: str) -> str:
    if scope == "sampler":
        return scope
    for part, category in _OPERATORS.items():
        if part in name:
            return category
    if name in _PRODUCTS:
        # A convolution of stitched patches is a matrix product, and attention may be two.
        return scope if scope == "convolution" or (scope == "attention" and "bmm" in name) else "linear"
    if name in _MOVES:
        return "stitching"
    return "host" if name in _VIEWS else scope


def _kernel_category(name: str, frame: _Frame) -> str:
    if frame.is_scope and any(part in name for part in _MOVING_KERNELS):
        return "stitching"
    return frame.inner
