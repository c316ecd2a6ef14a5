"""Entry point of a rank process of `--parallel N`."""

from ..core.processes import is_parent_alive
from ..parallel.worker import RankSettings, serve_rank
from .parts import load_rank
from .placement import quiet_libraries


def run(given: str) -> int:
    """Run the rank with these settings, from `RankSettings.to_json`; return the exit code."""
    quiet_libraries()
    settings = RankSettings.from_json(given)
    return serve_rank(settings, lambda: load_rank(settings), is_parent_alive)
