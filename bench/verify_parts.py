"""The two parts of a tree pass that have two ways, side by side, at Qwen3.6-27B's head sizes: which one pays from where.

    python -m bench.verify_parts [--nodes 1 64 256] [--context 256 1024 4096] [--device cpu] [--dtype float32]

core: one layer's delta rule, dense triangular solve against substitution over ancestors. attention: one full-attention
layer, as transformers does it under a (T, prefix) mask, against prefix and nodes apart, merged by log-sum-exp. Both ways run
alternately; a ratio is the median of each round's ratio, and above 1 the second way is faster.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from bench.tree_verify import DTYPES, drafted_tree, milliseconds, report
from ddtree.gdn import TreeInputs, tree_delta_rule
from ddtree.merged_attention import merged_attention
from ddtree.nodes import NodeBatch


@dataclass(frozen=True)
class Row:
    part: str
    """core: dense, then substitution; attention: masked, then merged."""
    nodes: int
    context: int
    """Committed tokens; the core's time does not depend on them."""
    first_ms: float
    second_ms: float
    ratio: float


class _GroupedHeads(nn.Module):
    """What transformers' attention reads of a module."""

    num_key_value_groups = 6


def core_row(num_nodes: int, num_rounds: int, device: torch.device) -> Row:
    """float32, whatever the target's dtype: so is the core of every verify pass."""
    generator = torch.Generator().manual_seed(num_nodes)
    nodes = _nodes(num_nodes, 0, generator, device)
    keys, values = (torch.randn(1, num_nodes, n, 128, generator=generator) for n in (16, 48))
    gates = torch.rand(1, num_nodes, 48, generator=generator)
    given = [x.to(device) for x in (keys, keys, values, -gates, gates)]
    states = torch.randn(1, 48, 128, 128, generator=generator).to(device)
    inputs = TreeInputs(*given)
    ways = [lambda w=way: tree_delta_rule(inputs, states, nodes, w) for way in (False, True)]
    return _row("core", num_nodes, 0, ways, num_rounds, device)


def attention_row(
    num_nodes: int, context: int, num_rounds: int, device: torch.device, dtype: torch.dtype
) -> Row:
    """24 query heads on 4 key heads of 256."""
    generator = torch.Generator().manual_seed(0)
    nodes = _nodes(num_nodes, context, generator, device)
    query, key, value = (
        torch.randn(1, heads, count, 256, generator=generator).to(device, dtype)
        for heads, count in ((24, num_nodes), (4, context + num_nodes), (4, context + num_nodes))
    )
    seen = nodes.ancestors.new_ones(1, num_nodes, context)
    mask = torch.cat([seen, nodes.ancestors], dim=2)[:, None]
    among, module, scaling = nodes.ancestors[:, None], _GroupedHeads(), 1 / 16
    ways = [
        lambda: sdpa_attention_forward(module, query, key, value, mask, scaling=scaling),
        lambda: merged_attention(
            module, query, key, value, among, scaling, committed_lengths=(context,)
        ),
    ]
    return _row("attention", num_nodes, context, ways, num_rounds, device)


def _nodes(
    num_nodes: int, context: int, generator: torch.Generator, device: torch.device
) -> NodeBatch:
    return NodeBatch.of(
        [drafted_tree(num_nodes, 4096, generator)], [context], [0], num_nodes, device
    )


def _row(
    part: str,
    num_nodes: int,
    context: int,
    ways: Sequence[Callable[[], object]],
    num_rounds: int,
    device: torch.device,
) -> Row:
    times = [[milliseconds(way, device) for way in ways] for _ in range(num_rounds + 1)][1:]
    first, second = zip(*times, strict=True)
    medians = [statistics.median(x) for x in (first, second, [a / b for a, b in times])]
    return Row(part, num_nodes, context, *(round(value, 2) for value in medians))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 64, 256])
    parser.add_argument("--context", type=int, nargs="+", default=[256, 1024, 4096])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    parser.add_argument("--dtype", choices=list(DTYPES), default="float32")
    parser.add_argument("--output", type=Path, default=Path("outputs/bench/verify_parts.json"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rounds, device, dtype = arguments.rounds, arguments.device, DTYPES[arguments.dtype]
    with torch.inference_mode():
        rows = [core_row(n, rounds, device) for n in arguments.nodes]
        for num_nodes in arguments.nodes:
            for context in arguments.context:
                rows.append(attention_row(num_nodes, context, rounds, device, dtype))
    report(arguments.output, "verify_parts", device, rows, dtype=arguments.dtype)


if __name__ == "__main__":
    main()
