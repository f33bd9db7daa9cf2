"""Who works on what: a small file a shard, created by one worker, kept fresh while it works, given up when it is done.

    claims/shard-000012.json      {"worker": ..., "beat": 7, "machine": ..., "process": ...}

A claim only saves work: two workers on one shard write the same bytes. So nothing here needs agreed clocks or locks. The holder
raises `beat` every quarter of the lease; whoever has seen a claim unchanged for a whole lease, by its own monotonic clock, takes
it over. A holder of this machine whose process is gone is known at once.
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
from collections.abc import Callable, Iterator
from pathlib import Path

from common.progress import format_duration
from common.storage import Storage
from common.waiting import Waiting

logger = logging.getLogger(__name__)

PREFIX = "claims/"
BEATS_A_LEASE = 4
STALL_LEASES = (
    10  # a worker that gets nothing done for so long hangs: its claims are no longer kept fresh
)


class Claims:
    """This worker's claims, and what it has seen of the others'. A context: claims live no longer than it."""

    def __init__(
        self,
        storage: Storage,
        lease_s: float,
        clock: Callable[[], float] = time.monotonic,
        prefix: str = PREFIX,
    ):
        """prefix: the folder of the claims; those of other work do not meet there."""
        self.storage, self.lease_s, self.clock, self.prefix = storage, lease_s, clock, prefix
        self.worker = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
        self._held: dict[str, int] = {}  # name -> beat
        self._seen: dict[str, tuple[bytes, float]] = {}  # others': bytes, since when
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._last_work = clock()
        self._thread = threading.Thread(target=self._beat_on, name="claims", daemon=True)

    def __enter__(self) -> Claims:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self.give_up_all()
        self._thread.join()

    @property
    def held(self) -> list[str]:
        with self._lock:
            return list(self._held)

    def holds(self, name: str) -> bool:
        return name in self._held

    def take(self, name: str) -> bool:
        """Whether `name` is this worker's now: it was free, or its holder is dead."""
        if self._create(name):
            return True
        if not self.is_abandoned(name):
            return False
        logger.info("taking over %s from a worker that is gone", name)
        self.storage.delete(self._path(name))
        return self._create(name)

    def is_abandoned(self, name: str) -> bool:
        """Whether the holder is a dead process of this machine, or was seen doing nothing for a lease.

        Looking is what starts that clock.
        """
        try:
            data = self.storage.read(self._path(name))
        except FileNotFoundError:
            self._seen.pop(name, None)
            return True
        now = self.clock()
        known, since = self._seen.get(name, (b"", now))
        self._seen[name] = data, since if data == known else now
        return now - self._seen[name][1] >= self.lease_s or _died_here(data)

    def give_up(self, name: str) -> None:
        """Done with `name`, or unable to go on. A claim that another has taken over stays the other's."""
        with self._lock:
            if self._held.pop(name, None) is not None and self._is_ours(name):
                self.storage.delete(self._path(name))

    def give_up_all(self) -> None:
        for name in self.held:
            with contextlib.suppress(OSError):  # it lapses by itself
                self.give_up(name)

    @contextlib.contextmanager
    def wait_for(self, name: str) -> Iterator[None]:
        """Hold `name`, once whoever has it gives it up or is gone."""
        waiting = Waiting()
        while not self.take(name):
            waiting.pause(
                lambda: (
                    f"waiting for the worker that holds {self.storage.location(self._path(name))}; if it is gone, this one goes on "
                    f"in {format_duration(self.lease_s)}"
                )
            )
        try:
            yield
        finally:
            self.give_up(name)

    def worked(self) -> None:
        """This worker got something done: it does not hang."""
        self._last_work = self.clock()

    def beat(self) -> None:
        """Show that this worker lives: raise the beat of every claim that is still its own."""
        for name in self.held:
            with self._lock:
                if name not in self._held:
                    continue
                if self._is_ours(name):
                    self._held[name] += 1
                    self.storage.write(self._path(name), self._data(self._held[name]))
                else:
                    del self._held[name]
                    logger.warning("%s was taken over: this worker was silent too long", name)

    def _beat_on(self) -> None:
        while not self._stop.wait(self.lease_s / BEATS_A_LEASE):
            if self.clock() - self._last_work < STALL_LEASES * self.lease_s:
                try:
                    self.beat()
                except OSError as error:  # the next beat may do; else the claims lapse
                    logger.warning("claims could not be kept fresh: %s", error)

    def _create(self, name: str) -> bool:
        with self._lock:
            created = self.storage.create(self._path(name), self._data(0))
            if created:
                self._held[name] = 0
                self.worked()
            return created

    def _is_ours(self, name: str) -> bool:
        try:
            return json.loads(self.storage.read(self._path(name)))["worker"] == self.worker
        except FileNotFoundError:
            return False

    def _path(self, name: str) -> str:
        return f"{self.prefix}{name}.json"

    def _data(self, beat: int) -> bytes:
        machine, process = _this_process()
        value = {"worker": self.worker, "beat": beat, "machine": machine, "process": process}
        return (json.dumps(value) + "\n").encode()


class ClaimsGoFirst:
    """On a machine that is being taken away every second counts: claims are given up before the stages are waited for."""

    def __init__(self, claims: Claims):
        self.claims = claims

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.claims.give_up_all()


def claimed(storage: Storage) -> list[str]:
    """Names that some worker claims."""
    return [name.removeprefix(PREFIX).removesuffix(".json") for name in storage.names(PREFIX)]


def workers(storage: Storage) -> set[str]:
    """Who holds a claim."""
    found: set[str] = set()
    for name in storage.names(PREFIX):
        with contextlib.suppress(FileNotFoundError):  # given up meanwhile
            found.add(json.loads(storage.read(name))["worker"])
    return found


def clear_claims(storage: Storage) -> None:
    """All of them: there is nothing left to work on."""
    for name in storage.names(PREFIX):
        storage.delete(name)
    if storage.folder:
        with contextlib.suppress(OSError):  # somebody came in between; the folder is harmless
            (storage.folder / PREFIX).rmdir()


def _this_process() -> tuple[str, str]:
    """Machine and process, each never met again: boot and process namespace; process id and start. Empty if not Linux."""
    if sys.platform != "linux":
        return "", ""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {Path('/proc/self/ns/pid').readlink()}", f"{os.getpid()} {_start(os.getpid())}"


def _died_here(data: bytes) -> bool:
    """Whether this machine knows that the claim's process is gone."""
    holder = json.loads(data)
    machine, _ = _this_process()
    if not machine or holder["machine"] != machine:
        return False
    pid, _, start = holder["process"].partition(" ")
    return _start(int(pid)) != start


def _start(pid: int) -> str:
    """When process `pid` began, in the kernel's ticks; empty if it is dead, a zombie included."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return "" if fields[0] in "ZX" else fields[19]  # state, then field 22 of proc(5)
