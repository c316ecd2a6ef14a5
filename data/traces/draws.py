"""What requests ask for, drawn at random: prompts, resolutions and seeds, with the mixes that users write for them."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..errors import UsageError
from ..requests import Request
from ..resolution import Resolution, parse

_SHAPE_KEYS = ("width", "height", "num_inference_steps", "weight")


class RequestDraws:
    """An endless, reproducible sequence of what requests ask for; the arrivals are somebody else's.

    Resolutions, prompts and seeds come from three generators spawned from `seed`, one draw of each per request. So
    another mix changes no prompt and no seed, and request i is the same however many requests follow it.

    Raises:
        UsageError: no resolution or prompt, weights or steps that do not fit the resolutions, a field out of range.
    """

    def __init__(
        self,
        *,
        prompts: Sequence[str],
        resolutions: Sequence[Resolution],
        mix: Sequence[float] | None,
        num_inference_steps: int | Sequence[int],
        guidance_scale: float,
        seed: int,
        negative_prompt: str | None = None,
        slo_s: float | None = None,
    ) -> None:
        if not prompts:
            raise UsageError("there are no prompts, but at least one is needed")
        if not resolutions:
            raise UsageError("there are no resolutions, but at least one is needed")
        steps = (
            (num_inference_steps,) * len(resolutions)
            if isinstance(num_inference_steps, int)
            else tuple(num_inference_steps)
        )
        if len(steps) != len(resolutions):
            raise UsageError(f"{len(steps)} numbers of steps are given for {len(resolutions)} resolutions")
        self._prompts = tuple(prompts)
        self._shapes = tuple(zip(resolutions, steps, strict=True))
        self._thresholds = np.cumsum(_normalised(mix, len(resolutions)))
        self._guidance_scale = guidance_scale
        self._negative_prompt = negative_prompt
        self._slo_s = slo_s
        for shape in self._shapes:  # a bad field is found now, not in the middle of the trace
            self._request(0, shape, "", seed)
        shapes, order, seeds = np.random.SeedSequence(seed).spawn(3)
        self._shape_rng, self._order_rng, self._seed_rng = map(np.random.default_rng, (shapes, order, seeds))
        self._deck: list[int] = []

    def next(self, request_id: int) -> Request:
        """The next request, arriving at 0."""
        # The last threshold is left out: rounding may leave it just below 1, and everything beyond is the last one's.
        index = int(np.searchsorted(self._thresholds[:-1], self._shape_rng.random(), side="right"))
        if not self._deck:
            self._deck = self._order_rng.permutation(len(self._prompts)).tolist()
        prompt = self._prompts[self._deck.pop()]
        return self._request(request_id, self._shapes[index], prompt, int(self._seed_rng.integers(2**32)))

    def _request(self, request_id: int, shape: tuple[Resolution, int], prompt: str, seed: int) -> Request:
        return Request(
            request_id=request_id,
            prompt=prompt,
            resolution=shape[0],
            num_inference_steps=shape[1],
            guidance_scale=self._guidance_scale,
            seed=seed,
            negative_prompt=self._negative_prompt,
            slo_s=self._slo_s,
        )


def parse_mix(text: str, resolutions: Sequence[Resolution]) -> tuple[float, ...]:
    """Read how often each resolution is asked for: `"128=0.5,192=0.3,256=0.2"`, or `"1,1,2"` in their order.

    Weights need not add up to 1. In the named form a resolution that is not named gets weight 0.

    Returns:
        One weight for each of `resolutions`.

    Raises:
        UsageError: another form, a resolution that is not among `resolutions` or is named twice, a bad weight.
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


@dataclass(frozen=True, slots=True)
class RequestShape:
    """One kind of request of a `--random-request-config`, and how often it is asked for."""

    resolution: Resolution
    num_inference_steps: int
    weight: float


def parse_request_config(text: str, *, num_inference_steps: int) -> tuple[RequestShape, ...]:
    """Read a `--random-request-config`: a JSON list of objects with width, height, num_inference_steps, weight.

    Args:
        text: the JSON.
        num_inference_steps: number of steps of objects that name none. A missing weight is 1.

    Raises:
        UsageError: the text is not such a list; the message says which item is wrong and why.
    """
    try:
        items = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"random request config is not valid JSON: {error}") from error
    if not isinstance(items, list) or not items or not all(isinstance(item, dict) for item in items):
        raise UsageError(f"random request config must be a JSON list of objects with the keys {', '.join(_SHAPE_KEYS)}")
    shapes: list[RequestShape] = []
    for i, item in enumerate(items):
        unknown = sorted(set(item) - set(_SHAPE_KEYS))
        missing = [key for key in ("width", "height") if key not in item]
        if unknown or missing:
            what = f"unknown key {unknown[0]!r}" if unknown else f"{missing[0]} is missing"
            raise UsageError(f"random request config, item {i}: {what}; its keys are {', '.join(_SHAPE_KEYS)}")
        try:
            resolution = Resolution(item["width"], item["height"]).checked()
            steps = item.get("num_inference_steps", num_inference_steps)
            Request(request_id=i, prompt="", resolution=resolution, num_inference_steps=steps)
            shapes.append(RequestShape(resolution, steps, _weight(item.get("weight", 1), item.get("weight", 1))))
        except UsageError as error:
            raise UsageError(f"random request config, item {i}: {error}") from error
    _normalised([shape.weight for shape in shapes], len(shapes))
    return tuple(shapes)


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
