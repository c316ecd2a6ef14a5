"""Random parameters of requests: prompts, resolutions and seeds, and the mixes of resolutions that users specify."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..errors import UsageError
from ..requests import Request
from ..resolution import Resolution, parse
from .edits import EditDraws


@dataclass(frozen=True)
class TraceDefaults:
    """Parameters of requests: of all requests of a random trace, and for fields that the lines of a trace file omit.

    Attributes:
        prompts: prompts, drawn without replacement: all once in random order before any is repeated.
        resolutions: resolutions to draw from.
        mix: weight of each resolution; None for equal weights.
        num_inference_steps: one number for all requests, or one for each of `resolutions`.
        guidance_scale, negative_prompt, slo_s: values for all requests.
        seed: seed of all random draws.
        edits: edits among the requests; None for none.
    """

    prompts: Sequence[str] = ()
    resolutions: Sequence[Resolution] = ()
    mix: Sequence[float] | None = None
    num_inference_steps: int | Sequence[int] = 30
    guidance_scale: float = 4.0
    seed: int = 0
    negative_prompt: str | None = None
    slo_s: float | None = None
    edits: EditDraws | None = None


class RequestDraws:
    """An endless, reproducible sequence of requests, without their arrivals.

    Resolutions, prompts, seeds and edits come from four generators spawned from the seed, with the same number of draws
    for every request. A different mix therefore changes no prompt and no seed, a different share of edits changes no
    mask, and request i does not depend on the number of requests that follow.

    Raises:
        UsageError: there is no resolution or prompt, weights or steps do not match the resolutions, or a field is
            out of range.
    """

    def __init__(self, settings: TraceDefaults) -> None:
        resolutions, steps = settings.resolutions, settings.num_inference_steps
        for name, values in (("prompts", settings.prompts), ("resolutions", resolutions)):
            if not values:
                raise UsageError(f"there are no {name}, but at least one is needed")
        steps = (steps,) * len(resolutions) if isinstance(steps, int) else tuple(steps)
        if len(steps) != len(resolutions):
            raise UsageError(f"{len(steps)} numbers of steps are given for {len(resolutions)} resolutions")
        self._settings = settings
        self._shapes = tuple(zip(resolutions, steps, strict=True))
        self._thresholds = np.cumsum(_normalised(settings.mix, len(resolutions)))
        for shape in self._shapes:  # finds a bad field now, not in the middle of the trace
            self._request(0, shape, "", settings.seed)
        rngs = map(np.random.default_rng, np.random.SeedSequence(settings.seed).spawn(4))
        self._shape_rng, self._order_rng, self._seed_rng, self._edit_rng = rngs
        self._templates = np.ones(1) if settings.edits is None else settings.edits.thresholds()
        self._deck: list[int] = []

    def next(self, request_id: int) -> Request:
        """Return the next request, arriving at 0."""
        # Without the last threshold, which rounding may leave just below 1; everything beyond belongs to the last one.
        index = int(np.searchsorted(self._thresholds[:-1], self._shape_rng.random(), side="right"))
        prompts = self._settings.prompts
        if not self._deck:
            self._deck = self._order_rng.permutation(len(prompts)).tolist()
        prompt = prompts[self._deck.pop()]
        drawn = self._request(request_id, self._shapes[index], prompt, int(self._seed_rng.integers(2**32)))
        edits = self._settings.edits
        return drawn if edits is None else replace(drawn, traced=edits.next(self._edit_rng, self._templates))

    def _request(self, request_id: int, shape: tuple[Resolution, int], prompt: str, seed: int) -> Request:
        settings = self._settings
        negative, slo_s = settings.negative_prompt, settings.slo_s
        return Request(request_id, prompt, *shape, settings.guidance_scale, seed, negative, slo_s=slo_s)


def parse_mix(text: str, resolutions: Sequence[Resolution]) -> tuple[float, ...]:
    """Parse the weights of resolutions: `"128=0.5,192=0.3,256=0.2"`, or `"1,1,2"` in their order.

    Weights need not add up to 1. In the named form a resolution that is not named has weight 0.

    Returns:
        One weight for each of `resolutions`.

    Raises:
        UsageError: the text has another form, a resolution is not among `resolutions` or is named twice, or a weight is
            invalid.
    """
    items = [item.strip() for item in text.split(",")]
    if not any("=" in item for item in items):
        mix = tuple(_weight(item, text) for item in items)
        _normalised(mix, len(resolutions))
        return mix
    named: dict[Resolution, float] = {}
    for item in items:
        name, equals, weight = item.partition("=")
        if not equals:
            raise UsageError(f"mix is {text!r}, but either all of its items or none must be RESOLUTION=WEIGHT")
        resolution = parse(name)
        if resolution not in resolutions:
            allowed = ", ".join(map(str, resolutions))
            raise UsageError(f"mix names {resolution}, but the resolutions are {allowed}")
        if resolution in named:
            raise UsageError(f"mix is {text!r}, but {resolution} may be named only once")
        named[resolution] = _weight(weight, text)
    mix = tuple(named.get(resolution, 0.0) for resolution in resolutions)
    _normalised(mix, len(resolutions))
    return mix


def _weight(value: object, given: object) -> float:
    try:
        weight = float(value) if isinstance(value, (str, int, float)) and not isinstance(value, bool) else math.nan
    except (ValueError, OverflowError):
        weight = math.nan
    if not 0 <= weight < math.inf:
        raise UsageError(f"mix is {given!r}, but every weight must be a finite number that is not negative")
    return weight


def _normalised(mix: Sequence[float] | None, num_resolutions: int) -> list[float]:
    if mix is None:
        return [1 / num_resolutions] * num_resolutions
    if len(mix) != num_resolutions:
        raise UsageError(f"mix has {len(mix)} weights, but there are {num_resolutions} resolutions: give one for each")
    weights = [_weight(weight, tuple(mix)) for weight in mix]
    total = math.fsum(weights)
    if not 0 < total < math.inf:
        raise UsageError(f"mix is {tuple(mix)}, but at least one weight must be more than 0, and their sum finite")
    return [weight / total for weight in weights]
