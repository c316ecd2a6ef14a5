"""Edits that read records, while processes are killed, records damaged, and more records made than fit.

    python tests/benchmarks/edit_reliability.py [--kills 100] [--damages 20] [--edits 2000] [--output-file found.json]

A tiny model: the script checks the resulting images and the space in use, not times. Takes some ten minutes.
"""

import argparse
import json
import os
import random
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch

from patchedserve.data.edits import TemplateSpec
from patchedserve.data.files import write_json
from patchedserve.data.requests import Request
from patchedserve.data.resolution import Resolution
from patchedserve.serving.editing.templates import TemplateStore
from patchedserve.serving.engine.collectors import InMemory
from patchedserve.serving.engine.engine import Engine
from patchedserve.serving.models.build import build_model
from patchedserve.serving.options import TemplateTiers
from patchedserve.serving.scheduling.policies import get_policy
from patchedserve.tests.support.edits import edit_request
from patchedserve.tests.support.killed_edits import edit_and_kill
from patchedserve.tests.support.template_records import serve, with_records
from patchedserve.tests.support.tiny_models import save_tiny, tiny_sdxl

_SIZES = (Resolution(64, 64), Resolution(96, 64), Resolution(128, 128))
_STEPS = 4


def of_kills(folder: Path, kills: int) -> dict[str, Any]:
    """Run `psctl edit --reuse`, kill it `kills` times, and return the counts of `KilledEdits`."""
    save_tiny(folder / "sdxl", tiny_sdxl(), num_inference_steps=40, guidance_scale=4.0)
    found = edit_and_kill(folder, folder / "sdxl", kills)
    return {each.name: getattr(found, each.name) for each in fields(found)}


def damage(file: Path, other: Path, draws: random.Random) -> str:
    """Damage a file of a record in a random way; return the kind of damage."""
    content = bytearray(file.read_bytes())
    kinds: dict[str, Callable[[], object]] = {
        "truncated": lambda: file.write_bytes(content[: draws.randrange(len(content))]),
        "one byte": lambda: file.write_bytes(_flipped(content, draws.randrange(len(content)))),
        "missing": file.unlink,
        "empty": lambda: file.write_bytes(b""),
        "of another step": lambda: file.write_bytes(other.read_bytes()),
        "longer": lambda: file.write_bytes(content + os.urandom(100)),
    }
    kind = draws.choice(list(kinds))
    kinds[kind]()
    return f"{file.suffix.removeprefix('.')} {kind}"


def _flipped(content: bytearray, place: int) -> bytes:
    content[place] ^= 0xFF
    return bytes(content)


def of_damages(folder: Path, damages: int, seed: int = 0) -> dict[str, Any]:
    """Count damages after which the edit is exact, and those whose quarantined record can be made again."""
    draws, kinds, exact, again = random.Random(seed), list[str](), 0, 0
    edit = edit_request(0, _SIZES[2], num_steps=_STEPS, template=TemplateSpec("a picture", 5))
    pipe = tiny_sdxl()
    assert edit.edit is not None
    exact_edit = replace(edit, edit=replace(edit.edit, template=None))
    expected = serve(build_model(pipe, name="tiny"), [exact_edit]).latents[0]
    reused: torch.Tensor | None = None
    for _ in range(damages):
        model = with_records(build_model(pipe, name="tiny"), TemplateStore(folder), [edit])
        found = serve(model, [edit]).latents[0]
        reused = found if reused is None else reused
        again += bool(torch.equal(found, reused)) and not torch.equal(found, expected)
        (record,) = (path for path in folder.iterdir() if path.suffix != ".bad")
        files = sorted(record.iterdir())
        file = draws.choice(files)
        kinds.append(damage(file, draws.choice([each for each in files if each != file]), draws))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            after = with_records(build_model(pipe, name="tiny"), TemplateStore(folder))
            exact += bool(torch.equal(serve(after, [edit]).latents[0], expected))
    return {"damages": kinds, "exact_after": exact, "as_before_when_recorded_again": again}


def of_bounds(folder: Path, edits: int, templates: int, seed: int = 0) -> dict[str, Any]:
    """Return the largest share of each bound that was in use at any time, while edits miss, record and read."""
    draws, pipe = random.Random(seed), tiny_sdxl()
    all_of_them = [
        edit_request(0, _SIZES[number % 3], "box", num_steps=_STEPS, template=TemplateSpec("", number))
        for number in range(templates)
    ]
    largest = max(all_of_them, key=lambda each: each.resolution.pixels)
    probe = TemplateStore(folder / "probe")
    with_records(build_model(pipe, name="tiny"), probe, [largest])
    record_mb = probe.list()[0]["bytes"] / 1e6
    # Memory has room for small records only, disk for ten of the largest; staging has room for four edits' current and
    # next steps.
    tiers = TemplateTiers(0.4 * record_mb, 8.5 * record_mb / _STEPS, 10 * record_mb)
    store = TemplateStore(folder / "records", tiers)
    model = with_records(build_model(pipe, name="tiny"), store)
    most: dict[str, float] = dict.fromkeys(("memory", "staging", "disk"), 0.0)
    limits = {"memory": tiers.memory_mb, "staging": tiers.staging_mb, "disk": tiers.disk_mb}

    def look(*_: object) -> None:
        on_disk = sum(_size(Path(place, name)) for place, _, names in os.walk(store.folder) for name in names)
        used = {"memory": store.num_memory_bytes, "staging": store.staging.num_bytes, "disk": on_disk}
        for name, value in used.items():
            most[name] = max(most[name], value / 1e6 / limits[name])

    waiting = iter(_skewed(all_of_them, edits, draws))

    def follow(*_: object) -> None:
        """Keep three edits active, so that the batch has a free place in which templates are recorded."""
        if (following := next(waiting, None)) is None:
            engine.close()
        else:
            engine.submit(following)

    engine = Engine(
        model,
        get_policy("continuous"),
        max_batch_size=4,
        collector=InMemory(),
        records_templates=True,
        on_step=look,
        on_finish=follow,
    )
    for _ in range(3):
        follow()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = engine.run()
    reused = sum(bool(record.reused) for record in result.records)
    failed = sum(record.status != "completed" for record in result.records)
    return {
        "edits": len(result.records),
        "failed": failed,
        "read_a_record": reused,
        "recorded": store.num_added,
        "bounds_mb": limits,
        "largest_share_of_bound": most,
    }


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except FileNotFoundError:  # deleted after it was listed
        return 0


def _skewed(templates: list[Request], count: int, draws: random.Random) -> list[Request]:
    weights = [1 / (rank + 1) for rank in range(len(templates))]
    chosen = draws.choices(templates, weights, k=count)
    return [replace(each, request_id=number, seed=number) for number, each in enumerate(chosen)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--damages", type=int, default=20)
    parser.add_argument("--edits", type=int, default=2000)
    parser.add_argument("--templates", type=int, default=50)
    parser.add_argument("--output-file", type=Path)
    given = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for part in ("kills", "damages", "bounds"):
            (folder / part).mkdir()
        found = {
            "bounds": of_bounds(folder / "bounds", given.edits, given.templates),
            "damages": of_damages(folder / "damages", given.damages),
            "kills": of_kills(folder / "kills", given.kills),
        }
    print(json.dumps(found, indent=1))
    if given.output_file is not None:
        write_json(given.output_file, found)


if __name__ == "__main__":
    main()
