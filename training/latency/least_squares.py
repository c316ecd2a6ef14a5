"""Linear fits of measured times with non-negative coefficients. This module imports no torch."""

import numpy as np
from scipy.optimize import nnls


def relative_line(features: np.ndarray, measured: np.ndarray) -> np.ndarray:
    """Return the non-negative weights with the least relative error, as a millisecond matters more in a short step.

    A column that is linearly dependent on those before it in these rows (such as "different resolutions" on "every
    step" where no batch is mixed) gets weight 0: the solver would otherwise divide the cost between them arbitrarily,
    and predict batches of another kind by chance. Columns that certainly have a cost must therefore come first.

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
