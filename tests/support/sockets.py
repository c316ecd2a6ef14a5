"""Which sockets a process listens on, as the kernel has them."""

import contextlib
import ipaddress
from pathlib import Path

_LISTENS = "0A"


def listening(pid: int) -> dict[str, ipaddress.IPv4Address | ipaddress.IPv6Address]:
    """The addresses of the TCP sockets that a process listens on, by inode."""
    own: set[str] = set()
    for file in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            own.add(str(file.readlink()))
    found: dict[str, ipaddress.IPv4Address | ipaddress.IPv6Address] = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == _LISTENS and f"socket:[{inode}]" in own:
                address = local.partition(":")[0]
                # In words of four bytes, each of which begins with its last.
                words = (bytes.fromhex(address[at : at + 8])[::-1] for at in range(0, len(address), 8))
                found[inode] = ipaddress.ip_address(b"".join(words))
    return found
