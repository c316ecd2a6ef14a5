"""`psctl config check`: checks a file of options."""

import os
from pathlib import Path
from typing import Annotated

import typer

from ..config_file import ConfigFile, check
from ..output import Output


def config_check(
    *,
    context: typer.Context,
    file: Annotated[Path, typer.Argument(help="TOML file of options.", metavar="FILE")],
    out: Output,
) -> None:
    """Check a file of options for --config, without running anything.

    Prints the options that each command gets from it, and a line for each one that is wrong, with the allowed values.
    Exits with 1 if there are any. Environment variables are ignored.

    Examples:

        psctl config check psctl.toml
    """
    config = ConfigFile.read(file.expanduser())
    hidden = {name: os.environ.pop(name) for name in list(os.environ) if name.startswith("PSCTL_")}
    try:
        found = check(config, context.find_root())
    finally:
        os.environ.update(hidden)
    out.data(
        {"file": file, "commands": found.commands, "problems": found.problems},
        table="\n".join(f"psctl {name}: {', '.join(keys)}" for name, keys in found.commands.items()),
    )
    for problem in found.problems:
        out.warn(problem)
    if found.problems:
        raise typer.Exit(1)
