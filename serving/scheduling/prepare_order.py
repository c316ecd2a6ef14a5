"""Which request is prepared next, so that few hold tensors while they wait. Used by the engine and the simulator."""


class PrepareOrder:
    """Says which request the prepare stage takes next.

    A policy sees all requests that have arrived, prepared or not. Requests that it has admitted come first, as they
    hold a place in the batch; beyond them, up to `max_ahead` requests that wait are prepared in order of arrival, so
    that policies which admit in that order find theirs ready. So never more than `max_ahead` requests hold tensors
    while they wait, however long the queue is, and with the places of the batch the whole is bounded.

    Args:
        max_ahead: largest number of waiting requests that are prepared or being prepared, at least 1.

    Raises:
        ValueError: `max_ahead` is below 1.
    """

    def __init__(self, max_ahead: int) -> None:
        if max_ahead < 1:
            raise ValueError(f"max_ahead is {max_ahead}, but it must be at least 1")
        self.max_ahead = max_ahead
        # Dicts as ordered sets.
        self._untouched: dict[int, None] = {}
        self._demanded: dict[int, None] = {}
        self._ahead: set[int] = set()

    @property
    def num_ahead(self) -> int:
        """Number of waiting requests that are prepared or being prepared."""
        return len(self._ahead)

    def add(self, request_id: int) -> None:
        """A request has arrived."""
        self._untouched[request_id] = None

    def demand(self, request_id: int) -> None:
        """A request was admitted: it no longer waits, and is prepared before those that do."""
        self._ahead.discard(request_id)
        if request_id in self._untouched:
            del self._untouched[request_id]
            self._demanded[request_id] = None

    def forget(self, request_id: int) -> None:
        """A request has ended; it need not be prepared any more."""
        self._untouched.pop(request_id, None)
        self._demanded.pop(request_id, None)
        self._ahead.discard(request_id)

    def take(self) -> int | None:
        """Take the request that is to be prepared now; None if nobody is."""
        if self._demanded:
            request_id = next(iter(self._demanded))
            del self._demanded[request_id]
            return request_id
        if self._untouched and len(self._ahead) < self.max_ahead:
            request_id = next(iter(self._untouched))
            del self._untouched[request_id]
            self._ahead.add(request_id)
            return request_id
        return None
