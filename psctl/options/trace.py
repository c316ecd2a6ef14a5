"""Options of the commands that serve a trace, on an engine or on the virtual clock.

As with `options`, a command annotates its parameters with them and gives the defaults itself. What it is given becomes
a `profiling.trace_settings.TraceSettings`.
"""

from pathlib import Path
from typing import Annotated

import typer

from ...serving.engine.stepper import EngineName

_RATE_HELP = "Mean arrivals per second of a random trace; inf: all at once."

Trace = Annotated[
    str,
    typer.Option(
        "--trace",
        metavar="poisson|gamma|diurnal|azure|FILE",
        help="Random or recorded arrivals, or a file (JSONL, CSV, Request(...) lines).",
    ),
]
RandomTrace = Annotated[
    str,
    typer.Option(
        "--trace", metavar="poisson|gamma|diurnal|azure", help="Random or recorded arrivals, drawn anew at every rate."
    ),
]
RequestRate = Annotated[float, typer.Option("--request-rate", help=_RATE_HELP)]
OptionalRequestRate = Annotated[
    float | None, typer.Option("--request-rate", help=f"{_RATE_HELP[:-1]}. Default: 1, of a file its own.")
]
Cv = Annotated[
    float | None, typer.Option("--cv", help="Coefficient of variation of the gaps, with --trace gamma. Default: 2.")
]
Amplitude = Annotated[
    float | None, typer.Option("--amplitude", help="Swing of the rate, with --trace diurnal, 0 to 1. Default: 0.8.")
]
Period = Annotated[
    float | None,
    typer.Option("--period", help="Length of the day, with --trace diurnal. Default: 600.", metavar="SECONDS"),
]
Arrivals = Annotated[
    Path | None,
    typer.Option("--arrivals", help="CSV of recorded arrivals, with --trace azure (arrived_at or TIMESTAMP)."),
]
NumPrompts = Annotated[
    int | None,
    typer.Option("--num-prompts", help="Number of requests. Default: 32, or with --duration or a file all."),
]
NumPromptsSimulated = Annotated[
    int | None,
    typer.Option("--num-prompts", help="Number of requests. Default: 1000, or with --duration, a file or azure all."),
]
Duration = Annotated[
    float | None, typer.Option("--duration", help="Seconds in which requests arrive.", metavar="SECONDS")
]
Mix = Annotated[
    str | None, typer.Option("--mix", metavar="WEIGHTS", help='As "1,1,2" or "128=0.5,192=0.5". Default: equal.')
]
SloScale = Annotated[
    float, typer.Option("--slo-scale", help="SLO of a request: this many times its latency when served alone.")
]
FromZero = Annotated[
    bool, typer.Option("--from-zero", help="Start a trace file with its first request, whatever its clock says.")
]
SystemName = Annotated[
    str,
    typer.Option(
        "--system",
        help="What serves: patchedserve, patched-fcfs, patched-edf, bucketed, nirvana, diffusers or diffusers-fcfs; "
        "distrifusion-fcfs is simulated only. It sets engine, policy and cache; their own options override it.",
    ),
]
SystemEngine = Annotated[
    EngineName | None,
    typer.Option("--engine", help="patched or plain. Default: the system's.", envvar="PSCTL_ENGINE"),
]
PolicyName = Annotated[
    str | None,
    typer.Option("--policy", help="Who is admitted when: fcfs, static, continuous, edf, slack. Default: the system's."),
]
StageTimesRun = Annotated[
    Path | None,
    typer.Option(
        "--stage-times",
        help="Times of text encoding and decoding from this served run: its folder.",
        metavar="RUN",
        file_okay=False,
    ),
]
Gpus = Annotated[int, typer.Option("--gpus", help="GPUs that serve in data parallel, all alike.", min=1, max=4096)]
