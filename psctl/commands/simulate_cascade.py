"""`psctl simulate --cascade`: serves a trace with a light and a heavy model on a virtual clock."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ...data.errors import UsageError
from ...data.files import require_places
from ...data.run_facts import describe
from ...data.tables.published import published_cascade
from ...serving.cascade.legs import CASCADE_SYSTEM_NAMES, Side, cascade_name, parse_cascade
from ..flags import Flags, given_flags
from ..options.cascade import CASCADE, PROFILE_FILE, CascadeOptions, CascadePlan, newest_profile_place
from ..options.http import HttpFlags
from ..options.target import Target
from ..output import Output

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ...data.requests import Request
    from ...data.workspace import ModelWorkspace
    from ...profiling.cascade.bank import Bank
    from ...serving.cascade.profile import CascadeProfile
    from ...serving.cascade.result import CascadeResult
    from ...serving.models.defaults import ModelDefaults
    from ...serving.runs.cascade.deployment import CascadeDeployment

_DEFAULT_NUM_PROMPTS = 1000
_OWN = CASCADE.names()
_SHARED = {
    "--cascade", "--workers", "--system", "--gpus", "--slo-scale", "--prompts", "--output-file", "--workspace",
    "--device", "--dtype", "--json", "--quiet", "--seed", "--trace", "--request-rate", "--cv", "--amplitude",
    "--period", "--arrivals", "--num-prompts", "--duration", "--resolutions", "--mix", "--from-zero", "--curve",
    "--rate-range", "--http", "--slo", "--config", "--owners", "--speed",
} | Flags.of(HttpFlags).without("calibrate", "calibrate_time").names()  # fmt: skip


def check_cascade_flags(context: typer.Context, cascade: str | None, system: str) -> None:
    """Raise UsageError if options of a cascade are combined with those of a single model."""
    given = set(given_flags(context))
    if cascade is None:
        if wrong := sorted(given & _OWN):
            raise UsageError(f"{', '.join(wrong)} belongs to --cascade LIGHT,HEAVY, which was not given")
        if system in CASCADE_SYSTEM_NAMES:
            raise UsageError(f"--system {system} is of two models: give --cascade LIGHT,HEAVY")
    elif wrong := sorted(given - _OWN - _SHARED):
        raise UsageError(f"{', '.join(wrong)} is for a single model, but --cascade is given")


@dataclass(frozen=True, slots=True)
class CascadeImages:
    """Results of `psctl profile cascade`.

    Attributes:
        cascade: the cascade as the user writes it.
        workspace: its part of the workspace; None if files were named.
        profile_file, profile: times of both models.
        bank_folder, bank: prompts with confidences.
        defaults: default settings of requests.
    """

    cascade: str
    workspace: "ModelWorkspace | None"
    profile_file: Path
    profile: "CascadeProfile"
    bank_folder: Path
    bank: "Bank"
    defaults: "ModelDefaults"

    @property
    def has_reused(self) -> bool:
        """Whether there are times and images of heavy images that start from light ones."""
        reused = self.profile.reused
        return reused is not None and self.bank.about.get("reused", {}).get("strength") == reused.strength

    def place(self, target: Target) -> "ModelWorkspace":
        """Part of the workspace for runs."""
        return self.workspace or target.root.for_model(self.cascade, "simulated")

    def deployment(
        self, options: CascadeOptions, system: str, gpus: int, slo_scale: float, seed: int
    ) -> "CascadeDeployment":
        """Return a deployment. Raises UsageError: there is no such system, or a number is out of range."""
        from ...serving.cascade.systems import CascadeKnobs, get_cascade_system
        from ...serving.runs.cascade.deployment import CascadeDeployment

        sizes = None
        if options.threshold_per_resolution:
            sizes = [str(entry.resolution) for entry in self.bank.entries]
        quality = self.quality(sizes, options.reuse_light) if options.objective == "quality" else ()
        return CascadeDeployment(
            self.profile,
            self.bank.confidences,
            get_cascade_system(system),
            gpus,
            slo_scale,
            options.overprovision,
            CascadeKnobs(options.solver, options.queue_factor, options.threshold, quality),
            options.balance,
            options.on_late,
            options.replan_on_burst,
            options.skip_light,
            options.reuse_light,
            sizes,
            seed,
        )

    def config(self, plan: CascadePlan, *, num_workers: str) -> dict[str, Any]:
        """Return the settings of a run as JSON, for its summary; `num_workers` is the name of that setting."""
        options = asdict(plan.options)
        return {
            **plan.trace.to_config(),
            "cascade": plan.cascade,
            "system": plan.system,
            num_workers: plan.num_workers,
            "slo_scale": plan.slo_scale,
            **{name: str(value) if isinstance(value, Path) else value for name, value in options.items()},
            "cascade_profile": str(self.profile_file),
            "bank": str(self.bank_folder),
        }

    def quality_served(
        self, requests: "Sequence[Request]", places: Sequence[int], result: "CascadeResult"
    ) -> dict[str, Any]:
        """Return the quality of a run's images, in total and over time; `places` are indices of requests in the bank.

        Raises UsageError: the bank is damaged.
        """
        from ...eval.cascade.bank import load_features
        from ...eval.cascade.quality import quality_over_time, served_quality

        features, sides = load_features(self.bank_folder, len(self.bank.entries)), result.sides()
        served: list[Side | None] = [sides.get(request.request_id) for request in requests]
        arrivals_s = [request.arrival_s for request in requests]
        over_time = quality_over_time(features, places, served, arrivals_s)
        return {**served_quality(features, places, served), "over_time": over_time}

    def quality(self, sizes: Sequence[str] | None, reuses_light: bool) -> tuple[tuple[float, float], ...]:
        """Return the FID of the bank's images at thresholds of confidence. Raises UsageError: the bank is damaged."""
        from ...eval.cascade.bank import load_features
        from ...eval.cascade.quality import quality_curve
        from ...serving.cascade.deferral import score

        confidences = self.bank.confidences
        if sizes is not None:
            costs = self.profile.serving(reuses_light=reuses_light)["heavy"].costs_of(sizes)
            confidences = list(map(score, confidences, costs))
        features = load_features(self.bank_folder, len(self.bank.entries))
        return quality_curve(features, confidences, reuses_light=reuses_light)


def find_cascade_images(
    cascade: str,
    options: CascadeOptions,
    target: Target,
    *,
    wants_reused: bool = False,
    on_published: Callable[[str], None] | None = None,
) -> CascadeImages:
    """Return the profile and the bank that were named, or the newest in the workspace, or the bundled ones.

    Args:
        cascade: both models.
        options: options with the named files.
        target: the workspace.
        wants_reused: prefer the newest bank with heavy images that start from light ones as profiled, if there is one.
        on_published: called with a line about the measurement if the workspace has no profile and a bundled one is
            used. None to refuse bundled ones.

    Raises:
        UsageError: there are none, they are damaged, or do not belong together.
    """
    from ...profiling.cascade.bank import BANK_FILE, Bank, bank_name
    from ...serving.cascade.profile import read_profile

    specs = parse_cascade(cascade)
    name = cascade_name(specs)
    found = None if options.cascade_profile is not None else newest_profile_place(target.root, specs)
    published = None
    file = options.cascade_profile or (found.tables / PROFILE_FILE if found is not None else None)
    if file is None and on_published is not None and (published := published_cascade(name)) is not None:
        file = published / PROFILE_FILE
        facts = read_profile(file).legs["heavy"].facts
        on_published(f"Times and images: those in the box ({describe(facts.to_json())})")
    if file is None:
        raise UsageError(
            f"no profile of the cascade {name} is in {target.root.root}: psctl profile cascade --cascade {name}, or "
            "name one (--cascade-profile)"
        )
    profile = read_profile(file)
    if options.reuse_light:
        profile.serving(reuses_light=True)
    folder = options.bank or published
    if folder is None:
        names = ["bank-*"]
        if profile.reused is not None and (wants_reused or options.reuse_light):
            names.insert(0, bank_name("*", profile.reused.strength))
        banks = [] if found is None else [bank for name in names for bank in found.newest_tables(f"{name}/{BANK_FILE}")]
        if not banks:
            raise UsageError(
                f"no bank of {cascade} is beside {file}: psctl profile cascade --cascade {cascade}, or name one "
                "(--bank)"
            )
        folder = banks[0].parent
    bank = Bank.load(folder)
    if bank.about.get("discriminator") != profile.discriminator:
        raise UsageError(f"{folder} was scored by another discriminator than {file}: psctl profile cascade makes both")
    defaults = replace(target, base=specs["heavy"].model).defaults()
    images = CascadeImages(
        cascade, found, file, profile, folder, bank, replace(defaults, resolutions=profile.resolutions)
    )
    if options.reuse_light and not images.has_reused:
        raise UsageError(
            f"{folder} has no heavy images that start from light ones as {file} does: psctl profile cascade "
            "--reuse-light STRENGTH draws them"
        )
    return images


def simulate_cascade(plan: CascadePlan, output_file: Path | None, target: Target, out: Output) -> None:
    """Simulate, write the run, and print its figures."""
    from ...serving.cascade.systems import get_cascade_system
    from ...serving.runs.cascade.folder import cascade_summary, write_cascade_run
    from ...serving.runs.trace_requests import draw_requests

    specs, trace = parse_cascade(plan.cascade), plan.trace
    get_cascade_system(plan.system)
    images = find_cascade_images(plan.cascade, plan.options, target, on_published=out.note)
    if trace.num_prompts is None and trace.duration_s is None and trace.trace in ("poisson", "gamma", "diurnal"):
        trace = replace(trace, num_prompts=_DEFAULT_NUM_PROMPTS)
        plan = replace(plan, trace=trace)
    deployment = images.deployment(plan.options, plan.system, plan.num_workers, plan.slo_scale, trace.seed)
    bank = images.bank
    requests, places = bank.dealt(draw_requests(trace, images.defaults), trace.seed)
    promised = deployment.promised(requests)
    require_places(target.workspace, file=output_file)
    with out.status(f"Serving {len(requests)} requests on the virtual clock ..."):
        run = deployment.run(promised, places)
    with out.status("Measuring the images that were served ..."):
        quality = images.quality_served(promised, places, run.result)
    config = images.config(plan, num_workers="gpus")
    summary = cascade_summary(run, deployment, specs, dataset=trace.trace, config=config, quality=quality)
    run_dir = images.place(target).new_run("simulate")
    from ...profiling.report.cascade_page import write_cascade_report

    report = write_cascade_run(run_dir, run, specs, summary, write_cascade_report)
    out.data(summary, table=lambda: cascade_table(summary), file=output_file)
    out.note(f"Results: {report}")


def cascade_table(summary: dict[str, Any]) -> "RenderableType":
    """Return the figures of a cascade's run for the terminal."""
    from rich.console import Group

    from ...profiling.report.table import Table, to_rich
    from ...profiling.report.tables import run_tables
    from ...profiling.report.words import number, share

    rows = [
        ("late, discarded or failed", share(summary["slo_violation_rate"])),
        ("images of the heavy model", share(summary["heavy_share"])),
        ("light images deferred", share(summary["deferred_share"])),
        ("threshold, mean over plans", number(summary["threshold_mean"])),
        ("plans", ", ".join(f"{count} {status}" for status, count in summary["plans_by_status"].items())),
        ("switches of workers", str(summary["switches"])),
        ("seconds of light images that were not the answer", number(summary["wasted_light_s"])),
    ]
    if (quality := summary["quality"]) is not None:
        what = f"FID of {quality['num_images']} images served ({quality['num_prompts']} prompts)"
        alone = f"{number(quality['fid_light'])}; {number(quality['fid_heavy'])}"
        rows += [(what, number(quality["fid"])), ("FID of the same, all light; all heavy", alone)]
    return Group(to_rich(run_tables(summary)), Table("Cascade", ("", ""), rows).to_rich())
