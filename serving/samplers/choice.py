"""Choice of the sampler for the requests of a model."""

from typing import Any

from ...data.errors import UsageError
from .batched import BatchedSampler
from .single import PerRequestSampler
from .skipping import SkippingSampler


def choose_sampler(
    scheduler: Any, *, pass_step_kwargs: bool, skips: bool = False
) -> tuple[BatchedSampler | PerRequestSampler, str | None]:
    """Return the sampler for this scheduler, and the reason if each request calls its own scheduler, else None.

    With `skips`, requests may skip steps.

    Raises UsageError: the scheduler draws noise that does not depend on a seed; or steps are skipped, and it is not
    batched.
    """
    if skips:
        return SkippingSampler(scheduler, pass_step_kwargs=pass_step_kwargs), None
    try:
        return BatchedSampler(scheduler, pass_step_kwargs=pass_step_kwargs), None
    except UsageError as error:
        return PerRequestSampler(scheduler, pass_step_kwargs=pass_step_kwargs), str(error)
