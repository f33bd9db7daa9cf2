"""The gated delta rule over a whole tree in one pass, and the state after any of its nodes.

Token by token a layer's state follows S <- e^g S; u = beta (v - S^T k); S <- S + k u^T; o = S^T q. Unrolled along the path
from the root, with c the sum of g over a node and its ancestors and D[t, j] = exp(c_t - c_j) where j is t or an ancestor of
t, else 0:

    M[t, j] = beta_t (k_t . k_j) D[t, j]            j a strict ancestor
    (I + M) U = beta (V - exp(c) K S0)              one unit-triangular solve
    O = exp(c) Q S0 + (Q K^T * D) U
    state after node a: exp(c_a) S0 + sum over its path of exp(c_a - c_j) k_j u_j^T

So no node needs a state of its own: K, U and c of the tree are enough for any commit. Source: the WY form of the gated delta
rule (arXiv:2412.06464) with its causal mask replaced by ancestry.

Numerics. The mask comes before exp: c_t - c_j is at most 0 for ancestors and can overflow for others. c is float64, as its
differences matter and it may reach hundreds. The core is float32 (float64 for a float64 target) without TF32. The system is
solved, never expanded into a Neumann series, whose terms cancel for correlated keys.

R rows, T nodes, Hk key heads, Hv value heads (consecutive ones share a key head), dk and dv head sizes, P path nodes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ddtree.nodes import NodeBatch, PathBatch

_NORM_EPS = 1e-6
"""Inside the square root, as the models' own kernels have it."""
_SUBSTITUTION_FROM = 112
"""Nodes from which summing over ancestors beats the dense solve on a CPU (bench/verify_parts.py)."""


@dataclass(frozen=True, eq=False)
class TreeInputs:
    """What the projections and the convolution give for every node."""

    queries: Tensor  # (R, T, Hk, dk), not normalised
    keys: Tensor  # (R, T, Hk, dk), not normalised
    values: Tensor  # (R, T, Hv, dv)
    log_decay: Tensor  # (R, T, Hv), at most 0
    beta: Tensor  # (R, T, Hv), in 0..1


@dataclass(frozen=True, eq=False)
class TreeWrites:
    """What the nodes would write into the state: all that a commit needs. Core dtype."""

    keys: Tensor  # (R, Hk, T, dk), normalised
    updates: Tensor  # (R, Hv, T, dv): u above
    log_decay: Tensor  # (R, Hv, T) float64: c above


def core_dtype(dtype: torch.dtype) -> torch.dtype:
    """float32, whatever the target's, and float64 for a float64 target."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def tree_delta_rule(
    inputs: TreeInputs, states: Tensor, nodes: NodeBatch, by_substitution: bool | None = None
) -> tuple[Tensor, TreeWrites]:
    """Outputs (R, T, Hv, dv) in the values' dtype and the writes, given the states (R, Hv, dk, dv) before the roots.

    `by_substitution`: sum over each node's ancestors, depth by depth, in place of the dense solve; None chooses by size and
    device.
    """
    core = states.dtype
    queries, keys, values = (
        x.transpose(1, 2).to(core) for x in (inputs.queries, inputs.keys, inputs.values)
    )
    queries, keys = _unit(queries) * queries.shape[-1] ** -0.5, _unit(keys)
    beta = inputs.beta.transpose(1, 2).to(core)[..., None]  # (R, Hv, T, 1)
    if by_substitution is None:
        by_substitution = _substitution_pays(nodes)
    with true_float32():
        log_decay = inputs.log_decay.transpose(1, 2).double() @ nodes.ancestor_weights
        decay = log_decay.to(core).exp()[..., None]  # (R, Hv, T, 1)
        key_reads, query_reads = _reads(keys, queries, states)
        wanted = beta * (values - decay * key_reads)
        solve = _substitute if by_substitution else _solve
        updates, outputs = solve(queries, keys, wanted, beta, log_decay, nodes)
        outputs = outputs.addcmul_(decay, query_reads)
    return outputs.transpose(1, 2).to(inputs.values.dtype), TreeWrites(keys, updates, log_decay)


def commit_states(states: Tensor, writes: Sequence[TreeWrites], paths: PathBatch) -> None:
    """Advance the states of all layers, (L, R, Hv, dk, dv), down one path a row, in place: a rank-P update, no replay."""
    dk, dv = states.shape[-2:]
    keys = on_path([w.keys for w in writes], paths.nodes)  # (L, R, Hk, P, dk)
    updates = on_path([w.updates for w in writes], paths.nodes)  # (L, R, Hv, P, dv)
    log_decay = on_path([w.log_decay[..., None] for w in writes], paths.nodes)  # (L, R, Hv, P, 1)
    counts = paths.is_on_path.sum(1)
    last = (counts - 1).clamp_min(0)[:, None, None, None]
    total = torch.take_along_dim(log_decay, last[None], dim=3)  # (L, R, Hv, 1, 1): c of the ends
    off_path = ~paths.is_on_path[:, None, :, None]
    weights = (total - log_decay).masked_fill_(off_path, -torch.inf).exp_().to(states.dtype)
    total = total.masked_fill((counts == 0)[:, None, None, None], 0.0)  # an idle row stays
    repeats = states.shape[2] // keys.shape[2]
    with true_float32():
        states.mul_(total.exp().to(states.dtype))
        states.view(-1, dk, dv).baddbmm_(
            (keys.repeat_interleave(repeats, dim=2) * weights).flatten(0, 2).mT,
            updates.flatten(0, 2),
        )


def on_path(values: Sequence[Tensor], places: Tensor) -> Tensor:
    """The values (R, ..., T, d) of L layers at `places` (R, P): (L, R, ..., P, d).

    A GPU is better off with two kernels over all nodes, a CPU with few bytes.
    """
    index = places.view(places.shape[0], *[1] * (values[0].ndim - 3), -1, 1)
    if places.device.type == "cuda":
        return torch.take_along_dim(torch.stack(list(values)), index[None], dim=-2)
    return torch.stack([torch.take_along_dim(value, index, dim=-2) for value in values])


def tree_convolution(
    cached: Tensor, inputs: Tensor, weight: Tensor, bias: Tensor | None, columns: Tensor
) -> Tensor:
    """The short causal convolution down every path: (R, T, C) before the activation, in the inputs' dtype.

    cached (R, W - 1, C): the last inputs before the roots; inputs (R, T, C); weight (C, W);
    columns (R, T, W) from `NodeBatch.convolution_columns`.
    """
    core = core_dtype(inputs.dtype)
    num_rows, num_nodes, num_channels = inputs.shape
    longer = torch.cat([cached, inputs], dim=1)  # (R, W - 1 + T, C)
    starts = torch.arange(num_rows, device=inputs.device)[:, None, None] * longer.shape[1]
    places = (columns + starts).flatten(0, 1).unbind(1)
    flat, weight = longer.flatten(0, 1), weight.to(core)
    total = inputs.new_zeros((), dtype=core) if bias is None else bias.to(core)
    for step, place in enumerate(places):  # W is 4; all at once would need W times the memory
        total = torch.addcmul(total, flat.index_select(0, place).to(core), weight[:, step])
    return total.to(inputs.dtype).view(num_rows, num_nodes, num_channels)


@contextlib.contextmanager
def true_float32() -> Iterator[None]:
    """No TF32 inside: 4e-4 of error in place of 6e-7, for a share of under 1 % of a layer's arithmetic."""
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(precision)


def _solve(
    queries: Tensor, keys: Tensor, wanted: Tensor, beta: Tensor, log_decay: Tensor, nodes: NodeBatch
) -> tuple[Tensor, Tensor]:
    """Updates, and outputs without the states' share: dense (R, Hv, T, T) products and one triangular solve."""
    gaps = (log_decay[..., :, None] - log_decay[..., None, :]).to(wanted.dtype)
    factors = gaps.masked_fill_(~nodes.ancestors[:, None], -torch.inf).exp_()  # D
    grouped = factors.unflatten(1, (keys.shape[1], -1))  # (R, Hk, Hv / Hk, T, T)
    system = ((keys @ keys.mT)[:, :, None] * grouped).flatten(1, 2) * beta
    # reads below the diagonal only
    updates = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
    mixing = ((queries @ keys.mT)[:, :, None] * grouped).flatten(1, 2)
    return updates, mixing @ updates


def _substitute(
    queries: Tensor, keys: Tensor, wanted: Tensor, beta: Tensor, log_decay: Tensor, nodes: NodeBatch
) -> tuple[Tensor, Tensor]:
    """The same by forward substitution, all nodes of one depth at a time: T * depth products in place of T * T."""
    updates, outputs = torch.empty_like(wanted), torch.empty_like(wanted)
    repeats = wanted.shape[1] // keys.shape[1]
    own = (queries * keys).sum(-1, keepdim=True).repeat_interleave(repeats, dim=1)
    both = torch.stack([keys, queries], dim=-1)  # (R, Hk, T, dk, 2)
    for row, levels in enumerate(nodes.levels):
        for level, above in levels:  # (n,) nodes of one depth, (n, depth) their strict ancestors
            seen = keys[row][:, above] @ both[row][:, level]  # (Hk, n, depth, 2)
            gaps = log_decay[row][:, level, None] - log_decay[row][:, above]
            factors = gaps.to(wanted.dtype).exp_()[..., None]  # (Hv, n, depth, 1)
            shares = (seen.repeat_interleave(repeats, dim=0) * factors).mT  # (Hv, n, 2, depth)
            read, answer = (shares @ updates[row][:, above]).unbind(2)  # (Hv, n, dv) each
            found = wanted[row][:, level] - beta[row][:, level] * read
            updates[row][:, level] = found
            outputs[row][:, level] = answer + own[row][:, level] * found
    return updates, outputs


def _substitution_pays(nodes: NodeBatch) -> bool:
    """Not on a GPU, where each depth would cost several launches."""
    deepest = int(nodes.host_depths.max())
    return (
        nodes.tokens.device.type == "cpu"
        and nodes.num_nodes >= _SUBSTITUTION_FROM
        and nodes.num_nodes >= 8 * (deepest + 1)
    )


def _reads(keys: Tensor, queries: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
    """K S and Q S, (R, Hv, T, dv) each."""
    both = torch.cat([keys, queries], dim=2)[:, :, None]  # (R, Hk, 1, 2T, dk)
    found = (both @ states.unflatten(1, (keys.shape[1], -1))).flatten(1, 2)
    key_reads, query_reads = found.split(keys.shape[2], dim=2)
    return key_reads, query_reads


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + _NORM_EPS)
