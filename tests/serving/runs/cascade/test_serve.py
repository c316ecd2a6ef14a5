"""A cascade requires a profile of the same models, processor and discriminator."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from patchedserve.data.errors import UsageError
from patchedserve.data.files import sha256_of
from patchedserve.data.run_facts import RunFacts
from patchedserve.data.workspace import Workspace
from patchedserve.serving.cascade.legs import LEGS, Leg, LegSpec
from patchedserve.serving.cascade.profile import CascadeProfile
from patchedserve.serving.models.checkpoint import fingerprint
from patchedserve.serving.models.loading import resolve_model
from patchedserve.serving.runs.cascade.serve import CascadeFiles
from patchedserve.serving.runs.machine import cpu_name

from ....support.cascades import profile

_SPECS: dict[Leg, LegSpec] = {"light": LegSpec("emoji-xl", 4), "heavy": LegSpec("emoji-xl", 50)}


def profile_of_here(discriminator: Path) -> CascadeProfile:
    facts = replace(
        profile().legs["light"].facts,
        model="emoji-xl",
        fingerprint=fingerprint(resolve_model("emoji-xl")),
        device="cpu",
        device_name=cpu_name(),
    )
    return CascadeProfile({leg: replace(profile().legs[leg], facts=facts) for leg in LEGS}, sha256_of(discriminator))


def files_with(discriminator: Path) -> CascadeFiles:
    return CascadeFiles(_SPECS, Workspace(), "cpu", "float32", discriminator)


@pytest.fixture
def discriminator(tmp_path: Path) -> Path:
    path = tmp_path / "discriminator.safetensors"
    path.write_bytes(b"weights")
    return path


def test_profile_of_the_same_files_is_used(discriminator: Path) -> None:
    files_with(discriminator).require_profiled(profile_of_here(discriminator))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda facts: replace(facts, fingerprint="other"), "the profile of the heavy model is for other files of"),
        (lambda facts: replace(facts, device_name="another processor"), "is for device another processor, but"),
    ],
)
def test_profile_of_other_files_is_refused(
    discriminator: Path, change: Callable[[RunFacts], RunFacts], reason: str
) -> None:
    known = profile_of_here(discriminator)
    heavy = known.legs["heavy"]
    other = replace(known, legs={**known.legs, "heavy": replace(heavy, facts=change(heavy.facts))})
    with pytest.raises(UsageError, match=reason):
        files_with(discriminator).require_profiled(other)


def test_different_discriminator_is_refused(discriminator: Path) -> None:
    known = profile_of_here(discriminator)
    discriminator.write_bytes(b"other weights")
    with pytest.raises(UsageError, match="is another discriminator than the profile was measured with"):
        files_with(discriminator).require_profiled(known)
