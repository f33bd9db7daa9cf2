"""Which server takes the next request: balance, back-pressure and cool-down over several servers of one target.

Each server has a limit of requests in flight. Trouble (429, 5xx, cut or silent connections) halves it and rests the server,
longer each time, or as long as its Retry-After says; answers raise it again, up to data.responses.server.concurrency.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence

_GROWTH = 4.0
"""The limit rises by so much while a limit's worth of requests is answered: back at 256 from 128 after 6,000 answers."""
_FIRST_REST_S = 0.5
_LONGEST_REST_S = 60.0


class NoServer(Exception):
    """No server has answered anything for so long that waiting is no use."""


class Server:
    """One base URL and how it is doing. Times are of time.monotonic()."""

    def __init__(self, url: str, concurrency: int):
        self.url = url.rstrip("/")
        self.model = ""
        """Name the target is served under."""
        self.in_flight = 0
        self.limit = float(concurrency)
        self.most = concurrency
        self.rest_until = 0.0
        self.num_troubles = 0
        """In a row, without an answer between; those of requests sent before the last one are the same."""
        self.troubled_since: float | None = None
        self.last_trouble = ""
        self._last_trouble_at = 0.0

    @property
    def load(self) -> float:
        return self.in_flight / self.limit

    def is_free(self, now: float) -> bool:
        return now >= self.rest_until and self.in_flight < max(1, int(self.limit))

    def answered(self) -> None:
        self.limit = min(float(self.most), self.limit + _GROWTH / self.limit)
        self.num_troubles, self.troubled_since = 0, None

    def troubled(self, what: str, sent_at: float, retry_after_s: float | None) -> None:
        """Rest. A crash cuts all requests in flight at once: those sent before the last trouble are no new one."""
        now = time.monotonic()
        self.last_trouble = what
        if retry_after_s is not None:
            self.rest_until = max(self.rest_until, now + retry_after_s)
        if sent_at < self._last_trouble_at:
            return
        self._last_trouble_at = now
        self.troubled_since = self.troubled_since or now
        self.limit = max(1.0, self.limit / 2)
        if retry_after_s is None:
            rest = min(_LONGEST_REST_S, _FIRST_REST_S * 2**self.num_troubles)
            self.rest_until = max(self.rest_until, now + rest * random.uniform(0.5, 1.0))
        self.num_troubles += 1


class Servers:
    """`take` a server, send one request, `give` it back."""

    def __init__(self, urls: Sequence[str], concurrency: int, give_up_s: float):
        self.all = [Server(url, concurrency) for url in urls]
        self._give_up_s = give_up_s
        self._freed = asyncio.Event()

    @property
    def in_flight(self) -> int:
        return sum(server.in_flight for server in self.all)

    async def take(self, preferred: Server | None = None) -> Server:
        """The preferred server if it is free (it has the conversation's prefix in its cache), else the least loaded free one.

        Waits for one otherwise. Raises NoServer when all have been in trouble for `give_up_s`.
        """
        while True:
            now = time.monotonic()
            free = [server for server in self.all if server.is_free(now)]
            if free:
                server = preferred if preferred in free else min(free, key=lambda s: s.load)
                assert server is not None
                server.in_flight += 1
                return server
            self._require_hope(now)
            await self._wait(now)

    def give(self, server: Server) -> None:
        server.in_flight -= 1
        self._freed.set()

    def _require_hope(self, now: float) -> None:
        since = [server.troubled_since for server in self.all]
        if all(at is not None and now - at > self._give_up_s for at in since):
            told = "; ".join(f"{server.url}: {server.last_trouble}" for server in self.all)
            raise NoServer(f"no server has answered for {self._give_up_s:.0f} s ({told})")

    async def _wait(self, now: float) -> None:
        """Until a request ends, or a resting server may be tried again."""
        rests = [s.rest_until - now for s in self.all if s.rest_until > now]
        self._freed.clear()
        try:
            await asyncio.wait_for(self._freed.wait(), min([*rests, 5.0]))
        except TimeoutError:
            return
