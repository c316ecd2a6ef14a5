"""Synthetic evaluations and comparisons, with real images, and a parser of pages, for tests of reports."""

from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from patchedserve.data.files import write_json
from patchedserve.data.resolution import Resolution
from patchedserve.eval.compare.comparison import FID_TO_FIRST, ComparedSide, Comparison
from patchedserve.eval.compare.paired import compare_values
from patchedserve.eval.metrics.judges import Judges
from patchedserve.eval.report.tables import ReportFigure, ReportTable
from patchedserve.eval.result_files import EvalResults
from patchedserve.eval.results import MetricResult
from patchedserve.eval.sets.generate import Manifest, make_items
from patchedserve.serving.cache.options import CacheOptions

from .eval_cases import Colours

DRAWN = {
    "model": "tiny",
    "fingerprint": "f",
    "dtype": "float32",
    "device": "cpu",
    "policy": "bucketed",
    "num_inference_steps": 2,
    "guidance_scale": 3.0,
    "dataset": "emoji",
}


TRUTH = "emoji (heldout, 256x256)"
"""Name of the images of the data set `emoji` in results."""


CLIP = "clip[emoji-clip]"


SHA = {"clip": "c" * 64, "fid": "f" * 64, "lpips": "1" * 64}


def settings_of(engine: str = "patched", cache: CacheOptions | None = None, **more: Any) -> dict[str, Any]:
    return DRAWN | {"engine": engine, "cache": (cache or CacheOptions()).identity()} | more


def metric(name: str, value: float, n: int = 4, **details: Any) -> MetricResult:
    kind = name.split("[")[0].split("_")[0]
    more = {"weights_sha256": SHA[kind]} if kind in SHA else {}
    unit = "dB" if name == "psnr" else ""
    return MetricResult(name, value, value - 1, value + 1, n, unit, details={"reference": TRUTH} | more | details)


def image_set(folder: Path, settings: dict[str, Any], shift: int = 0, count: int = 4, seed: int = 5) -> Path:
    """Write a set of noise images with its manifest; `shift` makes them brighter."""
    items = make_items([(f"p{i}", f"a <hat> & {i}") for i in range(count)], [Resolution(40, 32)], seed)
    folder.mkdir()
    write_json(folder / "manifest.json", Manifest(items, settings).to_json())
    rng = np.random.default_rng(0)
    for i, item in enumerate(items):
        pixels = rng.integers(0, 200, (32, 40, 3)) + shift * (i + 1)
        Image.fromarray(pixels.astype(np.uint8)).save(folder / item.file)
    return folder


def comparison_of(
    root: Path, name: str, *, cache: CacheOptions | None = None, dataset: str = "emoji", fid: float = 20.0, **ours: Any
) -> Path:
    """Write a synthetic comparison with every figure that a report shows, and two real sets of images."""
    sides = []
    for engine, value in (("plain", 10.0), ("patched", fid)):
        settings = settings_of(engine, cache if engine == "patched" else None, dataset=dataset)
        settings |= ours if engine == "patched" else {}
        folder = image_set(root / f"{name}-{engine}", settings, shift=5 if engine == "patched" else 0)
        truth = TRUTH if dataset == "emoji" else dataset + "/captions.json"
        metrics = {CLIP: metric(CLIP, value)}
        metrics |= {
            name: metric(name, figure, reference=truth) for name, figure in (("fid", value), ("lpips", value / 100))
        }
        more = {"num_prompts": 4, "seed": 5, "resolutions": ["40x32"]}
        use = (
            {"saved_computation": 0.25, "saved_by_block": {}, "num_images": 4}
            if settings["cache"]["mode"] != "off"
            else None
        )
        sides.append(ComparedSide(str(folder), settings | more, metrics, use))
    ids = [f"p{i}" for i in range(4)]
    comparison = Comparison(
        *sides,
        metrics={"psnr": metric("psnr", 30), "lpips": metric("lpips", 0.5), FID_TO_FIRST: metric(FID_TO_FIRST, 7)},
        differences={
            CLIP: compare_values(CLIP, dict.fromkeys(ids, 10.0), dict.fromkeys(ids, fid), "higher"),
            "fid": compare_values("fid", dict.fromkeys(ids, 10.0), dict.fromkeys(ids, fid), "lower"),
        },
        warnings=["few images"],
        prompts_digest="digest",
        per_image={"lpips": dict(zip(ids, (0.1, 0.9, 0.2, 0.3), strict=True))},
    )
    comparison.save(root / f"{name}.json")
    return root / f"{name}.json"


def results_of(path: Path, engine: str, metrics: list[MetricResult], **more: Any) -> Path:
    settings = settings_of(
        engine, **{"prompts_digest": "digest", "num_prompts": 4, "seed": 5, "reference": TRUTH} | more
    )
    EvalResults({each.name: each for each in metrics}, {}, settings).save(path)
    return path


def table(tables: list[ReportTable], key: str) -> ReportTable:
    return next(each for each in tables if each.key == key)


def values(row: dict[str, Any]) -> dict[str, Any]:
    return {name: cell.value if isinstance(cell, ReportFigure) else cell for name, cell in row.items()}


class FakeJudges(Judges):
    """The bundled CLIP, and instead of Inception a network whose features can be computed by hand."""

    inception_sha256 = "made up"  # type: ignore[assignment]

    @property
    def inception(self) -> Any:
        return Colours()

    def inception_details(self) -> dict[str, Any]:
        return {"weights": "colours", "weights_sha256": self.inception_sha256}


class PageParser(HTMLParser):
    """Collects the parts of a page that tests examine, and checks that its tags are closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.images: list[str] = []
        self.links: list[str] = []
        self.open: list[str] = []
        self.texts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag == "img":
            self.images.append(given["src"] or "")
        self.links += [value or "" for name, value in attrs if name in ("href", "src") and tag != "img"]
        if tag not in ("img", "meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)
