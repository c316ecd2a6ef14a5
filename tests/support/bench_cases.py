"""What the tests of benchmarks of steps share: resolutions of tiny models, short settings, the fields of a row."""

from patchedserve.data.resolution import parse_list
from patchedserve.profiling.steps.bench import BenchSettings
from patchedserve.profiling.steps.combinations import Combination

SIZES = parse_list("32,48,64")
FAST = BenchSettings(repeats=2, warmup=1)
ROW = {
    *("combination", "label", "requests", "is_mixed", "one_by_one_ms", "same_resolution_ms", "same_resolution_format"),
    *("patched_ms", "patched_p10_ms", "patched_p90_ms", "patched_repack_ms", "ratio_one_by_one"),
    *("ratio_same_resolution", "patched_is_plain", "intervals", "repeats", "same_resolution_share_of_peak"),
    "patched_share_of_peak",
}


def squares(*counts: int) -> Combination:
    return Combination(SIZES, counts)
