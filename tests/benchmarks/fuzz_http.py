"""Generated requests to a real server: by schemathesis from its OpenAPI schema, and byte strings by hypothesis.

    python tests/benchmarks/fuzz_http.py [--cases 20000] [--model emoji-xl]

Goals: no 5xx response except 503, every error is JSON, and the server still draws. Exits with 1 otherwise.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

from patchedserve.data.files import write_json
from patchedserve.serving.runs.machine import cpu_name
from patchedserve.tests.support.fuzz import fuzz
from patchedserve.tests.support.http_server import HttpServer


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="emoji-xl")
    parser.add_argument("--cases", type=int, default=20_000)
    parser.add_argument("--output-file", type=Path)
    given = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        HttpServer(given.model, Path(folder), "--max-steps", "4", "--system", "patched-fcfs") as server,
    ):
        counts = fuzz(server.url, given.cases)
    found = {"machine": cpu_name(), "model": given.model, "answers": counts}
    print(json.dumps(found, indent=1))
    if given.output_file is not None:
        write_json(given.output_file, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
