"""Options of the batch server, `psctl serve --http`."""

import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from ...data.errors import UsageError
from ...serving.options import CALIBRATE_S, Calibrate
from ..flags import flag

if TYPE_CHECKING:
    from ...serving.server.address import Address
    from ...serving.server.keys import Keys
    from ...serving.server.limits import Limits
    from ...serving.server.request_log import RequestLog
    from ...serving.server.traces import Traces

KEY_VARIABLE = "PSCTL_API_KEY"
_HTTP = "With --http: "


@dataclass(frozen=True, slots=True)
class HttpFlags:
    """Address, access and limits of a server."""

    PANEL: ClassVar = "Server (--http)"

    host: Annotated[str, flag("--host", f"{_HTTP}address to listen on; other hosts than loopback need a key.")] = (
        "127.0.0.1"
    )
    port: Annotated[int, flag("--port", f"{_HTTP}port; 0 for any free port.", min=0, max=65535)] = 8000
    api_key_file: Annotated[
        Path | None,
        flag("--api-key-file", f"{_HTTP}file of accepted keys, one per line or by name (.toml).", dir_okay=False),
    ] = None
    insecure: Annotated[bool, flag("--insecure", f"{_HTTP}allow any address without a key.")] = False
    allowed_host: Annotated[
        list[str] | None, flag("--allowed-host", f"{_HTTP}accepted host name of requests; may be repeated.")
    ] = None
    served_model_name: Annotated[
        list[str] | None, flag("--served-model-name", f"{_HTTP}additional name of the model; may be repeated.")
    ] = None
    max_queue: Annotated[int, flag("--max-queue", f"{_HTTP}maximum number of open images.", min=1)] = 64
    max_queue_time: Annotated[
        float, flag("--max-queue-time", f"{_HTTP}maximum time that the queue may take.", min=0.001, metavar="SECONDS")
    ] = 60.0
    max_per_key: Annotated[
        int | None,
        flag("--max-per-key", f"{_HTTP}maximum number of open images per key. Default: all that others leave.", min=1),
    ] = None
    max_pixels: Annotated[
        int | None,
        flag(
            "--max-pixels",
            f"{_HTTP}maximum number of pixels of an image. Default: that of the largest served size.",
            min=64,
        ),
    ] = None
    max_steps: Annotated[int, flag("--max-steps", f"{_HTTP}maximum number of steps of an image.", min=1, max=1000)] = (
        200
    )
    request_timeout: Annotated[
        float, flag("--request-timeout", f"{_HTTP}time after which a request is aborted.", min=0.001, metavar="SECONDS")
    ] = 600.0
    drain_timeout: Annotated[
        float, flag("--drain-timeout", f"{_HTTP}time for open requests after a signal.", min=0.0, metavar="SECONDS")
    ] = 30.0
    keep_alive: Annotated[
        float,
        flag(
            "--keep-alive",
            f"{_HTTP}time that idle connections stay open; must be longer than that of a proxy.",
            min=0.001,
            metavar="SECONDS",
        ),
    ] = 90.0
    calibrate: Annotated[
        Calibrate,
        flag(
            "--calibrate",
            f"{_HTTP}latencies measured at the start: what the workspace lacks (auto), nothing (off), or all (force).",
        ),
    ] = "auto"
    calibrate_time: Annotated[
        float,
        flag(
            "--calibrate-time",
            f"{_HTTP}time after which no further measurement begins; the next start continues.",
            min=0.0,
            metavar="SECONDS",
        ),
    ] = CALIBRATE_S
    root_path: Annotated[
        str,
        flag("--root-path", f"{_HTTP}path under which a proxy serves it, such as /images.", metavar="PATH"),
    ] = ""
    trusted_proxy: Annotated[
        list[str] | None,
        flag(
            "--trusted-proxy",
            f"{_HTTP}proxy whose X-Forwarded-Proto and X-Forwarded-For count, so that addresses of images begin with "
            "https; may be repeated.",
            metavar="ADDRESS|NETWORK",
        ),
    ] = None
    cors_origin: Annotated[
        list[str] | None,
        flag(
            "--cors-origin",
            f"{_HTTP}other site whose pages may send requests, such as https://app.example; may be repeated.",
            metavar="ORIGIN",
        ),
    ] = None
    otlp_traces_endpoint: Annotated[
        str | None,
        flag(
            "--otlp-traces-endpoint",
            f"{_HTTP}collector of OpenTelemetry traces (OTLP over HTTP), such as http://localhost:4318/v1/traces.",
            metavar="URL",
        ),
    ] = None
    log_level: Annotated[
        Literal["info", "warning", "error"],
        flag("--log-level", f"{_HTTP}requests that are logged: all, those refused or failed, or those failed."),
    ] = "info"
    log_format: Annotated[Literal["json", "text"], flag("--log-format", f"{_HTTP}format of the log of requests.")] = (
        "json"
    )
    log_prompts: Annotated[bool, flag("--log-prompts", f"{_HTTP}also log prompts.")] = False

    def limits(self, largest_pixels: int, keys: "Keys") -> "Limits":
        """Return the limits of a server with these keys; `largest_pixels` is the number of pixels of the largest served
        size.
        """
        from ...serving.server.limits import Limits

        return Limits(
            max_queue=self.max_queue,
            max_queue_time_s=self.max_queue_time,
            max_pixels=largest_pixels if self.max_pixels is None else self.max_pixels,
            max_steps=self.max_steps,
            keys=keys.limits,
            max_per_key=self.max_per_key,
            request_timeout_s=self.request_timeout,
        )

    def log(self) -> "RequestLog":
        """Return the log of requests."""
        from ...serving.server.request_log import RequestLog

        return RequestLog(with_prompts=self.log_prompts, level=self.log_level, form=self.log_format)

    def traces(self) -> "Traces | None":
        """Return what exports traces, if there is a collector.

        Raises:
            UsageError: its address is not valid.
            MissingExtraError: a package of the extra `otel` is missing.
        """
        if self.otlp_traces_endpoint is None:
            return None
        if not self.otlp_traces_endpoint.startswith(("http://", "https://")):
            raise UsageError(
                f"--otlp-traces-endpoint is {self.otlp_traces_endpoint!r}, but it must be like "
                "http://localhost:4318/v1/traces"
            )
        from ...serving.server.traces import otlp_traces

        return otlp_traces(self.otlp_traces_endpoint)

    def address(self) -> "Address":
        """Return the address to listen on. Raises UsageError: the keys cannot be read, a required key is missing, or
        what a proxy or other sites need is not valid.
        """
        from ...serving.server.address import Address
        from ...serving.server.keys import read_keys

        read = partial(read_keys, self.api_key_file, os.environ.get(KEY_VARIABLE, "").strip() or None)
        keys = read()
        address = Address(
            self.host,
            self.port,
            keys,
            tuple(self.allowed_host or ()),
            self.drain_timeout,
            self.insecure,
            self.keep_alive,
            tuple(self.cors_origin or ()),
            self.root_path,
            tuple(self.trusted_proxy or ()),
            read_keys=None if self.api_key_file is None else read,
        )
        address.check()
        return address
