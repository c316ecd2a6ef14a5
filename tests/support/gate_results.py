"""Result files for tests of gates."""

from pathlib import Path

from patchedserve.data.statistics import Estimate
from patchedserve.eval.gates.results import read_results
from patchedserve.eval.result_files import EvalResults
from patchedserve.eval.results import MetricResult


def write_results(path: Path, **figures: tuple[float, float | None, float | None]) -> Path:
    """Write a result file with these figures: value, low, high."""
    names = {name.replace("__", "[emoji-clip]"): figure for name, figure in figures.items()}
    EvalResults({name: MetricResult(name, *figure, n=256) for name, figure in names.items()}).save(path)
    return path


def write_usual_results(folder: Path) -> Path:
    """Write a result file with FID 30, CLIP score 31 and a KID about 0 into a folder."""
    return write_results(
        folder / "results.json", fid=(30.0, 28.0, 32.0), clip__=(31.0, 30.8, 31.2), kid=(-0.001, -0.003, 0.001)
    )


def figures_in(path: Path) -> dict[str, Estimate]:
    """Return the figures that gates read from a result file or the folder of a run."""
    return {name: figure for each in read_results(path) for name, figure in each.figures.items()}
