"""PatchedServe (Sun, Zhao, Wang): the exhibits that are reproduced, and the paper's statements about them.

Numbers of the paper are those of its text and tables; it prints none for most bars and lines. This module imports no
torch until an exhibit is measured.
"""

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from . import plots
from .paper import SD3, SDXL, Exhibit, Measure, Paper

_Settings = Mapping[str, Any]


def _lazy(module: str, name: str, **given: Any) -> Measure:
    """Return a function of a module of this package, which is imported when the function is first called."""
    return lambda lab, settings: getattr(import_module(f".{module}", __package__), name)(lab, settings, **given)


_COLUMNS = ("SDXL, COCO", "SDXL, DiffusionDB", "SD3, COCO", "SD3, DiffusionDB")
_CLIP = {"Original": (14.92, 16.24, 14.79, 16.65), "PatchedServe": (15.43, 16.62, 15.13, 17.06)}
_FID = {"Original": (31.92, 35.56, 28.94, 32.38), "PatchedServe": (28.85, 33.42, 26.56, 38.01)}


def _table(number: int, metric: str, title: str, about: str, printed: Mapping[str, Sequence[float]]) -> Exhibit:
    pairs = zip(printed["Original"], printed["PatchedServe"], strict=True)
    changes = [round(own - other, 2) for other, own in pairs]
    is_more = metric == "clip"
    return Exhibit(
        "table",
        number,
        title,
        about,
        _lazy("images", "compare_quality", metric=metric, printed=(min(changes), max(changes)), is_more=is_more),
        plots.quality_table,
        full={"num_prompts": 256},
        quick={"num_prompts": 4},
        paper={side: dict(zip(_COLUMNS, numbers, strict=True)) for side, numbers in printed.items()},
        metrics=(metric,),
    )


_SERVED: _Settings = {
    "lowest_load": 0.3,
    "highest_load": 2.2,
    "num_rates": 5,
    "served_steps": 30,
    "num_prompts": 200,
    "longest_trace_s": 30,
    "num_seeds": 5,
    "warmup_requests": 32,
    "tables": 60,
    "table_repeats": 2,
}
_QUICK_SERVED: _Settings = {
    "lowest_load": 0.5,
    "highest_load": 1.5,
    "num_rates": 2,
    "served_steps": 24,
    "num_prompts": 6,
    "longest_trace_s": None,
    "num_seeds": 1,
    "warmup_requests": 6,
    "tables": 6,
    "table_repeats": 1,
}
_GPUS: _Settings = {"gpus": [2, 4, 8], "simulated_prompts": 300}
_QUICK_GPUS: _Settings = {"gpus": [2, 8], "simulated_prompts": 20}

PATCHEDSERVE = Paper(
    "patchedserve",
    "PatchedServe",
    (
        Exhibit(
            "figure",
            4,
            "savings from skipped computations",
            "the share of blocks that one could skip, because their output changes by a mean square error of less than "
            "0.1 from one step to the next, by resolution; 1,000 requests each (section 3).",
            _lazy("batches", "block_savings"),
            plots.block_savings,
            full={},
            quick={},
        ),
        Exhibit(
            "figure",
            5,
            "latency of one batch size, in different combinations",
            "three requests, S, M and L being the three resolutions; three large ones take 68 % longer than three "
            "small ones, and SML may take longer than MML although it has fewer pixels (section 3).",
            _lazy("batches", "step_latencies"),
            plots.step_latencies,
            full={"repeats": 15, "warmup": 3},
            quick={"repeats": 2, "warmup": 1},
        ),
        Exhibit(
            "figure",
            11,
            "end-to-end SLO satisfaction",
            "the share of requests in time over the request rate on one H100, SLO 5 times the latency alone: 30.1 % "
            "above NIRVANA on average, more than 99 % in time, and 1.5, 1.12 and 1.1 times as tight a workload with "
            "99, 95 and 90 % in time (section 8.1).",
            _lazy("serving", "served_on_one_gpu"),
            plots.attainment,
            full=_SERVED,
            quick=_QUICK_SERVED,
        ),
        *(
            Exhibit(
                "figure",
                number,
                f"{name} with different numbers of GPUs",
                "the same on 2, 4 and 8 H100s in data parallel: PatchedServe is the highest everywhere, NIRVANA is "
                "better under heavy and DistriFusion under light load (section 8.1).",
                _lazy("serving", "served_on_many_gpus"),
                plots.attainment_by_gpus,
                full={**_SERVED, **_GPUS},
                quick={**_QUICK_SERVED, **_QUICK_GPUS},
                pipelines=(pipeline,),
            )
            for number, name, pipeline in ((12, "SDXL", SDXL), (13, "SD3", SD3))
        ),
        Exhibit(
            "figure",
            14,
            "latency of patched batches with and without the cache, and overheads",
            "as many requests of each of three resolutions; patched batching takes 13 % less time than the baseline on "
            "average, and gains less in larger batches; the cache gains more in SDXL than in SD3. Splitting takes next "
            "to nothing, managing the cache no more for each request of a large batch, and the scheduler is not "
            "counted, as it works beside the model (section 8.2).",
            _lazy("batches", "batched_with_and_without_cache"),
            plots.batches,
            full={**_SERVED, "of_each": [1, 2, 3, 4], "rounds": 5, "repeats": 7, "warmup": 3},
            quick={**_QUICK_SERVED, "of_each": [1, 2], "rounds": 2, "repeats": 2, "warmup": 1},
        ),
        Exhibit(
            "figure",
            15,
            "computation savings of patches and of full images",
            "patch by patch saves more than whole images in both models; in SDXL 512 px saves more computation than "
            "1024 px, which saves more time (section 8.2).",
            _lazy("batches", "savings_of_patches_and_images"),
            plots.savings,
            full={"requests": 6, "rounds": 5},
            quick={"requests": 2, "rounds": 2},
        ),
        _table(1, "clip", "CLIP score (higher is better)", "5,000 captions each (section 8.2).", _CLIP),
        _table(2, "fid", "FID (lower is better)", "5,000 captions each, against the real images (section 8.2).", _FID),
    ),
)
