"""The parts of a lease in order of priority, and the time that each needs. Imports no torch.

Limits are for one H100: with all parts at their limit, they fit into two calls of 560 and 170 seconds.
"""

from dataclasses import dataclass

_PARTS = "patchedserve.tests.benchmarks.lease.parts"


@dataclass(frozen=True, slots=True)
class Part:
    """A unit of measurement.

    Attributes:
        name: name of its results file and in the manifest.
        worker: name of the process that runs it; parts of one worker share its model.
        source: `module:function`. The function takes a `Context` and yields rows.
        least_s: smallest remaining time with which the part starts; with less it is left out.
        most_s: time after which the part is killed.
    """

    name: str
    worker: str
    source: str
    least_s: float
    most_s: float


def _part(name: str, worker: str, source: str, least_s: float, most_s: float) -> Part:
    return Part(name, worker, f"{_PARTS}.{source}", least_s, most_s)


PLAN: tuple[Part, ...] = (
    _part("machine", "sdxl", "machine:machine", 5, 60),
    _part("ceilings", "sdxl", "ceilings:ceilings", 10, 45),
    _part("sdxl-steps", "sdxl", "steps:eager_and_graphs", 30, 110),
    _part("sdxl-steps-compiled", "sdxl", "steps:all_efforts", 60, 130),
    _part("sdxl-first-seen", "sdxl", "first_seen:first_seen", 15, 40),
    _part("sdxl-served", "sdxl", "served:served", 60, 150),
    _part("flux-steps", "flux-dev", "steps:eager_and_graphs", 30, 70),
    _part("flux-steps-compiled", "flux-dev", "steps:all_efforts", 50, 90),
    _part("sdxl-profile", "sdxl", "profile:profile", 15, 40),
    _part("sdxl-edits", "sdxl", "edits:edits", 25, 90),
    _part("sdxl-strips", "sdxl", "strips:strips", 20, 50),
    _part("vae", "sdxl", "autoencoder:decoding", 12, 60),
    _part("sdxl-fp8", "sdxl", "eight_bits:eight_bits", 25, 60),
    _part("tests", "tests", "suite:suite", 25, 300),
)
