"""Request router for Ray Serve: sends each request to the replica that the load book chooses.

Ray pickles this module by value into the process of the handle, so all state is kept in the load book, which is
imported there. Ray's own statistics of replicas are seconds old and are not used.
"""

from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica


class LoadBookRouter(RequestRouter):
    """Ranks replicas in the order of a load book; Ray tries the next rank if a replica has no room."""

    def initialize_state(self, *, book: str) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Look up the load book; Ray calls this with `book`, its name in `book.BOOKS`."""
        from .book import BOOKS

        self._book = BOOKS[book]

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Rank the candidates for a call; one that draws no request may go to any replica."""
        request = _request_of(pending_request)
        if request is None:
            return [candidate_replicas]
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        ranked = self._book.reserve(request.request_id, by_name.keys())
        return [[by_name[name]] for name in ranked]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Record the replica that a request was sent to."""
        request = _request_of(pending_request)
        if request is not None:
            self._book.confirm(request.request_id, replica_id.unique_id)


def _request_of(pending: PendingRequest | None) -> Any:
    """Return the request of a call, the first argument of `Replica.draw`; None for other calls."""
    from ...data.requests import Request

    first = pending.args[0] if pending is not None and pending.args else None
    return first if isinstance(first, Request) else None
