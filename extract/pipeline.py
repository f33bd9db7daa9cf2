"""Stages in threads, joined by bounded queues: all are busy at once, none runs ahead, and the first failure ends them all.

with Pipeline([Stage("copy", copy), Stage("write", write, num_threads=2)]) as pipeline:
    for item in items:
        pipeline.put(item)      # waits while the first queue is full; raises what went wrong in any stage
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Stage:
    name: str
    run: Callable[[Any], Any]
    """Takes an item; what it gives goes to the next stage, None goes nowhere."""
    num_threads: int = 1
    """With more than one, items may overtake each other."""
    depth: int = 1
    """Items that wait for it at most."""


class _Stopped(Exception):
    """Another stage failed; not an error of its own."""


class Pipeline:
    """Leaving the block waits for what is under way, or drops it if the block failed."""

    def __init__(self, stages: Sequence[Stage]):
        self.stages = list(stages)
        self._changed = threading.Condition()
        self._queues: list[deque[Any]] = [deque() for _ in stages]
        self._fillers = [1] + [stage.num_threads for stage in stages]  # who may still fill queue i
        self._failure: BaseException | None = None
        self._is_stopped = False
        self._pool = ThreadPoolExecutor(sum(stage.num_threads for stage in stages))

    def __enter__(self) -> Pipeline:
        for index, stage in enumerate(self.stages):
            for _ in range(stage.num_threads):
                self._pool.submit(self._work, index).add_done_callback(self._on_end)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.stop()
        with self._changed:
            self._fillers[0] = 0
            self._changed.notify_all()
        self._pool.shutdown(wait=True)
        if kind is None and self._failure:
            raise self._failure

    def put(self, item: Any) -> None:
        """Hand `item` to the first stage. Raises what went wrong in a stage."""
        try:
            self._put(0, item)
        except _Stopped:
            self.require_sound()
            raise AssertionError from None

    def require_sound(self) -> None:
        """Raises what went wrong in a stage: for a caller that waits with nothing to put."""
        if self._failure is not None:
            raise self._failure from None

    def stop(self) -> None:
        """Drop what waits; each stage ends with its present item."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify_all()

    def _work(self, index: int) -> None:
        try:
            while (item := self._get(index)) is not None:
                found = self.stages[index].run(item)
                del item  # not kept alive while the next one is awaited
                if found is not None:
                    self._put(index + 1, found)
                    del found
        except _Stopped:
            return
        finally:
            with self._changed:
                self._fillers[index + 1] -= 1
                self._changed.notify_all()

    def _on_end(self, thread: Future[None]) -> None:
        failure = thread.exception()
        if failure is not None:
            with self._changed:
                self._failure = self._failure or failure
            self.stop()

    def _put(self, index: int, item: Any) -> None:
        assert index < len(self.stages), "the last stage gives nothing"
        queue, depth = self._queues[index], self.stages[index].depth
        with self._changed:
            self._changed.wait_for(lambda: self._is_stopped or len(queue) < depth)
            if self._is_stopped:
                raise _Stopped
            queue.append(item)
            self._changed.notify_all()

    def _get(self, index: int) -> Any | None:
        """The next item of queue `index`; None if none will come."""
        queue = self._queues[index]
        with self._changed:
            self._changed.wait_for(lambda: self._is_stopped or queue or not self._fillers[index])
            if self._is_stopped:
                raise _Stopped
            item = queue.popleft() if queue else None
            self._changed.notify_all()
            return item
