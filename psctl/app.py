"""The command line application: registers the commands, and maps every error to one line and an exit code.

Exit codes: 0 done, 1 the run failed, 2 wrong usage, 3 not enough evidence (`psctl gate`), 130 interrupted.
"""

import errno
import functools
import inspect
import io
import os
import sys
import traceback
from collections.abc import Callable, MutableMapping, Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from .. import __version__
from ..data.errors import UsageError
from ..serving.core.quiet import quiet_imports
from .command import Command
from .commands.batch import batch_run
from .commands.bench_cache import bench_cache
from .commands.bench_cascade import bench_cascade
from .commands.bench_edit import bench_edit
from .commands.bench_parallel import bench_parallel
from .commands.bench_serve import bench_serve
from .commands.bench_slo import bench_slo
from .commands.bench_steps import bench_steps
from .commands.config import config_check
from .commands.demo import demo
from .commands.doctor import doctor
from .commands.edit import edit
from .commands.eval import eval_all, eval_clip, eval_fid, eval_kid, eval_lpips, eval_psnr, eval_ssim
from .commands.eval_compare import eval_compare
from .commands.eval_discriminators import eval_discriminators
from .commands.eval_parallel import eval_parallel
from .commands.eval_report import eval_report
from .commands.gate import gate
from .commands.generate import generate
from .commands.groups import profile, train_predictor
from .commands.models import models_card, models_list, models_train
from .commands.profile import profile_blocks, profile_edits, profile_latency
from .commands.profile_cascade import profile_cascade
from .commands.profile_parallel import profile_parallel
from .commands.reproduce import reproduce_patchedserve
from .commands.router import router
from .commands.serve import serve
from .commands.simulate import simulate
from .commands.templates import templates_add, templates_check, templates_list, templates_remove
from .commands.train_discriminator import train_predictor_discriminator
from .commands.train_predictor import train_predictor_cache, train_predictor_latency
from .commands.train_schedule import train_predictor_schedule
from .config_file import Config
from .errors import describe_error
from .flags import expanded
from .long_help import FIRST_OPTIONS, HelpAll, LongCommand

# Name and function of every command, in the order of the help; "bench steps" is `steps` in the group `bench`. The
# modules must be cheap to import (no torch, pandas, numpy, matplotlib at module level): all of them are imported before
# `psctl --help` prints.
COMMANDS: tuple[tuple[str, Callable[..., None]], ...] = (
    ("serve", serve),
    ("router", router),
    ("generate", generate),
    ("edit", edit),
    ("templates add", templates_add),
    ("templates list", templates_list),
    ("templates check", templates_check),
    ("templates remove", templates_remove),
    ("batch run", batch_run),
    ("demo", demo),
    ("profile latency", profile_latency),
    ("profile blocks", profile_blocks),
    ("profile edits", profile_edits),
    ("profile parallel", profile_parallel),
    ("profile cascade", profile_cascade),
    ("train-predictor latency", train_predictor_latency),
    ("train-predictor cache", train_predictor_cache),
    ("train-predictor schedule", train_predictor_schedule),
    ("train-predictor discriminator", train_predictor_discriminator),
    ("simulate", simulate),
    ("bench steps", bench_steps),
    ("bench cache", bench_cache),
    ("bench slo", bench_slo),
    ("bench parallel", bench_parallel),
    ("bench cascade", bench_cascade),
    ("bench edit", bench_edit),
    ("bench serve", bench_serve),
    ("reproduce patchedserve", reproduce_patchedserve),
    ("eval all", eval_all),
    ("eval fid", eval_fid),
    ("eval kid", eval_kid),
    ("eval clip", eval_clip),
    ("eval lpips", eval_lpips),
    ("eval psnr", eval_psnr),
    ("eval ssim", eval_ssim),
    ("eval compare", eval_compare),
    ("eval parallel", eval_parallel),
    ("eval discriminators", eval_discriminators),
    ("eval report", eval_report),
    ("gate", gate),
    ("models list", models_list),
    ("models card", models_card),
    ("models train", models_train),
    ("config check", config_check),
    ("doctor", doctor),
)
_PANELS = {
    "Serve": ("serve", "router", "generate", "edit", "templates", "batch", "demo"),
    "Measure the machine, and learn from it": ("profile", "train-predictor"),
    "Plan and compare": ("simulate", "bench", "reproduce"),
    "Quality": ("eval", "gate"),
    "Models and set-up": ("models", "config", "doctor"),
}
"""Groups of commands in the help, in the order of a user's workflow."""
_GROUPS = {
    "batch": """Draw files of requests.

    Examples:

        psctl batch run requests.jsonl --output-dir drawn
    """,
    "bench": """Measure how fast this machine is.

    Examples:

        psctl bench steps --model emoji-3
        psctl bench slo --systems bucketed,patched-fcfs,patchedserve --rates 2,4,6
    """,
    "config": """Options from a file.

    Examples:

        psctl config check psctl.toml
        psctl serve --config psctl.toml
    """,
    "eval": """Measure how good images are.

    Examples:

        psctl eval all --model emoji-xl --num-prompts 256
        psctl eval fid --generated images --reference coco/val2014
        psctl eval compare --cache patch && psctl eval report
    """,
    "models": """List, measure and train the bundled models.

    Examples:

        psctl models list
        psctl models card emoji-clip
        psctl models train text
    """,
    "templates": """Record images that will be edited, so that edits compute their own part only.

    Examples:

        psctl templates add room.png
        psctl templates list
    """,
    "reproduce": """Measure the figures and tables of a paper, beside its own numbers.

    Examples:

        psctl reproduce patchedserve --quick
        psctl reproduce patchedserve --figure 14 --table 1
    """,
}
_GROUPS_THAT_RUN: dict[str, Callable[..., None]] = {"profile": profile, "train-predictor": train_predictor}
"""Groups that also run without a command, and take their help from their functions."""

_EPILOG = (
    "Every option can be set by an environment variable: PSCTL_<COMMAND>_<OPTION>, such as PSCTL_SERVE_REQUEST_RATE; "
    "shared ones by PSCTL_<OPTION>, such as PSCTL_MODEL. PSCTL_THREADS sets the CPU threads; PSCTL_DEBUG=1 shows "
    "tracebacks."
)


class _InOrder(TyperGroup):
    """Group whose help lists commands in the order of `_PANELS`."""

    def list_commands(self, ctx: typer.Context) -> list[str]:  # type: ignore[override]
        order = [name for names in _PANELS.values() for name in names]
        return sorted(self.commands, key=lambda name: order.index(name) if name in order else len(order))


app = typer.Typer(
    name="psctl",
    cls=_InOrder,
    help="""Serve text-to-image diffusion models whose requests mix resolutions.

    Examples:

        psctl serve --trace poisson --request-rate 2
        psctl profile && psctl train-predictor
        psctl eval all --num-prompts 256
    """,
    epilog=_EPILOG,
    invoke_without_command=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["--help", "-h"], "auto_envvar_prefix": "PSCTL"},
)


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        typer.echo(f"psctl {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            help="Print the version and exit.",
            callback=_print_version,
            is_eager=True,
            # Images and CI often set <NAME>_VERSION to a number, which must not be taken for this option.
            allow_from_autoenv=False,
        ),
    ] = False,
) -> None:
    _show_help_without_command(context)


def _show_help_without_command(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help(), nl=False)
        raise typer.Exit(2)


def _register() -> None:
    panels = {name: panel for panel, names in _PANELS.items() for name in names}
    groups = {"": app}
    for name, function in COMMANDS:
        group, _, command = name.rpartition(" ")
        if group not in groups:
            runs = _GROUPS_THAT_RUN.get(group)
            run = expanded(_show_help_without_command) if runs is None else expanded(runs, config=Config)
            about = _help_of(_GROUPS.get(group, run.__doc__))
            groups[group] = typer.Typer(help=about, invoke_without_command=True)
            groups[group].callback()(run)
            app.add_typer(groups[group], name=group, rich_help_panel=panels[group])
        panel, about = None if group else panels[name], _help_of(function.__doc__)
        kind, added = Command, {"config": Config}
        if first := FIRST_OPTIONS.get(name):
            kind, added = LongCommand.showing(first), added | {"help_all": HelpAll}
        groups[group].command(command, cls=kind, rich_help_panel=panel, help=about)(expanded(function, **added))


def _help_of(docstring: str | None) -> str:
    """Return a docstring with each paragraph on one line, as the terminal breaks lines. Examples keep theirs."""
    paragraphs = inspect.cleandoc(docstring or "").split("\n\n")
    return "\n\n".join(each if each.startswith(" ") else each.replace("\n", " ") for each in paragraphs)


_register()


@functools.cache
def command_tree() -> Any:
    """Return the application with all its commands and options, which takes a twentieth of a second to make."""
    return typer.main.get_command(app)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; the console script `psctl`.

    Args:
        arguments: arguments after `psctl`; None for those of the process.
    """
    _escape_on_stdout()
    try:
        apply_thread_settings(os.environ)
        quiet_imports()
        # Not standalone: typer then raises errors instead of printing them in its own form. It returns the code of
        # typer.Exit, or 130 after Ctrl-C, or None, since commands return nothing.
        result: Any = command_tree().main(
            args=None if arguments is None else list(arguments), prog_name="psctl", standalone_mode=False
        )
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader of our output has closed the pipe (`psctl ... | head`), so no message can reach it.
        _discard_stdout()
        return 1
    except BaseException as error:
        if isinstance(error, SystemExit):
            raise
        return _report(error)
    code = result if isinstance(result, int) else 0
    return _report(KeyboardInterrupt()) if code == 130 else code


def apply_thread_settings(environ: MutableMapping[str, str]) -> None:
    """Set the environment variables of CPU threading, which libraries read once, when they are first imported.

    `PSCTL_THREADS` becomes the number of OpenMP and MKL threads. Unless the user says otherwise, idle threads spin only
    briefly before they sleep: beside another busy process libgomp's long spinning made one run of `psctl generate` take
    106 s instead of 2.1 s (2 cores).

    Raises UsageError if `PSCTL_THREADS` is not a whole number of at least 1.
    """
    if "OMP_WAIT_POLICY" not in environ:
        environ.setdefault("GOMP_SPINCOUNT", "20000")
    threads = environ.get("PSCTL_THREADS")
    if threads is None:
        return
    if not (threads.isascii() and threads.isdigit() and int(threads) > 0):
        raise UsageError(f"PSCTL_THREADS is {threads!r}; it must be a whole number of at least 1")
    environ["OMP_NUM_THREADS"] = environ["MKL_NUM_THREADS"] = threads


def _report(error: BaseException) -> int:
    """Print an error on stderr and return the exit code. Only unknown errors, which are bugs, get a traceback."""
    known = describe_error(error)
    if known is None or os.environ.get("PSCTL_DEBUG", "0") not in ("", "0"):
        traceback.print_exception(error)
    message, code = known or (f"{type(error).__name__}: {error} (this is a bug in psctl; please report it)", 1)
    print("Error:", " ".join(message.split()), file=sys.stderr)
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        # Data still buffered for stdout would fail again at exit, with a traceback.
        _discard_stdout()
    return code


def _escape_on_stdout() -> None:
    """Escape characters that the encoding of stdout lacks (a code page, an ASCII locale), as Python does on stderr."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def _discard_stdout() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
