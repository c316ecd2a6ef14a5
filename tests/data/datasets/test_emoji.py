"""The emoji world as a data set: its splits."""

import pytest

from patchedserve.data.datasets.emoji import open_emoji
from patchedserve.data.errors import UsageError


def test_training_split_differs_and_is_named() -> None:
    held_out, training = open_emoji(num_images=3), open_emoji(split="train", num_images=3)
    names = [[entry.id for entry in each.entries()] for each in (held_out, training)]
    assert not {*names[0]} & {*names[1]}
    assert "train" in training.name
    assert training.fingerprint() != held_out.fingerprint()
    with pytest.raises(UsageError, match="split of the emoji world is 'test', but it must be one of train, heldout"):
        open_emoji(split="test")
