"""Log-probs of a few tokens a row, without ever holding the rows' logits: the head in chunks of rows.

R rows, M asked tokens a row, H hidden, V vocabulary, k top tokens. For any loss of the asked log-probs, with c_v its
derivative by log q(v) and h = E_q[W] = softmax(logits) W,

    d loss / d hidden = sum_v c_v W[v] - (sum_v c_v) h

so the forward pass keeps h, and backward is a gather and a subtraction. Derived from first principles.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

CPU_CHUNK_BYTES = 2**26
"""Logits alive at once on a CPU: more rows do not make its matmuls faster (bench/head.py)."""
MIN_CHUNK_ROWS = 128


@dataclass(frozen=True)
class SparseLogProbs:
    log_probs: Tensor  # (R, M) float32, of the asked tokens; differentiable
    top_log_probs: Tensor | None  # (R, k) float32, falling; no gradient
    top_ids: Tensor | None  # (R, k) int64; of equal logits the lower id comes first


def sparse_log_probs(
    hidden: Tensor,
    head: Tensor,
    token_ids: Tensor,
    top_k: int = 0,
    chunk_rows: int = 1024,
    temperature: float | Tensor = 1.0,
) -> SparseLogProbs:
    """log softmax(hidden @ head.T / temperature) at `token_ids`, and the `top_k` best tokens of each row.

    hidden: (R, H); head: (V, H), frozen; token_ids: (R, M) int64 in 0..V-1; temperature: one for all rows, or (R,)
    on their device, no gradient. Log-probs are float32 (float64 for float64 inputs); the softmax is never taken in bf16.
    Memory beyond the result is chunk_rows * V values; on the CPU chunks are cut smaller (to 64 MiB, or 128 rows).
    """
    assert not head.requires_grad, "the head is the target's and frozen"
    assert token_ids.shape[0] == hidden.shape[0], (token_ids.shape, hidden.shape)
    chunk_rows = _fitting(chunk_rows, hidden, head)
    needs_grad = hidden.requires_grad and torch.is_grad_enabled()
    log_probs, top_log_probs, top_ids = _SparseLogProbs.apply(
        hidden, head, token_ids, top_k, chunk_rows, temperature, needs_grad
    )
    if top_k == 0:
        return SparseLogProbs(log_probs, None, None)
    return SparseLogProbs(log_probs, top_log_probs, top_ids)


@torch.no_grad()
def log_probs_at(
    hidden: Tensor,
    head: Tensor,
    token_ids: Tensor,
    top_k: int,
    temperatures: Sequence[float | Tensor],
    chunk_rows: int = 1024,
) -> list[SparseLogProbs]:
    """`sparse_log_probs` at each temperature, the same bits, without gradient: the product with the head is made once for all."""
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    chunk_rows = _fitting(chunk_rows, hidden, head)
    found: list[list[tuple[Tensor, ...]]] = [[] for _ in temperatures]
    for start in range(0, len(hidden), chunk_rows):
        chunk = slice(start, start + chunk_rows)
        logits = _matmul(hidden[chunk].to(head.dtype), head.T, dtype)
        for place, temperature in enumerate(temperatures):
            of_rows = temperature[chunk, None] if isinstance(temperature, Tensor) else temperature
            own = logits if place == len(temperatures) - 1 else logits.clone()  # is overwritten
            found[place].append(
                _read(own, head, token_ids[chunk], top_k, of_rows, needs_mean=False)[:3]
            )
    return [SparseLogProbs(*map(torch.cat, zip(*chunks, strict=True))) for chunks in found]


def _fitting(chunk_rows: int, hidden: Tensor, head: Tensor) -> int:
    if hidden.is_cuda:
        return chunk_rows
    return min(chunk_rows, max(MIN_CHUNK_ROWS, CPU_CHUNK_BYTES // (4 * len(head))))


class _SparseLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head: Tensor,
        token_ids: Tensor,
        top_k: int,
        chunk_rows: int,
        temperature: float | Tensor,
        needs_grad: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        rows, size = hidden.shape
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        log_probs = hidden.new_empty(token_ids.shape, dtype=dtype)
        top_log_probs = hidden.new_empty((rows, top_k), dtype=dtype)
        top_ids = token_ids.new_empty((rows, top_k))
        mean_rows = hidden.new_empty((rows if needs_grad else 0, size), dtype=dtype)  # h, E_q[W]
        for start in range(0, rows, chunk_rows):
            chunk = slice(start, start + chunk_rows)
            of_rows = temperature[chunk, None] if isinstance(temperature, Tensor) else temperature
            found = _scan(hidden[chunk], head, token_ids[chunk], top_k, of_rows, needs_grad, dtype)
            log_probs[chunk], top_log_probs[chunk], top_ids[chunk] = found[:3]
            if needs_grad:
                mean_rows[chunk] = found[3]
        ctx.save_for_backward(head, token_ids, mean_rows)
        ctx.temperature, ctx.chunk_rows, ctx.hidden_dtype = temperature, chunk_rows, hidden.dtype
        ctx.mark_non_differentiable(top_log_probs, top_ids)
        return log_probs, top_log_probs, top_ids

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - torch's stub has one name for all
        ctx: Any, grad: Tensor, *_: Tensor
    ) -> tuple[Tensor | None, ...]:
        head, token_ids, mean_rows = ctx.saved_tensors
        gradient = mean_rows * -grad.sum(-1, keepdim=True)
        # the gathered rows are (chunk, M, H): keep them as small as the forward's chunk is
        chunk_rows = max(1, ctx.chunk_rows // max(1, token_ids.shape[1]))
        for start in range(0, len(grad), chunk_rows):
            chunk = slice(start, start + chunk_rows)
            asked = head[token_ids[chunk]].to(grad.dtype)  # (chunk, M, H)
            gradient[chunk] += (grad[chunk, None] @ asked)[:, 0]
        temperature = ctx.temperature
        per_row = temperature[:, None] if isinstance(temperature, Tensor) else temperature
        gradient = (gradient / per_row).to(ctx.hidden_dtype)
        return gradient, None, None, None, None, None, None


def _scan(
    hidden: Tensor,
    head: Tensor,
    token_ids: Tensor,
    top_k: int,
    temperature: float | Tensor,
    needs_mean: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One chunk: log-probs of `token_ids` (R, M), the top k's and their ids (R, k), and E_q[W] (R, H) if it is needed.

    A function of its own, so that one chunk's logits are gone before the next one's are made.
    """
    logits = _matmul(hidden.to(head.dtype), head.T, dtype)  # (R, V)
    return _read(logits, head, token_ids, top_k, temperature, needs_mean)


def _read(
    logits: Tensor,
    head: Tensor,
    token_ids: Tensor,
    top_k: int,
    temperature: float | Tensor,
    needs_mean: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`_scan` of logits (R, V), which are overwritten."""
    if isinstance(temperature, Tensor) or temperature != 1.0:
        logits = logits.div_(temperature)
    asked = logits.gather(1, token_ids)
    values, top_ids = ordered_top_k(logits, top_k) if top_k else (asked[:, :0], token_ids[:, :0])
    peak = logits.amax(-1, keepdim=True)
    # in place: of the logits and their exponentials only one ever exists, and exp is taken once
    weights = logits.sub_(peak).exp_()
    total = weights.sum(-1, keepdim=True)
    normaliser = peak + total.log()
    mean = _matmul(weights.to(head.dtype), head, logits.dtype).div_(total) if needs_mean else asked
    return asked - normaliser, values - normaliser, top_ids, mean


def ordered_top_k(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of each row, falling; of equal values the lower index, inside and at the edge of the k.

    values: (R, V). Returns values and int64 indices, (R, k). torch.topk leaves both kinds of tie open.
    """
    size = values.shape[-1]
    best, ids = values.topk(min(k + 1, size), -1)
    if k < size:
        tied = (best[:, k - 1] == best[:, k]).nonzero()[:, 0]
        best, ids = best[:, :k].contiguous(), ids[:, :k].contiguous()
        if len(tied):
            ids[tied] = _lowest_at_the_edge(values[tied], best[tied], ids[tied])
    ids, order = ids.sort(-1)
    best, order = best.gather(1, order).sort(stable=True, dim=-1, descending=True)
    return best, ids.gather(1, order)


def _lowest_at_the_edge(values: Tensor, best: Tensor, ids: Tensor) -> Tensor:
    """`ids` with those that share the k-th value replaced by the lowest ids of that value. All (R, V) or (R, k)."""
    size, k = values.shape[-1], best.shape[-1]
    index = torch.arange(size, 0, -1, dtype=torch.int32, device=values.device)
    lowest = size - (index * (values == best[:, -1:])).topk(k, -1).values.long()  # (R, k) rising
    num_greater = (best > best[:, -1:]).sum(-1, keepdim=True)
    place = torch.arange(k, device=values.device) - num_greater  # (R, k), from 0 at the first tie
    return torch.where(place < 0, ids, lowest.gather(1, place.clamp(min=0)))


def _matmul(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """a @ b as `dtype`; on CUDA bf16 products leave the kernel as float32, on CPU they are rounded to bf16 first."""
    if a.is_cuda and a.dtype != dtype:
        return torch.mm(a, b, out_dtype=dtype)
    return (a @ b).to(dtype)
