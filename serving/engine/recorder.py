"""Templates that edits have missed, recorded in the free places of the engine's batch (InstGenIE section 3.1)."""

import queue
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence

from torch import Tensor

from ...data.requests import Request
from ..core.prepared import PreparedRequest
from ..editing.keys import TemplateKey
from ..models.reuse import PASSES_TOGETHER
from ..models.served import ServedModel
from .stages import StageThread

_MOST_WAITING, _MOST_GIVEN_UP = 16, 1024
_Seen = Sequence[Sequence[Mapping[str, Tensor]]]


class TemplateRecorder:
    """Records templates, one after the other, and each once, however many edits have missed it.

    A thread of its own prepares a template and writes what was seen. The passes between are taken by the thread of the
    engine: between two steps of the batch, and not more than it has free places for. Never is more in memory than what
    one batch of passes has seen, and what the store keeps. What ends before it is complete leaves nothing.

    Args:
        model: with the store of its templates.
        changed: notified when passes are due.
        on_error: called if the thread ends by a defect.
    """

    def __init__(self, model: ServedModel, changed: threading.Condition, on_error: Callable[[], None]) -> None:
        assert model.reuse.store is not None, "there is no place for records"
        self._model, self._store, self._changed = model, model.reuse.store, changed
        self._open: dict[str, str] = {}
        self._given_up: deque[str] = deque(maxlen=_MOST_GIVEN_UP)
        self._due: Sequence[PreparedRequest] = ()
        self._taken: queue.SimpleQueue[_Seen | Exception | None] = queue.SimpleQueue()
        self._thread = StageThread("psctl-record", self._record, device=model.device, on_error=on_error)

    @property
    def error(self) -> BaseException | None:
        """What has ended the thread: a defect."""
        return self._thread.error

    @property
    def is_due(self) -> bool:
        """Whether there are passes to take."""
        return bool(self._due)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def want(self, request: Request) -> None:
        """Have the template of an edit recorded that had to do without; one thread at a time calls this.

        Not if that is under way or has failed before, if it is of a generation, which is over, if no edit could read
        the record or should, or if many others of its owner wait: then a later edit asks again.
        """
        edit = request.edit
        if (
            edit is None
            or edit.template is None
            or edit.template.kind != "noised"
            or not self._model.reuse.is_worth_masking(edit)
        ):
            return
        key = self._model.reuse.key_of(request)
        if key is None or key.digest in self._open or key.digest in self._given_up:
            return
        if sum(owner == key.owner for owner in list(self._open.values())) >= _MOST_WAITING:
            return
        self._open[key.digest] = key.owner
        self._thread.put((request, key))

    def take_passes(self, num_free: int) -> None:
        """Take passes that are due, in one batch, for as many requests as it has places for; in the engine's thread."""
        passes, self._due = self._due[:num_free], ()
        try:
            self._taken.put(self._model.reuse.record(passes))
        except Exception as error:  # noqa: BLE001  the requests in the batch know nothing of it
            self._taken.put(error)

    def finish(self) -> None:
        """End the thread; what it has not completed is given up."""
        self._thread.discard_queued()
        self._taken.put(None)
        self._thread.finish()

    def _record(self, wanted: tuple[Request, TemplateKey]) -> None:
        request, key = wanted
        try:
            # Another process may have recorded it meanwhile.
            if self._store.find(key, self._model.device) is None:
                self._store.add(key, self._seen(request), self._model.device)
        except _StoppedError:
            return
        except Exception as error:  # noqa: BLE001  edits are exact without it
            self._given_up.append(key.digest)
            warnings.warn(f"template {key.digest} could not be recorded, and is not tried again: {error}", stacklevel=1)
        finally:
            self._open.pop(key.digest, None)

    def _seen(self, request: Request) -> Iterator[Sequence[Mapping[str, Tensor]]]:
        passes = self._model.reuse.template_passes(request)
        while passes:
            with self._changed:
                self._due = passes[:PASSES_TOGETHER]
                self._changed.notify_all()
            taken = self._taken.get()
            if taken is None:
                raise _StoppedError
            if isinstance(taken, Exception):
                raise taken
            passes = passes[len(taken) :]
            yield from taken


class _StoppedError(Exception):
    """The engine ends."""
