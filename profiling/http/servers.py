"""Names of the parameters of a request on servers of OpenAI's images API: discovered, or from a profile. No torch."""

import tomllib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import httpx
from pydantic import BaseModel, ConfigDict

from ...data.errors import UsageError
from ...data.parsing import parse
from ...data.records import open_text
from ...data.resolution import parse as parse_resolution

PARAMETERS = (
    "prompt", "model", "size", "width", "height", "num_inference_steps", "guidance_scale", "seed", "negative_prompt",
    "response_format", "slo", "priority", "stream", "partial_images",
)  # fmt: skip
"""Parameters of a request, by our names; a server takes `size`, or `width` and `height`."""
_ALIASES: Mapping[str, tuple[str, ...]] = {
    "num_inference_steps": ("steps", "num_steps", "sampling_steps"),
    "guidance_scale": ("cfg_scale", "guidance", "cfg"),
}
_SIDES = ("width", "height")


class _Profile(BaseModel):
    model_config = ConfigDict(extra="forbid")
    fields: dict[str, str] = {}
    extra: dict[str, Any] = {}


@dataclass(frozen=True, slots=True)
class ServerProfile:
    """Names of the parameters of a request on one server.

    Attributes:
        fields: the server's name of each parameter that it calls differently, "" for one that it lacks. `width` and
            `height` are sent only if they are named.
        extra: further fields of every request, which replace ours of the same name.
    """

    fields: Mapping[str, str] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path | None) -> Self:
        """Read a profile, TOML with the tables `fields` and `extra`; without a file it is empty.

        Raises UsageError: the file cannot be read or has another form, or it names an unknown parameter.
        """
        if path is None:
            return cls()
        with open_text(path, "the profile of a server") as file:
            try:
                content = tomllib.loads(file.read())
            except tomllib.TOMLDecodeError as error:
                raise UsageError(f"{path}: is not valid TOML: {error}") from error
        given = parse(_Profile, content, str(path))
        if unknown := sorted({*given.fields} - {*PARAMETERS}):
            raise UsageError(f"{path}: {unknown[0]!r} is no parameter; they are {', '.join(PARAMETERS)}")
        return cls(given.fields, given.extra)

    def lacks(self, name: str) -> bool:
        """Return whether the server has no such parameter."""
        return self.fields.get(name) == ""

    def translated(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return the body of a request by the server's names, without the parameters that it lacks."""
        sides = parse_resolution(body["size"])._asdict()
        given = {**body, **{name: side for name, side in sides.items() if self.fields.get(name)}}
        named = {self.fields.get(name, name): value for name, value in given.items()}
        named.pop("", None)
        return {**named, **self.extra}

    def discover(self, url: str, sent: Collection[str], key: str | None, on_note: Callable[[str], None]) -> Self:
        """Return the profile with the names that the server's own description gives for what this one leaves open.

        The description is `/openapi.json`, which servers made with FastAPI have; without it, and without a list of
        parameters in it, all are sent under our names.

        Args:
            url: address to which requests are sent.
            sent: parameters that requests have.
            key: API key; None for none.
            on_note: called with a line that says which parameters have another name, and which are not sent.
        """
        known = _described(url, key)
        if known is None:
            return self
        found = dict(self.fields)
        for name in sent:
            if name not in found and name not in known:
                found[name] = next((alias for alias in _ALIASES.get(name, ()) if alias in known), "")
        if found.get("size") == "" and {*_SIDES} <= {*known}:
            found |= {side: found.get(side) or side for side in _SIDES}
        renamed = [f"{name} as {found[name]}" for name in sorted(sent) if found.get(name, name) not in ("", name)]
        lacking = [name for name in sorted(sent) if found.get(name) == ""]
        if found.get("width") and "size" in lacking:
            renamed, lacking = [*renamed, "size as width and height"], [name for name in lacking if name != "size"]
        parts = [f"sends {', '.join(renamed)}" if renamed else "", f"omits {', '.join(lacking)}" if lacking else ""]
        if any(parts):
            on_note(f"{url}: {' and '.join(filter(None, parts))}, as the server's /openapi.json says")
        return replace(self, fields=found)


def _described(url: str, key: str | None) -> Mapping[str, Any] | None:
    """Return the parameters of requests to this address from the server's OpenAPI description; None if it has none."""
    address = httpx.URL(url)
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    # At the root of the server, or where a proxy has put it.
    places = [address.copy_with(path="/openapi.json", query=None)]
    prefix = address.path.partition("/v1/")[0]
    if prefix and prefix != address.path:
        places.append(address.copy_with(path=f"{prefix}/openapi.json", query=None))
    for place in places:
        try:
            answer = httpx.get(place, headers=headers, timeout=30)
            content = answer.json() if answer.status_code == 200 else None
        except (httpx.HTTPError, ValueError):
            continue
        if isinstance(content, dict) and (found := _parameters(content, address.path)) is not None:
            return found
    return None


def _parameters(content: Mapping[str, Any], path: str) -> Mapping[str, Any] | None:
    try:
        route = max((each for each in content["paths"] if path.endswith(each)), key=len)
        schema = content["paths"][route]["post"]["requestBody"]["content"]["application/json"]["schema"]
        while "$ref" in schema:
            found: Any = content
            for part in schema["$ref"].removeprefix("#/").split("/"):
                found = found[part]
            schema = found
        return None if schema.get("additionalProperties") else schema.get("properties")
    except (KeyError, TypeError, ValueError, AttributeError):
        return None
