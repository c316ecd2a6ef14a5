"""Where Ray Serve sends a request: to the replica that the load book's router chooses.

Ray pickles this module by value into the process of the handle, so all state lies in the load book, which is imported
there. Ray's own statistics of replicas are seconds old and not used.
"""

from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica


class ByLoadBook(RequestRouter):
    """Ranks replicas as a load book says; the next rank is tried where one has no room."""

    def initialize_state(self, *, book: str) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """See Ray; `book` is its name in `load_book.BOOKS`."""
        from .load_book import BOOKS

        self._book = BOOKS[book]

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """See Ray. A call that draws nothing goes anywhere."""
        request = _request_of(pending_request)
        if request is None:
            return [candidate_replicas]
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        ranked = self._book.reserve(request.request_id, by_name.keys())
        return [[by_name[name]] for name in ranked]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """See Ray."""
        request = _request_of(pending_request)
        if request is not None:
            self._book.confirm(request.request_id, replica_id.unique_id)


def _request_of(pending: PendingRequest | None) -> Any:
    """The request that is to be drawn, the first argument of `Replica.draw`; None for other calls."""
    from ...data.requests import Request

    first = pending.args[0] if pending is not None and pending.args else None
    return first if isinstance(first, Request) else None
