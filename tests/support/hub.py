"""A local hub for the Hugging Face client, whose repositories are folders of one commit."""

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

COMMIT = "c" * 40


@dataclass
class Hub:
    """Address of a hub, and the files that were requested, as `org/name/path`."""

    url: str = ""
    fetched: list[str] = field(default_factory=list)


@contextmanager
def serving_hub(repositories: Mapping[str, Path]) -> Iterator[Hub]:
    """Serve a hub with these repositories, by id."""
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            parts = unquote(urlsplit(self.path).path).strip("/").split("/")
            if parts[:2] == ["api", "models"] and (folder := repositories.get("/".join(parts[2:4]))) is not None:
                self._say(folder, "/".join(parts[2:4]), is_tree=parts[4:5] == ["tree"])
            elif parts[2:3] == ["resolve"] and (folder := repositories.get("/".join(parts[:2]))) is not None:
                self._send(folder / "/".join(parts[4:]), parts)
            else:
                self.send_response(404)
                self.send_header("X-Error-Code", "RepoNotFound")
                self.send_header("Content-Length", "0")
                self.end_headers()

        def do_HEAD(self) -> None:
            self.do_GET()

        def _say(self, folder: Path, name: str, *, is_tree: bool) -> None:
            files = sorted(path for path in folder.rglob("*") if path.is_file())
            names = [path.relative_to(folder).as_posix() for path in files]
            tree = [
                {"type": "file", "path": path, "size": file.stat().st_size, "oid": _etag(file)}
                for path, file in zip(names, files, strict=True)
            ]
            model = {"id": name, "sha": COMMIT, "siblings": [{"rfilename": path} for path in names]}
            self._answer(json.dumps(tree if is_tree else model).encode(), {"Content-Type": "application/json"})

        def _send(self, file: Path, parts: list[str]) -> None:
            if not file.is_file():
                self.send_response(404)
                self.send_header("X-Error-Code", "EntryNotFound")
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            if self.command == "GET":
                hub.fetched.append("/".join(parts[:2] + parts[4:]))
            self._answer(file.read_bytes(), {"ETag": f'"{_etag(file)}"', "X-Repo-Commit": COMMIT})

        def _answer(self, body: bytes, headers: Mapping[str, str]) -> None:
            self.send_response(200)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Log nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    hub.url = f"http://127.0.0.1:{server.server_port}"
    yield hub
    server.shutdown()


def _etag(file: Path) -> str:
    return hashlib.sha1(file.read_bytes(), usedforsecurity=False).hexdigest()
