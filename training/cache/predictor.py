"""The cache predictor: a random forest that predicts, patch by patch, whether a block's cached output may be reused.

Features of a patch before a block: distance of the block's input from the cached input, index of the block, progress of
the request, number of steps in a row for which the patch has skipped the block, and size of the image. Training and
serving share one definition, `features_of`. Sources: PatchedServe sections 5.1 and 7.

The file is safetensors: the nodes of the forest as flat arrays, and in its header a JSON text and a checksum of both.
Nothing is pickled, and scikit-learn is not needed to load it.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from ...data.checks import require_counts
from ...data.errors import UsageError
from ...data.files import write_bytes
from ...data.parsing import parse
from ...data.tables.block_facts import BlockFacts
from ...kernels.forest import forest_predict, forest_votes
from ...kernels.forest_tables import FlatForest

FEATURES = ("log10_input_mse_normalised", "block_index", "step_fraction", "reuses_in_row", "pixels")
"""Names of the columns that `features_of` returns, in order."""

INPUT_MSE_FLOOR = 1e-10
"""Lower bound of the input change. It is a relative change of 1e-5: below any useful threshold, and far above the
rounding of float32."""

_FORMAT = "2"
"""Forests of format 1 were not trained on the whole model as one block."""
_KIND_KEY, _FORMAT_KEY, _CONTENT_KEY, _SUM_KEY = "psctl.kind", "psctl.format", "psctl.content", "psctl.sha256"
_KIND = "cache predictor"


def features_of(
    input_mse_normalised: torch.Tensor,
    block_index: torch.Tensor | int,
    step_fraction: torch.Tensor,
    reuses_in_row: torch.Tensor,
    pixels: torch.Tensor,
) -> torch.Tensor:
    """Return the forest's features.

    Args:
        input_mse_normalised: (rows,) mean square difference of the block's input and the cached input, divided by the
            mean square of the cached input; any floating dtype. NaN counts as infinite, as does 0 / 0.
        block_index: index of the block in the order of a step, from 0; (rows,) or one for all rows.
        step_fraction: (rows,) step / number of steps of the request.
        reuses_in_row: (rows,) number of consecutive steps before this one that have reused the cached output: 0 if the
            cached tensors are the last step's.
        pixels: (rows,) width * height of the patch's image, in pixels of the image.

    Returns:
        (rows, 5) float32 on the device of the first argument, with the columns `FEATURES`.
    """
    change = torch.nan_to_num(input_mse_normalised.float(), nan=torch.inf, posinf=torch.inf)
    features = change.new_empty((change.shape[0], len(FEATURES)))
    features[:, 0] = change.clamp_(min=INPUT_MSE_FLOOR).log10_()
    for column, values in enumerate((block_index, step_fraction, reuses_in_row, pixels), start=1):
        features[:, column] = values
    return features


@dataclass(frozen=True, slots=True)
class _Head:
    """Content of a file beside the forest and its `BlockFacts`, as in `CachePredictor`."""

    features: list[str]
    input_mse_floor: float
    threshold: float
    min_confidence: float
    max_lag: int
    report: dict[str, Any]

    def __post_init__(self) -> None:
        require_counts({"max_lag": self.max_lag})


@dataclass(frozen=True, slots=True)
class CachePredictor:
    """A trained predictor, with its forest on the device where it is evaluated.

    Attributes:
        forest: class 1 is "the output stays within the threshold".
        facts: the model, scheduler, patch size and blocks that it was trained for.
        threshold: largest mean square difference of a block's output and the cached one, divided by the mean square of
            the cached output, at which the cached one may be used.
        min_confidence: the cached output is used if the forest's vote is above this; for the whole model as one block,
            if the mean vote of a request's patches is.
        max_lag: largest number of steps between a tensor and the cached one in training; the forest has seen no more
            than max_lag - 1 reuses in a row.
        report: figures of the training, as JSON (`fitting.fit_cache_predictor`).
    """

    forest: FlatForest
    facts: BlockFacts
    threshold: float
    min_confidence: float
    max_lag: int
    report: Mapping[str, Any] = field(default_factory=dict)

    def may_reuse(self, features: torch.Tensor, *, kernels: str = "auto") -> torch.Tensor:
        """Return which patches may use the cached output of a block, (rows,) bool, without waiting for the device.

        Args:
            features: (rows, 5) float32 from `features_of`, on the predictor's device.
            kernels: one of `kernels.launch.KERNELS`.

        Raises ValueError as `kernels.forest.forest_proba`.
        """
        return forest_predict(features, self.forest, min_confidence=self.min_confidence, kernels=kernels)

    def votes(self, features: torch.Tensor, *, kernels: str = "auto") -> torch.Tensor:
        """Return the forest's confidence that patches may use it, (rows,) float64; otherwise as `may_reuse`."""
        return forest_votes(features, self.forest, kernels=kernels)

    def to(self, device: torch.device | str) -> "CachePredictor":
        """Return the predictor with its forest on a device."""
        return replace(self, forest=self.forest.to(device))

    def save(self, path: str | Path) -> None:
        """Write the predictor, atomically. Raises OSError."""
        arrays = {name: array.cpu().contiguous() for name, array in self.forest.nodes().items()}
        content = json.dumps(
            {
                **self.facts.to_json(),
                "features": list(FEATURES),
                "input_mse_floor": INPUT_MSE_FLOOR,
                "threshold": self.threshold,
                "min_confidence": self.min_confidence,
                "max_lag": self.max_lag,
                "report": dict(self.report),
            },
            ensure_ascii=False,
            allow_nan=False,
        )
        head = {_KIND_KEY: _KIND, _FORMAT_KEY: _FORMAT, _CONTENT_KEY: content, _SUM_KEY: _checksum(content, arrays)}
        write_bytes(path, save(arrays, head))

    @classmethod
    def load(
        cls, path: str | Path, *, expect: BlockFacts | None = None, device: torch.device | str = "cpu"
    ) -> "CachePredictor":
        """Read a predictor and check its checksum, and that it fits the served model, `expect` (None skips this check).

        Raises:
            UsageError: the file is missing, truncated, edited or of another kind; it was made for other features; or it
                does not fit `expect`. The message names the file and the first problem.
        """
        content, arrays = _read(Path(path))
        head = parse(_Head, content, f"{path} is damaged")
        if head.features != list(FEATURES) or head.input_mse_floor != INPUT_MSE_FLOOR:
            raise UsageError(
                f"{path} was trained on the features {head.features}, but this psctl uses {list(FEATURES)}; "
                "run psctl train-predictor cache again"
            )
        facts = parse(BlockFacts, content, f"{path} is damaged")
        if expect is not None:
            facts.check_fits(expect, source=str(path))
        try:
            forest = FlatForest.of(**arrays, num_features=len(FEATURES))
        except (ValueError, TypeError) as error:
            raise UsageError(f"{path} is damaged: {error}") from error
        return cls(forest.to(device), facts, head.threshold, head.min_confidence, head.max_lag, head.report)


def _read(path: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Return content and arrays of a file with a valid checksum. Raises UsageError."""
    if not path.is_file():
        raise UsageError(f"there is no cache predictor {path}; train one with: psctl train-predictor cache")
    try:
        with safe_open(path, "pt") as file:
            head = file.metadata() or {}
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (the file is not a dict)
    except (SafetensorError, OSError) as error:
        raise UsageError(f"{path} is truncated, damaged or no safetensors file") from error
    if head.get(_KIND_KEY) != _KIND:
        raise UsageError(f"{path} is a safetensors file, but no cache predictor")
    if head.get(_FORMAT_KEY) != _FORMAT:
        raise UsageError(
            f"{path} is of format {head.get(_FORMAT_KEY)}, but this psctl reads format {_FORMAT}; "
            "run psctl train-predictor cache again"
        )
    text = head.get(_CONTENT_KEY, "")
    if head.get(_SUM_KEY) != _checksum(text, arrays):
        raise UsageError(f"{path} was edited or damaged: its checksum is wrong; run psctl train-predictor cache again")
    return json.loads(text), arrays


def _checksum(content: str, arrays: Mapping[str, torch.Tensor]) -> str:
    digest = hashlib.sha256(content.encode())
    for name, array in sorted(arrays.items()):
        digest.update(f"\n{name} {array.dtype} {tuple(array.shape)}\n".encode())
        digest.update(array.numpy().tobytes())
    return digest.hexdigest()
