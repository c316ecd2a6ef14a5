"""Recording of missing templates in the free places of the engine's batch (InstGenIE section 3.1)."""

import queue
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence

from torch import Tensor

from ...data.requests import Request
from ..core.prepared import PreparedRequest
from ..core.record_key import RecordKey
from ..models.reuse import PASSES_TOGETHER
from ..models.served import ServedModel
from .stages import StageThread

_MAX_WAITING, _MAX_GIVEN_UP = 16, 1024
_RecordedPasses = Sequence[Sequence[Mapping[str, Tensor]]]


class TemplateRecorder:
    """Records templates, one after the other, and each only once, however many edits have missed it.

    A separate thread prepares a template and writes its record. The engine's thread runs the passes, between two steps
    of the batch and at most as many as the batch has free places. Memory holds at most the values of one batch of
    passes, besides those that the store keeps. A recording that is not completed leaves nothing behind.

    Args:
        model: model with a store of templates.
        changed: condition that is notified when passes are ready to run.
        on_error: called if the thread ends by a defect.
    """

    def __init__(self, model: ServedModel, changed: threading.Condition, on_error: Callable[[], None]) -> None:
        assert model.reuse.store is not None, "there is no place for records"
        self._model, self._store, self._changed = model, model.reuse.store, changed
        self._recording: set[RecordKey] = set()
        self._given_up: deque[RecordKey] = deque(maxlen=_MAX_GIVEN_UP)
        self._pending_passes: Sequence[PreparedRequest] = ()
        self._results: queue.SimpleQueue[_RecordedPasses | Exception | None] = queue.SimpleQueue()
        self._thread = StageThread("psctl-record", self._record, device=model.device, on_error=on_error)

    @property
    def error(self) -> BaseException | None:
        """Defect that has ended the thread; None if there is none."""
        return self._thread.error

    @property
    def is_due(self) -> bool:
        """Whether there are passes to run."""
        return bool(self._pending_passes)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def request_recording(self, request: Request) -> None:
        """Request the recording of the template that an edit has missed. Not thread-safe.

        Does nothing if the template is being recorded or has failed before, if it belongs to a generation, which is
        over, if no edit could or should read the record, or if many others of its owner wait; a later edit then
        requests it again.
        """
        key = self._model.reuse.masked_key_of(request)
        if key is None or key.kind != "noised" or key in self._recording or key in self._given_up:
            return
        if sum(each.owner == key.owner for each in list(self._recording)) >= _MAX_WAITING:
            return
        self._recording.add(key)
        self._thread.put((request, key))

    def take_passes(self, num_free: int) -> None:
        """Run pending passes, at most `num_free`, in one batch; called from the engine's thread."""
        passes, self._pending_passes = self._pending_passes[:num_free], ()
        try:
            self._results.put(self._model.reuse.record(passes))
        except Exception as error:  # noqa: BLE001  requests in the batch are not affected
            self._results.put(error)

    def finish(self) -> None:
        """End the thread; unfinished recordings are discarded."""
        self._thread.discard_queued()
        self._results.put(None)
        self._thread.finish()

    def _record(self, wanted: tuple[Request, RecordKey]) -> None:
        request, key = wanted
        try:
            # Another process may have recorded it meanwhile.
            if self._store.find(key, self._model.device) is None:
                self._store.add(key, self._recorded_steps(request), self._model.device)
        except _StoppedError:
            return
        except Exception as error:  # noqa: BLE001  edits are exact without a record
            self._given_up.append(key)
            warnings.warn(f"template {key.digest} could not be recorded, and is not tried again: {error}", stacklevel=1)
        finally:
            self._recording.discard(key)

    def _recorded_steps(self, request: Request) -> Iterator[Sequence[Mapping[str, Tensor]]]:
        passes = self._model.reuse.template_passes(request)
        while passes:
            with self._changed:
                self._pending_passes = passes[:PASSES_TOGETHER]
                self._changed.notify_all()
            taken = self._results.get()
            if taken is None:
                raise _StoppedError
            if isinstance(taken, Exception):
                raise taken
            passes = passes[len(taken) :]
            yield from taken


class _StoppedError(Exception):
    """Raised in the recorder's thread when the engine ends."""
