"""Groups of commands that also run by themselves: some of their commands, one after the other, with the defaults."""

from typing import Annotated, Any

import typer

from ...data.errors import UsageError
from ..flags import flag, given_flags
from ..options.common import Seed
from ..options.target import WHERE, Target
from ..output import Output


def profile(
    *,
    context: typer.Context,
    quick: Annotated[bool, flag("--quick", "Coarser, both parts within 2 minutes on 2 cores.")] = False,
    target: Annotated[Target, WHERE.without("dtype")],
    seed: Seed = 0,
    out: Output,
) -> None:
    """Measure what the predictors learn from; without a command, first latency, then blocks.

    Options here are for that case only. With --json every command prints an object of its own. How good a predictor
    becomes of a profile, quick or not, psctl train-predictor says: its error on what it has not seen.

    Examples:

        psctl profile
        psctl profile --quick --model emoji-3 && psctl train-predictor --model emoji-3
        psctl profile latency --combinations 60
        psctl profile parallel --config sdxl
    """
    _run_all(context, "latency", "blocks")


def train_predictor(
    *, context: typer.Context, target: Annotated[Target, WHERE.without("dtype")], seed: Seed = 0, out: Output
) -> None:
    """Train what the scheduler and the cache decide by; without a command, first latency, then cache.

    Options here are for that case only. With --json every command prints an object of its own.

    Examples:

        psctl train-predictor
        psctl train-predictor --model emoji-3
        psctl train-predictor cache --threshold 0.1
    """
    _run_all(context, "latency", "cache")


def _run_all(context: typer.Context, *names: str) -> None:
    """Run these commands of the group with the options that were given to the group, unless one was named.

    Raises UsageError: a command was named, and options stand before it.
    """
    given = given_flags(context)
    if context.invoked_subcommand is not None:
        if given:
            raise UsageError(
                f"{', '.join(given)} comes before {context.invoked_subcommand}, but options of a command come after "
                f"it: {context.command_path} {context.invoked_subcommand} {next(iter(given))} ..."
            )
        return
    arguments = [text for name, value in given.items() for text in _as_text(name, value)]
    commands: dict[str, Any] = context.command.commands  # type: ignore[attr-defined]
    for name in names:
        command = commands[name]
        # Within the group's own context, so that each option also has its usual environment variable.
        with command.make_context(name, list(arguments), parent=context) as own:
            command.invoke(own)


def _as_text(name: str, value: Any) -> list[str]:
    if isinstance(value, bool):
        return [name] if value else []
    return [name, str(value)]
