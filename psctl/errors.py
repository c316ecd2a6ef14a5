"""Messages and exit codes of errors for users."""

import errno
import os

import typer

from ..data.errors import PsctlError


def describe_error(error: BaseException) -> tuple[str, int] | None:
    """Return the line that a user sees for an error and the exit code, or None if the error is a bug of ours."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", 130
    if isinstance(error, PsctlError):
        return str(error), error.exit_code
    if isinstance(error, typer.TyperException):
        context = getattr(error, "ctx", None)
        hint = f" (see '{context.command_path} --help')" if context is not None else ""
        return message_of(error) + hint, error.exit_code
    if isinstance(error, typer.Abort):
        return "aborted", 1
    # torch.OutOfMemoryError is matched by its name, because torch must not be imported for it; on a CPU torch raises a
    # RuntimeError in words of its allocator.
    is_memory = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    if is_memory or (isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)):
        return "out of memory; use smaller resolutions, a smaller --max-batch-size or another --dtype", 1
    if isinstance(error, OSError) and error.errno is not None:
        return _describe_os_error(error), 1
    return None


def message_of(error: typer.TyperException | PsctlError) -> str:
    """Return the message of an error; for an invalid option with its value, which typer omits if pydantic has validated
    it.
    """
    if isinstance(error, PsctlError):
        return str(error)
    message, cause = error.format_message(), error.__context__
    judged = getattr(cause, "errors", list)()
    if not judged:
        return message
    given, reason = judged[0]["input"], judged[0]["msg"]
    plain = reason.removeprefix("Value error, ").partition(", unable to")[0].rstrip(".")
    if plain.startswith("Input should be"):
        plain = f"{given!r}, but it must be{plain.removeprefix('Input should be')}"
    return message.replace(reason, plain)


_OS_ERRORS = {
    errno.ENOSPC: "disk full",
    errno.EDQUOT: "disk quota used up",
    errno.EACCES: "no permission",
    errno.EPERM: "no permission",
    errno.EROFS: "the file system is read-only",
    errno.ENOENT: "no such file or folder",
    errno.EISDIR: "is a folder, not a file",
    errno.ENOTDIR: "is not a folder",
    errno.EEXIST: "exists already",
}


def _describe_os_error(error: OSError) -> str:
    assert error.errno is not None
    reason = _OS_ERRORS.get(error.errno, (error.strerror or os.strerror(error.errno)).lower())
    files = [os.fsdecode(name) for name in (error.filename, error.filename2) if isinstance(name, str | bytes)]
    return ": ".join([reason, *files])
