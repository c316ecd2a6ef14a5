"""Circumstances of a measurement: the model, the machine and the engine's options. Imports no torch."""

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, Self


def usable_cores() -> int:
    """Return the number of processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True, slots=True)
class MeasuredModel:
    """The model of a measurement, and in subclasses the other facts on which its result depends.

    Attributes:
        model: the user's name for the model.
        fingerprint: fingerprint of the model's files (`serving.models.checkpoint.fingerprint`); empty if it has none.
    """

    model: str
    fingerprint: str

    def to_json(self) -> dict[str, Any]:
        """Return all facts, for the head of a file."""
        return asdict(self)

    @property
    def decisive(self) -> tuple[str, ...]:
        """Names of the facts, besides the model, without which the result does not apply."""
        return ()

    def difference(self, served: Self) -> str | None:
        """Return in one line why results with these facts do not apply to `served`; None if they do.

        Models are compared by fingerprint, or by name if one of them has none.
        """
        decisive = "fingerprint" if self.fingerprint and served.fingerprint else "model"
        if getattr(self, decisive) != getattr(served, decisive):
            if self.model == served.model:
                return f"is for other files of the model {self.model} than those that are served now"
            return f"is for the model {self.model}, but {served.model} is served"
        for name in self.decisive:
            own, other = getattr(self, name), getattr(served, name)
            if own != other:
                word = {"device_name": "device", "is_guided": "guidance"}.get(name, name.replace("_", " "))
                return f"is for {word} {_word(own)}, but {_word(other)} is served"
        return None


@dataclass(frozen=True, slots=True)
class RunFacts(MeasuredModel):
    """Facts that a time depends on besides the batch. Two are equal if all but their dates are. Older files lack those
    with a default.

    Attributes:
        device, device_name: device as torch names it ("cpu", "cuda:0"), and the name of its processor.
        dtype: number format of the denoising model.
        engine, order, patch_size, strategy, kernels, compile, cuda_graphs: as in `EngineOptions`; the order that was
            chosen.
        threads: number of torch's CPU threads.
        cpu: processor that drives the device.
        torch: version of torch.
        guidance_scale, is_guided: guidance of the requests.
        date: date of the measurement, as 2026-01-31; "" in older files.
    """

    __pydantic_config__: ClassVar = {"extra": "forbid"}
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

    def key(self) -> dict[str, Any]:
        """Return all facts but the date; measurements with equal keys are interchangeable."""
        return {name: value for name, value in asdict(self).items() if name != "date"}

    @property
    def decisive(self) -> tuple[str, ...]:
        """Names of the decisive facts: not the version of torch, nor the guidance scale if guidance is on in both."""
        names = ("device_name", "dtype", "engine", "order", "patch_size", "strategy", "kernels", "compile")
        return (*names, "cuda_graphs", "is_guided", *(["threads"] if self.device == "cpu" else []))


def describe(facts: Mapping[str, Any]) -> str:
    """Return a short description of the circumstances of a result whose head holds `RunFacts`."""
    threads = facts["threads"]
    count = f", {threads} thread{'s' if threads > 1 else ''}" if facts["device"] == "cpu" else ""
    # The last part of a path or a hub id suffices.
    name = facts["model"].rstrip("/").rpartition("/")[2]
    return f"{name}, {facts['dtype']}, {facts['device_name']}{count}"


def _word(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        return ", ".join(value)
    return "auto" if value is None else str(value)
