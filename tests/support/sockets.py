"""Sockets that a process listens on, as reported by the kernel."""

import contextlib
import ipaddress
from pathlib import Path

_LISTENS = "0A"


Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def listening(pid: int) -> dict[str, tuple[Address, int]]:
    """Return the addresses and ports of the TCP sockets that a process listens on, by inode."""
    own: set[str] = set()
    for file in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            own.add(str(file.readlink()))
    found: dict[str, tuple[Address, int]] = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == _LISTENS and f"socket:[{inode}]" in own:
                address, _, port = local.partition(":")
                # Words of four bytes, each in little-endian order.
                words = (bytes.fromhex(address[at : at + 8])[::-1] for at in range(0, len(address), 8))
                known = ipaddress.ip_address(b"".join(words))
                found[inode] = (getattr(known, "ipv4_mapped", None) or known, int(port, 16))
    return found


def started_by(pid: int) -> list[int]:
    """Return a process and all its running descendants."""
    found = [pid]
    for process in found:
        for children in Path(f"/proc/{process}/task").glob("*/children"):
            with contextlib.suppress(FileNotFoundError):  # ended meanwhile
                found += map(int, children.read_text().split())
    return found
