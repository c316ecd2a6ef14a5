"""Lines fitted to tables that do not determine all coefficients."""

import numpy as np
import pytest

from patchedserve.training.latency.least_squares import relative_line

COUNTS = np.array([[1.0, 0], [4, 0], [0, 1], [0, 4]])
EVERY_STEP = np.ones((4, 1))
LAW = np.array([10.0, 30, 5])


def test_known_line_is_recovered() -> None:
    features = np.hstack([COUNTS, EVERY_STEP])
    assert relative_line(features, features @ LAW) == pytest.approx(LAW)


def test_indistinguishable_columns_get_no_weight() -> None:
    """In batches of one size each, the number of different sizes equals the constant of every step."""
    features = np.hstack([COUNTS, EVERY_STEP, EVERY_STEP])
    found = relative_line(features, np.hstack([COUNTS, EVERY_STEP]) @ LAW)
    assert found == pytest.approx([*LAW, 0.0])


def test_no_weight_is_negative() -> None:
    features = np.hstack([COUNTS, EVERY_STEP])
    assert (relative_line(features, np.array([10.0, 10, 5, 4])) >= 0).all()
