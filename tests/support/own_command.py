"""A command of the application whose body a test supplies, started as the console script is."""

import os
import subprocess
import sys

PROGRAM = """
import sys
from patchedserve.data.errors import RunError, UsageError
from patchedserve.psctl.app import app, main
from patchedserve.psctl.output import Json, Output, Quiet

@app.command("try")
def try_it(json: Json = False, quiet: Quiet = False) -> None:
    out = Output(json=json, quiet=quiet)
    BODY

sys.exit(main(["try", *sys.argv[1:]]))
"""
"""Adds a command that runs the lines inserted for BODY, then starts it as the console script does."""


def run_body(
    body: str, *arguments: str, stdout: int = subprocess.PIPE, encoding: str | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run the command with these lines and arguments to its end; keyword arguments are added to the environment.

    `encoding` is that of its outputs; None for the locale's.
    """
    return subprocess.run(
        [sys.executable, "-c", PROGRAM.replace("BODY", body.replace("\n", "\n    ")), *arguments],
        env=os.environ | environment,
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        encoding=encoding,
        check=False,
    )
