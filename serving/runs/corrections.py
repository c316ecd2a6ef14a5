"""Corrections of step latencies that serve runs have learnt, kept in the workspace for the next run.

Profiles are taken without the cache. Without a correction, a run with the cache would begin with predictions two or
three times too long and discard its first requests.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Self

from ...data.files import quarantine, write_json
from ...data.parsing import parse
from ...data.requests import Request
from ...data.resolution import parse as parse_resolution
from ...training.latency.learnt_line import LearntLine, LineState
from ...training.latency.online_correction import OnlineCorrection, bounded
from ..scheduling.policies import StepLatencyPredictor, get_policy
from .standalone import context_key

if TYPE_CHECKING:
    from ...data.workspace import ModelWorkspace
    from ..models.served import ServedModel

CORRECTIONS_FILE = "corrections.json"
_MIN_STEPS = 30
"""Minimum number of steps of a run whose correction is kept; after fewer, its scale is still half the earlier one."""
_FAR_OFF = 1 / 3
"""Mean error of a profile above which users are notified of the correction."""


@dataclass(frozen=True)
class CorrectionState:
    """State of an `OnlineCorrection` after a run, with resolutions by name."""

    scale: float = 1.0
    pace: float = 1.0
    after_s: dict[str, float] | None = None
    line: LineState = field(default_factory=LineState)

    @classmethod
    def of(cls, correction: OnlineCorrection, scale: float | None = None) -> Self:
        """Return the state of a correction as it is kept, with `scale` in place of its own if given."""
        after_s = {str(resolution): seconds for resolution, seconds in correction.after_s.items()}
        return cls(correction.scale if scale is None else scale, correction.pace, after_s, correction.line.state)


def correction_of(
    model: "ServedModel",
    workspace: "ModelWorkspace",
    latency: StepLatencyPredictor,
    *,
    first: Sequence[Request] = (),
    on_note: Callable[[str], None] = lambda note: None,
) -> OnlineCorrection:
    """Return a correction of these latencies that starts with the state of the last run of this engine and cache.

    If there is no such run and the engine has a patch cache, which profiles do not include, the `first` requests are
    served together to learn the correction. Otherwise the first run would discard requests that it could have drawn in
    time.

    Raises:
        UsageError: the model cannot serve one of the requests.
        OSError: the cache's predictor cannot be read.
        KeyboardInterrupt: on Ctrl-C while it learns; nothing is kept then.
    """
    known = _known(model, workspace)
    if known is None and first and model.options.cache.is_of_patches:
        on_note(f"Learning how long steps take with the cache: {len(first)} requests ...")
        known = _learn_from(model, latency, first)
        _keep(model, workspace, known)
    known = known or CorrectionState()
    after_s = {parse_resolution(name): seconds for name, seconds in (known.after_s or {}).items()}
    try:
        line = LearntLine(known.line)
        return OnlineCorrection(latency, scale=known.scale, pace=known.pace, after_s=after_s, line=line)
    except ValueError as error:
        quarantine(_path(workspace), str(_path(workspace)), error)
        return OnlineCorrection(latency)


def _learn_from(model: "ServedModel", latency: StepLatencyPredictor, requests: Sequence[Request]) -> CorrectionState:
    from ..engine.engine import Engine

    learner = OnlineCorrection(latency)
    engine = Engine(model, get_policy("continuous"), predictor=learner, max_batch_size=len(requests))
    for number, request in enumerate(requests):
        engine.submit(replace(request, request_id=number, arrival_s=0.0, slo_s=None))
    engine.close()
    result = engine.run()
    if result.was_interrupted:
        raise KeyboardInterrupt
    predicted_s = 0.0
    for row in result.steps:
        sizes = [parse_resolution(name) for name, count in row.resolutions.items() for _ in range(count)]
        predicted_s += latency.step_latency_s(sorted(sizes))
    # The mean over all steps: a moving average adapts too slowly for so few steps.
    scale = sum(row.duration_s for row in result.steps) / predicted_s if predicted_s > 0 else 1.0
    return CorrectionState.of(learner, bounded(scale))


def keep_correction(
    model: "ServedModel",
    workspace: "ModelWorkspace",
    correction: OnlineCorrection,
    *,
    on_note: Callable[[str], None] = lambda note: None,
) -> None:
    """Keep the correction of a run, if the run was long enough.

    The first time, `on_note` is called if the profile was far off, unless the engine has a patch cache, which profiles
    do not include. Raises as `correction_of`.
    """
    drift = correction.drift()
    if drift.num_observations < _MIN_STEPS:
        return
    is_first = _known(model, workspace) is None
    _keep(model, workspace, CorrectionState.of(correction))
    off = drift.mean_uncorrected_error
    if is_first and not model.options.cache.is_of_patches and off is not None and off > _FAR_OFF:
        on_note(
            f"Step latencies were off by {off:.0%}. What this run has learnt corrects them from now on (psctl profile "
            "measures them again)"
        )


def _path(workspace: "ModelWorkspace") -> Path:
    # Not `workspace.tables`, which would create the folder.
    return workspace.root / "tables" / CORRECTIONS_FILE


def _known(model: "ServedModel", workspace: "ModelWorkspace") -> CorrectionState | None:
    """Return the kept correction of this engine and cache; None if there is none."""
    return _read(_path(workspace)).get(_key(model))


def _keep(model: "ServedModel", workspace: "ModelWorkspace", learnt: CorrectionState) -> None:
    path = workspace.tables / CORRECTIONS_FILE
    known = _read(path) | {_key(model): learnt}
    write_json(path, {key: asdict(each) for key, each in known.items()})


def _key(model: "ServedModel") -> str:
    return json.dumps(context_key(model), sort_keys=True)


def _read(path: Path) -> dict[str, CorrectionState]:
    if not path.exists():
        return {}
    try:
        return parse(dict[str, CorrectionState], json.loads(path.read_text(encoding="utf-8")))
    except ValueError as error:
        quarantine(path, str(path), error)
        return {}
