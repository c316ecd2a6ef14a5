"""Forms whose images would exhaust a server's time and memory are refused or end with their process."""

import asyncio
import io
import multiprocessing
import os
import signal
import struct
import zlib
from collections.abc import Coroutine
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from patchedserve.data.resolution import Resolution
from patchedserve.serving.models.defaults import ModelDefaults
from patchedserve.serving.server import edit_processes
from patchedserve.serving.server.edit_processes import EditProcesses
from patchedserve.serving.server.edits import parse_edit
from patchedserve.serving.server.errors import ApiError
from patchedserve.serving.server.limits import Limits
from patchedserve.serving.server.protocol import Generation, ModelFacts

from ...support.waits import is_alive

SIZE, LARGE = Resolution(64, 48), Resolution(4096, 4096)
MODEL = ModelFacts("tiny", ModelDefaults(4, 4.0, SIZE, (SIZE,)))
LIMITS = Limits(max_pixels=LARGE.pixels)
PIXELS = np.random.default_rng(0).integers(0, 256, (48, 64, 3), np.uint8)


def file_of(pixels: NDArray[np.uint8], kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind, **options)
    return file.getvalue()


IMAGE, MASK = file_of(PIXELS), file_of(np.eye(48, 64, dtype=np.uint8).repeat(8, 0)[:48] * 255)
FORM: dict[str, bytes | str] = {"image": IMAGE, "mask": MASK, "prompt": "a red hat"}


def parsed(**files: bytes) -> Generation:
    return parse_edit(list((FORM | files).items()), MODEL, LIMITS)


def progressive(size: Resolution, num_scans: int) -> bytes:
    """Return a progressive JPEG file whose last scan is repeated `num_scans` times."""
    content = file_of(np.full((size.height, size.width, 3), 255, np.uint8), "JPEG", progressive=True)
    last = content.rindex(b"\xff\xda")
    return content[:last] + content[last:-2] * num_scans + b"\xff\xd9"


SLOW = {"image": progressive(LARGE, 85), "mask": progressive(LARGE, 85)}
"""Files that stay within the counted limits and yet take seconds to decode."""


def with_chunks(number: int) -> bytes:
    """Return a PNG file with this number of text chunks."""
    chunk = b"tEXta\0b"
    text = struct.pack(">I", 3) + chunk + struct.pack(">I", zlib.crc32(chunk))
    return IMAGE[:33] + text * number + IMAGE[33:]


def webp_with_chunks(number: int) -> bytes:
    content = file_of(PIXELS, "WEBP", lossless=True) + (b"junk" + struct.pack("<I", 3) + b"abc\0") * number
    return content[:4] + struct.pack("<I", len(content) - 8) + content[8:]


def test_chunks_are_counted_before_decoding() -> None:
    for content, what in (
        (progressive(SIZE, 200_000), "more than 100 scans"),
        (b"\xff\xd8" + b"\xff\xfe\0\x02" * 60_000 + progressive(SIZE, 1)[2:], "more than 50,000 segments"),
        (with_chunks(60_000), "more than 50,000 chunks"),
        (webp_with_chunks(60_000), "more than 50,000 chunks"),
    ):
        for name in ("image", "mask"):
            with pytest.raises(ApiError, match=f"{name} has {what}"):
                parsed(**{name: content})


def test_usual_files_have_few_chunks() -> None:
    photo = file_of(PIXELS, "JPEG", progressive=True, quality=95, exif=b"Exif\0\0" + b"\xff\xda" * 5_000)
    # Phones append a video to the image.
    for content in (photo + b"\xff\xda\0\x02" * 1_000, with_chunks(200), webp_with_chunks(200)):
        assert parsed(image=content).resolution == SIZE


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 120))


async def answered(processes: EditProcesses, **files: bytes) -> Generation:
    return await processes.parse(list((FORM | files).items()), None)


def pids() -> set[int]:
    return {each.pid or 0 for each in multiprocessing.active_children() if each.name == "psctl-edits"}


async def ended(processes: set[int]) -> None:
    while any(map(is_alive, processes)):
        await asyncio.sleep(0.01)


def test_process_equals_decoding_in_place() -> None:
    async def work() -> None:
        processes, before = EditProcesses(MODEL, LIMITS), pids()
        await processes.start()
        ready = pids() - before
        assert len(ready) == 1
        found, wanted = await answered(processes), parsed()
        assert found.edit is not None
        assert wanted.edit is not None
        assert np.array_equal(found.edit.image, wanted.edit.image)
        assert np.array_equal(found.edit.mask, wanted.edit.mask)
        with pytest.raises(ApiError) as caught:
            await answered(processes, mask=b"no image")
        assert (caught.value.status, caught.value.param, caught.value.code) == (400, "mask", "invalid_value")
        assert pids() - before == ready, "both were taken apart by the one that was ready"

    run(work())


def test_time_and_memory_have_limits() -> None:
    async def work() -> None:
        for limits, message in (({"decode_s": 0}, "of a processor to decode"), ({"most_bytes": 1 << 25}, "GiB")):
            processes = EditProcesses(MODEL, LIMITS, **limits)
            with pytest.raises(ApiError, match=message) as caught:
                await answered(processes, **SLOW)
            assert (caught.value.status, caught.value.param) == (400, "image")
            assert (await answered(processes)).resolution == SIZE

    run(work())


def test_slow_form_blocks_no_other_and_ends_with_its_client() -> None:
    async def work() -> None:
        processes, before = EditProcesses(MODEL, LIMITS, decode_s=600), pids()
        slow = asyncio.ensure_future(answered(processes, **SLOW))
        while not (busy := pids() - before):
            await asyncio.sleep(0.01)
        assert (await answered(processes)).resolution == SIZE
        assert not slow.done(), "or it was not slow"
        slow.cancel()
        await ended(busy)
        assert (await answered(processes)).resolution == SIZE

    run(work())


def test_killed_or_hanging_process_affects_only_its_form(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        processes, before = EditProcesses(MODEL, LIMITS), pids()
        await answered(processes)
        [process] = pids() - before
        os.kill(process, signal.SIGSTOP)
        monkeypatch.setattr(edit_processes, "ANSWER_WITHIN_S", 0.5)
        with pytest.raises(ApiError, match="could not be decoded in time") as caught:
            await answered(processes)
        assert caught.value.status == 429
        await ended({process})
        monkeypatch.undo()
        await answered(processes)
        # If it is killed while idle, another process decodes the next form.
        [process] = pids() - before
        os.kill(process, signal.SIGKILL)
        await ended({process})
        assert (await answered(processes)).resolution == SIZE

    run(work())


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGKILL, 503), (signal.SIGTERM, 503), (signal.SIGSEGV, 400), (signal.SIGABRT, 400)]
)
def test_client_errors_are_only_those_of_its_image(number: signal.Signals, status: int) -> None:
    async def work() -> None:
        processes, before = EditProcesses(MODEL, LIMITS, decode_s=600), pids()
        slow = asyncio.ensure_future(answered(processes, **SLOW))
        while not (busy := pids() - before):
            await asyncio.sleep(0.01)
        for process in busy:
            os.kill(process, number)
        with pytest.raises(ApiError, match=number.name) as caught:
            await slow
        assert caught.value.status == status
        # What needed all of the memory is not sent again by itself.
        assert caught.value.headers.get("x-should-retry") == ("false" if number == signal.SIGKILL else None)
        assert (await answered(processes)).resolution == SIZE

    run(work())
