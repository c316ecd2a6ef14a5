"""Values derived from weights."""

import torch

from patchedserve.serving.core.derived import Derived


def test_derived_tensors_are_rebuilt_for_another_dtype_or_device() -> None:
    made: list[int] = []

    def make() -> int:
        made.append(0)
        return len(made)

    derived, weight = Derived(make), torch.zeros(2)
    assert [derived.of(weight), derived.of(weight + 1)] == [1, 1]
    assert [derived.of(weight.half()), derived.of(weight.half().to("meta")), derived.of(weight)] == [2, 3, 4]
