"""Replicas as a deployment of Ray Serve, which places, starts, restarts and stops them."""

import logging
import os
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, redirect_stdout, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...data.errors import MissingExtraError, RunError, UsageError
from ...data.requests import Request
from .book import BOOKS, LoadBook
from .messages import ReplicaStatus

if TYPE_CHECKING:
    from ..server.local import LocalSetup

_DEPLOYMENT = "engine"
_STATUS_WITHIN_S = 3.0
_HEALTH_EVERY_S, _HEALTH_WITHIN_S = 2.0, 30.0
_LONGEST_START_S = 1800.0
_UPSCALE_DELAY_S = 2.0
"""Seconds for which more replicas must have been needed before one is started."""


@dataclass(frozen=True, slots=True)
class ReplicaPlan:
    """Number of replicas, and the resources of each.

    Attributes:
        least, most: smallest and largest number of replicas; equal for a fixed number.
        takes_gpu: whether each takes one GPU, instead of one CPU core.
        max_ongoing: open requests that a replica may have; above what its queue and its batch can hold.
        target_s: seconds within which the pending work should be done, where the number is not fixed.
        drain_s: seconds that a replica which is being stopped may take to finish its requests.
        calm_s: seconds for which fewer replicas must have been needed before one is stopped.

    Raises:
        UsageError: `least` is below 1 or above `most`.
    """

    least: int
    most: int
    takes_gpu: bool
    max_ongoing: int
    target_s: float = 10.0
    drain_s: float = 600.0
    calm_s: float = 30.0

    def __post_init__(self) -> None:
        if not 1 <= self.least <= self.most:
            raise UsageError(f"replicas go from {self.least} to {self.most}, but it must be from 1 on, and not fall")


class Deployment:
    """The replicas of one front end; they run once `start` has returned.

    Args:
        plan: number and size of the replicas.
        build: builds the parts of an engine and their description in a replica's process; it is pickled.
        book: chooses the replica of each request.
    """

    def __init__(self, plan: ReplicaPlan, build: "Callable[[], tuple[LocalSetup, object]]", book: LoadBook) -> None:
        self._plan, self._build, self._book = plan, build, book
        # A unique name, as a cluster may run other applications.
        self._app = f"psctl-{secrets.token_hex(4)}"
        self._owns_ray = False
        self._redirected = ExitStack()

    def start(self) -> Any:
        """Start the replicas, wait until they have loaded and are warm, and return `build`'s description of them.

        Raises:
            MissingExtraError: Ray is not installed.
            UsageError: the cluster has no room for the largest number of replicas.
            RunError: the replicas do not start.
        """
        try:
            import ray
            from ray import serve
            from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig
        except ImportError as error:
            raise MissingExtraError(error.name or "ray", "ray") from error
        from .autoscale import PixelStepsPolicy
        from .replica import Replica
        from .router import LoadBookRouter

        plan = self._plan
        # Ray reports actors that die on stdout, which is for results.
        self._redirected.enter_context(redirect_stdout(sys.stderr))
        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        if not ray.is_initialized():
            # RAY_ADDRESS names a cluster, which keeps running afterwards; without it, this process starts its own.
            options: dict[str, Any] = {}
            if not os.environ.get("RAY_ADDRESS"):
                self._owns_ray, options = True, {"address": "local", "include_dashboard": False}
                _restrict_to_loopback()
            ray.init(log_to_driver=False, logging_level=logging.ERROR, **options)
        self._check_resources(ray.cluster_resources())
        serve.start(proxy_location="Disabled", logging_config={"log_level": "WARNING"})
        replicas: dict[str, Any] = {"num_replicas": plan.least}
        if plan.most > plan.least:
            policy = AutoscalingPolicy(
                policy_function=_path_of(PixelStepsPolicy, ":"),
                policy_kwargs={"target_s": plan.target_s},
            )
            replicas = {
                "autoscaling_config": AutoscalingConfig(
                    min_replicas=plan.least,
                    max_replicas=plan.most,
                    metrics_interval_s=1.0,
                    look_back_period_s=2.0,
                    upscale_delay_s=_UPSCALE_DELAY_S,
                    downscale_delay_s=plan.calm_s,
                    policy=policy,
                )
            }
        BOOKS[self._app] = self._book
        router: dict[str, Any] = {
            "request_router_class": _path_of(LoadBookRouter, "."),
            "request_router_kwargs": {"book": self._app},
        }
        deployment = serve.deployment(Replica).options(
            name=_DEPLOYMENT,
            ray_actor_options={"num_gpus": 1} if plan.takes_gpu else {"num_cpus": 1},
            max_ongoing_requests=plan.max_ongoing,
            health_check_period_s=_HEALTH_EVERY_S,
            health_check_timeout_s=_HEALTH_WITHIN_S,
            graceful_shutdown_timeout_s=plan.drain_s,
            graceful_shutdown_wait_loop_s=1.0,
            max_constructor_retry_count=2,
            request_router_config=RequestRouterConfig(**router),
            **replicas,
        )
        try:
            self._handle = serve.run(deployment.bind(self._build), name=self._app, route_prefix=None)
            self._draw = self._handle.options(method_name="draw", stream=True)
            return self._handle.describe.remote().result(timeout_s=_LONGEST_START_S)
        except BaseException as error:
            self.end()
            if not isinstance(error, Exception):
                raise
            raise RunError(f"the replicas do not start: {last_line_of(error)}") from error

    def draw(self, request: Request, waited_s: float, num_partials: int, follows_steps: bool) -> Any:
        """Call `Replica.draw` on the replica that the router chooses; returns Ray's asynchronous iterator."""
        return self._draw.remote(request, waited_s, num_partials, follows_steps)

    def statuses(self) -> tuple[Sequence[ReplicaStatus], int]:
        """Wait for the replicas; return the statuses received within 3 s, and the number of replicas without an answer.

        Raises Ray's own errors if there is no replica.
        """
        from ray.exceptions import RayActorError

        answers = self._handle.broadcast("status").results(timeout_s=_STATUS_WITHIN_S, return_exceptions=True)
        found = [each for each in answers if isinstance(each, ReplicaStatus)]
        # Replicas that have died do not count.
        return found, sum(not isinstance(each, ReplicaStatus | RayActorError) for each in answers)

    def lost_part(self) -> str:
        """Return the name of a process without which Ray works no more, and which has ended; "" if there is none.

        Only of a Ray instance that this process has started. Such a process ends with any of the agents beside it.
        """
        from ray._private import ray_constants, worker

        node: Any = worker._global_node
        if not self._owns_ray or node is None:
            return ""
        vital = {ray_constants.PROCESS_TYPE_GCS_SERVER, ray_constants.PROCESS_TYPE_RAYLET}
        return next((name for name, _ in node.dead_processes() if name in vital), "")

    def end(self) -> None:
        """Shut the replicas down, and Ray too if this process started it. A second call does nothing."""
        import ray
        from ray import serve

        BOOKS.pop(self._app, None)
        with self._redirected, suppress(Exception):
            if not ray.is_initialized():
                return
            if not self._owns_ray:
                serve.delete(self._app)
                return
            # Otherwise nothing is left that would answer.
            if not self.lost_part():
                serve.shutdown()
            ray.shutdown()

    def _check_resources(self, resources: Mapping[str, float]) -> None:
        kind = "GPU" if self._plan.takes_gpu else "CPU"
        found = int(resources.get(kind, 0))
        if found < self._plan.most:
            self.end()
            raise UsageError(f"{self._plan.most} replicas take one {kind} each, but the cluster has {found}")


def _restrict_to_loopback() -> None:
    """Make the Ray instance that this process starts listen on loopback only, and require a token of its own."""
    from ray._private import ray_constants

    # As on systems where Ray supports no clusters; elsewhere Ray replaces a loopback address by another one.
    ray_constants.ENABLE_RAY_CLUSTER = False
    os.environ[ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR] = "0"
    if not os.environ.keys() & {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"}:
        # Ray would write a token into the home folder, where others can read it.
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)


def last_line_of(error: Exception) -> str:
    """Return the last line of an error of Ray's, after the traces of other processes; its class if it is empty."""
    return (str(error).strip() or type(error).__name__).splitlines()[-1]


def _path_of(kind: type, mark: str) -> str:
    """Return the import path of a class, with Ray's mark between module and name."""
    return f"{kind.__module__}{mark}{kind.__name__}"
