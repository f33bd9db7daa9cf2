"""A real S3 server on this machine for the tests: moto behind a gate that fails calls on purpose and notes them all.

Also a script, for tests whose processes must share one: `python tests/s3_server.py PORT_FILE [EVERY]`.
"""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

import moto.backends
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server

BUCKET = "bucket"
VARIABLES = {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "test",
    "AWS_REGION": "us-east-1",
    "NO_PROXY": "127.0.0.1",
}
FAULTS = ("busy", "refused", "answer lost", "half an answer")
"""503; the connection dropped before the call; after it; in the body of its answer."""


@dataclass
class Gate:
    """In front of the server. Each `every`-th call fails, in turn in every way of `faults`; 0: none.

    `busy`: calls whose text holds it are always refused with 503.
    """

    app: WSGIApplication
    every: int = 0
    faults: tuple[str, ...] = FAULTS
    busy: str | None = None
    calls: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.lock = threading.Lock()

    def __call__(self, environ: WSGIEnvironment, start: StartResponse) -> Iterable[bytes]:
        query = environ["QUERY_STRING"]
        call = f"{environ['REQUEST_METHOD']} {environ['PATH_INFO']}{query and '?'}{query}"
        fault = self._fault(call)
        if fault == "busy":
            start("503 Slow Down", [("Content-Length", "0")])
            return []
        if fault == "refused":
            return _hang_up(environ, start)
        if fault == "answer lost":
            list(self.app(environ, _ignore))
            return _hang_up(environ, start)
        if fault == "half an answer":
            return _halved(self.app(environ, start))
        return self.app(environ, start)

    def _fault(self, call: str) -> str | None:
        with self.lock:
            self.calls.append(call)
            if self.busy and self.busy in call:
                return "busy"
            if not self.every or len(self.calls) % self.every:
                return None
            fault = self.faults[len(self.failed) % len(self.faults)]
            self.failed.append(f"{fault}: {call}")
            return fault


def _ignore(*_: Any) -> Any: ...


def _hang_up(environ: WSGIEnvironment, start: StartResponse) -> Iterable[bytes]:
    environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
    start("200 OK", [("Content-Length", "0")])
    return []


def _halved(answer: Iterable[bytes]) -> Iterator[bytes]:
    body = b"".join(answer)
    if not body:
        return
    yield body[: len(body) // 2]
    raise ConnectionAbortedError("on purpose")


class _Silent(WSGIRequestHandler):
    protocol_version = "HTTP/1.1"

    def log(self, type: str, message: str, *args: Any) -> None: ...


@dataclass
class S3Server:
    port: int
    gate: Gate

    @property
    def variables(self) -> dict[str, str]:
        return VARIABLES | {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}"}

    def objects(self) -> dict[str, bytes]:
        """All of the bucket, asked of the server itself, not through the gate."""
        return {key.name: key.value for key in _backend().buckets[BUCKET].keys.values()}

    def open_uploads(self) -> int:
        return len(_backend().buckets[BUCKET].multiparts)


def _backend() -> Any:
    return moto.backends.get_backend("s3")["123456789012"]["aws"]


@contextlib.contextmanager
def s3_server(every: int = 0, port: int = 0) -> Iterator[S3Server]:
    """An empty server with one bucket."""
    gate = Gate(DomainDispatcherApplication(create_backend_app))
    server = make_server("127.0.0.1", port, gate, threaded=True, request_handler=_Silent)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    backend = _backend()
    backend.reset()
    backend.create_bucket(BUCKET, "us-east-1")
    gate.every = every
    try:
        yield S3Server(server.server_port, gate)
    finally:
        server.shutdown()
        thread.join()


if __name__ == "__main__":
    file, every = Path(sys.argv[1]), int((*sys.argv[2:], "0")[0])
    with s3_server(every) as running:
        file.write_text(str(running.port))
        threading.Event().wait()
