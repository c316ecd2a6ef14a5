"""Text encoding and image decoding on a CPU: `psctl serve` with `--stages threads` and `inline`, by turns.

Serves one trace repeatedly in both ways and prints a line for each run; the last two lines are the medians of each
way. `--cores N` limits the cores of each process.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

WAYS = ("threads", "inline")
FIGURES = ("throughput_qps", "latency_mean", "slo_attainment_rate", "step_latency_mean", "batch_size_mean")


def served(way: str, options: argparse.Namespace, workspace: Path) -> dict[str, float]:
    """Return the figures of one run."""
    command = [
        *(str(Path(sys.executable).with_name("psctl")), "serve", "--model", options.model, "--system", options.system),
        *("--request-rate", str(options.rate), "--num-prompts", str(options.requests), "--seed", "0"),
        *("--num-inference-steps", str(options.steps), "--stages", way, "--workspace", str(workspace), "--json"),
    ]
    if options.cores:
        command = ["taskset", "-c", ",".join(map(str, sorted(os.sched_getaffinity(0))[: options.cores])), *command]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    summary = json.loads(done.stdout)
    return {name: summary[name] for name in FIGURES}


def main() -> None:
    """Serve by turns and print a row for each run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="emoji-xl")
    parser.add_argument("--system", default="patched-fcfs")
    parser.add_argument("--rate", type=float, default=2.0)
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cores", type=int)
    options = parser.parse_args()
    print(json.dumps(vars(options)))
    with tempfile.TemporaryDirectory() as folder:
        runs: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
        for _ in range(options.rounds):
            for way in WAYS:
                runs[way].append(served(way, options, Path(folder)))
                print(json.dumps({"stages": way} | runs[way][-1]), flush=True)
    for way in WAYS:
        print(json.dumps({"stages": way} | {name: median(run[name] for run in runs[way]) for name in FIGURES}))


if __name__ == "__main__":
    main()
