"""Number of replicas that a load needs."""

import pytest

from patchedserve.data.errors import UsageError
from patchedserve.serving.fleet.autoscale import replicas_needed


def test_number_of_replicas_follows_the_load() -> None:
    bounds = {"least": 1, "most": 8}
    assert replicas_needed(0, 100, 10, **bounds) == 1
    assert replicas_needed(1000, 100, 10, **bounds) == 1
    assert replicas_needed(1001, 100, 10, **bounds) == 2
    assert replicas_needed(1e9, 100, 10, **bounds) == 8
    assert replicas_needed(1e9, None, 10, now=3, **bounds) == 3
    for wrong in ({"least": 0}, {"least": 3, "most": 2}):
        with pytest.raises(UsageError, match="replicas go from"):
            replicas_needed(1, 1, 1, **wrong)
    with pytest.raises(UsageError, match="must be more than 0"):
        replicas_needed(1, 1, 0)
