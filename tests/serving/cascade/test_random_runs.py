"""Many random cascades; `tests/benchmarks/cascade_runs.py` runs 10,000."""

from collections import Counter

import pytest

from ...support.cascade_runs import check_run, random_run


@pytest.mark.exhaustive
@pytest.mark.slow
def test_random_runs_end_every_request_once() -> None:
    seen = Counter[str]()
    for seed in range(400):
        requests, result = random_run(seed)
        check_run(requests, result)
        seen.update(record.status for record in result.records)
        seen.update(result.served_by().values())
        seen["switches"] += result.num_switches
        seen["deferred"] += sum(row.is_deferred for row in result.legs)
    assert min(seen[what] for what in ("completed", "discarded", "light", "heavy", "switches", "deferred")) > 100
