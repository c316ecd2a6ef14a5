"""Add the results of `psctl profile cascade` for two bundled models to the bundled data.

    psctl train-predictor discriminator
    psctl profile cascade --quick --reuse-light 0.6
    python tests/benchmarks/publish_cascade.py

The location of the bank's images on this machine is not published.
"""

import argparse
import shutil
import sys
from dataclasses import replace
from pathlib import Path

from patchedserve.data.tables import published
from patchedserve.data.workspace import Workspace
from patchedserve.profiling.cascade.bank import BANK_FILE, FEATURES_FILE, Bank
from patchedserve.psctl.options.cascade import DEFAULT_CASCADE, PROFILE_FILE, newest_profile_place
from patchedserve.serving.cascade.legs import parse_cascade


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cascade", default=DEFAULT_CASCADE)
    parser.add_argument("--workspace", type=Path, default=Path("psctl-workspace"))
    given = parser.parse_args()
    place = newest_profile_place(Workspace(given.workspace), parse_cascade(given.cascade))
    table = None if place is None else place.newest_table(f"bank-*/{BANK_FILE}")
    if place is None or table is None:
        sys.exit(f"{given.workspace} has no profile and bank of {given.cascade}: psctl profile cascade")
    folder = Path(published.__file__).parent / published.published_cascade_name(given.cascade)
    folder.mkdir(exist_ok=True)
    bank = Bank.load(table.parent)
    kept = {name: value for name, value in bank.about.items() if not name.endswith("_images")}
    replace(bank, about=kept).save(folder)
    shutil.copyfile(table.parent / FEATURES_FILE, folder / FEATURES_FILE)
    shutil.copyfile(place.tables / PROFILE_FILE, folder / PROFILE_FILE)
    print(folder)


if __name__ == "__main__":
    main()
