"""Serves one Poisson trace under every policy and engine and tabulates SLO attainment, latency and throughput.

    python tests/benchmarks/bench_policies.py [--model emoji-xl] [--rates 0.5,1,2] [--seeds 0,1]

Every run is a real `psctl serve` in a process of its own, so that none profits from another's warm-up; sides alternate
within a rate and seed and serve the same requests with the same SLOs, those of the plain engine. The table goes to
stdout as Markdown and, with all figures, to tests/benchmarks/results/policies-MODEL.json. Nothing else may run on the
machine meanwhile.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from patchedserve.profiling.machine import cpu_name

SIDES = (("plain", "fcfs"), ("plain", "static"), ("plain", "bucketed"), ("patched", "bucketed"))
"""Engine and policy; the first one draws the trace and measures the standalone latencies."""
RESULTS = Path(__file__).with_name("results")


def serve(
    side: tuple[str, str], rate: float, seed: int, trace: str | None, options: argparse.Namespace, workspace: str
) -> dict[str, Any]:
    engine, policy = side
    command = [
        *(str(Path(sys.executable).with_name("psctl")), "serve", "--json", "--quiet", "--workspace", workspace),
        *("--model", options.model, "--dtype", options.dtype, "--engine", engine, "--policy", policy),
    ]
    if trace is None:
        command += ["--trace", "poisson", "--request-rate", str(rate), "--seed", str(seed)]
        command += ["--num-prompts", str(options.num_prompts), "--num-inference-steps", str(options.steps)]
    else:
        command += ["--trace", trace]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(run.stdout)


def machine() -> str:
    """What it runs on, in words, for the head of the table."""
    return f"{os.cpu_count()} cores of {cpu_name()}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="emoji-xl")
    parser.add_argument("--rates", default="1,2,3", help="requests per second")
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--num-prompts", type=int, default=48)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--dtype", default="auto")
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as workspace:
        for rate in map(float, options.rates.split(",")):
            for seed in map(int, options.seeds.split(",")):
                trace = None
                for side in SIDES:
                    summary = serve(side, rate, seed, trace, options, workspace)
                    trace = trace or str(Path(summary["run_dir"]) / "trace.jsonl")
                    rows.append({"engine": side[0], "policy": side[1], "request_rate": rate, "seed": seed} | summary)
    dtype = rows[0]["config"]["dtype"]
    print(f"{options.model}, {options.steps} steps, {dtype}, equal mix of its sizes, SLO scale 5, {machine()}\n")
    print("| requests/s | engine | policy | SLO attainment | mean latency | p95 latency | completed/s |")
    print("|---|---|---|---|---|---|---|")
    for rate in dict.fromkeys(row["request_rate"] for row in rows):
        for side in SIDES:
            chosen = [row for row in rows if row["request_rate"] == rate and (row["engine"], row["policy"]) == side]

            def mean(key: str, chosen: list[dict[str, Any]] = chosen) -> float:
                return sum(row[key] for row in chosen) / len(chosen)

            cells = (f"{mean('slo_attainment_rate'):.0%}", f"{mean('latency_mean'):.2f} s")
            cells += (f"{mean('latency_p95'):.2f} s", f"{mean('throughput_qps'):.2f}")
            print(f"| {rate:g} | {side[0]} | {side[1]} | " + " | ".join(cells) + " |")
    RESULTS.mkdir(exist_ok=True)
    content = {"machine": machine(), "options": vars(options), "rows": rows}
    (RESULTS / f"policies-{options.model}.json").write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
