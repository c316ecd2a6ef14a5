"""Banks: their files, and the assignment of their prompts to the requests of a trace."""

import math
from collections import Counter
from pathlib import Path

import pytest

from patchedserve.data.errors import UsageError
from patchedserve.data.requests import Request
from patchedserve.data.resolution import Resolution
from patchedserve.profiling.cascade.bank import BANK_FILE, Bank, BankEntry

S, L = Resolution(64, 64), Resolution(128, 128)
BANK = Bank(
    tuple(
        BankEntry(f"prompt {number}", S if number % 2 else L, 100 + number, number / 10 if number else math.nan)
        for number in range(10)
    ),
    {"discriminator": "abc"},
)


def test_bank_round_trips_through_a_file(tmp_path: Path) -> None:
    BANK.save(tmp_path)
    again = Bank.load(tmp_path)
    assert again.about == BANK.about
    assert again.entries[1:] == BANK.entries[1:]
    assert math.isnan(again.confidences[0])
    (tmp_path / BANK_FILE).write_bytes(b"PAR1")
    with pytest.raises(UsageError, match="damaged or not parquet"):
        Bank.load(tmp_path)
    with pytest.raises(UsageError, match=r"holds no bank\.parquet"):
        Bank.load(tmp_path / "none")


def test_prompts_are_dealt_by_resolution_without_early_repeats() -> None:
    requests = [Request(number, "", S if number % 3 else L, arrival_s=float(number)) for number in range(21)]
    dealt, places = BANK.dealt(requests, seed=1)
    for request, place in zip(dealt, places, strict=True):
        entry = BANK.entries[place]
        assert (request.prompt, request.resolution, request.seed) == (entry.prompt, entry.resolution, entry.seed)
    assert [each.arrival_s for each in dealt] == [each.arrival_s for each in requests]
    uses = Counter(places)
    assert {uses[place] for place in range(0, 10, 2)} <= {1, 2}
    assert {uses[place] for place in range(1, 10, 2)} <= {2, 3}
    assert BANK.dealt(requests, seed=1) == (dealt, places)
    assert BANK.dealt(requests, seed=2)[1] != places
    with pytest.raises(UsageError, match="no image of 256x256, only of 128x128, 64x64"):
        BANK.dealt([Request(0, "", Resolution(256, 256))], seed=0)
