"""Errors that a user may see: each carries a one-line message and the exit code of the command that it ends."""


class PsctlError(Exception):
    """Base of all errors that `psctl` shows as one line instead of a traceback."""

    exit_code: int = 1


class UsageError(PsctlError, ValueError):
    """Invalid input of the user; the message states what was given and what is allowed."""

    exit_code = 2


class RunError(PsctlError):
    """Failure of a run with valid input; the message states what failed and what to do."""


class MissingExtraError(RunError):
    """A package of an extra of pyproject.toml is not installed; the message states how to install it."""

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(f"{package} is not installed; install it with: pip install 'psctl[{extra}]'")
