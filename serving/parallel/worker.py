"""A rank in a process of its own: it loads the denoising model, meets the others, and follows rank 0 to the end."""

import json
import os
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any

import diffusers
import torch
import torch.distributed as dist
from torch import nn

from ... import __version__
from .group import GroupError
from .options import NormOptions
from .processes import ProcessEnd
from .ranks import follow
from .strip_model import StripModel

_LOOK_EVERY_S = 0.5


@dataclass(frozen=True, slots=True)
class RankSettings:
    """What a rank is told as it starts.

    Attributes:
        port: of the store on this machine where the ranks meet.
        rank, size: of the group.
        model: its directory.
        fingerprint: of the model's files, as rank 0 has them.
        device, dtype: of the model.
        threads: that it computes with.
        timeout_s: how long ranks may keep each other waiting in a call.
        parent: the process of rank 0, without which it ends.
        norms: `NormOptions` by name.
    """

    port: int
    rank: int
    size: int
    model: str
    fingerprint: str
    device: str
    dtype: str
    threads: int
    timeout_s: float
    parent: int
    norms: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> str:
        """As `from_json` reads it."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "RankSettings":
        """What `to_json` wrote."""
        return cls(**json.loads(text))


def facts_of(fingerprint: str, model: nn.Module) -> dict[str, Any]:
    """What must be the same on all ranks."""
    parameter = next(model.parameters())
    return {
        "psctl": __version__,
        "torch": torch.__version__,
        "diffusers": diffusers.__version__,
        "model": fingerprint,
        "class": type(model).__name__,
        "dtype": str(parameter.dtype).removeprefix("torch."),
        "device": parameter.device.type,
    }


def key_of(what: str, rank: int) -> str:
    """Where a rank says in the store that it is `ready`, or has `failed`."""
    return f"{what}/{rank}"


def serve_rank(settings: RankSettings, load: Callable[[], tuple[str, nn.Module]]) -> int:
    """Be a rank; returns the exit code. `load` gives the fingerprint of the model's files, and the model."""
    threading.Thread(target=_end_with, args=(settings.parent,), daemon=True).start()
    torch.set_num_threads(settings.threads)
    store = dist.TCPStore("127.0.0.1", settings.port, is_master=False, timeout=timedelta(seconds=60))
    try:
        fingerprint, model = load()
        ours = StripModel(model, NormOptions(**settings.norms))
    except Exception as error:  # noqa: BLE001  told to rank 0, which says it to the user
        store.set(key_of("failed", settings.rank), f"{type(error).__name__}: {error}")
        return 1
    store.set(key_of("ready", settings.rank), json.dumps(facts_of(fingerprint, model)))
    try:
        follow(ProcessEnd(store, settings.rank, settings.size, settings.timeout_s), ours)
    except GroupError:
        return 1  # Rank 0, which sees it as well, tells the user.
    return 0


def _end_with(parent: int) -> None:
    """End this process at once when its parent has gone, whatever it waits for."""
    while os.getppid() == parent:
        time.sleep(_LOOK_EVERY_S)
    os._exit(1)
