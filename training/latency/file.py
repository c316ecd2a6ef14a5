"""The fitted model of a latency predictor, and its file."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np

from ...data.parsing import NamedResolution, parse
from ...data.run_facts import RunFacts
from ..sealed import Sealed

_VERSION = 2
_FILE = Sealed("psctl.latency_predictor", "a latency predictor", "psctl train-predictor latency")


@dataclass(frozen=True, slots=True)
class SupportVectors:
    """A fitted SVR with an RBF kernel behind a standard scaler, all float64.

    Attributes:
        mean, scale: mean and scale of the features, shape (features,).
        vectors: scaled support vectors, shape (vectors, features).
        dual: coefficients of the support vectors, shape (vectors,).
        gamma, intercept: shape (1,).
    """

    mean: np.ndarray
    scale: np.ndarray
    vectors: np.ndarray
    dual: np.ndarray
    gamma: np.ndarray
    intercept: np.ndarray

    def predict(self, features: np.ndarray) -> np.ndarray:
        """Predict rows of features, shape (rows, features) -> (rows,)."""
        scaled = (features - self.mean) / self.scale
        squares = np.square(scaled[:, None, :] - self.vectors[None]).sum(-1)
        return np.exp(-self.gamma * squares) @ self.dual + self.intercept


@dataclass(frozen=True, slots=True)
class StepModel:
    """Milliseconds of a step: a linear model, times the exponential of a support vector regression where there is one.

    Attributes:
        weights: shape (1 + features,); the first is the constant time of every step, and that of the logarithm is 0.
            None is negative, so that no batch gets faster by growing.
        vectors: regression of the logarithm of measured over linear; None for the linear model alone.
    """

    weights: np.ndarray
    vectors: SupportVectors | None = None

    @property
    def kind(self) -> str:
        """Name of the kind of model in files and tables."""
        return "linear" if self.vectors is None else "svr"

    def ms(self, features: np.ndarray) -> np.ndarray:
        """Predict rows of features, shape (rows, features) -> (rows,)."""
        linear_ms = self.weights[0] + features @ self.weights[1:]
        return linear_ms if self.vectors is None else linear_ms * np.exp(self.vectors.predict(features))


@dataclass(frozen=True, slots=True)
class PredictorAbout:
    """Description of the data that a predictor was fitted to.

    Attributes:
        resolutions: the profiled resolutions, from small to large.
        largest_counts: largest number of requests of each resolution in one batch.
        max_batch_size: largest number of requests in one batch.
        circumstances: model, device and engine of the measurements; None for a table of another program.
        fit: seed, parameters, held-out combinations and errors (`fitting.fit_latency_predictor`), as JSON.
    """

    resolutions: tuple[NamedResolution, ...]
    largest_counts: tuple[int, ...]
    max_batch_size: int
    circumstances: RunFacts | None = None
    fit: Mapping[str, Any] = field(default_factory=dict)

    @property
    def patch_px(self) -> int:
        """Side of a patch in pixels: the greatest common divisor of all sides of the profiled resolutions."""
        return math.gcd(*(side for resolution in self.resolutions for side in resolution))

    @property
    def feature_names(self) -> tuple[str, ...]:
        names = (f"requests_{resolution}" for resolution in self.resolutions)
        return (*names, "distinct_resolutions", "patches", "log_patches")

    def features(self, counts: Sequence[float], num_distinct: int) -> list[float]:
        """Return the features of a batch with these numbers of requests of each profiled resolution.

        They are the paper's and the logarithm of the number of patches: the constant cost of a step matters for small
        batches only, which otherwise lie too close together for a kernel model.
        """
        pixels = sum(count * resolution.pixels for count, resolution in zip(counts, self.resolutions, strict=True))
        patches = pixels / self.patch_px**2
        return [*counts, num_distinct, patches, math.log(patches)]

    def to_json(self) -> dict[str, Any]:
        return {
            "version": _VERSION,
            "feature_names": list(self.feature_names),
            "resolutions": list(map(str, self.resolutions)),
            "largest_counts": list(self.largest_counts),
            "max_batch_size": self.max_batch_size,
            "circumstances": None if self.circumstances is None else self.circumstances.to_json(),
            "fit": dict(self.fit),
        }


def write_predictor(path: str | Path, model: StepModel, about: PredictorAbout) -> None:
    """Write a predictor, atomically. Raises OSError."""
    arrays = {"weights": model.weights}
    if model.vectors is not None:
        arrays |= {item.name: getattr(model.vectors, item.name) for item in fields(SupportVectors)}
    _FILE.write(path, arrays, about.to_json() | {"kind": model.kind})


def read_predictor(path: Path) -> tuple[StepModel, PredictorAbout]:
    """Read a file that `write_predictor` has written.

    Raises UsageError: the file cannot be read, is damaged, was edited, or is of another kind.
    """
    arrays, content = _FILE.read(path)
    try:
        _FILE.require_version(content, _VERSION)
        about = parse(PredictorAbout, content)
        weights = arrays.pop("weights")
        return StepModel(weights, SupportVectors(**arrays) if arrays else None), about
    except (ValueError, KeyError, TypeError) as error:
        raise _FILE.version_error(path, error) from error
