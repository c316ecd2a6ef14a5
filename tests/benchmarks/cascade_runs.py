"""Random cascades on the virtual clock: every request must end once, deferred if and only if its score requires it.

    python tests/benchmarks/cascade_runs.py [--runs 10000] [--output-file FILE]

Systems, models, load, confidences and options are random but fixed by the seed. Exits with an AssertionError that names
the seed at the first run that violates an invariant.
"""

import argparse
import json
from collections import Counter
from pathlib import Path

from patchedserve.data.files import write_json
from patchedserve.tests.support.cascade_runs import check_run, random_run


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=10_000)
    parser.add_argument("--output-file", type=Path)
    given = parser.parse_args()
    seen = Counter[str]()
    for seed in range(given.runs):
        requests, result = random_run(seed)
        try:
            check_run(requests, result)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        seen.update(record.status for record in result.records)
        seen.update(f"served by {leg}" for leg in result.served_by().values())
        seen["switches"] += result.num_switches
        seen["deferred"] += sum(row.is_deferred for row in result.legs)
        seen["scores that were no number"] += sum(
            row.confidence is not None and row.confidence != row.confidence for row in result.legs
        )
    found = {"runs": given.runs, **dict(seen)}
    print(json.dumps(found, indent=1))
    if given.output_file is not None:
        write_json(given.output_file, found)


if __name__ == "__main__":
    main()
