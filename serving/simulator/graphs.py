"""Launching of passes in the simulator: without CUDA graphs, with one for each composition, or one for each bucket.

The latency table of a run then holds the time that a device computes. The host adds to it: it launches the kernels of a
pass one by one, or records them in a graph and replays that. No torch.
"""

import math
from collections import Counter, OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Literal

from ...data.errors import UsageError
from ...data.resolution import Resolution
from ...data.work import Work, resolution_of, share_of
from ..layout.bucket import Bucket

GraphsMode = Literal["off", "exact", "bucketed"]


@dataclass(frozen=True, slots=True)
class GraphCosts:
    """Costs of launching, recording and replaying the passes of one model on one machine.

    Attributes:
        launches: launches of a pass over images of one resolution.
        launch_us: microseconds of a launch.
        record_ms: milliseconds of recording a pass.
        launches_per_resolution: further launches for each further resolution of a batch.
        replay_ms: milliseconds that the host takes to replay a pass, beyond its computation.
        patience: passes of a composition or a bucket that are launched one by one before it is recorded.
        max_recorded: number of compositions that are kept recorded; None for any number, as of buckets.
        rows_per_request: rows of a pass for each request: 2 with guidance.
        about: where the numbers come from.

    Raises:
        UsageError: a number is out of its range.
    """

    launches: int
    launch_us: float
    record_ms: float
    launches_per_resolution: int = 0
    replay_ms: float = 0.0
    patience: int = 0
    max_recorded: int | None = None
    rows_per_request: int = 2
    about: str = ""

    def __post_init__(self) -> None:
        lows = {"launches": 1, "rows_per_request": 1} | ({} if self.max_recorded is None else {"max_recorded": 1})
        names = ("launch_us", "record_ms", "launches_per_resolution", "replay_ms", "patience")
        for name, low in (lows | dict.fromkeys(names, 0)).items():
            if not low <= getattr(self, name) < math.inf:
                raise UsageError(f"{name} is {getattr(self, name):g}, but it must be finite and {low} or more")


@dataclass(frozen=True, slots=True)
class GraphModel:
    """How the passes of the patch engine are launched.

    Attributes:
        mode: `off`: one by one. `exact`: a graph for each composition. `bucketed`: a graph for each bucket, to which
            passes are padded, as `--cuda-graphs` records them.
        costs: costs of the host.
        patch_side: side in pixels of the patches that buckets count; it divides every served side.
    """

    mode: GraphsMode
    costs: GraphCosts
    patch_side: int

    def launch_s(self, batch: Sequence[Resolution | Work]) -> float:
        """Return the seconds that the host takes to launch a pass one by one."""
        further = len(set(map(resolution_of, batch))) - 1
        return (self.costs.launches + further * self.costs.launches_per_resolution) * self.costs.launch_us / 1e6

    def patches_of(self, batch: Sequence[Resolution | Work]) -> int:
        """Return the number of patches in all rows of a pass."""
        pixels = sum(share_of(work) * resolution_of(work).pixels for work in batch)
        return math.ceil(pixels / self.patch_side**2) * self.costs.rows_per_request

    def bucket_of(self, batch: Sequence[Resolution | Work]) -> Bucket:
        """Return the smallest bucket for a pass."""
        return Bucket.of(self.patches_of(batch), self.costs.rows_per_request * len(batch))


class RecordedPasses:
    """Passes of one GPU, and those of them that are recorded.

    Attributes:
        keys: different compositions or, if `bucketed`, buckets of the passes.
        num_recordings, num_replays: passes that were recorded, and passes that were replayed without being recorded.
    """

    def __init__(self, model: GraphModel) -> None:
        self._model = model
        self.keys: set[Hashable] = set()
        self.num_recordings = self.num_replays = 0
        self._recorded: OrderedDict[Hashable, None] = OrderedDict()
        self._num_eager: Counter[Hashable] = Counter()

    def step_s(self, device_s: float, batch: Sequence[Resolution | Work]) -> float:
        """Return the seconds of a step that computes for `device_s` on the device.

        Args:
            device_s: seconds of the step on the device.
            batch: works that the model computes, sorted; none if all requests reuse.
        """
        if not batch:
            return device_s
        model, costs = self._model, self._model.costs
        is_bucketed = model.mode == "bucketed"
        key: Hashable = model.bucket_of(batch) if is_bucketed else tuple(batch)
        self.keys.add(key)
        if model.mode == "off" or not self._is_due(key):
            return max(device_s, model.launch_s(batch))
        if is_bucketed:
            device_s *= model.bucket_of(batch).num_patches / model.patches_of(batch)
        if key in self._recorded:
            self._recorded.move_to_end(key)
            self.num_replays += 1
            return device_s + costs.replay_ms / 1e3
        self._recorded[key] = None
        self.num_recordings += 1
        # Recorded buckets share the memory of their inputs.
        if not is_bucketed and costs.max_recorded is not None and len(self._recorded) > costs.max_recorded:
            dropped, _ = self._recorded.popitem(last=False)
            del self._num_eager[dropped]
        return device_s + (costs.record_ms + costs.replay_ms) / 1e3

    def _is_due(self, key: Hashable) -> bool:
        """Return whether a pass is replayed or recorded now, as `core.captured.CapturedPasses` decides."""
        if key in self._recorded:
            return True
        self._num_eager[key] += 1
        return self._num_eager[key] > self._model.costs.patience
