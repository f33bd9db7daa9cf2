"""Features off the device while it computes the next batch: a stream of their own and a pinned buffer on CUDA, nothing on a CPU.

Legend: B sequences, S tokens, D taps, H hidden.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor


class HostCopies:
    """For one thread. The pinned buffer is as large as the largest batch so far and is used again for each."""

    def __init__(self, device: torch.device):
        is_cuda = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if is_cuda else None
        self._buffer: Tensor | None = None

    @contextlib.contextmanager
    def of(self, ready: torch.cuda.Event | None, features: Tensor) -> Iterator[None]:
        """Work of this block waits for `ready` alone, not for the forward that was launched since."""
        if self._stream is None or ready is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(ready)
            features.record_stream(self._stream)  # its memory is not given away before this is done
            yield

    def to_host(self, features: Tensor, lengths: Sequence[int]) -> list[Tensor]:
        """(B, S, D, H) on the device -> (S_b, D, H) a row on the host, without padding.

        On the CPU they are views. On CUDA they share one tensor of the batch.
        """
        if self._stream is None:
            return [row[:length] for row, length in zip(features, lengths, strict=True)]
        pinned = self._pinned(sum(lengths), features)
        parts = list(pinned.split(list(lengths)))
        for part, row in zip(parts, features, strict=True):
            part.copy_(row[: len(part)], non_blocking=True)
        self._stream.synchronize()
        return list(pinned.clone().split(list(lengths)))  # the buffer is the next batch's

    def _pinned(self, num_tokens: int, features: Tensor) -> Tensor:
        if self._buffer is None or len(self._buffer) < num_tokens:
            self._buffer = None  # before the larger one is asked for
            shape = (num_tokens, *features.shape[2:])
            self._buffer = torch.empty(shape, dtype=features.dtype, pin_memory=True)
        return self._buffer[:num_tokens]
