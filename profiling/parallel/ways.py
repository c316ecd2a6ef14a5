"""Ways of running ranks that `psctl bench parallel` measures. This module imports no torch."""

from collections.abc import Mapping, Sequence
from typing import Any

from ...data.errors import UsageError
from ...serving.parallel.options import ParallelOptions

WAYS: Mapping[str, dict[str, Any]] = {
    "cfg": {"mode": "sync", "cfg_split": "on"},
    "sync": {"mode": "sync", "cfg_split": "off"},
    "displaced": {"mode": "displaced", "cfg_split": "off", "warmup": 0},
    "naive": {"mode": "naive", "cfg_split": "off"},
}
"""Options of the ranks, by the name of the side."""


def parse_ways(text: str, options: ParallelOptions) -> Sequence[str]:
    """Parse comma-separated names of ways. Raises UsageError: a name is unknown or repeated, or the number of ranks
    does not allow it.
    """
    names = [name.strip() for name in text.split(",")]
    if not set(names) <= set(WAYS) or len(set(names)) < len(names):
        raise UsageError(f"--modes are {text!r}, but they must be some of {', '.join(WAYS)}, each once")
    if not options.is_on or ("cfg" in names and options.count % 2):
        least = "an even number of ranks" if "cfg" in names else "2 ranks or more"
        raise UsageError(f"--parallel is {options.ranks!r}, but --modes {text} need {least}")
    return names
