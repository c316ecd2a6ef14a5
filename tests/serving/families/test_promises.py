"""Every family keeps the promises of the kit; the support matrix says what it lacks."""

from collections.abc import Callable

import pytest

from ...support.family_kit import BUILDS, PROMISES, Build


@pytest.mark.slow
@pytest.mark.parametrize("promise", PROMISES, ids=lambda promise: promise.__name__)
@pytest.mark.parametrize("family", BUILDS)
def test_promise(family: str, promise: Callable[[Build], None]) -> None:
    promise(BUILDS[family])
