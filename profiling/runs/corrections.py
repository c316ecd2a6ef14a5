"""What serve runs have learnt of step latencies, kept in the workspace: the next run starts with it.

Profiles are taken without the cache, so that a run with it would begin with predictions two or three times too long and
give up its first requests.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ...data.errors import UsageError
from ...data.files import write_json
from ...data.parsing import parse
from ...data.resolution import parse as parse_resolution
from ...serving.scheduling.policies import StepLatencyPredictor
from ...training.latency.online_correction import OnlineCorrection
from ..measure.standalone import context_key

if TYPE_CHECKING:
    from ...data.workspace import ModelWorkspace
    from ...serving.models.served import ServedModel

CORRECTIONS_FILE = "corrections.json"
_LEAST_STEPS = 30
"""A run of fewer steps says too little: half of what was known before would still be in its scale."""


@dataclass(frozen=True)
class Learnt:
    """What a run has learnt: see `OnlineCorrection`; resolutions by name."""

    scale: float = 1.0
    after_s: dict[str, float] | None = None


def correction_of(model: "ServedModel", workspace: "ModelWorkspace", latency: StepLatencyPredictor) -> OnlineCorrection:
    """A correction of these latencies that starts where the last run of this engine and cache has ended.

    Raises:
        UsageError: the workspace's file is damaged.
        OSError: the cache's predictor cannot be read.
    """
    path = workspace.root / "tables" / CORRECTIONS_FILE
    known = _read(path).get(_key(model), Learnt())
    after_s = {parse_resolution(name): seconds for name, seconds in (known.after_s or {}).items()}
    try:
        return OnlineCorrection(latency, scale=known.scale, after_s=after_s)
    except ValueError as error:
        raise UsageError(f"{path}: {error}") from error


def keep_correction(model: "ServedModel", workspace: "ModelWorkspace", correction: OnlineCorrection) -> None:
    """Keep what a run has learnt, if it was long enough. Raises as `correction_of`."""
    if correction.drift().num_observations < _LEAST_STEPS:
        return
    path = workspace.tables / CORRECTIONS_FILE
    after_s = {str(resolution): seconds for resolution, seconds in correction.after_s.items()}
    known = _read(path) | {_key(model): Learnt(correction.scale, after_s)}
    write_json(path, {key: asdict(each) for key, each in known.items()})


def _key(model: "ServedModel") -> str:
    return json.dumps(context_key(model), sort_keys=True)


def _read(path: Path) -> dict[str, Learnt]:
    if not path.exists():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UsageError(f"{path}: is damaged: {error}") from error
    return parse(dict[str, Learnt], content, f"{path}: is damaged")
