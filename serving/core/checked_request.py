"""Requests that a model has checked, in the form in which its engine serves them."""

from dataclasses import dataclass, replace
from typing import Self

from ...data.requests import Request
from .request_state import RequestView


@dataclass(frozen=True, slots=True)
class CheckedRequest:
    """A request that a model can serve, as `ServedModel.checked` returns it.

    Attributes:
        request: the request, with the number of steps that its system gives it.
        num_computed: number of its steps that the model computes.
        standalone_s: its latency when served alone; None if not known.
    """

    request: Request
    num_computed: int
    standalone_s: float | None = None

    @property
    def view(self) -> RequestView:
        """View of the request for policies."""
        return RequestView.of(self.request, self.standalone_s, num_computed=self.num_computed)

    def promised(self, slo_s: float | None, standalone_s: float | None) -> Self:
        """Return the request with an SLO and its latency when served alone, neither of which the model checks."""
        return replace(self, request=replace(self.request, slo_s=slo_s), standalone_s=standalone_s)
