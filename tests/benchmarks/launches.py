"""Launches, waits and copies from the host that a step of each family asks of a GPU. No GPU is needed.

    python tests/benchmarks/launches.py [--families sdxl,flux] [--places] [--write]

Prints a Markdown table, as docs/patch-engine.md explains it; `--places` lists the waits and copies of each batch with
the place in the code that causes them. `--write` rewrites the table that the tests compare with,
tests/serving/patched/launches.json, for these families.
"""

import argparse
from collections import Counter

from patchedserve.tests.support.family_kit import BUILDS
from patchedserve.tests.support.launches import (
    BATCHES,
    COUNTED,
    FILE,
    Counts,
    counts_of,
    events_of,
    read_table,
    replay_events_of,
    write_table,
)

PHASES = ("step", "join", "leave", "exchange")
REPLAY = ("launches", "segments")


def line_of(family: str, batch: str, counts: Counts) -> str:
    """Return a row of the printed table."""
    numbers = [str(counts[phase][column]) for phase in PHASES for column in COUNTED.values()]
    numbers += [str(counts["replay"][column]) for column in REPLAY]
    return f"| {family} | {batch} | {' | '.join(numbers)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", default=",".join(BUILDS), help=f"some of {', '.join(BUILDS)}")
    parser.add_argument("--places", action="store_true", help="list waits and copies with their places")
    parser.add_argument("--write", action="store_true", help="rewrite the table that the tests compare with")
    given = parser.parse_args()
    families = given.families.split(",")
    if unknown := set(families) - set(BUILDS):
        parser.error(f"--families has {', '.join(sorted(unknown))}, but the families are {', '.join(BUILDS)}")
    names = [f"{column} a {phase}" for phase in PHASES for column in COUNTED.values()]
    names += [f"{column} a replay" for column in REPLAY]
    print(f"| family | batch | {' | '.join(names)} |")
    print(f"|---|---|{'--:|' * len(names)}")
    table: dict[str, dict[str, Counts]] = {}
    for family in families:
        for batch, sizes in BATCHES.items():
            events = events_of(BUILDS[family], sizes)
            events |= replay_events_of(BUILDS[family], sizes)
            counts = table.setdefault(family, {})[batch] = counts_of(events)
            print(line_of(family, batch, counts), flush=True)
            if given.places:
                for phase in PHASES:
                    for event, number in Counter(event for event in events[phase] if event.kind != "launch").items():
                        print(f"    {phase}: {number} x {event}")
    if given.write:
        before = read_table() if FILE.exists() else {}
        write_table({family: (before | table)[family] for family in BUILDS if family in before | table})


if __name__ == "__main__":
    main()
