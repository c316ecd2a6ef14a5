"""Replicas as a deployment of Ray Serve: placed, started, started again and ended."""

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
from .load_book import BOOKS, LoadBook
from .messages import ReplicaStatus

if TYPE_CHECKING:
    from ..server.local import LocalSetup

_DEPLOYMENT = "engine"
_STATUS_WITHIN_S = 3.0
_HEALTH_EVERY_S, _HEALTH_WITHIN_S = 2.0, 30.0
_LONGEST_START_S = 1800.0
_LOADED_S = 2.0
"""So long more replicas must have been needed before one is started."""


@dataclass(frozen=True, slots=True)
class ReplicaPlan:
    """How many replicas there are, and what each takes.

    Attributes:
        least, most: number of replicas; equal for a fixed number.
        takes_gpu: one GPU each; else one CPU core each.
        max_ongoing: requests that a replica may have open, above what its queue and its batch can hold.
        target_s: what is pending shall be done within so long, where the number is not fixed.
        drain_s: how long a replica that is stopped may still take.
        calm_s: so long fewer replicas must have been needed before one is stopped.

    Raises:
        UsageError: there is no such number.
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
    """The replicas, once `start` has returned.

    Args:
        plan: how many.
        build: makes the parts of an engine, and what is to be known of them, in a replica's process: it is pickled.
        book: chooses the replica of each request.
    """

    def __init__(self, plan: ReplicaPlan, build: "Callable[[], tuple[LocalSetup, object]]", book: LoadBook) -> None:
        self._plan, self._build, self._book = plan, build, book
        # A cluster may hold those of others, too.
        self._app = f"psctl-{secrets.token_hex(4)}"
        self._owns_ray = False
        self._redirected = ExitStack()

    def start(self) -> Any:
        """Start the replicas and wait until they are warm; returns what `build` tells. Takes as long as loading does.

        Raises:
            MissingExtraError: Ray is not installed.
            UsageError: the cluster has no room for so many replicas.
            RunError: they do not start.
        """
        try:
            import ray
            from ray import serve
            from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig
        except ImportError as error:
            raise MissingExtraError(error.name or "ray", "ray") from error
        from .autoscale import ByPixelSteps
        from .replica import Replica
        from .router import ByLoadBook

        plan = self._plan
        # Ray tells of actors that die on stdout, which is for results.
        self._redirected.enter_context(redirect_stdout(sys.stderr))
        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        if not ray.is_initialized():
            # RAY_ADDRESS names a cluster, which is left standing; without it one of this process's own is started.
            options: dict[str, Any] = {}
            if not os.environ.get("RAY_ADDRESS"):
                self._owns_ray, options = True, {"address": "local", "include_dashboard": False}
                _close_to_others()
            ray.init(log_to_driver=False, logging_level=logging.ERROR, **options)
        self._check_room(ray.cluster_resources())
        serve.start(proxy_location="Disabled", logging_config={"log_level": "WARNING"})
        replicas: dict[str, Any] = {"num_replicas": plan.least}
        if plan.most > plan.least:
            policy = AutoscalingPolicy(
                policy_function=_path_of(ByPixelSteps, ":"),
                policy_kwargs={"target_s": plan.target_s},
            )
            replicas = {
                "autoscaling_config": AutoscalingConfig(
                    min_replicas=plan.least,
                    max_replicas=plan.most,
                    metrics_interval_s=1.0,
                    look_back_period_s=2.0,
                    upscale_delay_s=_LOADED_S,
                    downscale_delay_s=plan.calm_s,
                    policy=policy,
                )
            }
        BOOKS[self._app] = self._book
        router: dict[str, Any] = {
            "request_router_class": _path_of(ByLoadBook, "."),
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
        """What `Replica.draw` tells, of whichever replica the router chooses: Ray's asynchronous iterator."""
        return self._draw.remote(request, waited_s, num_partials, follows_steps)

    def statuses(self) -> tuple[Sequence[ReplicaStatus], int]:
        """How the replicas are that answer within 3 s, and how many do not; waits for them. Raises as Ray, where there
        is none.
        """
        from ray.exceptions import RayActorError

        answers = self._handle.broadcast("status").results(timeout_s=_STATUS_WITHIN_S, return_exceptions=True)
        found = [each for each in answers if isinstance(each, ReplicaStatus)]
        # Those that have died are none.
        return found, sum(not isinstance(each, ReplicaStatus | RayActorError) for each in answers)

    def end(self) -> None:
        """End the replicas, and Ray where it was started here. Again does nothing."""
        import ray
        from ray import serve

        BOOKS.pop(self._app, None)
        with self._redirected, suppress(Exception):
            if not ray.is_initialized():
                return
            if not self._owns_ray:
                serve.delete(self._app)
                return
            serve.shutdown()
            ray.shutdown()

    def _check_room(self, resources: Mapping[str, float]) -> None:
        kind = "GPU" if self._plan.takes_gpu else "CPU"
        found = int(resources.get(kind, 0))
        if found < self._plan.most:
            self.end()
            raise UsageError(f"{self._plan.most} replicas take one {kind} each, but the cluster has {found}")


def _close_to_others() -> None:
    """Let a Ray that this process starts listen on loopback alone, and take calls only with a token of its own."""
    from ray._private import ray_constants

    # As on systems for which Ray has no clusters: it replaces an address of loopback that it is given.
    ray_constants.ENABLE_RAY_CLUSTER = False
    os.environ[ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR] = "0"
    if not os.environ.keys() & {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"}:
        # Ray would write one into the home folder, where others can read it.
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)


def last_line_of(error: Exception) -> str:
    """What Ray says in the end, after traces of other processes; its kind where it says nothing."""
    return (str(error).strip() or type(error).__name__).splitlines()[-1]


def _path_of(kind: type, mark: str) -> str:
    """Where Ray finds a class."""
    return f"{kind.__module__}{mark}{kind.__name__}"
