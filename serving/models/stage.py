"""A process of `--stages processes`: `python -m patchedserve.serving.models.stage SETTINGS SOCKET`."""

import os
import socket
import sys

from ..core.garbage import imports_are_no_garbage

with imports_are_no_garbage():
    from .placement import quiet_libraries

    quiet_libraries()
    from .channel import Channel
    from .parts import load_stage
    from .stage_process import StageSettings, serve_stage

if __name__ == "__main__":
    given = StageSettings.from_json(sys.argv[1])
    end = socket.socket(fileno=int(sys.argv[2]))
    code = serve_stage(Channel(end), lambda: load_stage(given))
    sys.stderr.flush()
    # Taking torch down would take a second or more on a busy machine, in which the process outlives its server.
    os._exit(code)
