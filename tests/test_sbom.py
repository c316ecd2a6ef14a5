"""The bill of materials names the installed distributions and all distributions that they need."""

import json
import re
import subprocess
import sys
from pathlib import Path


def test_sbom_equals_installed_packages(repository: Path, tmp_path: Path) -> None:
    target = tmp_path / "dist" / "sbom.cdx.json"
    subprocess.run([sys.executable, repository / ".ci" / "sbom.py", target], check=True, capture_output=True)
    told = json.loads(target.read_text())
    assert (told["bomFormat"], told["specVersion"]) == ("CycloneDX", "1.6")
    assert told["metadata"]["component"]["name"] == "psctl"
    components = [told["metadata"]["component"], *told["components"]]
    named = {(each["name"], each["version"]) for each in components}
    pip = [sys.executable, "-m", "pip", "list", "--format", "json", "--disable-pip-version-check"]
    installed = json.loads(subprocess.run(pip, check=True, capture_output=True).stdout)
    assert named == {(each["name"], each["version"]) for each in installed}
    refs = [each["bom-ref"] for each in components]
    assert len(refs) == len({*refs}), "each is there once"
    depends = {each["ref"]: each["dependsOn"] for each in told["dependencies"]}
    assert depends.keys() == {*refs}
    assert all(ref in depends for each in depends.values() for ref in each)
    own = {re.sub(r"^pkg:pypi/|@.*", "", ref) for ref in depends[told["metadata"]["component"]["bom-ref"]]}
    assert {"torch", "diffusers", "fastapi", "safetensors"} <= own
