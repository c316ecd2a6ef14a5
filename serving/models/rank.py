"""A rank of `--parallel N`, as a process: `python -m patchedserve.serving.models.rank SETTINGS`."""

import sys

from ..core.garbage import imports_are_no_garbage

with imports_are_no_garbage():
    from .placement import quiet_libraries

    quiet_libraries()
    from ..parallel.worker import RankSettings, serve_rank
    from .parts import load_rank

if __name__ == "__main__":
    given = RankSettings.from_json(sys.argv[1])
    sys.exit(serve_rank(given, lambda: load_rank(given)))
