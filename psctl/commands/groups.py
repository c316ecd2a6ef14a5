"""Groups that are commands, too: without a subcommand they run some of their commands with the defaults."""

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
    quick: Annotated[bool, flag("--quick", "Coarser measurements: both parts take 2 minutes on 2 cores.")] = False,
    target: Annotated[Target, WHERE.without("dtype")],
    seed: Seed = 0,
    out: Output,
) -> None:
    """Measure training data of the predictors. Without a command: latency, then blocks.

    The options below apply to that case only. With --json each command prints an object of its own. psctl
    train-predictor reports the held-out error of a predictor that is trained on a profile.

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
    """Train the predictors of the scheduler and the cache. Without a command: latency, then cache.

    Options here are for that case only. With --json every command prints an object of its own.

    Examples:

        psctl train-predictor
        psctl train-predictor --model emoji-3
        psctl train-predictor cache --threshold 0.1
    """
    _run_all(context, "latency", "cache")


def _run_all(context: typer.Context, *names: str) -> None:
    """Run commands of the group with its own options, unless the user named a command.

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
