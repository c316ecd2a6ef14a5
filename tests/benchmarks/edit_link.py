"""Predicted and measured step times of edits whose records lie behind links of several speeds, by plan.

    python tests/benchmarks/edit_link.py [--model emoji-3] [--keep all] [--side 256] [--batch 4] [--share 0.2]
        [--rounds 5] [--device auto] [--dtype auto] [--output-file results/edit-link.json]

Each edit reads a record of its own. In each round and for each of five links, the plans `strawman`, `none`, `optimal`
and `paper` take turns in random order; each runs some warm-up steps in which loading starts, and then the steps that
count. The middle link loads everything that the parts read in the time that computing all tokens takes; the others are
two and four times as fast and as slow. Goals: the optimal plan takes at most 1.03 times as long as the better of
`strawman` and `none`, at most 0.90 times on the middle link, and predictions are right to 10 %. Nothing else may run.
"""

import argparse
import random
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from patchedserve.data.edits import EditSpec, TemplateSpec
from patchedserve.data.files import write_json
from patchedserve.data.requests import Request
from patchedserve.data.resolution import Resolution
from patchedserve.data.templates import KEEPS, LOAD_PLANS, LoadPlan
from patchedserve.serving.models.loading import load_model
from patchedserve.serving.models.served import ServedModel
from patchedserve.serving.options import LoadOptions, TemplateOptions
from patchedserve.serving.patched.stepper import PatchedStepper
from patchedserve.serving.runs.machine import cpu_name

RESULTS = Path(__file__).with_name("results")
SPEEDS = (0.25, 0.5, 1.0, 2.0, 4.0)
"""Speeds of the links, relative to the middle one."""
_STARTING, _COUNTED = 3, 5
"""Warm-up steps and counted steps of a turn."""


def edits_of(model: ServedModel, side: int, batch: int, share: float) -> list[Request]:
    """Return edits, each of a picture of its own, whose mask is a square of about this share of the cells."""
    geometry, size = model.family.geometry, Resolution(side, side)
    cell = geometry.cell * geometry.latent_factor
    masked = max(1, round(side / cell * share**0.5)) * cell
    mask = np.zeros((side, side), bool)
    mask[:masked, :masked] = True
    image, scale = np.random.default_rng(0).integers(0, 256, (side, side, 3), np.uint8), model.defaults.guidance_scale
    edits = [EditSpec(image, mask, template=TemplateSpec(seed=number)) for number in range(batch)]
    steps = _STARTING + _COUNTED + 1  # a finished batch has no plan
    return [Request(number, "a red hat", size, steps, scale, number, edit=edit) for number, edit in enumerate(edits)]


def turn(model: ServedModel, requests: list[Request], folder: Path, loads: LoadOptions) -> dict[str, Any]:
    """Return the seconds of a plan's counted steps, the prediction, and the numbers of parts read and of all parts."""
    stepper = model.stepper
    assert isinstance(stepper, PatchedStepper), "records are read by the patch engine"
    # A new store: nothing is loaded yet.
    model.reuse.open_store(folder / "templates", TemplateOptions(loads=loads))
    model.reuse.plan_loads(loads, model.tuning([requests[0].resolution], folder))
    active = [model.prepare(replace(request)) for request in requests]
    assert all(each.template is not None for each in active)
    taken_s = []
    for number in range(_STARTING + _COUNTED):
        start_s = time.perf_counter()
        failures = stepper.step(active)
        assert not failures, failures
        if number >= _STARTING:
            taken_s.append(time.perf_counter() - start_s)
    plan = stepper.plan
    assert plan is not None
    stepper.step([])
    return {"taken_s": taken_s, "predicted_s": plan.latency_s, "parts": [sum(plan.reuses), len(plan.reuses)]}


def middle_mbps(model: ServedModel, requests: list[Request], folder: Path) -> float:
    """Return the megabytes per second at which loading for all parts takes as long as computing all tokens."""
    none = turn(model, requests, folder, LoadOptions(1.0, "none"))
    records = [model.reuse.find(request) for request in requests]
    num_bytes = sum(each.num_bytes for each in records if each is not None) / requests[0].num_inference_steps
    return num_bytes / 1e6 / median(none["taken_s"])


def compared(turns: dict[LoadPlan, list[dict[str, Any]]]) -> dict[str, Any]:
    """Return each plan's median step time and its prediction relative to that, and the optimal plan's time relative to
    the better of `strawman` and `none`.
    """
    plans = {}
    for name, own in turns.items():
        taken_s = median(each for found in own for each in found["taken_s"])
        predicted_s = median(found["predicted_s"] for found in own)
        plans[name] = {
            "step_s": taken_s,
            "predicted_s": predicted_s,
            "predicted_ratio": predicted_s / taken_s,
            "parts": own[0]["parts"],
        }
    better_s = min(plans[name]["step_s"] for name in ("strawman", "none"))
    return {"plans": plans, "optimal_ratio": plans["optimal"]["step_s"] / better_s}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="emoji-3")
    parser.add_argument("--keep", choices=KEEPS, default="all")
    parser.add_argument("--side", type=int, default=256)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--share", type=float, default=0.2, help="of the cells that are in the mask, about")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--output-file", type=Path, default=RESULTS / "edit-link.json")
    given = parser.parse_args()
    model = load_model(given.model, given.device, given.dtype)
    model.reuse.use_keep(given.keep)
    model.reuse.masked_up_to = 1.0
    requests, rng = edits_of(model, given.side, given.batch, given.share), random.Random(0)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model.tune([requests[0].resolution], folder)
        for request in requests:
            model.reuse.use_template(request, folder / "templates", lambda count: None)
        middle = middle_mbps(model, requests, folder)
        turns: dict[float, dict[LoadPlan, list[dict[str, Any]]]] = {
            speed: {plan: [] for plan in LOAD_PLANS} for speed in SPEEDS
        }
        for _ in range(given.rounds):
            order: list[tuple[float, LoadPlan]] = [(speed, plan) for speed in SPEEDS for plan in LOAD_PLANS]
            rng.shuffle(order)
            for speed, plan in order:
                turns[speed][plan].append(turn(model, requests, folder, LoadOptions(speed * middle, plan)))
    links = [{"speed": speed, "mbps": speed * middle, **compared(own)} for speed, own in turns.items()]
    for link in links:
        plans = ", ".join(
            f"{name} {each['step_s'] * 1e3:.1f} ms ({each['predicted_ratio']:.2f} predicted)"
            for name, each in link["plans"].items()
        )
        print(f"{link['mbps']:.1f} MB/s: {plans}; optimal to the better one: {link['optimal_ratio']:.3f}")
    about = {
        "machine": cpu_name() if model.device.type == "cpu" else torch.cuda.get_device_name(model.device),
        "threads": torch.get_num_threads(),
        "dtype": str(model.dtype).removeprefix("torch."),
        **{name: getattr(given, name) for name in ("model", "keep", "side", "batch", "share", "rounds")},
    }
    write_json(given.output_file, {**about, "links": links})


if __name__ == "__main__":
    main()
