"""Latencies of edits that arrive one by one, over records of their images and by other methods (InstGenIE, 6.2).

    python tests/benchmarks/edit_latency.py [--model emoji-xl] [--side 256] [--num-edits 120] [--load 1.5] [--seed 0]
        [--output-file results/edit-latency.json]

All sides get the same edits with mask ratios of the public trace, at Poisson arrivals with `--load` times the rate at
which diffusers draws them one by one, which is measured first. `diffusers` draws one by one; `static` finishes each
batch over records before other requests join; `inline`, `threads` and `processes` are continuous batches over records
with the stages of that `--stages` option. Gaps are the times between two steps while a request is in the batch. Goals:
diffusers' mean latency is at least 5 times that of `processes`, the P95 of `static` 1.3 times its P95, and the P95 of
its gaps at most 10 ms. Nothing else may run.
"""

import argparse
import tempfile
from contextlib import closing
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from patchedserve.data.edits import TemplateSpec
from patchedserve.data.files import write_json
from patchedserve.data.requests import Request
from patchedserve.serving.engine.engine import Engine
from patchedserve.serving.engine.replay import replay
from patchedserve.serving.engine.run_result import RunResult
from patchedserve.serving.models.build import as_plain, with_engine
from patchedserve.serving.models.loading import load_model
from patchedserve.serving.models.served import ServedModel
from patchedserve.serving.options import EngineOptions, StagesName
from patchedserve.serving.runs.machine import cpu_name
from patchedserve.serving.runs.trace_requests import draw_requests
from patchedserve.serving.runs.trace_settings import TraceEditSettings, TraceSettings
from patchedserve.serving.scheduling.policies import get_policy

RESULTS = Path(__file__).with_name("results")
TEMPLATES, BATCH = 4, 8


def with_template(request: Request) -> Request:
    """Return the same edit over the record of its image."""
    assert request.edit is not None, "all requests are edits"
    return replace(request, edit=replace(request.edit, template=TemplateSpec()))


def gaps_s(result: RunResult) -> list[float]:
    """Return the times between two steps while a request was in the batch."""
    stays = [(record.admitted_s, record.denoise_end_s) for record in result.records]
    return [
        after.start_s - end_s
        for before, after in pairwise(result.steps)
        for end_s in [before.start_s + before.duration_s]
        if any(begun is not None and begun <= end_s and (left is None or left > end_s) for begun, left in stays)
    ]


def measured(model: ServedModel, requests: list[Request], policy: str, batch: int) -> dict[str, Any]:
    """Run one side and return its figures. Raises AssertionError: an edit fails."""
    engine = Engine(model, get_policy(policy), max_batch_size=batch)
    result = replay(engine, list(map(model.checked, requests)))
    assert all(record.status == "completed" for record in result.records), [each.reason for each in result.records]
    latencies_s = [each.finish_s - each.arrival_s for each in result.records if each.finish_s is not None]
    gaps = gaps_s(result)
    return {
        "mean_latency_s": float(np.mean(latencies_s)),
        "p95_latency_s": float(np.percentile(latencies_s, 95)),
        "duration_s": result.duration_s,
        "p50_gap_s": float(np.percentile(gaps, 50)),
        "p95_gap_s": float(np.percentile(gaps, 95)),
        "reused": sum(bool(each.reused) for each in result.records),
        "latencies_s": latencies_s,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="emoji-xl")
    parser.add_argument("--side", type=int, default=256)
    parser.add_argument("--num-edits", type=int, default=120)
    parser.add_argument("--load", type=float, default=1.5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--output-file", type=Path, default=RESULTS / "edit-latency.json")
    given = parser.parse_args()
    served = load_model(given.model, given.device, given.dtype, EngineOptions(stages="processes"))
    edits = TraceEditSettings(share=1.0, mask_ratios="public", templates=TEMPLATES)
    settings = TraceSettings(
        num_prompts=given.num_edits, resolutions=str(given.side), seed=given.seed, request_rate=1.0, edits=edits
    )
    requests = draw_requests(settings, served.defaults, geometry=lambda: served.family.geometry)
    with closing(served), tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        plain = as_plain(served)
        stages: dict[StagesName, ServedModel] = {
            "inline": with_engine(served, replace(served.options, stages="inline")),
            "threads": with_engine(served, replace(served.options, stages="threads")),
            "processes": served,
        }
        over_records = [with_template(request) for request in requests]
        for model in (plain, *stages.values()):
            model.tune([requests[0].resolution], folder)
        for model in stages.values():
            for request in over_records:
                if request.edit is not None and model.reuse.is_worth_masking(request.edit):
                    model.reuse.use_template(request, folder / "templates", lambda count: None)
        at_once = [replace(request, arrival_s=0.0) for request in requests[: 3 * TEMPLATES]]
        rate = len(at_once) / measured(plain, at_once, "continuous", 1)["duration_s"]
        scale = 1 / (given.load * rate)

        def arriving(those: list[Request]) -> list[Request]:
            return [replace(request, arrival_s=request.arrival_s * scale) for request in those]

        for model in stages.values():
            # The first read of a record compares its checksum.
            measured(model, [with_template(request) for request in at_once], "continuous", BATCH)
        sides = {"diffusers": measured(plain, arriving(requests), "continuous", 1)}
        sides["static"] = measured(stages["threads"], arriving(over_records), "static", BATCH)
        for stage, model in stages.items():
            sides[stage] = measured(model, arriving(over_records), "continuous", BATCH)
    for name, side in sides.items():
        print(
            f"{name}: mean {side['mean_latency_s']:.2f} s, P95 {side['p95_latency_s']:.2f} s, "
            f"gaps P50 {side['p50_gap_s'] * 1e3:.1f} ms, P95 {side['p95_gap_s'] * 1e3:.1f} ms"
        )
    about = {
        "machine": cpu_name() if served.device.type == "cpu" else str(served.device),
        "dtype": str(served.dtype).removeprefix("torch."),
        "diffusers_edits_per_minute": 60 * rate,
        **{name: getattr(given, name) for name in ("model", "side", "num_edits", "load", "seed")},
    }
    write_json(given.output_file, {**about, "sides": sides})


if __name__ == "__main__":
    main()
