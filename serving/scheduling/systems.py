"""Systems that papers compare, each a preset of engine, policy, cache and allocation under one name. No torch."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Self

from ...data.errors import UsageError
from ...data.requests import Request
from ..options import EngineName
from .policies import get_policy


@dataclass(frozen=True, slots=True)
class System:
    """A complete way of serving requests, under the name that papers use.

    Attributes:
        name: name of the system on the command line (`--system`).
        about: one line for help and tables.
        engine: `patched`, `plain` for one forward pass of unmodified diffusers per resolution, or `parallel` for
            devices that share each image.
        policy: name of the policy that schedules.
        cache: mode of the patch cache; `off` for none.
        steps_share: share of the requested steps that a request gets.
        spans_gpus: whether all GPUs serve one request together, instead of each serving its own. Simulated only.

    Raises:
        UsageError: the policy is unknown.
    """

    name: str
    about: str
    engine: EngineName
    policy: str
    cache: str = "off"
    steps_share: float = 1.0
    spans_gpus: bool = False

    def __post_init__(self) -> None:
        get_policy(self.policy)

    def overridden(
        self,
        *,
        engine: EngineName | None = None,
        policy: str | None = None,
        cache: str | None = None,
    ) -> Self:
        """Return the same system with the parts that the user overrides. Every engine supports the cache mode
        `schedule`; only the patch engine supports the others.
        """
        engine = engine or self.engine
        return replace(
            self,
            engine=engine,
            policy=policy or self.policy,
            cache=cache or (self.cache if engine == "patched" or self.cache == "schedule" else "off"),
        )

    def adapt(self, request: Request) -> Request:
        """Return the request with its share of steps, rounded up and at least 1; its SLO is unchanged."""
        if self.steps_share == 1:
            return request
        # Less than a billionth of a step is a rounding error of the product.
        num_steps = max(1, math.ceil(request.num_inference_steps * self.steps_share - 1e-9))
        return replace(request, num_inference_steps=num_steps)


# NIRVANA (Agarwal et al., NSDI 2024) starts from noise that it cached for a similar prompt and so skips the first
# steps; its authors report 21 % less GPU compute on average over a production trace. PatchedServe (section 8) runs
# fewer steps in place of that cache, with ORCA's batching, and so do we.
_NIRVANA_STEPS = 0.79

SYSTEMS: Mapping[str, System] = {
    system.name: system
    for system in (
        System("diffusers", "static batches of one resolution, as one diffusers call runs them", "plain", "static"),
        System("diffusers-fcfs", "one request at a time", "plain", "fcfs"),
        System("bucketed", "continuous batching, one forward pass per resolution", "plain", "continuous"),
        System(
            "nirvana",
            "79 % of the steps, continuous batching (NIRVANA as PatchedServe compares with it)",
            "plain",
            "continuous",
            steps_share=_NIRVANA_STEPS,
        ),
        System(
            "distrifusion",
            "one request at a time, its image shared by the devices of --parallel (DistriFusion)",
            "parallel",
            "fcfs",
        ),
        System(
            "distrifusion-fcfs",
            "one request at a time on all GPUs, with DistriFusion's published speed-ups (simulated)",
            "plain",
            "fcfs",
            spans_gpus=True,
        ),
        System(
            "patched-slack",
            "mixed-resolution batches, scheduled by deadlines; every step is computed, so that images are exact",
            "patched",
            "fair-fitting",
        ),
        System(
            "patched-schedule",
            "the same with a cache that computes some steps, known in advance, and forecasts the others",
            "patched",
            "fair-fitting",
            cache="schedule",
        ),
        System(
            "patched-fcfs",
            "mixed-resolution batches and the patch cache, in order of arrival (the paper's PatchedCache)",
            "patched",
            "continuous",
            cache="patch",
        ),
        System("patched-edf", "the same, earliest deadline first", "patched", "edf", cache="patch"),
        System(
            "patchedserve",
            "mixed-resolution batches, the patch cache and slack scheduling (PatchedServe)",
            "patched",
            "slack",
            cache="patch",
        ),
    )
}
DEFAULT_SYSTEM = "patched-slack"
"""The default is exact; lossy systems must be requested."""
COMPARED_SYSTEMS = ("diffusers", "bucketed", "nirvana", "patched-fcfs", "patched-slack", "patchedserve")
"""Systems that a comparison serves by default."""


def get_system(name: str, *, is_simulated: bool = False, has_ranks: bool = False) -> System:
    """Return the system with this name.

    Args:
        name: one of `SYSTEMS`, or SYSTEM:POLICY for a system with another policy.
        is_simulated: whether the system is simulated; only the simulator runs systems that span GPUs.
        has_ranks: whether the system may use several devices, which some systems need.

    Raises:
        UsageError: the system or the policy is unknown, or the system does not run here; the message lists the
            choices.
    """
    full_name, (name, _, policy) = name, name.partition(":")
    known = {
        key: each
        for key, each in SYSTEMS.items()
        if (is_simulated or not each.spans_gpus) and (has_ranks or each.engine != "parallel")
    }
    if name not in known:
        places = {True: " (only in the simulator)", False: " (only in psctl serve --parallel)"}
        hint = places[SYSTEMS[name].spans_gpus] if name in SYSTEMS else ""
        raise UsageError(f"system is {name!r}{hint}, but it must be one of {', '.join(known)}")
    return replace(known[name], name=full_name, policy=policy) if policy else known[name]
