"""Edits that record their template and read the record, in processes that are killed at any moment."""

import random
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from patchedserve.data.resolution import Resolution
from patchedserve.serving.editing.templates import TemplateStore

from .edits import image_of
from .psctl_process import PsctlProcess, start_psctl

SIZE = Resolution(64, 64)


@dataclass(frozen=True, slots=True)
class KilledEdits:
    """State after each kill.

    Attributes:
        moments: number of kills before anything was written, while the record was being written, with the record
            complete, and with some of the images written, and how often the command had ended before.
        wrong_images: files that differ from those of a command that was not killed.
        half_records: incomplete records in the folder.
        failed: commands that failed after a kill.
    """

    moments: Counter[str]
    wrong_images: int
    half_records: int
    failed: int


def edit_and_kill(folder: Path, model: Path, kills: int, num_images: int = 6, seed: int = 0) -> KilledEdits:
    """Run `psctl edit --reuse` and kill it this many times; every other time it has to record the template first."""
    draws, moments = random.Random(seed), Counter[str]()
    wrong_images = half_records = failed = 0
    mask = np.zeros((SIZE.height, SIZE.width), bool)
    mask[:32, :32] = True
    Image.fromarray(image_of(SIZE)).save(folder / "room.png")
    Image.fromarray(mask).save(folder / "mask.png")
    command = ["edit", folder / "room.png", "a hat", "--mask", folder / "mask.png", "--reuse", "--model", model]
    command += ["-n", num_images, "--workspace", folder / "workspace", "--dtype", "float32", "--overwrite"]

    def start(output: Path) -> PsctlProcess:
        told = subprocess.DEVNULL
        return start_psctl(*map(str, command), "-o", str(output), stdout=told, stderr=told)

    def records() -> Iterator[Path]:
        return (folder / "workspace").glob("*/*/templates/[!.]*")

    def finish() -> float:
        started_s = time.monotonic()
        assert start(folder / "expected").wait() == 0
        return time.monotonic() - started_s

    finish()  # run the measurements that are made only once
    expected = {path.name: path.read_bytes() for path in (folder / "expected").iterdir()}
    assert len(expected) == num_images
    shutil.rmtree(next(records()))
    left = set[Path]()
    longest_s = {True: finish(), False: finish()}
    for number in range(kills):
        has_to_record = number % 2 == 0
        for record in records() if has_to_record else ():
            shutil.rmtree(record)
        output = folder / "drawn"
        shutil.rmtree(output, ignore_errors=True)
        process = start(output)
        time.sleep(draws.uniform(0.2, 1.0) * longest_s[has_to_record])
        process.send_signal(signal.SIGKILL)
        has_ended = process.wait() == 0
        drawn = {path.name: path.read_bytes() for path in output.glob("[!.]*.png")} if output.exists() else {}
        wrong_images += sum(content != expected[name] for name, content in drawn.items())
        half_written = set((folder / "workspace").glob("*/*/templates/.*")) - left
        left |= half_written
        names = {"over": has_ended, "with images": bool(drawn), "while recording": bool(half_written)}
        names |= {"with the record": any(records()), "before": True}
        moments[next(name for name, is_so in names.items() if is_so)] += 1
        for record in records():
            try:
                TemplateStore(record.parent).check(record.name)
            except Exception:  # noqa: BLE001  whatever is wrong with it
                half_records += 1
        if number % 10 == 9:
            after = folder / "after"
            failed += start(after).wait() != 0
            wrong_images += sum(path.read_bytes() != expected[path.name] for path in after.iterdir())
    return KilledEdits(moments, wrong_images, half_records, failed)
