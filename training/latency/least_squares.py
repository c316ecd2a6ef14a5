"""Lines through measured times, whose coefficients are none of them negative. This module imports no torch."""

import numpy as np
from scipy.optimize import nnls


def relative_line(features: np.ndarray, measured: np.ndarray) -> np.ndarray:
    """Non-negative weights of the line with the least relative error: a millisecond matters more to a short step.

    A column that these rows cannot tell from those before it (as "different resolutions" from "every step" where no
    batch is mixed) has no weight: otherwise the solver puts what both cost where it likes, and batches of another kind
    are predicted by chance. So what is sure to count stands in front.

    Args:
        features: (rows, columns).
        measured: (rows,), each above 0.

    Returns:
        (columns,).
    """
    kept: list[int] = []
    for column in range(features.shape[1]):
        if np.linalg.matrix_rank(features[:, [*kept, column]]) > len(kept):
            kept.append(column)
    weights = np.zeros(features.shape[1])
    weights[kept] = nnls(features[:, kept] / measured[:, None], np.ones(len(measured)))[0]
    return weights
