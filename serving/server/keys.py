"""API keys, the owners that they belong to, and the limits of these. No torch."""

import hashlib
import hmac
import math
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from ...data.errors import UsageError
from ...data.requests import MAX_WEIGHT, MIN_WEIGHT
from .body import shown
from .errors import ApiError
from .limits import KeyLimits

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", re.ASCII)
_KEY = re.compile(r"[\x21-\x7e]{1,1024}", re.ASCII)
_TABLE = re.compile(r"\[.*\]")
_KEYS = "keys"
_WHOLE = ("max_open", "max_batches")
SHARED = KeyLimits(max_batches=16, max_disk_mb=10_000)
"""Default limits of each owner if there are several."""


class Keys:
    """Accepted API keys, stored as digests and compared in constant time. Without any, no key is needed.

    Args:
        unnamed: keys each of which is an owner by itself.
        named: keys by the name of their owner.
        operator: one of these keys, whose owner sees the metrics of all owners.
        limits: limits of owners by name.
        default: limits of all other owners.

    Attributes:
        limits: limits by owner. The owner of an unnamed key is the beginning of its digest.
        operator: owner of the operator's key; "" if there is none.
        renamed: names of owners, by the digest that would be the owner of each named key without a name. Files and
            batches of the digest belong to the name.
    """

    def __init__(
        self,
        unnamed: Sequence[str] = (),
        named: Mapping[str, Sequence[str]] | None = None,
        operator: str | None = None,
        limits: Mapping[str, KeyLimits] | None = None,
        default: KeyLimits | None = None,
    ) -> None:
        self._owners = {_digest_of(key): name for name, keys in (named or {}).items() for key in keys}
        self.renamed = {_owner_of(digest): name for digest, name in self._owners.items()}
        for digest in map(_digest_of, unnamed):
            self._owners.setdefault(digest, _owner_of(digest))
        known, default = limits or {}, default or KeyLimits()
        self.limits = {owner: known.get(owner, default) for owner in self._owners.values()}
        self.operator = "" if operator is None else self._owners[_digest_of(operator)]

    def __bool__(self) -> bool:
        return bool(self._owners)

    def become(self, other: "Keys") -> None:
        """Replace all keys, names and limits by those of `other`, also for those who hold `limits` or `renamed`."""
        self._owners, self.operator = other._owners, other.operator
        self.limits.clear()
        self.limits.update(other.limits)
        self.renamed.clear()
        self.renamed.update(other.renamed)

    def limits_of(self, owner: str) -> KeyLimits:
        """Return the limits of an owner; an unknown owner, and "" if there are no keys, has none."""
        return self.limits.get(owner, KeyLimits())

    def owner(self, authorization: str | None) -> str:
        """Return the owner of the key in an `Authorization` header; "" if no key is needed.

        Raises ApiError (401) if the header has no key, or one that is not accepted.
        """
        if not self._owners:
            return ""
        scheme, _, given = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not given:
            raise ApiError(
                401,
                "an API key is needed: Authorization: Bearer KEY",
                code="missing_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        # Headers are bytes, decoded as Latin-1.
        digest = hashlib.sha256(given.strip().encode("latin-1")).digest()
        # Compares with all keys, so that the time does not depend on the one that matches.
        matches = [owner for each, owner in self._owners.items() if hmac.compare_digest(digest, each)]
        if not matches:
            raise ApiError(401, "the API key is wrong", code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
        return matches[0]


def read_keys(path: Path | None, operator: str | None = None) -> Keys:
    """Read the operator's key, and those of a file: one a line, or (.toml) a table for each name with its `keys`.

    If there are several owners, each has the `SHARED` limits unless the file sets others.

    Raises:
        UsageError: the file cannot be read, holds no key, or has invalid content.
    """
    more = () if operator is None else (operator,)
    if path is None:
        return Keys(more, operator=operator)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--api-key-file {path} cannot be read: {error}") from error
    if path.suffix.lower() == ".toml":
        try:
            return _by_name(tomllib.loads(text), operator)
        except (tomllib.TOMLDecodeError, UsageError) as error:
            raise UsageError(f"--api-key-file {path}: {error}") from None
    found = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]
    if not found:
        raise UsageError(f"--api-key-file {path} holds no key")
    if any(map(_TABLE.fullmatch, found)):
        raise UsageError(f"--api-key-file {path} has names: call it .toml, or write one key a line")
    keys = (*more, *found)
    return Keys(keys, operator=operator, default=SHARED if len({*keys}) > 1 else None)


def _by_name(content: Mapping[str, Any], operator: str | None) -> Keys:
    """Return the keys of a TOML file. Raises UsageError, whose message contains no key."""
    tables = {name: table for name, table in content.items() if isinstance(table, dict)}
    of_all = _limits_in("the top of the file", {name: content[name] for name in content if name not in tables})
    named = _named_keys(tables)
    is_more = operator is not None and not any(operator in keys for keys in named.values())
    shared = asdict(SHARED if len(named) + is_more > 1 else KeyLimits()) | of_all
    limits = {
        name: KeyLimits(**shared | _limits_in(name, {field: table[field] for field in table if field != _KEYS}))
        for name, table in tables.items()
    }
    return Keys((operator,) if operator else (), named, operator, limits, KeyLimits(**shared))


def _named_keys(tables: Mapping[str, Mapping[str, Any]]) -> dict[str, list[str]]:
    named: dict[str, list[str]] = {}
    owners: dict[str, str] = {}
    for name, table in tables.items():
        if not _NAME.fullmatch(name):
            raise UsageError(f"the name {name[:80]!r} must be 1 to 64 letters, digits, dots, hyphens and underscores")
        keys = table.get(_KEYS)
        if not isinstance(keys, list) or not keys:
            raise UsageError(f'{name} has no keys: {_KEYS} = ["KEY", "ANOTHER"]')
        for number, key in enumerate(keys, 1):
            if not isinstance(key, str) or not _KEY.fullmatch(key):
                raise UsageError(f"key {number} of {name} must be text of 1 to 1,024 characters of ASCII, none blank")
            if owners.setdefault(key, name) != name:
                raise UsageError(f"key {number} of {name} is one of {owners[key]}, too")
        named[name] = keys
    if not named:
        raise UsageError("it holds no name with keys")
    return named


def _limits_in(where: str, given: Mapping[str, Any]) -> dict[str, Any]:
    allowed = [each.name for each in fields(KeyLimits)]
    for name, value in given.items():
        if name not in allowed:
            raise UsageError(f"{where} has {name[:80]!r}, but limits are {', '.join(allowed)}")
        is_whole = name in _WHOLE
        is_right = isinstance(value, int if is_whole else (int, float)) and not isinstance(value, bool)
        if not is_right or not 0 < value < math.inf:
            kind = "whole number" if is_whole else "finite number"
            raise UsageError(f"{name} of {where} is {shown(value)}, but it must be a {kind} above 0")
        if name == "weight" and not MIN_WEIGHT <= value <= MAX_WEIGHT:
            allowed = f"from {MIN_WEIGHT:g} to {MAX_WEIGHT:g}"
            raise UsageError(f"{name} of {where} is {shown(value)}, but it must be {allowed}")
    return dict(given)


def _digest_of(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def _owner_of(digest: bytes) -> str:
    return digest.hex()[:16]
