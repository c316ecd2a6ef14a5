"""Entry point of a process of `--stages processes`."""

import socket

from .channel import Channel
from .parts import load_stage
from .placement import quiet_libraries
from .stage_process import StageSettings, serve_stage


def run(given: str, end: socket.socket) -> int:
    """Run the stage at the other end of a socket, with settings from `StageSettings.to_json`; return the exit code."""
    quiet_libraries()
    settings = StageSettings.from_json(given)
    return serve_stage(Channel(end), lambda: load_stage(settings), settings.prompt_cache_mb)
