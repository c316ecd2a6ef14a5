"""A record of a template in files, one for every step, or in memory (InstGenIE section 4.2)."""

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load, save
from torch import Tensor

Seen = Mapping[str, Tensor]
LATENTS, END = "latents", "end"
"""Of the first row of a record of a generation: its latents (1, channels, h, w) before each step; those at the end."""
_MOST_STAGED = 4
"""Steps of one record in memory; edits at one step need two."""


class StagedSteps:
    """The steps of a record in its files, of which the next is read while one is computed. Any thread may use it.

    Args:
        folder: with the files.
        num_steps: of the record.
        reader: reads them, one at a time.

    Attributes:
        folder: see above.
    """

    def __init__(self, folder: Path, num_steps: int, reader: Executor) -> None:
        self.folder, self._num_steps, self._reader = folder, num_steps, reader
        self._staged: OrderedDict[int, Future[list[dict[str, Tensor]]]] = OrderedDict()
        self._lock = threading.Lock()

    def expect(self, step: int) -> "Future[list[dict[str, Tensor]]]":
        """Have a step read, if it is not there, or could not be read before."""
        with self._lock:
            staged = self._staged.pop(step, None)
            if staged is None or (staged.done() and staged.exception() is not None):
                staged = self._reader.submit(read_step, self.folder / file_of(step))
            self._staged[step] = staged
            while len(self._staged) > _MOST_STAGED:
                self._staged.popitem(last=False)
            return staged

    def read(self, step: int) -> Sequence[Seen]:
        """A step; the next one is read from now on. Raises as `read_step`."""
        wanted = self.expect(step)
        if step + 1 < self._num_steps:
            self.expect(step + 1)
        return wanted.result()


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class TemplateRecord:
    """A record, in memory or in its files; see `core.prepared.Template`.

    Attributes:
        device: of the model.
        num_bytes: of all steps.
        steps: of every step and row, what operators have seen, by name: [cells, entries of a cell, ...]. None: they
            are `staged`.
        staged: reads them from files.
    """

    device: torch.device
    num_bytes: int
    steps: Sequence[Sequence[Seen]] | None
    staged: StagedSteps | None = None

    def latents(self, first: int) -> Tensor:
        """Of a generation, before each step from `first` on, and at the end: (steps + 1, channels, h, w)."""
        if self.staged is not None:
            files = [str(path) for path in sorted(self.staged.folder.glob("step-*.safetensors"))[first:]]
            found = [_read_one(path, LATENTS) for path in files] + [_read_one(files[-1], END)]
        else:
            assert self.steps is not None
            found = [rows[0][LATENTS] for rows in self.steps[first:]] + [self.steps[-1][0][END]]
        return torch.cat(found).to(self.device)

    def expect(self, step: int) -> None:
        """Have a step read that is needed soon, if it is not in memory."""
        if self.staged is not None:
            self.staged.expect(step)

    def seen(self, step: int) -> Sequence[Seen]:
        """See `core.prepared.Template`."""
        if self.staged is not None:
            rows = self.staged.read(step)
        else:
            assert self.steps is not None
            rows = self.steps[step]
        return [{name: tensor.to(self.device) for name, tensor in row.items()} for row in rows]


def file_of(step: int) -> str:
    """The name of a step's file."""
    return f"step-{step:04}.safetensors"


def content_of(rows: Sequence[Seen]) -> bytes:
    """Of such a file, which `read_step` reads."""
    named = {f"{row}.{operator}": tensor for row, each in enumerate(rows) for operator, tensor in each.items()}
    return save({name: tensor.cpu().contiguous() for name, tensor in named.items()})


def _read_one(path: str, operator: str) -> Tensor:
    with safe_open(path, "pt") as file:
        return file.get_tensor(f"0.{operator}")


def read_step(path: Path) -> list[dict[str, Tensor]]:
    """What operators have seen of each row. Raises OSError, SafetensorError or ValueError: the file is damaged."""
    rows: dict[int, dict[str, Tensor]] = {}
    for key, tensor in load(path.read_bytes()).items():
        row, _, operator = key.partition(".")
        rows.setdefault(int(row), {})[operator] = tensor
    return [rows[row] for row in range(len(rows))]
