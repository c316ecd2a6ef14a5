"""Parts of a measurement that a rehearsal makes smaller because they take minutes on a CPU."""

from patchedserve.profiling.steps import matrix_peak


def use_small_products() -> None:
    """Measure the peak of a processor on small products, for the life of the process."""
    matrix_peak._SIDE["cpu"] = 256
