"""A run starts with the corrections of step latencies that the last one learnt."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from patchedserve.data.requests import Request
from patchedserve.data.resolution import Resolution
from patchedserve.data.workspace import Workspace
from patchedserve.serving.cache.options import CacheOptions
from patchedserve.serving.models.build import with_engine
from patchedserve.serving.models.loading import load_model
from patchedserve.serving.runs.corrections import CORRECTIONS_FILE, correction_of, keep_correction
from patchedserve.training.latency.online_correction import LEAST_SCALE

from ...support.tiny_models import save_tiny, tiny_sdxl

S = Resolution(64, 64)


class OneSecond:
    """Step latencies of one second."""

    def step_latency_s(self, active: object) -> float:
        return 1.0


def test_next_run_starts_with_the_last_correction(tmp_path: Path) -> None:
    model = load_model(str(save_tiny(tmp_path / "tiny", tiny_sdxl())), "cpu", "float32")
    cached = with_engine(model, replace(model.options, cache=CacheOptions("interval", patch_size=4)))
    workspace = Workspace(tmp_path).for_model(model.name, "cpu")
    notes: list[str] = []
    first = correction_of(cached, workspace, OneSecond())
    assert (first.scale, first.after_s) == (1.0, {})
    for number in range(200):
        if number == 10:
            keep_correction(cached, workspace, first)
            assert not (workspace.tables / CORRECTIONS_FILE).exists(), "ten steps say too little"
        first.observe([S], 0.4)
    first.observe_end(S, 0.07)
    keep_correction(cached, workspace, first, on_note=notes.append)
    assert not notes, "profiles know nothing of a cache"
    second = correction_of(cached, workspace, OneSecond())
    assert (second.scale, second.after_s) == (first.scale, {S: 0.07})
    assert second.scale == pytest.approx(0.4, rel=0.05)
    # Without the cache, steps take a different time.
    assert correction_of(model, workspace, OneSecond()).scale == 1.0
    file = workspace.tables / CORRECTIONS_FILE
    [key] = json.loads(file.read_text())
    for damage, message in (
        ("{", "Expecting property name"),
        ("[]", "must be a mapping"),
        (json.dumps({key: {"scale": "1"}}), "scale is '1', but it must be a number"),
        (json.dumps({key: {"scale": 9.0}}), "scale is 9, but"),
    ):
        file.write_text(damage)
        with pytest.warns(UserWarning, match=rf"corrections\.json is damaged \(.*{message}.*\); it was put aside as"):
            again = correction_of(cached, workspace, OneSecond())
        assert (again.scale, again.after_s, file.exists()) == (1.0, {}, False)
    assert sorted(each.read_text() for each in file.parent.glob("corrections.json-*.bad"))[0] == "[]"


@pytest.mark.parametrize(("measured_s", "told"), [(0.5, "100%"), (0.9, None)])
def test_inaccurate_profile_is_reported_once(measured_s: float, told: str | None, tmp_path: Path) -> None:
    model = load_model(str(save_tiny(tmp_path / "tiny", tiny_sdxl())), "cpu", "float32")
    workspace = Workspace(tmp_path).for_model(model.name, "cpu")
    notes: list[str] = []
    for _ in range(2):
        correction = correction_of(model, workspace, OneSecond())
        for _ in range(60):
            correction.observe([S], measured_s)
        keep_correction(model, workspace, correction, on_note=notes.append)
    if told is None:
        assert not notes
    else:
        (note,) = notes
        assert note.startswith(f"Step latencies were off by {told}. What this run has learnt corrects them from now on")


def test_unknown_correction_is_learnt_before_serving(tmp_path: Path) -> None:
    model = load_model(str(save_tiny(tmp_path / "tiny", tiny_sdxl())), "cpu", "float32")
    cached = with_engine(model, replace(model.options, cache=CacheOptions("interval", patch_size=4)))
    workspace = Workspace(tmp_path).for_model(model.name, "cpu")
    requests = [Request(0, "a cat", S, 6, arrival_s=9.0, slo_s=0.1) for _ in range(3)]
    notes: list[str] = []
    assert correction_of(model, workspace, OneSecond(), first=requests, on_note=notes.append).scale == 1.0
    assert not notes, "without the cache profiles tell all"
    for _ in range(2):
        known = correction_of(cached, workspace, OneSecond(), first=requests, on_note=notes.append)
        assert LEAST_SCALE <= known.scale < 0.5, "such a model takes milliseconds, on a slow machine some more"
        assert 0 < known.after_s[S] < 1
    assert notes == ["Learning how long steps take with the cache: 3 requests ..."]
