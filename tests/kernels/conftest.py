"""Fixture that runs Triton kernels on the GPU if there is one, otherwise in triton's interpreter."""

import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from patchedserve.kernels.forest_tables import FlatForest

RunTriton = Callable[..., Any]


@pytest.fixture(scope="session")
def run_triton() -> Iterator[RunTriton]:
    """A function (dispatcher, *args, **kwargs) that calls the dispatcher with kernels="triton", on CPU tensors."""
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        yield _run_on_gpu
        return
    worker = subprocess.Popen(
        [sys.executable, Path(__file__).with_name("triton_worker.py")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"TRITON_INTERPRET": "1"},
    )
    stdin, stdout = worker.stdin, worker.stdout
    assert stdin is not None
    assert stdout is not None

    def run_interpreted(dispatcher: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # Pytest imports the tests' own modules without the name of the package.
        module = f"patchedserve.{dispatcher.__module__.removeprefix('patchedserve.')}"
        pickle.dump((module, dispatcher.__name__, args, kwargs), stdin)
        stdin.flush()
        reply = pickle.load(stdout)
        if isinstance(reply, Exception):
            raise reply
        return reply

    yield run_interpreted
    stdin.close()
    assert worker.wait(timeout=60) == 0


def _run_on_gpu(dispatcher: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return _moved(dispatcher(*_moved(args, "cuda"), **_moved(kwargs, "cuda"), kernels="triton"), "cpu")


def _moved(value: Any, device: str) -> Any:
    if isinstance(value, torch.Tensor | FlatForest):
        return value.to(device)
    if isinstance(value, list | tuple):
        return type(value)(_moved(item, device) for item in value)
    if isinstance(value, dict):
        return {key: _moved(item, device) for key, item in value.items()}
    return value
