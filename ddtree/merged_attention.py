"""Attention of tree nodes over a long prefix without a (T, prefix) mask and without repeated keys.

Every node sees the whole prefix, so that part needs no mask: the query heads that share a key head become more queries of
it, and any fused kernel that returns its log-sum-exp does it without copying a key. The nodes among themselves are a small
masked product. The two are merged by their log-sum-exps:

    w = sigmoid(lse_nodes - lse_prefix),  out = out_prefix + w (out_nodes - out_prefix)

which is the softmax over both. transformers' masked SDPA copies the prefix once a query head of each group instead (6 times
for Qwen3.6-27B) and picks a slower kernel. Source: merging of partial softmax, as in FlashAttention (arXiv:2205.14135).

R rows, T nodes, L prefix, Hq query heads, Hk key heads, d head size.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward

logger = logging.getLogger(__name__)

NAME = "ddtree_merged"
"""Under which transformers finds it."""
MERGE_FROM = 1024
"""Committed tokens from which it pays (measured: tests and docs/verification.md); shorter prefixes take the mask."""
_PLAIN_KEYS = 4096
"""Keys at a time where no fused kernel returns its log-sum-exp."""

_Partial = tuple[Tensor, Tensor]
"""Outputs (R, Hk, n, d) and log-sum-exps (R, Hk, n)."""
_Kernel = Callable[[Tensor, Tensor, Tensor, float], _Partial]


def merged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: float,
    committed_lengths: Sequence[int],
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function: query (R, Hq, T, d), key and value (R, Hk, past + T, d) -> (R, T, Hq, d).

    attention_mask (R, 1, T, T) bool among the nodes; a mask over all keys (a sliding window's) goes to plain SDPA.
    committed_lengths: of each row, at the front of `key`; the nodes are at its end.
    """
    if attention_mask.shape[-1] == key.shape[2]:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **kwargs
        )
    num_rows, _, num_nodes, width = query.shape
    num_key_heads = key.shape[1]
    packed = query.reshape(num_rows, num_key_heads, -1, width)  # (R, Hk, Hq / Hk * T, d)
    on_prefix = _over_prefixes(packed, key, value, scaling, committed_lengths)
    mask = attention_mask.expand(-1, packed.shape[2] // num_nodes, -1, -1).flatten(1, 2)[:, None]
    among_nodes = _plain(packed, key[:, :, -num_nodes:], value[:, :, -num_nodes:], scaling, mask)
    merged = merge_partials(on_prefix, among_nodes)
    return merged.view(num_rows, -1, num_nodes, value.shape[-1]).transpose(1, 2).contiguous(), None


def merge_partials(a: _Partial, b: _Partial) -> Tensor:
    """The softmax over the keys of both; a part without keys has outputs 0 and log-sum-exps -inf."""
    weight = torch.sigmoid(b[1] - a[1])[..., None]
    return (a[0] + weight * (b[0] - a[0])).to(b[0].dtype)


@contextlib.contextmanager
def merging(config: PreTrainedConfig) -> Iterator[None]:
    """While open, the model of this text config attends by `merged_attention`."""
    own = config._attn_implementation
    config._attn_implementation = NAME
    try:
        yield
    finally:
        config._attn_implementation = own


def _over_prefixes(
    queries: Tensor, keys: Tensor, values: Tensor, scaling: float, lengths: Sequence[int]
) -> _Partial:
    """Each row over its own committed keys: no padding is read."""
    kernel = _kernel(queries.device, queries.dtype, queries.shape[-1])
    if len(set(lengths)) == 1:
        return kernel(queries, keys[:, :, : lengths[0]], values[:, :, : lengths[0]], scaling)
    parts = []
    for row, length in enumerate(lengths):
        mine = slice(row, row + 1)
        parts.append(
            kernel(queries[mine], keys[mine, :, :length], values[mine, :, :length], scaling)
            if length > 0
            else _nothing(queries[mine], values)
        )
    outputs, log_sums = zip(*parts, strict=True)
    return torch.cat(outputs), torch.cat(log_sums)


def _nothing(queries: Tensor, values: Tensor) -> _Partial:
    shape = queries.shape[:3]
    return values.new_zeros(*shape, values.shape[-1]), queries.new_full(shape, -torch.inf).float()


def _plain(
    queries: Tensor, keys: Tensor, values: Tensor, scaling: float, mask: Tensor | None = None
) -> _Partial:
    """By hand; softmax in float32 (float64 for float64). Every query sees at least one key."""
    scores = (queries @ keys.mT) * scaling
    scores = scores.double() if scores.dtype == torch.float64 else scores.to(torch.float32)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    log_sums = scores.logsumexp(-1)
    return (scores - log_sums[..., None]).exp().to(values.dtype) @ values, log_sums


def _plain_in_pieces(queries: Tensor, keys: Tensor, values: Tensor, scaling: float) -> _Partial:
    outputs, log_sums = _nothing(queries, values)
    for k, v in zip(keys.split(_PLAIN_KEYS, 2), values.split(_PLAIN_KEYS, 2), strict=True):
        piece = _plain(queries, k, v, scaling)
        outputs = merge_partials((outputs, log_sums.to(piece[1].dtype)), piece)
        log_sums = torch.logaddexp(log_sums.to(piece[1].dtype), piece[1])
    return outputs, log_sums


def _flash_cpu(queries: Tensor, keys: Tensor, values: Tensor, scaling: float) -> _Partial:
    found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        queries, keys, values, 0.0, False, scale=scaling
    )
    return found[0], found[1]


def _flash_cuda(queries: Tensor, keys: Tensor, values: Tensor, scaling: float) -> _Partial:
    found = torch.ops.aten._scaled_dot_product_flash_attention(
        queries, keys, values, 0.0, False, False, scale=scaling
    )
    return found[0], found[1]


def _efficient_cuda(queries: Tensor, keys: Tensor, values: Tensor, scaling: float) -> _Partial:
    found = torch.ops.aten._scaled_dot_product_efficient_attention(
        queries, keys, values, None, True, 0.0, False, scale=scaling
    )
    return found[0], found[1][:, :, : queries.shape[2]]  # padded to the kernel's tile


_KERNELS: dict[str, tuple[_Kernel, ...]] = {
    "cpu": (_flash_cpu,),
    "cuda": (_flash_cuda, _efficient_cuda),
}


@functools.cache
def _kernel(device: torch.device, dtype: torch.dtype, width: int) -> _Kernel:
    """The first fused kernel that gives what the plain product gives here, tried once on small tensors."""
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(1, 2, n, width, generator=generator) for n in (33, 70, 70)]
    queries, keys, values = (x.to(device, dtype) for x in made)
    expected = _plain(queries, keys, values, width**-0.5)
    for kernel in _KERNELS.get(device.type, ()):
        try:
            found = kernel(queries, keys, values, width**-0.5)
        except (RuntimeError, NotImplementedError, AttributeError) as error:
            logger.warning("%s does not run on %s in %s: %s", kernel.__name__, device, dtype, error)
            continue
        errors = [
            (a.double() - b.double()).abs().max() for a, b in zip(found, expected, strict=True)
        ]
        if float(max(errors)) < 8 * torch.finfo(dtype).eps:
            return kernel
        logger.warning("%s is off by %.1e on %s in %s", kernel.__name__, max(errors), device, dtype)
    return _plain_in_pieces


AttentionInterface.register(NAME, merged_attention)
