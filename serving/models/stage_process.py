"""Processes for the prepare and postprocess stages of a served model (`--stages processes`).

One process encodes texts and images of edits, another one decodes latents (InstGenIE section 4.3). They compute what
the threads of an engine would compute; these threads wait for the results without Python's lock and without torch.
"""

import json
import signal
import socket
import threading
import time
from collections import defaultdict, deque
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
from ..options import DecoderDtype, EngineOptions
from .channel import Channel
from .decoder import ImageDecoder
from .offload import text_encoders
from .prompt_cache import PromptCache

_ENTRY = f"{__package__}.stage:run"
_END_S, _DEAD_S = 5.0, 1.0
"""Times that a process may take to end: after we have closed its channel, and after it has closed the channel."""
CALL_S, CALL_TIMES = 60.0, 40.0
"""Time limits of a call: in seconds, and as a multiple of the slowest recent call, scaled by size. The longer one
applies. Both are twice those of a stalled server (`engine.stages.STALLED_S`), so that its probes report it before.
"""
_RECENT, _LONGEST = 32, 5.0
"""Number of recent calls; each counts as at most this many times the slowest before it. Otherwise a single call during
which the process was stopped would extend the limit of all later calls.
"""
_FIRST_CALL_S = 600.0
"""Time limit of the first call of each function, whose duration is not known yet."""
Part = Literal["prepare", "postprocess"]
_DOES: dict[Part, str] = {"prepare": "prepares requests", "postprocess": "decodes images"}


@dataclass(frozen=True, slots=True)
class StageSettings:
    """Settings of a stage process.

    Attributes:
        model: folder of the model's files.
        device, dtype: names of device and dtype, resolved.
        part: stage that the process computes.
        decoder_dtype, compile, cuda_graphs: how images are decoded, as in `EngineOptions`.
        prompt_cache_mb: size of the cache of encoded texts, as in `EngineOptions`.
    """

    model: str
    device: str
    dtype: str
    part: Part = "prepare"
    decoder_dtype: DecoderDtype = "auto"
    compile: bool = False
    cuda_graphs: bool | None = None
    prompt_cache_mb: int = 0

    @property
    def options(self) -> EngineOptions:
        """Those options of the engine that concern the process."""
        return EngineOptions(decoder_dtype=self.decoder_dtype, compile=self.compile, cuda_graphs=self.cuda_graphs)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "StageSettings":
        return cls(**json.loads(text))


@dataclass(frozen=True, slots=True)
class _Failed:
    reason: str


class StageProcess:
    """One stage process, which is restarted when it dies or does not answer.

    Any thread may call it; calls run one after the other.

    Args:
        settings: settings of the process.
    """

    def __init__(self, settings: StageSettings) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._is_over = False
        # Seconds per element of the largest tensor in recent calls, by function.
        self._recent_s: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=_RECENT))
        self._start()

    @property
    def process_id(self) -> int:
        """Id of the current process."""
        return self._process.pid or 0

    def wait(self) -> None:
        """Wait until the process is ready. Raises RunError: it cannot load the model, or has died."""
        self.call("ready")

    def call(self, name: str, *arguments: Any) -> Any:
        """Call a function of `serve_stage`, and return its result.

        Raises RunError: the function has failed, the process has died during the call or since the last one, or the
        call exceeds its time limit (`CALL_S`). In the last two cases another process is started.
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
                # A late answer must not be taken for that of the next call.
                self._end()
                raise
        if isinstance(answer, _Failed):
            raise RunError(answer.reason)
        return answer

    def abort(self) -> None:
        """Kill the process at once; all calls fail until `close`, including pending ones."""
        self._is_over = True
        self._process.kill()

    def close(self) -> None:
        """End the process; the next call starts another one."""
        with self._lock:
            self._end(_END_S)
            self._is_over = False

    def _exchange(self, name: str, *arguments: Any) -> Any:
        """Send a call and receive its answer. Raises TimeoutError; OSError or EOFError: the process has died."""
        assert self._channel is not None
        size = max((each.numel() for each in arguments if isinstance(each, torch.Tensor)), default=1)
        recent_s = self._recent_s[name]
        # The first load of a model has no limit, because its user waits for it.
        limit_s = None if name == "ready" else _FIRST_CALL_S
        if recent_s:
            limit_s = max(CALL_S, CALL_TIMES * max(recent_s) * size)
        self._channel.limit(limit_s)
        start_s = self._started_s if name == "ready" else time.monotonic()
        self._channel.send((name, arguments))
        answer = self._channel.receive()
        if not isinstance(answer, _Failed):
            took_s = (time.monotonic() - start_s) / size
            recent_s.append(min(took_s, _LONGEST * max(recent_s, default=took_s)))
        return answer

    def _replaced(self, what: str) -> RunError:
        """Start another process, and return the error for the call that found the old one in this state."""
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
        if self._is_over:  # `abort` was called in the meantime, or before
            self._process.kill()

    def _end(self, patience_s: float = 0.0) -> str:
        """End the process by closing its channel, or kill it after `patience_s`; return how it ended."""
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
    """Both stage processes of a model.

    Args:
        settings: settings of both, except `part`.
    """

    def __init__(self, settings: StageSettings) -> None:
        self.of = {part: StageProcess(replace(settings, part=part)) for part in _DOES}

    def wait(self) -> None:
        """Wait until both are ready. Raises RunError: one cannot load the model."""
        for process in self.of.values():
            process.wait()

    def use_processes(self, family: Family, device: torch.device) -> Family:
        """Return the same family with encoding and decoding in the processes, for tensors on this device."""
        prepare, postprocess = self.of["prepare"], self.of["postprocess"]

        def condition(request: Request, is_guided: bool) -> dict[str, torch.Tensor]:
            # The text depends on no image.
            own = replace(request, edit=None, traced=None, references=(), controls=())
            found = prepare.call("condition", own, is_guided)
            return {name: tensor.to(device) for name, tensor in found.items()}

        def encode(pixels: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
            latents, state = prepare.call("encode", pixels, generator.get_state())
            generator.set_state(state)
            return latents.to(device)

        def decode(latents: torch.Tensor, decode: Decode) -> Sequence[Image.Image]:
            return [Image.fromarray(image) for image in postprocess.call("decode", latents)]

        return replace(family, condition=condition, encode=encode, decode=decode)

    def abort(self) -> None:
        """Kill both at once, see `StageProcess.abort`."""
        for process in self.of.values():
            process.abort()

    def close(self) -> None:
        """End both processes."""
        for process in self.of.values():
            process.close()


def serve_stage(
    channel: Channel, load: Callable[[], tuple[Any, Family, ImageDecoder]], prompt_cache_mb: int = 0
) -> int:
    """Answer calls until the channel is closed; return the exit code.

    Args:
        channel: channel to the calling process.
        load: loads the pipeline, with the parts that are needed here, its family and its decoder.
        prompt_cache_mb: size of the cache of encoded texts.
    """
    compute_alone()
    try:
        pipe, family, decoder = load()
    except PsctlError as error:
        with suppress(OSError, EOFError):
            channel.receive()
            channel.send(_Failed(str(error)))
        return error.exit_code
    device, prompts = pipe.vae.device, PromptCache(text_encoders(pipe), prompt_cache_mb << 20)

    def condition(request: Request, is_guided: bool) -> dict[str, torch.Tensor]:
        with prompts.answering(request.adapters):
            return family.condition(request, is_guided)

    def encode(pixels: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator("cpu")
        generator.set_state(state)
        return family.encode(pixels.to(device), generator), generator.get_state()

    def decode(latents: torch.Tensor) -> list[np.ndarray[Any, Any]]:
        images = family.decode(latents.to(device), decoder)
        return [np.asarray(image) for image in images]

    functions: dict[str, Callable[..., Any]] = {
        "ready": lambda: None,
        "condition": condition,
        "encode": encode,
        "decode": decode,
    }
    with suppress(OSError, EOFError), torch.inference_mode():
        while True:
            name, arguments = channel.receive()
            try:
                answer = functions[name](*arguments)
            except Exception as error:  # noqa: BLE001  the caller gets the error, and the next request may be fine
                answer = _Failed(describe(name, error))
            channel.send(answer)
    return 0
