"""A replacement for CUDA graphs on a CPU: a tape of everything that a pass has launched."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from patchedserve.kernels.launch import TritonKernel
from patchedserve.serving.core.captured import Pause, Results

_ON_THE_HOST = (
    (torch, "from_numpy"),
    *((Tensor, name) for name in ("item", "tolist", "numpy", "nonzero", "cpu", "__bool__", "__int__", "__float__")),
)
"""Functions that copy from host memory, or wait for the device. Some of them call no operator of aten on a CPU."""
_WAITS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


class Tape:
    """A recorder for any device. Playing back launches the operators and Triton kernels of the recorded work again.

    As in a CUDA graph, Python does not run again: numbers, shapes and choices are those of the recording, and every
    result is written to the same memory. Tensors made outside of the work are read in place, and are not kept alive.

    Raises AssertionError:
        while recording: the work reads a value on the host, or copies from host memory;
        while playing back: a tensor that was made outside of the work is gone.
    """

    def __init__(self) -> None:
        self.recorded = self.played = 0

    def __call__(self, work: Callable[[Pause], Tensor]) -> tuple[Callable[[], object], Tensor]:
        self.recorded += 1
        recording = _Recording()
        # A compiled function launches kernels without passing through a dispatch mode.
        with torch.compiler.set_stance("force_eager"), _device_only(recording), recording:
            result = work(recording.pause)
        calls = recording.calls
        # Recording a graph computes nothing.
        result.fill_(float("nan"))

        def play() -> None:
            self.played += 1
            for call in calls:
                call.run()

        return play, result


@dataclass(frozen=True, slots=True)
class _Outside:
    """Description of a tensor whose storage the tape does not own."""

    storage: StorageWeakRef
    like: Tensor
    """An empty tensor of the same dtype and device."""
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> "_Outside":
        storage = StorageWeakRef(tensor.untyped_storage())
        return cls(storage, tensor.new_empty(0), int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride())

    def tensor(self) -> Tensor:
        storage = torch.UntypedStorage._new_with_weak_ptr(self.storage.cdata)
        assert storage is not None, f"a tensor {list(self.size)} that was made outside of the pass is gone"
        return torch.empty_like(self.like).set_(storage, self.offset, self.size, self.stride)


@dataclass(frozen=True, slots=True)
class _Call:
    """A function to run again, its arguments, and the tensors that receive its results."""

    function: Callable[..., Any]
    arguments: Sequence[Any]
    spec: Any
    results: Sequence[tuple[int, Tensor]]
    """Index of each result and the tensor that it is copied to; results that are views of arguments are left out."""

    def run(self) -> None:
        given = [each.tensor() if isinstance(each, _Outside) else each for each in self.arguments]
        args, kwargs = tree_unflatten(given, self.spec)
        found = tree_leaves(self.function(*args, **kwargs)) if self.results else self.function(*args, **kwargs)
        for place, target in self.results:
            target.copy_(found[place])


class DeviceMode(TorchDispatchMode):
    """Receives the operators of aten and the Triton launches of one thread, which are the work of a device."""

    def __init__(self) -> None:
        super().__init__()
        self._thread = threading.get_ident()

    @property
    def is_own_thread(self) -> bool:
        """Whether the caller is the thread that made the mode."""
        return threading.get_ident() == self._thread

    def launch(self, kernel: TritonKernel, *args: Any, **kwargs: Any) -> None:
        """Take the launch of a Triton kernel; the arguments are those of `TritonKernel.launch`."""
        raise NotImplementedError

    @contextmanager
    def triton_launches(self) -> Iterator[None]:
        """Call `launch` in place of `TritonKernel.launch` in the mode's thread, until the context ends."""

        def launch(kernel: TritonKernel, *args: Any, **kwargs: Any) -> None:
            (self.launch if self.is_own_thread else _LAUNCH)(kernel, *args, **kwargs)

        with mock.patch.object(TritonKernel, "launch", launch):
            yield

    @staticmethod
    def reads_values(func: Any, given: Sequence[Tensor]) -> bool:
        """Return whether the host needs values of these tensors before it can continue."""
        if func._schema.name.startswith("aten::index"):
            # Indexing with integers reads no values; a mask must be converted to integers.
            return any(each.dtype in (torch.bool, torch.uint8) for each in given[1:])
        return bool(_WAITS & set(func.tags))

    @staticmethod
    def made(found: Any, given: Sequence[Tensor]) -> list[tuple[int, Tensor]]:
        """Return the results that are no views of arguments, with their places among all results."""
        known = set(map(storage_of, given))
        return [
            (place, each)
            for place, each in enumerate(tree_leaves(found))
            if isinstance(each, Tensor) and storage_of(each) not in known
        ]


class _Recording(DeviceMode):
    """Records the calls of one thread."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[_Call] = []
        self.is_paused = False
        # Storages that were made while recording, and those of them on the host; tensors that keep the latter.
        self._own: set[int] = set()
        self._on_host: set[int] = set()
        self._held: list[Any] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.is_paused:
            return func(*args, **kwargs)
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        assert not self.reads_values(func, given), f"{func} cannot be recorded: it waits for the device"
        found = func(*args, **kwargs)
        known = {storage_of(each) for each in given}
        # A tensor made from Python numbers is on the host, and so is one computed, once, from such tensors only.
        if func is torch.ops.aten.lift_fresh.default or (known and known <= self._on_host):
            self._own |= {storage_of(each) for each in tree_leaves(found) if isinstance(each, Tensor)}
            self._on_host |= {storage_of(each) for each in tree_leaves(found) if isinstance(each, Tensor)}
            self._held.append(found)
            return found
        copied = [each for each in given if each.dim() and storage_of(each) in self._on_host]
        assert not copied, f"{func} cannot be recorded: it copies from the host"
        results = self.made(found, given)
        if results or func._schema.is_mutable:
            self._log(func, args, kwargs, results)
        self._own |= {storage_of(each) for _, each in results}
        return found

    def pause(self, run: Callable[..., Results], inputs: Sequence[Tensor]) -> Results:
        """Run work now and whenever the tape is played back; see `captured.Pause`."""
        self.is_paused = True
        results = tuple(map(_unset_like, run(*inputs)))
        self._own |= {storage_of(each) for each in results}
        self._log(run, tuple(inputs), {}, list(enumerate(results)))
        return results

    def launch(self, kernel: TritonKernel, *args: Any, **kwargs: Any) -> None:
        """Launch a Triton kernel, which writes into its arguments, and record the launch."""
        self.is_paused = True
        try:
            _LAUNCH(kernel, *args, **kwargs)
        finally:
            self.is_paused = False
        self._log(_LAUNCH, (kernel, *args), kwargs, ())

    def _log(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        results: Sequence[tuple[int, Tensor]],
    ) -> None:
        def kept(tensor: Tensor) -> Tensor | _Outside:
            return tensor if storage_of(tensor) in self._own else _Outside.of(tensor)

        self.is_paused = True
        arguments, spec = tree_flatten((args, kwargs))
        self.calls.append(_Call(function, tree_map_only(Tensor, kept, arguments), spec, results))
        self.is_paused = False


_LAUNCH = TritonKernel.launch


def _unset_like(tensor: Tensor) -> Tensor:
    """Return a tensor of the same form, with values that no pass has computed."""
    return torch.full_like(tensor, float("nan") if tensor.is_floating_point() else torch.iinfo(tensor.dtype).max)


def storage_of(tensor: Tensor) -> int:
    """Return a number that all tensors on the same memory share."""
    return tensor.untyped_storage()._cdata


@contextmanager
def _device_only(recording: _Recording) -> Iterator[None]:
    """Record Triton launches and refuse operations of the host in this thread; other threads may encode and decode."""

    def refusal(name: str, usual: Callable[..., Any]) -> Callable[..., Any]:
        def refuse(*args: object, **named: object) -> Any:
            assert not recording.is_own_thread or recording.is_paused, f"{name} cannot be recorded"
            return usual(*args, **named)

        return refuse

    with ExitStack() as changed:
        for where, name in _ON_THE_HOST:
            changed.enter_context(mock.patch.object(where, name, refusal(name, getattr(where, name))))
        changed.enter_context(recording.triton_launches())
        yield
