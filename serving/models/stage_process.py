"""What a served model does beside denoising, in processes of their own (`--stages processes`).

Texts and images of edits are encoded in one, latents decoded in another (InstGenIE section 4.3). What is computed is
what the threads of an engine compute; these wait for it, without Python's lock and without torch.
"""

import json
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image

from ...data.errors import PsctlError, RunError
from ...data.requests import Request
from ..core.prepared import describe
from ..core.processes import start_process
from ..core.threads import compute_alone
from ..families import Decode, Family
from ..families.decoder import FiniteDecoder
from .channel import Channel

_ENTRY = f"{__package__}.stage:run"
_END_S, _DEAD_S = 5.0, 1.0
"""How long a process may take to end: one whose channel was closed, and one that has closed its own."""
CALL_S, CALL_TIMES = 60.0, 40.0
"""A call takes so long at most, or so many times as long as the slowest one before, for its size. Both are twice what a
server calls stalled (`engine.stages.STALLED_S`), so that its probes have told before.
"""
_FIRST_CALL_S = 600.0
"""The first call of each function: how long it takes is not known yet."""
Part = Literal["prepare", "postprocess"]
_DOES: dict[Part, str] = {"prepare": "prepares requests", "postprocess": "decodes images"}


@dataclass(frozen=True, slots=True)
class StageSettings:
    """What a process loads.

    Attributes:
        model: the folder of its files.
        device, dtype: by name, resolved.
        part: what it is for.
    """

    model: str
    device: str
    dtype: str
    part: Part = "prepare"

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "StageSettings":
        return cls(**json.loads(text))


@dataclass(frozen=True, slots=True)
class _Failed:
    reason: str


class StageProcess:
    """One process, that is started anew whenever it has died, or does not answer. Any thread may call it; calls wait
    for each other.

    Args:
        settings: what it loads.
    """

    def __init__(self, settings: StageSettings) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._is_over = False
        # By function, for each element of its largest tensor.
        self._slowest_s: dict[str, float] = {}
        self._start()

    @property
    def process_id(self) -> int:
        """Of the one that is there now."""
        return self._process.pid or 0

    def wait(self) -> None:
        """Return when it is ready. Raises RunError: it cannot load the model, or has died."""
        self.call("ready")

    def call(self, name: str, *arguments: Any) -> Any:
        """What one of the functions of `serve_stage` returns.

        Raises RunError: it has failed, or the process has died in it or since the last call, or it takes much longer
        than any before (`CALL_S`). Another process is on its way then.
        """
        with self._lock:
            if self._channel is None:
                self._start()
            try:
                if not self._is_loaded:
                    answer = self._exchange("ready")
                    self._is_loaded = not isinstance(answer, _Failed)
                if self._is_loaded:
                    answer = self._exchange(name, *arguments)
            except TimeoutError as error:
                self._end()
                raise self._replaced("does not answer and was ended") from error
            except (OSError, EOFError) as error:
                raise self._replaced(f"has died ({self._end(_DEAD_S)})") from error
            except BaseException:
                # What it would say later is no answer to the next call.
                self._end()
                raise
        if isinstance(answer, _Failed):
            raise RunError(answer.reason)
        return answer

    def abort(self) -> None:
        """End the process at once, whatever it is at: calls fail from now on, also those that wait, until `close`."""
        self._is_over = True
        self._process.kill()

    def close(self) -> None:
        """End the process; a call starts another one."""
        with self._lock:
            self._end(_END_S)
            self._is_over = False

    def _exchange(self, name: str, *arguments: Any) -> Any:
        """Ask the process. Raises TimeoutError, or OSError or EOFError: it has died."""
        assert self._channel is not None
        size = max((each.numel() for each in arguments if isinstance(each, torch.Tensor)), default=1)
        slowest_s = self._slowest_s.get(name)
        # However long it takes to load a model for the first time: its user waits for it.
        limit_s = None if name == "ready" else _FIRST_CALL_S
        if slowest_s is not None:
            limit_s = max(CALL_S, CALL_TIMES * slowest_s * size)
        self._channel.limit(limit_s)
        start_s = self._started_s if name == "ready" else time.monotonic()
        self._channel.send((name, arguments))
        answer = self._channel.receive()
        if not isinstance(answer, _Failed):
            self._slowest_s[name] = max(slowest_s or 0.0, (time.monotonic() - start_s) / size)
        return answer

    def _replaced(self, what: str) -> RunError:
        """Start another process; returns the error of the call that has found the one before so."""
        if not self._is_over:
            self._start()
        return RunError(f"the process that {_DOES[self._settings.part]} {what}")

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        self._started_s = time.monotonic()
        with theirs:
            own = self._settings
            name = f"psctl-{own.part}"
            self._process = start_process(_ENTRY, own.to_json(), theirs, device=own.device, name=name)
        self._channel: Channel | None = Channel(ours)
        self._is_loaded = False
        if self._is_over:  # `abort` came meanwhile, or before
            self._process.kill()

    def _end(self, patience_s: float = 0.0) -> str:
        """Returns how it has ended; it ends by itself when its channel is closed."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        self._process.join(patience_s)
        if self._process.exitcode is None:
            self._process.kill()
            self._process.join()
        code = self._process.exitcode or 0
        return signal.Signals(-code).name if code < 0 else f"exit code {code}"


class StageProcesses:
    """Both processes of a model.

    Args:
        settings: of both.
    """

    def __init__(self, settings: StageSettings) -> None:
        self.of = {part: StageProcess(replace(settings, part=part)) for part in _DOES}

    def wait(self) -> None:
        """Return when both are ready. Raises RunError: one cannot load the model."""
        for process in self.of.values():
            process.wait()

    def take_over(self, family: Family, device: torch.device) -> Family:
        """The same family, that encodes and decodes in the processes, from tensors on this device and to there."""
        prepare, postprocess = self.of["prepare"], self.of["postprocess"]

        def condition(request: Request, is_guided: bool) -> dict[str, torch.Tensor]:
            # What an edit changes is none of the text's concern.
            found = prepare.call("condition", replace(request, edit=None, traced=None), is_guided)
            return {name: tensor.to(device) for name, tensor in found.items()}

        def encode(pixels: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
            latents, state = prepare.call("encode", pixels, generator.get_state())
            generator.set_state(state)
            return latents.to(device)

        def decode(latents: torch.Tensor, decode: Decode) -> Sequence[Image.Image]:
            return [Image.fromarray(image) for image in postprocess.call("decode", latents)]

        return replace(family, condition=condition, encode=encode, decode=decode)

    def abort(self) -> None:
        """End both at once, see `StageProcess.abort`."""
        for process in self.of.values():
            process.abort()

    def close(self) -> None:
        """End both."""
        for process in self.of.values():
            process.close()


def serve_stage(channel: Channel, load: Callable[[], tuple[Any, Family]]) -> int:
    """Do what is asked for until nobody is there any more; returns the exit code.

    Args:
        channel: to the process that asks.
        load: the pipeline, with the parts that are needed here, and its family.
    """
    compute_alone()
    try:
        pipe, family = load()
    except PsctlError as error:
        with suppress(OSError, EOFError):
            channel.receive()
            channel.send(_Failed(str(error)))
        return error.exit_code
    device, decoder = pipe.vae.device, FiniteDecoder(pipe.vae)

    def encode(pixels: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator("cpu")
        generator.set_state(state)
        return family.encode(pixels.to(device), generator), generator.get_state()

    def decode(latents: torch.Tensor) -> list[np.ndarray[Any, Any]]:
        images = family.decode(latents.to(device), decoder)
        return [np.asarray(image) for image in images]

    functions: dict[str, Callable[..., Any]] = {
        "ready": lambda: None,
        "condition": family.condition,
        "encode": encode,
        "decode": decode,
    }
    with suppress(OSError, EOFError), torch.inference_mode():
        while True:
            name, arguments = channel.receive()
            try:
                answer = functions[name](*arguments)
            except Exception as error:  # noqa: BLE001  it is told, and the next request may be fine
                answer = _Failed(describe(name, error))
            channel.send(answer)
    return 0
