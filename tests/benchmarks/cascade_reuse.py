"""Gain of a cascade's heavy model by starting from the light image (DiffServe section 5, "reuse").

    python tests/benchmarks/cascade_reuse.py --bank DIR [--strengths 0.4,0.5,0.6,0.7,0.8] [--num-prompts N]
        [--output-file reuse.json] [--sheet reuse.png]

For the prompts of a bank by `psctl profile cascade`, the heavy model draws again, each time as an edit of the whole
light image: with noise of a strength s and that share of the steps. FID to the real images of the bank is compared
with that of heavy images drawn from noise, with intervals over prompts: for all prompts, and for the mixture that is
served if a share of the light images, those of the lowest confidence, is deferred. Images are kept in the folder of
the bank, so that a run continues where it stopped.
"""

import argparse
import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw

from patchedserve.data.datasets.folders import ImageFolder
from patchedserve.data.edits import EditSpec
from patchedserve.data.files import write_json
from patchedserve.data.requests import Request
from patchedserve.eval.cascade.bank import load_features
from patchedserve.eval.compare.paired import compare_fid
from patchedserve.eval.metrics.features import features_of
from patchedserve.eval.metrics.fid import frechet_distance
from patchedserve.eval.metrics.judges import Judges
from patchedserve.eval.sets.drawers import EngineDrawer
from patchedserve.eval.sets.generate import read_manifest
from patchedserve.eval.sets.image_sets import MappedImages, named_files, set_of
from patchedserve.profiling.cascade.bank import Bank
from patchedserve.serving.models.loading import load_model
from patchedserve.serving.models.served import ServedModel
from patchedserve.serving.runs.machine import cpu_name

SHARES = (0.2, 0.4, 0.6, 1.0)
"""Shares of light images that are deferred."""
_SHOWN = 8


def draw(
    model: ServedModel, bank: Bank, light: MappedImages, settings: Mapping[str, Any], strength: float, folder: Path
) -> MappedImages:
    """Draw the bank's prompts again, each from its light image; images that the folder has are not drawn again."""
    folder.mkdir(exist_ok=True)
    files = {image_id: f"{place:06}.png" for place, image_id in enumerate(light.ids)}
    missing = [place for place, image_id in enumerate(light.ids) if not (folder / files[image_id]).exists()]
    # Images are sorted by size because batches of one size are the fastest.
    missing.sort(key=lambda place: bank.entries[place].resolution)
    requests = {
        folder / files[light.ids[place]]: Request(
            place, entry.prompt, entry.resolution, settings["num_inference_steps"], settings["guidance_scale"],
            entry.seed,
        )
        for place in missing
        for entry in [bank.entries[place]]
    }  # fmt: skip

    def from_light(request: Request) -> Request:
        image = np.asarray(light.open_image(light.ids[request.request_id]).convert("RGB"))
        return replace(request, edit=EditSpec.of_whole_image(image, strength))

    drawn = 0
    for drawing in EngineDrawer(model, from_light).draw(requests, "continuous", 16, None):
        if drawing.was_interrupted:
            raise KeyboardInterrupt
        drawn += len(drawing.records)
        print(f"strength {strength:g}: {drawn} of {len(missing)}", flush=True)
    return named_files(ImageFolder(folder, tuple(files.values())), files)


def rows_of(
    bank: Bank, features: Mapping[str, torch.Tensor], again: torch.Tensor, strength: float, num_steps: int
) -> list[dict[str, Any]]:
    """Return the effect of a strength on the FID of the served images, by share of deferred images."""
    ranks = np.argsort(np.argsort(np.nan_to_num(bank.confidences, nan=-1.0), kind="stable"))
    rows = []
    for share in SHARES:
        is_heavy = torch.from_numpy(ranks < share * len(ranks))[:, None]
        plain, reused = (torch.where(is_heavy, each, features["light"]) for each in (features["heavy"], again))
        found = compare_fid(plain, reused, features["reference"])
        low, high = (None if end is None else end / found.first for end in (found.low, found.high))
        rows.append(
            {
                "strength": strength,
                "steps": min(int(num_steps * strength), num_steps),
                "deferred_share": share,
                "fid_light": frechet_distance(features["reference"], features["light"]),
                "fid_from_noise": found.first,
                "fid_reused": found.second,
                "relative_difference": found.difference / found.first,
                "relative_low": low,
                "relative_high": high,
            }
        )
    return rows


def sheet(columns: Mapping[str, MappedImages], path: Path) -> None:
    """Save a sheet with a row for each of the first prompts and a named column for each kind of image."""
    side, head = 128, 20
    page = Image.new("RGB", (side * len(columns), head + side * _SHOWN), "white")
    for column, (name, source) in enumerate(columns.items()):
        ImageDraw.Draw(page).text((column * side + side / 2, head / 2), name, "black", anchor="mm", font_size=14)
        for row, image_id in enumerate(source.ids[:_SHOWN]):
            image = source.open_image(image_id).convert("RGB")
            image.thumbnail((side, side))
            page.paste(image, (column * side, head + row * side))
    page.save(path)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--bank", type=Path, required=True)
    parser.add_argument("--model", help="the heavy model; by default that of the bank")
    parser.add_argument("--strengths", default="0.4,0.5,0.6,0.7,0.8")
    parser.add_argument("--num-prompts", type=int, help="the first ones of the bank; by default all")
    parser.add_argument("--output-file", type=Path)
    parser.add_argument("--sheet", type=Path)
    given = parser.parse_args()
    bank = Bank.load(given.bank)
    features = load_features(given.bank, len(bank.entries))
    count = given.num_prompts or len(bank.entries)
    sets: dict[str, MappedImages] = {}
    for leg in ("light", "heavy"):
        folder = Path(bank.about[f"{leg}_images"])
        drawn = set_of(folder, read_manifest(folder))
        sets[leg] = replace(drawn, ids=drawn.ids[:count], reading_order=drawn.ids[:count])
    bank = Bank(bank.entries[:count], bank.about)
    features = {name: each if name == "reference" else each[:count] for name, each in features.items()}
    settings = bank.about["heavy"]
    model = load_model(given.model or settings["model"], "auto", "auto")
    model.tune(sorted({entry.resolution for entry in bank.entries}), given.bank / "tables")
    judges, rows, columns = Judges(device=model.device), [], {"light": sets["light"], "from noise": sets["heavy"]}
    for strength in map(float, given.strengths.split(",")):
        drawn = draw(model, bank, sets["light"], settings, strength, given.bank / f"reuse-{strength:g}")
        columns[f"strength {strength:g}"] = drawn
        again = features_of(drawn, judges.inception, judges.inception_sha256)
        rows += rows_of(bank, features, again, strength, settings["num_inference_steps"])
        print(json.dumps(rows[-len(SHARES) :], indent=1), flush=True)
    found = {"machine": cpu_name(), "cores": len(os.sched_getaffinity(0)), "num_prompts": count,
             "light": bank.about["light"], "heavy": settings, "rows": rows}  # fmt: skip
    if given.output_file is not None:
        write_json(given.output_file, found)
    if given.sheet is not None:
        sheet(columns, given.sheet)


if __name__ == "__main__":
    main()
