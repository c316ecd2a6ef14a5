"""What serve runs have learnt of step latencies, kept in the workspace: the next run starts with it.

Profiles are taken without the cache, so that a run with it would begin with predictions two or three times too long and
give up its first requests.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...data.errors import UsageError
from ...data.files import write_json
from ...data.resolution import parse
from ...serving.scheduling.policies import StepLatencyPredictor
from ...training.latency.online_correction import OnlineCorrection
from ..machine import run_facts

if TYPE_CHECKING:
    from ...data.workspace import ModelWorkspace
    from ...serving.models.served import ServedModel

CORRECTIONS_FILE = "corrections.json"
_LEAST_STEPS = 30
"""A run of fewer steps says too little: half of what was known before would still be in its scale."""


def correction_of(model: "ServedModel", workspace: "ModelWorkspace", latency: StepLatencyPredictor) -> OnlineCorrection:
    """A correction of these latencies that starts where the last run of this engine and cache has ended.

    Raises:
        UsageError: the workspace's file is damaged.
        OSError: the cache's predictor cannot be read.
    """
    path = workspace.root / "tables" / CORRECTIONS_FILE
    known = _read(path).get(_key(model), {"scale": 1.0, "after_s": {}})
    try:
        after_s = {parse(name): float(seconds) for name, seconds in known["after_s"].items()}
        return OnlineCorrection(latency, scale=float(known["scale"]), after_s=after_s)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(path, error) from error


def keep_correction(model: "ServedModel", workspace: "ModelWorkspace", correction: OnlineCorrection) -> None:
    """Keep what a run has learnt, if it was long enough. Raises as `correction_of`."""
    if correction.drift().num_observations < _LEAST_STEPS:
        return
    path = workspace.tables / CORRECTIONS_FILE
    after_s = {str(resolution): seconds for resolution, seconds in correction.after_s.items()}
    write_json(path, _read(path) | {_key(model): {"scale": correction.scale, "after_s": after_s}})


def _key(model: "ServedModel") -> str:
    return json.dumps(run_facts(model).key() | {"cache": model.options.cache.identity()}, sort_keys=True, default=str)


def _read(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise _damaged(path, error) from error
    if not isinstance(content, dict):
        raise _damaged(path, "it holds no object")
    return content


def _damaged(path: Path, why: object) -> UsageError:
    return UsageError(f"{path}: is damaged ({why}); delete it, and runs learn anew")
