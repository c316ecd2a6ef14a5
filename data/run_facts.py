"""What something was measured with: the model, the machine, and how the engine was set. Imports no torch."""

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Self

_LATER = {"compile", "cuda_graphs", "date"}
"""Facts that older files do not have: what they hold was measured without the first two."""


def usable_cores() -> int:
    """How many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True, slots=True)
class RunFacts:
    """What a time depends on besides the batch. Two are equal if all but the date is.

    Attributes:
        model: what the user called it.
        fingerprint: of the model's files.
        device, device_name: as torch names it ("cpu", "cuda:0"), and the processor in words.
        dtype: of the denoising model.
        engine, order, patch_size, strategy, kernels, compile, cuda_graphs: of `EngineOptions`; the order as it was
            chosen.
        threads: CPU threads of torch.
        cpu: the processor that drives the device.
        torch: its version.
        guidance_scale, is_guided: of the requests.
        date: when it was measured, as 2026-01-31; "" in older files.
    """

    model: str
    fingerprint: str
    device: str
    device_name: str
    dtype: str
    engine: str
    order: str
    patch_size: int | None
    strategy: str
    kernels: str
    threads: int
    cpu: str
    torch: str
    guidance_scale: float
    is_guided: bool
    compile: bool = False
    cuda_graphs: bool = False
    date: str = field(default="", compare=False)

    def to_json(self) -> dict[str, Any]:
        """All facts, for the head of a file."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Any) -> Self:
        """Raises ValueError if it is not what `to_json` gives."""
        known = {each.name for each in fields(cls)}
        if not isinstance(data, dict) or not known - _LATER <= set(data) <= known:
            raise ValueError("its circumstances are incomplete")
        return cls(**data)

    def key(self) -> dict[str, Any]:
        """All but the date: equal for measurements that may stand in for each other."""
        return {name: value for name, value in asdict(self).items() if name != "date"}

    def difference(self, served: Self) -> str | None:
        """Say in one line what makes latencies with these facts useless for `served`, None if nothing does.

        Another version of torch, and another guidance scale that is also on, do not.
        """
        names = ["fingerprint", "device_name", "dtype", "engine", "order", "patch_size", "strategy", "kernels"]
        names += ["compile", "cuda_graphs", "is_guided"] + (["threads"] if served.device == "cpu" else [])
        name = next((name for name in names if getattr(self, name) != getattr(served, name)), None)
        if name is None:
            return None
        if name == "fingerprint":
            if self.model == served.model:
                return f"is for other files of the model {self.model} than those that are served now"
            return f"is for the model {self.model}, but {served.model} is served"
        word = {"device_name": "device", "is_guided": "guidance"}.get(name, name.replace("_", " "))
        return f"is for {word} {_word(getattr(self, name))}, but {_word(getattr(served, name))} is served"


def describe(facts: Mapping[str, Any]) -> str:
    """Say in a few words what a result whose head holds `RunFacts` was measured on."""
    threads = facts["threads"]
    count = f", {threads} thread{'s' if threads > 1 else ''}" if facts["device"] == "cpu" else ""
    # Of a path or a hub id the last part will do.
    name = facts["model"].rstrip("/").rpartition("/")[2]
    return f"{name}, {facts['dtype']}, {facts['device_name']}{count}"


def _word(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return "auto" if value is None else str(value)
