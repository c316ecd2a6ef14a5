"""Device of the tests in this folder: CUDA, or the CPU to try the tests themselves.

They require of a device what the other tests require of a CPU. Without a GPU they are skipped; `GPU_TESTS_DEVICE=cpu`
runs those that a CPU can run.
"""

import os
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(scope="session")
def device() -> str:
    """Name of the tested device."""
    name = os.environ.get("GPU_TESTS_DEVICE", "cuda" if torch.cuda.is_available() else None)
    if name is None:
        pytest.skip("there is no CUDA device, and GPU_TESTS_DEVICE names no other")
    return name


@pytest.fixture(scope="session")
def cuda(device: str) -> str:
    """Name of the tested device, for tests that a CPU cannot run."""
    if device == "cpu":
        pytest.skip("it needs a CUDA device")
    return device


@pytest.fixture(autouse=True)
def full_float32() -> Iterator[None]:
    """Disable TF32, whose 10 bits of fraction would hide errors up to 1e-3; it is off for products by default."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32 = before
    if torch.cuda.is_available():
        torch.cuda.synchronize()  # an error of a kernel is raised here, not in the next test
