"""Help of commands with many options: `--help` shows the most used ones, `--help-all` all of them by topic."""

from copy import copy
from typing import Annotated, Any, ClassVar

import typer

from .command import Command
from .flags import flag

_MODEL = "--model --device --dtype"
_DRAWING = "--num-inference-steps --guidance-scale --seed"
_SETS = f"--dataset --num-prompts --resolutions --num-inference-steps --seed --cache {_MODEL}"
FIRST_OPTIONS = {
    "serve": (
        "--http --model --device --port --api-key-file --resolutions --max-batch-size --cache --trace --request-rate"
    ),
    "generate": f"--prompts --resolution {_DRAWING} --output {_MODEL}",
    "edit": f"--mask --strength --reference --reuse {_DRAWING} --output {_MODEL}",
    "batch run": f"--output-dir --resolutions --max-batch-size --num-replicas --cache {_MODEL}",
    "simulate": (
        "--latency --trace --request-rate --num-prompts --duration --resolutions --gpus --slo-scale --slo-target --seed"
    ),
    "bench slo": f"--systems --rates --on --num-seeds --resolutions --duration --slo-scale {_MODEL}",
    "bench cascade": (
        "--cascade --systems --slo-scales --num-seeds --trace --request-rate --duration --resolutions --gpus"
    ),
    "bench serve": (
        "--base-url --trace --request-rate --num-prompts --resolutions --num-inference-steps --slo --slo-scale "
        "--stream --against --output-file"
    ),
    **{f"eval {name}": f"--images --generated --reference {_SETS}" for name in ("fid", "kid", "clip")},
    **{f"eval {name}": f"--generated --reference {_SETS}" for name in ("all", "lpips", "psnr", "ssim")},
    "eval compare": f"--metrics --reference {_SETS}",
}
"""The options that `--help` shows, by command; `--help-all` shows all of them."""
_ALL = f"{__name__}.all"


class LongCommand(Command):
    """Command whose `--help` shows its arguments and the options named in `first`, in this order."""

    first: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def showing(cls, first: str) -> type["LongCommand"]:
        """Return the class of a command with these first options, which spaces separate."""
        return type("LongCommand", (cls,), {"first": (*first.split(), "--help-all")})

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the help: all of it after `--help-all`."""
        params, shows_all = self.params, _ALL in ctx.meta
        by_name = {name: param for param in params for name in param.opts}
        first: list[Any] = [by_name[name] for name in self.first]
        arguments = [param for param in params if param.param_type_name == "argument"]
        more = [param for param in params if param not in (*arguments, *first)]
        shown = [copy(param) for param in first]
        for param in shown:
            param.rich_help_panel, param.show_envvar = None, shows_all and param.show_envvar
        self.params = [*arguments, *shown, *(more if shows_all else ())]
        self.epilog = None if shows_all else f"{len(more)} more options: {ctx.command_path} --help-all"
        try:
            super().format_help(ctx, formatter)
        finally:
            self.params = params


def _show_all(context: typer.Context, is_wanted: bool | None) -> None:
    if is_wanted:
        context.meta[_ALL] = True
        typer.echo(context.get_help(), nl=False)
        raise typer.Exit


HelpAll = Annotated[
    bool | None,
    flag("--help-all", "Show all options by topic.", is_eager=True, callback=_show_all, allow_from_autoenv=False),
]
