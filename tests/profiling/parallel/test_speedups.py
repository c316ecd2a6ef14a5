"""Speed-ups of several GPUs for the simulator: published, by the latency model, and from `psctl bench parallel`."""

import json
from pathlib import Path
from typing import Any

import pytest

from patchedserve.data.errors import UsageError
from patchedserve.data.resolution import Resolution
from patchedserve.profiling.parallel.speedups import modelled, read_speedups
from patchedserve.serving.simulator.distrifusion import PUBLISHED

LARGE = Resolution(3840, 3840)


def row(resolution: str, **speedups: float) -> dict[str, Any]:
    return {"resolution": resolution, "sides": {name: {"speedup": value} for name, value in speedups.items()}}


def write(path: Path, parallel: str, *rows: dict[str, Any], kind: str = "bench-parallel") -> str:
    path.write_text(json.dumps({"kind": kind, "parallel": parallel, "rows": rows}))
    return str(path)


def test_latency_model_is_close_to_published_speedups() -> None:
    found = modelled()
    assert sorted(found.points) == list(range(1, 9))
    assert read_speedups("model") == found
    # DistriFusion, section 5.2: 1.8, 3.4 and 6.1 times as fast at 3840 x 3840 pixels.
    for gpus, printed in ((2, 1.8), (4, 3.4), (8, 6.1)):
        assert found.of(LARGE, gpus) == pytest.approx(printed, rel=0.15)
    for size in (Resolution(1024, 1024), LARGE):
        speedups = [found.of(size, gpus) for gpus in (1, 2, 4, 8)]
        assert speedups == sorted(speedups)


def test_measured_speedups_use_the_fastest_mode_of_each_size(tmp_path: Path) -> None:
    two = write(
        tmp_path / "two.json",
        "2",
        row("512x512", cfg=1.6, sync=0.8, alone=1.9, naive=1.9),
        row("256x256", cfg=1.1, displaced=1.3),
    )
    four = write(tmp_path / "four.json", "4", row("512x512", cfg=2.0))
    found = read_speedups(f"{two}, {four}")
    assert [found.of(Resolution(side, side), 2) for side in (64, 256, 512, 2048)] == [1.3, 1.3, 1.6, 1.6]
    assert found.of(Resolution(512, 512), 4) == 2.0
    with pytest.raises(UsageError, match=r"two\.json, four\.json knows speedups only for 1, 2, 4"):
        found.check(8)
    assert read_speedups("published") is PUBLISHED


def test_sizes_not_measured_on_ranks_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"nowhere\.json"):
        read_speedups(str(tmp_path / "nowhere.json"))
    for parallel, kind in (("virtual:2", "bench-parallel"), ("2", "bench-steps")):
        file = write(tmp_path / "other.json", parallel, row("512x512", cfg=1.6), kind=kind)
        with pytest.raises(UsageError, match=r"other\.json: is not what psctl bench parallel has measured"):
            read_speedups(file)
    (tmp_path / "half.json").write_text('{"kind": "bench-parallel", "parallel": "2", "rows": [{}]}')
    with pytest.raises(UsageError, match=r"half\.json: is not a result of psctl bench parallel: 'sides'"):
        read_speedups(str(tmp_path / "half.json"))
