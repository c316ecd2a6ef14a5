"""`psctl eval parallel` in two halves: draw on a machine with a GPU but no judges, judge on one with judges.

    python tests/benchmarks/parallel_sets.py draw --model emoji-3 --num-ranks 2,4,8 --device cuda --folder sets
    python tests/benchmarks/parallel_sets.py judge --model emoji-3 --num-ranks 2,4,8 --folder sets

A set is transferred as one archive of lossless WebP, `sets/NAME.zip`; existing ones are not drawn again. All
computation is in float32, without TF32.
"""

import argparse
import io
import json
import re
import sys
import zipfile
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from patchedserve.data.files import atomic_write, write_json
from patchedserve.data.workspace import Workspace
from patchedserve.eval.measurer import Measurer
from patchedserve.eval.metrics.judges import Judges
from patchedserve.eval.options import EvalOptions, plan_eval
from patchedserve.eval.parallel.plan import ParallelPlan, parse_parts, parse_ranks
from patchedserve.eval.parallel.run import draw_sets, facts_of, judge_sets
from patchedserve.eval.sets.generate import MANIFEST_FILE
from patchedserve.serving.models.loading import load_model, model_defaults
from patchedserve.serving.options import EngineOptions
from patchedserve.serving.runs.machine import run_facts

_SETTINGS = "settings.json"


def phase(what: str, total: int) -> Any:
    """Print the start of a phase."""
    print(f"{what}: {total:,}", file=sys.stderr, flush=True)
    return lambda count: None


def archive_of(folder: Path, name: str) -> Path:
    """Return the path of a set's archive."""
    return folder / (re.sub(r"\W+", "-", name) + ".zip")


def draw(model_name: str, device: str, wanted: ParallelPlan, options: EvalOptions, folder: Path) -> None:
    """Draw the missing sets and pack each."""
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    plan = plan_eval(options, model_defaults(model_name), folder)
    model = load_model(model_name, device, "float32", EngineOptions("plain"))
    place = Workspace(folder / "workspace").for_model(model_name, str(model.device))
    missing = [each for each in wanted.settings() if not archive_of(folder, each.name).exists()]
    found = draw_sets(model, missing, plan, options, place, start_phase=phase, on_failed=sys.exit)
    if not (folder / _SETTINGS).exists():  # describes the machine that drew the first set
        write_json(folder / _SETTINGS, run_facts(model).to_json() | facts_of(model, wanted, plan, options))
    for name, own in found.items():
        with (
            atomic_write(archive_of(folder, name)) as temporary,
            zipfile.ZipFile(temporary, "w", zipfile.ZIP_STORED) as archive,
        ):
            archive.write(own / MANIFEST_FILE, MANIFEST_FILE)
            for item in plan.items:
                packed = io.BytesIO()
                Image.open(own / item.file).save(packed, "webp", lossless=True, quality=75)
                archive.writestr(f"{Path(item.file).stem}.webp", packed.getvalue())


def unpacked(archive: Path) -> Path:
    """Unpack a set's archive and return the folder."""
    folder = archive.with_suffix("")
    with zipfile.ZipFile(archive) as content:
        for name in content.namelist():
            place = folder / name
            folder.mkdir(exist_ok=True)
            if place.suffix == ".webp":
                Image.open(io.BytesIO(content.read(name))).save(place.with_suffix(".png"))
            else:
                place.write_bytes(content.read(name))
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("half", choices=("draw", "judge"))
    parser.add_argument("--model", default="emoji-3")
    parser.add_argument("--num-ranks", default="2,4,8")
    parser.add_argument("--parts", default="table1")
    parser.add_argument("--num-prompts", type=int, default=256)
    parser.add_argument("--resolutions", default="256")
    parser.add_argument("--max-batch-size", type=int, default=16)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--output-file", type=Path)
    given = parser.parse_args()
    wanted = ParallelPlan(parse_ranks(given.num_ranks), parse_parts(given.parts))
    options = EvalOptions(
        metrics=("fid",),
        num_prompts=given.num_prompts,
        resolutions=given.resolutions,
        max_batch_size=given.max_batch_size,
    )
    if given.half == "draw":
        draw(given.model, given.device, wanted, options, given.folder)
        return
    settings = json.loads((given.folder / _SETTINGS).read_text(encoding="utf-8"))
    folders = {each.name: unpacked(archive_of(given.folder, each.name)) for each in wanted.settings()}
    measurer = Measurer.of(options, Judges("emoji-clip", None, None, torch.device("cpu")), given.folder, phase)
    found = judge_sets(folders, settings, wanted, measurer).to_json()
    for claim in found["claims"]:
        print(claim["text"], claim["metric"], claim["worse"], claim["better"], claim["holds"], sep=" | ")
    if given.output_file is not None:
        write_json(given.output_file, found)


if __name__ == "__main__":
    main()
