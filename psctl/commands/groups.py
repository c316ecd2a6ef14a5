"""Groups of commands that also run by themselves: all their commands, one after the other, with the defaults."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer

from ...data.errors import UsageError
from ...data.workspace import DEFAULT_WORKSPACE
from ..options.common import Device, Json, Model, Quiet, Seed, WorkspaceRoot


def _running_all(about: str) -> Callable[..., None]:
    """A group's callback with this help."""

    def run(
        context: typer.Context,
        model: Model = "emoji-xl",
        device: Device = "auto",
        seed: Seed = 0,
        workspace: WorkspaceRoot = Path(DEFAULT_WORKSPACE),
        json: Json = False,
        quiet: Quiet = False,
    ) -> None:
        _run_all(context)

    run.__doc__ = about
    return run


profile = _running_all(
    """Measure what the predictors learn from; without a command, first latency, then blocks.

    Options here are for that case only. With --json every command prints an object of its own.

    Examples:

        psctl profile

        psctl profile --model emoji-3

        psctl profile latency --combinations 60
    """
)
train_predictor = _running_all(
    """Train what the scheduler and the cache decide by; without a command, first latency, then cache.

    Options here are for that case only. With --json every command prints an object of its own.

    Examples:

        psctl train-predictor

        psctl train-predictor --model emoji-3

        psctl train-predictor cache --threshold 0.1
    """
)


def _run_all(context: typer.Context) -> None:
    """Run every command of the group with the options that were given to the group, unless one was named.

    Raises:
        UsageError: a command was named, and options stand before it.
    """
    given = {
        param.opts[0]: context.params[param.name]
        for param in context.command.params
        if param.name is not None and context.get_parameter_source(param.name).name == "COMMANDLINE"  # type: ignore[union-attr]
    }
    if context.invoked_subcommand is not None:
        if given:
            raise UsageError(
                f"{', '.join(given)} stands before {context.invoked_subcommand}, but options of a command stand behind "
                f"it: {context.command_path} {context.invoked_subcommand} {next(iter(given))} ..."
            )
        return
    arguments = [text for name, value in given.items() for text in _as_text(name, value)]
    commands: dict[str, Any] = context.command.commands  # type: ignore[attr-defined]
    for name, command in commands.items():
        # Within the group's own context, so that each option also has its usual environment variable.
        with command.make_context(name, list(arguments), parent=context) as own:
            command.invoke(own)


def _as_text(name: str, value: Any) -> list[str]:
    if isinstance(value, bool):
        return [name] if value else []
    return [name, str(value)]
