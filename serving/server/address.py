"""Address of a server, the requests that it accepts there, and uvicorn's settings. No torch."""

import logging
import re
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from ipaddress import ip_network

import uvicorn

from ...data.errors import RunError, UsageError
from .connections import TimedConnection
from .guards import ANY_ADDRESS, LOOPBACK, App
from .keys import Keys

_BACKLOG = 256
KEEP_ALIVE_S = 90.0
"""Longer than the 60 s for which nginx and load balancers keep connections. If the server closed a connection first, a
request on its way would be answered with 502.
"""
_ORIGIN = re.compile(r"https?://[\w.-]+(:\d+)?|https?://\[[\da-f:]+\](:\d+)?", re.ASCII)
_ROOT_PATH = re.compile(r"(/[\w.~-]+)+", re.ASCII)


@dataclass(frozen=True, slots=True)
class Address:
    """Address on which a server listens, and the requests that it accepts.

    Attributes:
        host: host name or address.
        port: port; 0 for any free port.
        keys: accepted keys; if there are none, no key is needed.
        allowed_hosts: host names under which it accepts requests besides `host`. If there are none on another host than
            loopback, it accepts any name with keys, and the names of this machine without.
        drain_timeout_s: seconds that open requests may still take after a signal.
        is_open: whether it may listen on other hosts than loopback without keys.
        keep_alive_s: seconds after which an idle connection is closed.
        origins: origins of other sites whose pages may send requests.
        root_path: path under which a proxy serves it, such as `/images`; "" for none.
        proxies: addresses and networks of proxies whose `X-Forwarded-Proto` and `X-Forwarded-For` count.
        read_keys: reads the keys again, on SIGHUP; raises UsageError.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    keys: Keys = field(default_factory=Keys, repr=False)
    allowed_hosts: Sequence[str] = ()
    drain_timeout_s: float = 30.0
    is_open: bool = False
    keep_alive_s: float = KEEP_ALIVE_S
    origins: Sequence[str] = ()
    root_path: str = ""
    proxies: Sequence[str] = ()
    read_keys: Callable[[], Keys] | None = None

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can connect."""
        return self.host in ("localhost", "127.0.0.1", "::1")

    def check(self) -> None:
        """Raise UsageError if anyone on the network could send requests, unless `is_open` allows it, or if an origin,
        the path or a proxy is not valid.
        """
        if wrong := [origin for origin in self.origins if not _ORIGIN.fullmatch(origin)]:
            raise UsageError(f"--cors-origin is {wrong[0]!r}, but it must be like https://app.example, with no path")
        if self.root_path and not _ROOT_PATH.fullmatch(self.root_path):
            raise UsageError(f"--root-path is {self.root_path!r}, but it must be like /images, with no / at its end")
        for proxy in self.proxies:
            try:
                ip_network(proxy)
            except ValueError as error:
                raise UsageError(f"--trusted-proxy: {error}; give addresses or networks like 10.0.0.0/8") from None
        if not self.is_loopback and not self.keys and not self.is_open:
            raise UsageError(
                f"--host is {self.host}, where others can ask: set PSCTL_API_KEY or --api-key-file, or say --insecure"
            )

    def listen(self) -> socket.socket:
        """Return the bound socket, so that a port in use is reported before anything is loaded. Raises RunError."""
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        # With IPPROTO_TCP, asyncio sends small responses at once: without, each took 40 ms longer on kept connections.
        listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((self.host, self.port))
        except OSError as error:
            listening.close()
            raise RunError(f"cannot listen on {self.host}:{self.port}: {error.strerror}") from error
        return listening

    def url_of(self, listening: socket.socket) -> str:
        """Return the base URL of the API on a bound socket."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{listening.getsockname()[1]}/v1"

    @property
    def hosts(self) -> tuple[str, ...] | None:
        """Host names under which requests are accepted; None for any, as pages of other sites do not have the key."""
        if self.is_loopback or self.allowed_hosts:
            return (*LOOPBACK, self.host, *self.allowed_hosts)
        return None if self.keys else (*LOOPBACK, self.host, socket.gethostname(), socket.getfqdn(), ANY_ADDRESS)


def uvicorn_config(app: App, address: Address, *, drain_s: int) -> uvicorn.Config:
    """Return the settings of a server that logs nothing but errors, and gives open answers `drain_s` at its end."""
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
    return uvicorn.Config(
        app,  # type: ignore[arg-type]
        http=TimedConnection,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=bool(address.proxies),
        forwarded_allow_ips=list(address.proxies),
        backlog=_BACKLOG,
        timeout_keep_alive=address.keep_alive_s,  # type: ignore[arg-type]
        timeout_graceful_shutdown=drain_s,
    )
