"""Command of typer whose errors name the line of the file that has set an option."""

from typing import Any

import typer
from typer.core import TyperCommand

from ..data.errors import UsageError
from .config_file import placed


class Command(TyperCommand):
    """Command that `config_file` gives options to."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments. Raises UsageError and typer's errors, with the line of the file that is at fault."""
        try:
            return super().parse_args(ctx, args)
        except (UsageError, typer.BadParameter) as error:
            _place(error, ctx)
            raise

    def invoke(self, ctx: Any) -> Any:
        """Run the command. Raises what it raises, with the line of the file that is at fault."""
        try:
            return super().invoke(ctx)
        except UsageError as error:
            _place(error, ctx)
            raise


def _place(error: "UsageError | typer.BadParameter", context: Any) -> None:
    if isinstance(error, UsageError):
        error.args = (placed(str(error), context),)
    else:
        error.message = placed(error.message, context)
