"""Errors of a deployment on Ray Serve."""

from patchedserve.serving.fleet.deployment import last_line_of


def test_ray_errors_are_reduced_to_one_line() -> None:
    assert last_line_of(RuntimeError("trace\n  of another process\nno room\n")) == "no room"
    assert last_line_of(RuntimeError("")) == "RuntimeError"
