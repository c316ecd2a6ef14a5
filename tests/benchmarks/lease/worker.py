"""A process that runs parts of a lease on one model. It imports torch with the first part that needs it.

    python -m patchedserve.tests.benchmarks.lease.worker MODEL STATE_FOLDER [--rehearse]

Reads one JSON object per line from stdin: `part` and `source` of a `Part`, `known` labels, and `seconds` for it. Writes
one per line to stdout: rows as `{"row": ...}`, then `{"end": ..., "reason": ..., "notes": ...}`, where `end` is `done`,
`partial` or `failed`. All other output goes to stderr.
"""

import gc
import importlib
import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any, TextIO

from .context import Bench, Context
from .scale import FULL, REHEARSAL


def run(asked: dict[str, Any], bench: Bench, folder: Path, send: TextIO) -> None:
    """Run one part, and send its rows and its end."""
    context = Context(bench, folder, frozenset(asked["known"]), time.monotonic() + asked["seconds"])
    num_failed, reason = 0, ""
    try:
        module, _, name = asked["source"].partition(":")
        for row in getattr(importlib.import_module(module), name)(context):
            line = _encoded(row)
            if "error" in row:
                num_failed, reason = num_failed + 1, f"{row['label']}: {row['error']}"
            print(line, file=send, flush=True)
    except Exception as error:  # noqa: BLE001  the next part may well run
        traceback.print_exc(file=sys.stderr)
        num_failed, reason = num_failed + 1, f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    _release()
    end = "failed" if num_failed else "partial" if context.stopped else "done"
    message = {"end": end, "reason": reason or context.stopped, "notes": context.notes}
    print(json.dumps(message), file=send, flush=True)


def _encoded(row: dict[str, Any]) -> str:
    """Return a row as JSON for the parent. A row that JSON cannot hold, for example with NaN, has failed."""
    try:
        return json.dumps({"row": row}, allow_nan=False)
    except ValueError as error:
        row["error"] = f"the result is not a number: {error}"
        return json.dumps({"row": {"label": row["label"], "error": row["error"]}})


def _release() -> None:
    """Release device memory that a part has left, because another process needs it."""
    gc.collect()
    if (torch := sys.modules.get("torch")) is None or not torch.cuda.is_initialized():
        return
    # After an illegal access every call fails: this process cannot be used any more, and the parent starts another.
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def main() -> None:
    name, folder, *options = sys.argv[1:]
    # Output of libraries must not reach the parent's pipe.
    send = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    is_rehearsal = "--rehearse" in options
    if is_rehearsal:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    bench = Bench(name, REHEARSAL if is_rehearsal else FULL)
    for line in sys.stdin:
        run(json.loads(line), bench, Path(folder), send)


if __name__ == "__main__":
    main()
