"""A connection between every rank and rank 0, so that a rank that dies is missed within seconds, and by name.

A process that is killed cannot say so, but the system closes its connections. Without this the others find out through a
collective that breaks (a traceback of gloo's) or never ends (NCCL, until its time-out). A machine that loses power closes
nothing: TCP's own keep-alive notices it in half a minute. A rank that merely hangs is left to the collectives' time-out.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import socket
import sys
import threading
import time
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any, NoReturn, TextIO

import torch
import torch.distributed as dist

from common.command import StoppedElsewhere, say_error

logger = logging.getLogger(__name__)

GRACE_S, ORDERLY_GRACE_S = 5.0, 60.0
"""What the others may take to leave by themselves after a death, and after a rank that stopped with an error of its own."""
NEWS_S = 3.0
"""How long a broken collective waits to hear whose death broke it."""
CONNECT_S = 60.0


@dataclass(frozen=True)
class Peer:
    rank: int
    host: str
    process: int
    launcher: int
    """Its parent process."""


@dataclass(frozen=True)
class Lost:
    """A rank that is gone while others still work."""

    peer: Peer
    reason: str
    grace_s: float

    def __str__(self) -> str:
        peer = self.peer
        return f"rank {peer.rank} on {peer.host} (process {peer.process}) {self.reason}"


class Lifeline:
    """A context for the whole life of a rank. Collective: every rank of the process group enters."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.me = Peer(rank, socket.gethostname(), os.getpid(), os.getppid())
        self.world_size = world_size
        self.lost: Lost | None = None
        self._heard, self._leaving = threading.Event(), threading.Event()
        self._ending, self._lock = threading.Lock(), threading.Lock()
        self._sockets: list[socket.socket] = []

    def __enter__(self) -> Lifeline:
        server = _listening() if self.me.rank == 0 else None
        number = secrets.randbits(62)  # a stranger who connects does not know it
        address = torch.tensor([server.getsockname()[1] if server else 0, number])
        dist.broadcast(address, 0)
        port, token = address.tolist()
        if server is not None:
            self._sockets.append(server)
            self._start(self._accept, server, token)
        else:
            self._connect(port, token)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        is_broken = isinstance(error, RuntimeError) and not isinstance(error, StoppedElsewhere)
        if is_broken and self._heard.wait(NEWS_S):
            self._end(error)
        self._leaving.set()
        for connection in self._connections():
            with contextlib.suppress(OSError):
                _send(connection, {"bye": asdict(self.me), **_farewell(error)})
            connection.close()

    def _connections(self) -> list[socket.socket]:
        with self._lock:
            return list(self._sockets)

    def _start(self, target: Any, *arguments: Any) -> None:
        threading.Thread(target=target, args=arguments, daemon=True, name="lifeline").start()

    def _connect(self, port: int, token: int) -> None:
        """Until rank 0 has answered: from then on it is known by name, and missed even if it dies at once."""
        try:
            hub = socket.create_connection((os.environ["MASTER_ADDR"], port), CONNECT_S)
            _send(hub, {"token": token, **asdict(self.me)})
            lines = _lines(hub)
            answer = _parsed(lines.readline())
        except OSError as error:
            logger.warning(
                "rank %d cannot reach rank 0 on port %d (%s): a rank that dies may be noticed late",
                self.me.rank,
                port,
                error,
            )
            return
        if "hello" not in answer:
            raise ConnectionError(f"rank 0 is gone: it left before rank {self.me.rank} had joined")
        hub.settimeout(None)
        _keep_alive(hub)
        self._sockets.append(hub)
        self._start(self._listen, hub, lines, Peer(**answer["hello"]))

    def _accept(self, server: socket.socket, token: int) -> None:
        """Rank 0: let the other ranks in, and nobody else."""
        with contextlib.suppress(OSError):  # closed when this rank leaves
            while not self._leaving.is_set():
                peer, _ = server.accept()
                _keep_alive(peer)
                self._start(self._welcome, peer, token)

    def _welcome(self, peer: socket.socket, token: int) -> None:
        hello, lines = dict[str, Any](), _lines(peer)
        with contextlib.suppress(OSError):
            hello = _parsed(lines.readline(1000))
        if hello.pop("token", None) != token:
            peer.close()
            return
        with contextlib.suppress(OSError):  # gone already: the next line says so
            _send(peer, {"hello": asdict(self.me)})
        with self._lock:
            self._sockets.append(peer)
        self._listen(peer, lines, Peer(**hello))

    def _listen(self, connection: socket.socket, lines: TextIO, peer: Peer) -> None:
        """Until the connection ends: whatever the other side says, or that it went without a word."""
        with contextlib.suppress(OSError):
            for line in lines:
                message = _parsed(line)
                if "bye" in message:
                    reason, grace_s = message["reason"], message["grace_s"]
                    if reason:
                        self._lose(Lost(Peer(**message["bye"]), reason, grace_s), connection)
                    return
        if not self._leaving.is_set():
            gone = (
                "is gone without a word: killed, out of memory, or its machine or network is down"
            )
            self._lose(Lost(peer, gone, GRACE_S), connection)

    def _lose(self, lost: Lost, source: socket.socket) -> None:
        """Tell the main thread and, from rank 0, everybody; end this process if it does not end by itself."""
        with self._lock:
            if self.lost is not None:
                return
            self.lost = lost
        self._heard.set()
        news = {"bye": asdict(lost.peer), "reason": lost.reason, "grace_s": lost.grace_s}
        if self.me.rank == 0:
            for peer in self._connections()[1:]:  # the first is where others connect
                if peer is not source:
                    with contextlib.suppress(OSError):
                        _send(peer, news)
        time.sleep(lost.grace_s)
        if not self._leaving.is_set():
            self._end(None)

    def _end(self, error: BaseException | None) -> NoReturn:
        """Say who is gone, in one line a launcher, and leave at once: what holds a broken communicator may never return."""
        self._ending.acquire()  # for good: once is enough
        if error is not None:
            logger.debug("a collective broke", exc_info=error)
        if self.lost is not None and self._speaks(self.lost.peer):
            say_error(f"{self.lost}; the same command continues from what is saved")
        os._exit(1)

    def _speaks(self, gone: Peer) -> bool:
        """One rank of each launcher does; the launcher that saw the death says more, if it is torchrun: the signal."""
        is_sibling = (gone.host, gone.launcher) == (self.me.host, self.me.launcher)
        if is_sibling and "TORCHELASTIC_RUN_ID" in os.environ:
            return False
        local = int(os.environ.get("LOCAL_RANK", "0"))
        return local == (1 if is_sibling and gone.rank == self.me.rank - 1 else 0)


def _farewell(error: BaseException | None) -> dict[str, Any]:
    """Why a rank leaves: nothing if its work is done."""
    if error is None:
        return {"reason": "", "grace_s": 0.0}
    words = " ".join(f"{type(error).__name__}: {error}".split())
    orderly = isinstance(error, ValueError | OSError | StoppedElsewhere) or not isinstance(
        error, Exception
    )
    return {
        "reason": f"stopped with {words[:300]}",
        "grace_s": ORDERLY_GRACE_S if orderly else GRACE_S,
    }


def _listening() -> socket.socket:
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))


def _keep_alive(connection: socket.socket) -> None:
    """A peer whose machine is off is noticed after 10 + 3 x 5 seconds."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)


def _lines(connection: socket.socket) -> TextIO:
    return connection.makefile(encoding="utf-8", errors="replace")


def _send(connection: socket.socket, message: dict[str, Any]) -> None:
    connection.sendall((json.dumps(message) + "\n").encode())


def _parsed(line: str) -> dict[str, Any]:
    """{} for what is no message: a port scanner's bytes."""
    try:
        value = json.loads(line)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
