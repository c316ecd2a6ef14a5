"""Writes a software bill of materials: the distributions of this environment, as CycloneDX 1.6 in JSON.

`python .ci/sbom.py FILE`
"""

import json
import platform
import re
import sys
import uuid
from datetime import UTC, datetime
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Any

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_OWN = "psctl"


def main() -> None:
    target = Path(sys.argv[1])
    found = {_ref(each): each for each in distributions()}
    names = {_normal(each.metadata["Name"]): ref for ref, each in found.items()}
    own = next((ref for ref, each in found.items() if _normal(each.metadata["Name"]) == _OWN), None)
    if own is None:
        sys.exit(f"{_OWN} is not installed in this environment; run `make setup`")
    content = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid4()}",
        "version": 1,
        "metadata": {
            "timestamp": datetime.now(UTC).isoformat(timespec="seconds"),
            "component": _component(own, found[own], "application"),
            "properties": [{"name": "python", "value": platform.python_version()}],
        },
        "components": [_component(ref, each, "library") for ref, each in sorted(found.items()) if ref != own],
        "dependencies": [
            {"ref": ref, "dependsOn": sorted(names[name] for name in _required(each) & names.keys())}
            for ref, each in sorted(found.items())
        ],
    }
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(content, indent=2) + "\n")
    sys.stdout.write(f"{target}: {len(found)} distributions\n")


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _ref(distribution: Distribution) -> str:
    version = distribution.version.replace("+", "%2B")
    return f"pkg:pypi/{_normal(distribution.metadata['Name'])}@{version}"


def _component(ref: str, distribution: Distribution, kind: str) -> dict[str, Any]:
    about = distribution.metadata
    component: dict[str, Any] = {"type": kind, "bom-ref": ref, "purl": ref}
    component |= {"name": about["Name"], "version": distribution.version}
    if expression := about.get("License-Expression"):
        component["licenses"] = [{"expression": expression}]
    elif name := (about.get("License") or "").strip().partition("\n")[0]:
        component["licenses"] = [{"license": {"name": name}}]
    return component


def _required(distribution: Distribution) -> set[str]:
    """Names of what a distribution asks for, whatever the platform or extra."""
    matches = (_NAME.match(line) for line in distribution.requires or ())
    return {_normal(match[0]) for match in matches if match}


if __name__ == "__main__":
    main()
