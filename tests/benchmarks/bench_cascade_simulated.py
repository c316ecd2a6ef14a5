"""A cascade in processes compared with the simulator on the same traces, and its images with those of the bank.

    python tests/benchmarks/bench_cascade_simulated.py [--cascade LIGHT,HEAVY] [--workspace DIR] [--workers 2]
        [--system diffserve] [--loads 0.25,0.5,0.8] [--num-seeds 3] [--num-prompts 60] [--output-file FILE]

Needs the files of `psctl train-predictor discriminator` and `psctl profile cascade` in the workspace. A load of 1 is
the largest number of light images per second that all workers draw. Nothing else may run on the machine.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from patchedserve.data.files import write_json
from patchedserve.data.resolution import Resolution
from patchedserve.data.tables.schemas import RECORDS, read_rows
from patchedserve.data.workspace import Workspace
from patchedserve.eval.sets.generate import read_manifest
from patchedserve.profiling.cascade.bank import Bank
from patchedserve.psctl.options.cascade import PROFILE_FILE, newest_profile_place
from patchedserve.serving.cascade.legs import parse_cascade
from patchedserve.serving.cascade.profile import read_profile
from patchedserve.serving.runs.machine import cpu_name


def run(command: str, *options: str) -> dict[str, Any]:
    """Run a psctl command and return its JSON."""
    words = [str(Path(sys.executable).with_name("psctl")), command, *options, "--json", "--quiet"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"psctl {command} ended with {done.returncode}: {done.stderr}")
    return json.loads(done.stdout)


def figures(summary: dict[str, Any]) -> dict[str, float]:
    """Return the figures that are compared."""
    rows = read_rows(Path(summary["run_dir"]) / "records.parquet", RECORDS)
    latencies_s = [row["latency_s"] for row in rows if row["status"] == "completed"]
    return {
        "mean_latency_s": float(np.mean(latencies_s)),
        "violation_rate": summary["slo_violation_rate"],
        "deferred_share": summary["deferred_share"],
        "completed": len(latencies_s),
    }


def worst_image(summary: dict[str, Any], bank: Bank) -> tuple[int, int]:
    """Return the number of images compared with those of the bank, and the largest difference in levels of 255."""
    places = {(entry.prompt, entry.resolution, entry.seed): place for place, entry in enumerate(bank.entries)}
    folders = {leg: Path(bank.about[f"{leg}_images"]) for leg in ("light", "heavy")}
    files = {leg: [item.file for item in read_manifest(folder).items] for leg, folder in folders.items()}
    count = worst = 0
    for row in read_rows(Path(summary["run_dir"]) / "records.parquet", RECORDS):
        if row["status"] != "completed":
            continue
        leg, place = row["served_by"], places[row["prompt"], Resolution(row["width"], row["height"]), row["seed"]]
        served, known = (
            np.asarray(Image.open(path).convert("RGB"), dtype=int)
            for path in (Path(summary["run_dir"]) / row["image_path"], folders[leg] / files[leg][place])
        )
        worst, count = max(worst, int(np.abs(served - known).max())), count + 1
    return count, worst


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cascade", default="emoji-xl-turbo:1,emoji-xl:50")
    parser.add_argument("--workspace", type=Path, default=Path("psctl-workspace"))
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--system", default="diffserve")
    parser.add_argument("--loads", default="0.25,0.5,0.8")
    parser.add_argument("--num-seeds", type=int, default=3)
    parser.add_argument("--num-prompts", type=int, default=60)
    parser.add_argument("--slo-scale", type=float, default=4.0)
    parser.add_argument("--output-file", type=Path)
    given = parser.parse_args()
    place = newest_profile_place(Workspace(given.workspace), parse_cascade(given.cascade))
    if place is None:
        sys.exit(f"{given.workspace} has no profile of {given.cascade}: psctl profile cascade")
    profile = read_profile(place.tables / PROFILE_FILE)
    light = profile.legs["light"].batches(dict.fromkeys(map(str, profile.resolutions), 1.0))
    capacity = given.workers * max(light.throughput)
    newest = place.newest_table("bank-*/bank.parquet")
    assert newest is not None, "psctl profile cascade makes a bank"
    bank = Bank.load(newest.parent)
    common = (
        *("--cascade", given.cascade, "--system", given.system, "--workspace", str(given.workspace)),
        *("--slo-scale", str(given.slo_scale), "--num-prompts", str(given.num_prompts)),
    )
    rows = []
    for load in map(float, given.loads.split(",")):
        for seed in range(given.num_seeds):
            own = (*common, "--request-rate", f"{load * capacity:.4f}", "--seed", str(seed))
            served = run("serve", *own, "--workers", str(given.workers))
            simulated = run("simulate", *own, "--gpus", str(given.workers))
            count, worst = worst_image(served, bank)
            row = {
                "load": load, "seed": seed, "rate": load * capacity, "served": figures(served),
                "simulated": figures(simulated), "images_compared": count, "worst_difference": worst,
            }  # fmt: skip
            row["latency_ratio"] = row["simulated"]["mean_latency_s"] / row["served"]["mean_latency_s"]
            rows.append(row)
            print(json.dumps(row), flush=True)
    means = {
        f"{name}_difference": float(np.mean([row["simulated"][name] - row["served"][name] for row in rows]))
        for name in ("violation_rate", "deferred_share")
    }
    found = {
        "machine": cpu_name(), "cores": len(os.sched_getaffinity(0)), "cascade": given.cascade,
        "system": given.system, "workers": given.workers, "slo_scale": given.slo_scale, "capacity": capacity,
        "num_prompts": given.num_prompts, "rows": rows,
        "mean_latency_ratio": float(np.mean([row["latency_ratio"] for row in rows])), **means,
    }  # fmt: skip
    print(json.dumps({name: value for name, value in found.items() if name != "rows"}, indent=1))
    if given.output_file is not None:
        write_json(given.output_file, found)


if __name__ == "__main__":
    main()
