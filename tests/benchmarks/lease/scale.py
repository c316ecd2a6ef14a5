"""Sizes of a lease on a GPU and of its rehearsal on a CPU. Imports no torch."""

from dataclasses import dataclass
from typing import Any

from patchedserve.data.resolution import Resolution
from patchedserve.data.traces.workloads import DATASET_C, Workload

Counts = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Scale:
    """Sizes of the measurements of all parts.

    Attributes:
        is_rehearsal: whether parts run tiny models on the CPU, with `tests.support.tape.Tape` in place of CUDA graphs.
        device: name of the torch device.
        dtypes: dtype of each model.
        sides: sides of the images in pixels, from small to large.
        combinations, compiled: numbers of requests of each size, in the order in which they are measured; FLUX runs
            the first few.
        num_of_flux: number of these that FLUX runs.
        repeats, warmup: repetitions and warm-up runs of timings of steps.
        num_first_seen: number of compositions, of up to 12 requests, whose first passes are timed.
        served: workload of the traces.
        rates, num_prompts: requests per second, and requests of each trace.
        profiled: numbers of requests of each size whose steps are profiled.
        edit_side, edit_batch, templates: side of edited images, edits in a batch, and numbers of templates.
        strip_sides, ranks: sides of images that are cut into strips, and numbers of ranks.
        least_share, most_share: factors of a plan's limits.
        tests: arguments of pytest.
        num_tuned, num_decoded: numbers of sizes for which strategies and formats are measured first, and that the
            autoencoder decodes.
        max_text_tokens: limit on FLUX's text; None for the pipeline's own default.
    """

    is_rehearsal: bool = False
    device: str = "cuda:0"
    dtypes: tuple[tuple[str, str], ...] = (("sdxl", "float16"), ("flux-dev", "bfloat16"))
    sides: tuple[int, ...] = (512, 768, 1024)
    combinations: tuple[Counts, ...] = ((1, 1, 1), (0, 0, 1), (1, 0, 0), (2, 2, 2), (4, 4, 4))
    compiled: tuple[Counts, ...] = ((1, 1, 1), (0, 0, 1), (4, 4, 4), (1, 0, 0), (2, 2, 2))
    num_of_flux: int = 2
    repeats: int = 5
    warmup: int = 2
    num_first_seen: int = 8
    served: Workload = DATASET_C
    rates: tuple[float, ...] = (1.2, 0.8)
    num_prompts: int = 20
    profiled: tuple[Counts, ...] = ((1, 1, 1), (4, 4, 4))
    edit_side: int = 1024
    edit_batch: int = 4
    templates: tuple[int, ...] = (1, 4)
    strip_sides: tuple[int, ...] = (1024, 2048)
    ranks: tuple[int, ...] = (2, 4, 8)
    least_share: float = 1.0
    most_share: float = 1.0
    tests: tuple[str, ...] = ("tests/kernels", "tests/gpu")
    num_tuned: int = 4
    num_decoded: int = 3
    max_text_tokens: int | None = None

    def dtype(self, model: str) -> str:
        """Return the name of a model's dtype."""
        return dict(self.dtypes)[model]


FULL = Scale()
_TINY: dict[str, Any] = {
    "device": "cpu",
    "dtypes": (("sdxl", "float32"), ("flux-dev", "float32")),
    "sides": (64, 96, 128),
    "combinations": ((1, 1, 1),),
    "compiled": ((1, 0, 0),),
    "num_of_flux": 1,
    "repeats": 1,
    "warmup": 1,
    "num_first_seen": 1,
    "served": Workload((Resolution(64, 64),), (3,), (1.0,), Resolution(64, 64)),
    "rates": (20.0,),
    "num_prompts": 3,
    "edit_side": 64,
    "profiled": ((1, 1, 1),),
    "edit_batch": 2,
    "templates": (1, 2),
    "strip_sides": (256,),
    "ranks": (2,),
    "least_share": 0.05,
    "most_share": 1.5,
    "num_tuned": 1,
    "num_decoded": 1,
    "max_text_tokens": 16,
    "tests": ("tests/kernels/test_launch.py::test_kernel_choice",),
}
REHEARSAL = Scale(is_rehearsal=True, **_TINY)
