"""The latency predictor: seconds of one denoising step from the composition of its batch (PatchedServe section 6.1.2).

The paper's support vector regression on its features (requests of each resolution, number of different resolutions,
number of patches) and the logarithm of the last. The regression is fitted to the residual of a linear model, as the
logarithm of a ratio, so that small batches weigh as much as large ones. If the linear model alone is no worse, only
that is kept (`fitting`). The fitted model is stored as flat arrays and evaluated here with numpy alone, so that
policies need neither torch nor scikit-learn.
"""

import warnings
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np

from ...data.errors import UsageError
from ...data.resolution import Resolution
from ...data.run_facts import RunFacts
from ...data.work import Work, is_part, resolution_of, share_of
from ...data.workspace import ModelWorkspace
from .file import PredictorAbout, StepModel, read_predictor, write_predictor

PREDICTOR_FILE = "latency.safetensors"
_MAX_CACHED = 200_000

Warn = Callable[[str], None]


class LatencyPredictor:
    """Predicts step latencies; a `serving.scheduling.policies.base.StepLatencyPredictor`.

    A kernel model does not extrapolate, so batches outside the profile are mapped to ones inside. A batch with more
    requests than were profiled is scaled down, and its latency scaled up by the same factor. A resolution between two
    profiled ones counts as a share of each, so that the numbers of requests and of patches stay the same. Both cases
    are warned of once, and counted. A resolution smaller or larger than all profiled ones is refused.

    Args:
        model: the fitted model.
        about: description of the data that it was fitted to.
        on_warning: called for the first batch of each case outside the profile; None issues a RuntimeWarning.

    Attributes:
        num_too_large: predictions for more requests than were profiled.
        num_between: predictions for resolutions between the profiled ones.
    """

    def __init__(self, model: StepModel, about: PredictorAbout, on_warning: Warn | None = None) -> None:
        self.model, self.about = model, about
        self.num_too_large = self.num_between = 0
        self._warn = on_warning or (lambda message: warnings.warn(message, RuntimeWarning, stacklevel=4))
        self._index = {resolution: index for index, resolution in enumerate(about.resolutions)}
        self._known: dict[tuple[int, ...], float] = {}
        # Cache of batches outside the profile, apart from the others so that every prediction of one is counted.
        self._outside: dict[frozenset[tuple[Resolution, float]], tuple[float, bool, bool]] = {}

    def step_latency_s(self, active: Sequence[Resolution | Work]) -> float:
        """Return the seconds of one denoising step over one whole image of each resolution in `active`; 0 for none.
        References count as parts of an image.

        Raises UsageError: a resolution is smaller or larger than all profiled ones, or an entry is a part of an image.
        """
        counts = [0] * len(self._index)
        try:
            for resolution in active:
                counts[self._index[resolution]] += 1  # pyright: ignore[reportArgumentType]  parts are in no profile
        except KeyError:
            return self._predict_outside(active)
        key = tuple(counts)
        latency_s = self._known.get(key)
        if latency_s is not None:
            return latency_s
        if len(active) > self.about.max_batch_size or any(map(int.__gt__, counts, self.about.largest_counts)):
            return self._predict_outside(active)
        latency_s = self.predict_ms([key])[0] / 1e3 if active else 0.0
        _cache_prediction(self._known, key, latency_s)
        return latency_s

    def predict_ms(self, counts: Sequence[Sequence[float]], num_distinct: int | None = None) -> list[float]:
        """Return the milliseconds of a step for each row of request counts, in the order of `about.resolutions`."""
        rows = [self.about.features(row, num_distinct or sum(count > 0 for count in row)) for row in counts]
        return self.model.ms(np.array(rows, dtype=np.float64)).tolist()

    def _predict_outside(self, active: Sequence[Resolution | Work]) -> float:
        counts: dict[Resolution, float] = defaultdict(float)
        for work in active:
            if is_part(work):
                raise UsageError(f"the latency predictor knows whole images only, and not {work}")
            counts[resolution_of(work)] += share_of(work)
        key = frozenset(counts.items())
        if key not in self._outside:
            shares = [0.0] * len(self._index)
            for resolution, count in counts.items():
                for index, share in self._shares(resolution):
                    shares[index] += share * count
            ratios = [share / largest for share, largest in zip(shares, self.about.largest_counts, strict=True)]
            times = max(len(active) / self.about.max_batch_size, *ratios, 1.0)
            num_distinct = min(len(counts), len(self._index))
            ms = self.predict_ms([[share / times for share in shares]], num_distinct)[0] * times
            is_between = not counts.keys() <= self._index.keys()
            _cache_prediction(self._outside, key, (ms / 1e3, times > 1, is_between))
        latency_s, is_too_large, is_between = self._outside[key]
        if is_too_large and not self.num_too_large:
            with_references = " with references" if any(share_of(work) > 1 for work in active) else ""
            self._warn(
                f"a batch of {len(active)} requests{with_references} is larger than all that were profiled (at most "
                f"{self.about.max_batch_size}); its latency is extrapolated"
            )
        if is_between and not self.num_between:
            unknown = next(resolution for resolution in counts if resolution not in self._index)
            self._warn(f"{unknown} was not profiled; its latency is interpolated between {self._profiled()}")
        self.num_too_large += is_too_large
        self.num_between += is_between
        return latency_s

    def _shares(self, resolution: Resolution) -> list[tuple[int, float]]:
        """Return a resolution as indices of profiled resolutions with shares, which add up to 1."""
        if resolution in self._index:
            return [(self._index[resolution], 1.0)]
        pixels = [profiled.pixels for profiled in self.about.resolutions]
        if not pixels[0] <= resolution.pixels <= pixels[-1]:
            side = "smaller" if resolution.pixels < pixels[0] else "larger"
            raise UsageError(
                f"{resolution} is {side} than all resolutions that the latency predictor knows ({self._profiled()}); "
                "profile it, too: psctl profile latency --resolutions"
            )
        high = next(index for index, each in enumerate(pixels) if each >= resolution.pixels)
        if pixels[high] == resolution.pixels:
            return [(high, 1.0)]
        share = (resolution.pixels - pixels[high - 1]) / (pixels[high] - pixels[high - 1])
        return [(high - 1, 1 - share), (high, share)]

    def _profiled(self) -> str:
        return ", ".join(map(str, self.about.resolutions))

    def save(self, path: str | Path) -> None:
        """Write the predictor as safetensors, atomically. Raises OSError."""
        write_predictor(path, self.model, self.about)

    @classmethod
    def load(cls, path: str | Path, *, expect: RunFacts | None = None, on_warning: Warn | None = None) -> Self:
        """Read a predictor.

        Args:
            path: the file.
            expect: the model, device and engine to be served (`serving.runs.machine.run_facts`); None accepts any.
            on_warning: as for the class.

        Raises:
            UsageError: the file cannot be read, is damaged or was edited, or is for another model, device, dtype or
                engine than expected.
        """
        model, about = read_predictor(Path(path))
        if expect is not None:
            again = "run psctl profile latency and psctl train-predictor latency with the options that you serve with"
            if about.circumstances is None:
                raise UsageError(
                    f"{path} was fitted to an imported table, which may be of any model and device; {again}"
                )
            difference = about.circumstances.difference(expect)
            if difference is not None:
                raise UsageError(f"{path} {difference}; {again}")
        return cls(model, about, on_warning)


def load_workspace_predictor(
    workspace: ModelWorkspace, *, expect: RunFacts | None = None, on_warning: Warn | None = None
) -> LatencyPredictor:
    """Load the latency predictor of a model's workspace.

    Raises UsageError as `LatencyPredictor.load`, and if there is none yet.
    """
    path = workspace.find_predictor(PREDICTOR_FILE)
    if path is None:
        raise UsageError(
            f"no latency predictor is in {workspace.root}; make one: psctl profile latency, then "
            "psctl train-predictor latency, with the same --model, --device and --workspace"
        )
    return LatencyPredictor.load(path, expect=expect, on_warning=on_warning)


def _cache_prediction(known: dict[Any, Any], key: Any, value: Any) -> None:
    """Cache a prediction; a full cache is cleared first, as predicting again is better than growing without bound."""
    if len(known) >= _MAX_CACHED:
        known.clear()
    known[key] = value
