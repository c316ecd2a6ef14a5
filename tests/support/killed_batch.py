"""A file of requests, drawn by a process that is killed repeatedly."""

import json
import random
import signal
import subprocess
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from .psctl_process import PsctlProcess, start_psctl
from .waits import until


@dataclass(frozen=True, slots=True)
class KilledBatch:
    """Final state of the batch.

    Attributes:
        names: number of answers (images or errors) of each line.
        num_broken: number of lines whose image cannot be read.
        done_at_kills: number of finished lines at each kill.
    """

    names: Counter[str]
    num_broken: int
    done_at_kills: list[int]


def draw_and_kill(lines: Path, output_dir: Path, model: str, kills: int, seed: int = 0) -> KilledBatch:
    """Draw with `psctl batch run`, killed repeatedly soon after it has drawn something, and finally to the end."""
    command = ["batch", "run", str(lines), "-o", str(output_dir), "--model", model]
    command += ["--workspace", str(output_dir / "workspace")]
    output, draws, done = output_dir / "output.jsonl", random.Random(seed), list[int]()

    def num_done() -> int:
        return output.read_bytes().count(b"\n") if output.exists() else 0

    def start() -> PsctlProcess:
        return start_psctl(*command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    for _ in range(kills):
        before = num_done()
        process = start()
        until(lambda: process.poll() is not None or num_done() > before, 600, 0.005)  # noqa: B023
        time.sleep(draws.uniform(0.0, 0.1))
        process.send_signal(signal.SIGKILL)
        process.wait()
        done.append(num_done())
    assert start().wait() == 0
    told = [json.loads(line) for line in output.read_text().splitlines()]
    errors = output_dir / "errors.jsonl"
    names = Counter(each["custom_id"] for each in told)
    if errors.exists():
        names.update(json.loads(line)["custom_id"] for line in errors.read_text().splitlines())
    files = [output_dir / "images" / each["response"]["body"]["data"][0]["file"] for each in told]
    return KilledBatch(names, sum(map(_is_broken, files)), done)


def _is_broken(file: Path) -> bool:
    try:
        with Image.open(file) as image:
            image.load()
    except OSError:
        return True
    return False
