"""Options of replicas on Ray Serve."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

from ...data.errors import UsageError
from ...serving.scheduling.routers import DEFAULT_ROUTER, ROUTERS
from ..flags import Flags, flag

if TYPE_CHECKING:
    from ...serving.fleet.deployment import ReplicaPlan


@dataclass(frozen=True, slots=True)
class ReplicaFlags:
    """Number of engines, each in its own process placed by Ray; without this option, this process draws."""

    PANEL: ClassVar = "Replicas (--num-replicas)"

    num_replicas: Annotated[
        int | None,
        flag(
            "--num-replicas",
            "Number of engines on Ray Serve, each with a GPU (or a CPU core) of its own.",
            min=1,
            max=1024,
        ),
    ] = None
    min_replicas: Annotated[
        int | None, flag("--min-replicas", "Autoscaling: minimum number of replicas.", min=1, max=1024)
    ] = None
    max_replicas: Annotated[
        int | None, flag("--max-replicas", "Autoscaling: maximum number of replicas.", min=1, max=1024)
    ] = None
    target_queue_time: Annotated[
        float,
        flag(
            "--target-queue-time",
            "Autoscaling: seconds in which the replicas should clear all open requests.",
            min=0.1,
            metavar="SECONDS",
        ),
    ] = 10.0
    scale_down_delay: Annotated[
        float,
        flag(
            "--scale-down-delay",
            "Autoscaling: seconds after which replicas that are not needed are stopped.",
            min=1,
            metavar="SECONDS",
        ),
    ] = 30.0

    @property
    def is_any(self) -> bool:
        """Whether replicas are requested."""
        return self.num_replicas is not None or self.max_replicas is not None

    @property
    def most(self) -> int:
        """The largest number of engines."""
        return self.num_replicas or self.max_replicas or 1

    def plan(self, *, takes_gpu: bool, max_ongoing: int, drain_s: float) -> "ReplicaPlan | None":
        """Return the plan of replicas, if requested. Raises UsageError: the options contradict each other."""
        from ...serving.fleet.deployment import ReplicaPlan

        least, most = self.min_replicas, self.max_replicas
        if self.num_replicas is not None:
            if least is not None or most is not None:
                raise UsageError("--num-replicas is a fixed number: give it or --min-replicas and --max-replicas")
            least = most = self.num_replicas
        elif most is None:
            if least is not None:
                raise UsageError("--min-replicas needs --max-replicas")
            return None
        return ReplicaPlan(
            least or 1,
            most,
            takes_gpu,
            max_ongoing,
            target_s=self.target_queue_time,
            drain_s=drain_s,
            calm_s=self.scale_down_delay,
        )


@dataclass(frozen=True, slots=True)
class RouterFlags:
    """Options for the router, which sends a server's requests to its replicas."""

    PANEL: ClassVar = ReplicaFlags.PANEL

    router: Annotated[
        str,
        flag(
            "--router",
            f"With --num-replicas: router that assigns requests to them: {', '.join(ROUTERS)}.",
            metavar="NAME",
        ),
    ] = DEFAULT_ROUTER
    edit_profile: Annotated[
        Path | None,
        flag(
            "--edit-profile",
            "Of --router mask-aware and edits over records: what these take, of psctl profile edits. Default: the "
            "workspace's newest.",
            metavar="FILE",
            dir_okay=False,
        ),
    ] = None


REPLICAS = Flags.of(ReplicaFlags)
"""Its options."""
ROUTING = Flags.of(RouterFlags)
