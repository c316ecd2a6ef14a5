"""A GPU for machines without one: code takes the paths of CUDA, values are computed on the CPU, and everything that the
host asks of the device is listed.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from patchedserve.kernels import group_norm_stats, group_norm_stitch, halo, launch, patch, qk_norm_rotary, quantize_rows
from patchedserve.kernels.launch import TritonKernel
from patchedserve.serving.core.attention import _attend_masked

from .tape import DeviceMode

DEVICE = torch.device("cuda", 0)
_FILE = Path(__file__).resolve()
_REPOSITORY = _FILE.parents[2]
_ATEN = torch.ops.aten
_ATTENTION = _ATEN.scaled_dot_product_attention.default
"""One kernel on a GPU. Decomposing it asks for kernels that only a build with CUDA has."""
_FLASH = torch.ops.torch_attn._varlen_attn.default
"""Flash attention of sequences, which a build for the CPU only traces."""
_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
_TRANSFERS = {_ATEN._to_copy.default, _ATEN.copy_.default}
_NO_WORK = {_ATEN.pin_memory.default, _ATEN._pin_memory.default, _ATEN.detach_.default}

Kind = Literal["launch", "wait", "copy"]


class _DeviceTensor(FakeTensor):
    """A tensor on the device. `real_tensor` has its values, shape and memory format on the CPU."""

    # Otherwise results on the host would become fake tensors, too.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def tolist(self) -> Any:
        """Return the values after one wait."""
        return self.cpu().tolist()


@dataclass(frozen=True, slots=True)
class Event:
    """A request of the host to the device.

    Attributes:
        kind: `launch`: an operator of aten or a Triton kernel that computes on the device. `wait`: the host continues
            only after the device has done all of its work. `copy`: a copy from host memory; one that blocks is followed
            by a wait.
        name: name of the operator, kernel or function.
        place: file and line in the repository of waits and copies.
    """

    kind: Kind
    name: str
    place: str = ""

    def __str__(self) -> str:
        return f"{self.kind} {self.name} {self.place}".rstrip()


class FakeDevice(DeviceMode):
    """The device `cuda:0`, while `fake_device` is active. Work belongs into `torch.inference_mode`.

    All tensors but `_DeviceTensor`s are on the host. An operator counts as one launch, though some start several
    kernels on a GPU; allocations and views count as none. Operators return the memory format that they have on a CPU,
    so a copy that makes a tensor contiguous may be missing or be one too many.

    Attributes:
        events: what the host has asked of the device, in order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.events: list[Event] = []
        self.mode = FakeTensorMode()
        self._has_values = self._is_decomposing = False

    def put(self, tensor: Tensor) -> Tensor:
        """Return a copy of a tensor of the host on the device, without an event."""
        with torch.inference_mode(), _disable_current_modes():
            return self._placed(tensor.detach().clone())

    def move(self, module: nn.Module) -> None:
        """Move parameters and buffers of a module to the device, without events."""
        moved: dict[Tensor, Tensor] = {}
        for part in module.modules():
            stores: Any = part._parameters, part._buffers
            for tensors in stores:
                for name, tensor in tensors.items():
                    if tensor is None:
                        continue
                    if tensor not in moved:
                        moved[tensor] = self.put(tensor)
                        moved[tensor]._is_param = isinstance(tensor, nn.Parameter)  # type: ignore[attr-defined]
                    tensors[name] = moved[tensor]

    def note(self, kind: Kind, name: str) -> None:
        """Record an event."""
        self.events.append(Event(kind, name, "" if kind == "launch" else _place()))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.ops.prim.device.default:
            # A method of `Tensor` guards the device, which a torch that was built without it cannot.
            return DEVICE if self._is_decomposing else torch.device("cpu")
        if func in _NO_WORK:
            return args[0]
        if _is_composite(func):
            before, self._is_decomposing = self._is_decomposing, True
            try:
                with self:
                    return func._op_dk(_COMPOSITE, *args, **kwargs)
            finally:
                self._is_decomposing = before
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        held = [each for each in given if isinstance(each, _DeviceTensor)]
        is_on_device = _is_on_device(func, given, kwargs.get("device"))
        if is_on_device or held:
            assert torch.Tag.inplace_view not in func.tags, f"{func} changes the shape of a tensor in place"
            self._note_transfers(func, args, kwargs, given, is_on_device=is_on_device)
        if kwargs.get("device") is not None:
            kwargs["device"] = torch.device("cpu")
        kwargs.pop("pin_memory", None)
        own_args, own_kwargs = _values(args), _values(kwargs)
        with _disable_current_modes():
            found = (_flash if func is _FLASH else func)(*own_args, **own_kwargs)
            if not is_on_device:
                return found
            if self._computes(func, found, given):
                self.note("launch", str(func))
            known = {id(each.real_tensor): each for each in held}
            return tree_map_only(
                Tensor, lambda each: known[id(each)] if id(each) in known else self._placed(each), found
            )

    def launch(self, kernel: TritonKernel, grid: tuple[int, ...], *args: object, **constants: object) -> None:
        """Count the launch of a Triton kernel. Its torch reference computes the values (`_REFERENCES`)."""
        assert self._has_values, f"no reference of {kernel._function.__name__} is known here"
        if 0 not in grid:
            self.note("launch", kernel._function.__name__)

    def with_values(self, wrapper: Callable[..., Any], reference: Callable[..., Any]) -> Callable[..., Any]:
        """Return the wrapper of Triton kernels, whose results then get the values of the torch reference."""

        def run(*args: Any) -> Any:
            self._has_values = True
            try:
                found = wrapper(*args)
            finally:
                self._has_values = False
            with _disable_current_modes():
                values = reference(*_values(args))
                if found is not None:  # what changes its arguments in place returns nothing
                    for target, value in zip(tree_leaves(found), tree_leaves(values), strict=True):
                        target.real_tensor.copy_(value)
            return found

        return run

    def _placed(self, real: Tensor) -> _DeviceTensor:
        like = torch.empty_strided(real.shape, real.stride(), dtype=real.dtype, device="meta")
        return _DeviceTensor(self.mode, like, DEVICE, real_tensor=real)

    def _note_transfers(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], given: list[Tensor], *, is_on_device: bool
    ) -> None:
        """Record the copy from the host and the wait that an operator causes before it computes."""
        on_host = [each for each in given if not isinstance(each, _DeviceTensor)]
        # A number on the host is an argument of the kernel, unless it is moved.
        is_copy = is_on_device and any(each.dim() or func in _TRANSFERS for each in on_host)
        waits = is_copy or self.reads_values(func, given)
        if func in _TRANSFERS:
            is_blocking = not (kwargs.get("non_blocking") or args[2:] == (True,))
            waits = is_blocking and (is_copy or not is_on_device)
        if is_copy:
            self.note("copy", str(func))
        if waits:
            self.note("wait", str(func))

    def _computes(self, func: Any, found: Any, given: list[Tensor]) -> bool:
        """Return whether an operator with a result on the device starts a kernel."""
        if func in _TRANSFERS and not all(isinstance(each, _DeviceTensor) for each in given):
            return False
        is_empty = func._schema.name.startswith(("aten::empty", "aten::new_empty"))
        made = any(each.numel() for _, each in self.made(found, _values(given)))
        return func._schema.is_mutable or (made and not is_empty)


@contextmanager
def fake_device() -> Iterator[FakeDevice]:
    """Make CUDA available as a `FakeDevice`, until the context ends. Nothing else may use CUDA meanwhile."""
    device = FakeDevice()
    queue = _Queue(device)
    with ExitStack() as changed:
        for name in ("Stream", "Event", "current_stream"):
            changed.enter_context(mock.patch.object(torch.cuda, name, return_value=queue))
        changed.enter_context(mock.patch.object(torch.cuda, "synchronize", queue.synchronize))
        changed.enter_context(mock.patch.object(torch.cuda, "stream", nullcontext))
        changed.enter_context(mock.patch.object(launch, "is_triton_installed", return_value=True))
        for module, name, reference in _REFERENCES:
            run = device.with_values(getattr(module, name), reference)
            changed.enter_context(mock.patch.object(module, name, run))
        changed.enter_context(device.triton_launches())
        # Under this mode torch creates tensors on devices that it was built without.
        changed.enter_context(device.mode)
        changed.enter_context(device)
        yield device


@dataclass(frozen=True, slots=True)
class _Queue:
    """Every stream and every event of a fake device, whose work is done at once."""

    device: FakeDevice

    def synchronize(self, device: object = None) -> None:
        self.device.note("wait", "synchronize")

    def record(self, stream: object = None) -> None: ...

    def wait_event(self, event: object) -> None: ...


def _is_composite(func: Any) -> bool:
    """Return whether torch itself runs an operator as several others. Decompositions in Python are for compilers."""
    is_decomposed = torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), _COMPOSITE)
    return is_decomposed and _COMPOSITE not in func.py_kernels and func is not _ATTENTION


def _is_on_device(func: Any, given: list[Tensor], target: torch.device | None) -> bool:
    """Return whether the results of an operator are on the device."""
    if target is not None:
        return target.type == DEVICE.type
    if func._schema.is_mutable:
        return isinstance(given[0], _DeviceTensor)
    return any(isinstance(each, _DeviceTensor) for each in given)


def _values(given: Any) -> Any:
    """Return arguments with the values of tensors that are on the device."""
    return tree_map_only(_DeviceTensor, lambda each: each.real_tensor, given)


def _place() -> str:
    """Return file and line of the innermost call from the repository, outside of this module."""
    frame = sys._getframe(1)
    while frame is not None:
        path = Path(frame.f_code.co_filename).resolve()
        is_ours = path.is_relative_to(_REPOSITORY) and "site-packages" not in path.parts
        # A table is copied for the caller of `to_device`.
        is_ours = is_ours and path not in (_FILE, _FILE.with_name("tape.py"))
        if is_ours and frame.f_code.co_name != "to_device":
            return f"{path.relative_to(_REPOSITORY)}:{frame.f_lineno}"
        frame = frame.f_back
    raise AssertionError("a fake device is used by the repository only")


def _flash(query: Tensor, key: Tensor, value: Tensor, *given: Any) -> tuple[Tensor, ...]:
    """Compute `_FLASH` of tensors on the CPU, after the checks of the device."""
    *offsets, most_queries, most_keys, _, scale = given[:6]
    meta = [each.to("meta") for each in (query, key, value, *offsets)]
    traced = _FLASH(*meta, *given[2:])
    for each in (query, key, value):
        assert each.dtype in (torch.float16, torch.bfloat16)
        assert each.stride(-1) == 1
        assert each.shape[-1] % 8 == 0
        assert each.shape[-1] <= 256
    for tokens, ends, most in ((query, offsets[0], most_queries), (key, offsets[1], most_keys)):
        assert ends.dtype == torch.int32
        assert ends[0] == 0
        assert ends[-1] <= len(tokens)
        assert 0 <= ends.diff().min() <= ends.diff().max() <= most
    assert offsets[0][-1] == len(query), "results of other tokens are undefined"
    found = _attend_masked(query, key, value, offsets[0], offsets[1], most_queries, most_keys, scale=scale)
    return found, *(torch.zeros(each.shape, dtype=each.dtype) for each in traced[1:])


def _stitched(*given: Any) -> Tensor:
    """Torch reference of the wrapper that both functions of `group_norm_stitch` call."""
    *known, activation, width = given
    if width == 0:
        return group_norm_stitch.group_norm_apply_torch(*known[:-1], activation=activation)
    return group_norm_stitch.group_norm_silu_stitch_torch(*known, activation=activation, halo=width)


_REFERENCES: tuple[tuple[Any, str, Callable[..., Any]], ...] = (
    (patch, "_patch_split_triton", patch.patch_split_torch),
    (patch, "_patch_join_triton", patch.patch_join_torch),
    (halo, "_halo_gather_triton", halo.halo_gather_torch),
    (group_norm_stats, "_group_norm_stats_triton", group_norm_stats.group_norm_stats_torch),
    (group_norm_stitch, "_triton", _stitched),
    (qk_norm_rotary, "_qk_norm_rotary_triton", qk_norm_rotary.qk_norm_rotary_torch),
    (quantize_rows, "_quantize_rows_triton", quantize_rows.quantize_rows_torch),
)
"""Module, name and torch reference of the wrappers that launch Triton kernels."""
