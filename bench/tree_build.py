"""How fast is the build: one block against a naive heap, from log-probs and from logits, and 256 blocks at once.

    python -m bench.tree_build [--output outputs/bench/tree_build.json] [--device cuda] [--budgets 16 64 ...]

Both sides of a row run alternately in this process and build the same trees, which is checked; a row's ratio is the median
over rounds of other time / our time. `from logits` starts at a block's logits over a vocabulary of 49,152: ours takes the
top of each slot, the other side sorts it. Half a minute on an idle CPU core.
"""

from __future__ import annotations

import argparse
import heapq
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from common.files import write_json
from ddtree.build import build_tree, build_trees
from ddtree.tree import DraftTree
from drafter.head import ordered_top_k

_NUM_SLOTS, _VOCABULARY, _NUM_BLOCKS, _NUM_ROUNDS = 15, 4096, 256, 7
_LOGITS_VOCABULARY = 49_152
_BUDGETS = (16, 32, 64, 128, 256, 512, 1024)


@dataclass(frozen=True)
class Row:
    case: str
    budget: int
    num_blocks: int
    ours_us_per_block: float
    other_us_per_block: float
    ratio: float
    """Above 1: ours is faster."""


def naive_heap(log_probs: Tensor, ids: Tensor, budget: int) -> list[tuple[int, int]]:
    """(parent, token) a node, best first: the textbook heap, reading tensors element by element, ties left to chance."""
    num_slots, num_listed = log_probs.shape
    heap = [(-float(log_probs[0, 0]), 1, 0, -1)]
    nodes: list[tuple[int, int]] = []
    while heap and len(nodes) < budget:
        cost, depth, rank, parent = heapq.heappop(heap)
        nodes.append((parent, int(ids[depth - 1, rank])))
        if rank + 1 < num_listed:
            step = float(log_probs[depth - 1, rank]) - float(log_probs[depth - 1, rank + 1])
            heapq.heappush(heap, (cost + step, depth, rank + 1, parent))
        if depth < num_slots:
            child = cost - float(log_probs[depth, 0])
            heapq.heappush(heap, (child, depth + 1, 0, len(nodes) - 1))
    return nodes


def from_logits(logits: Tensor, budget: int) -> DraftTree:
    """A block's tree from its logits (L, V), as decoding makes it: soft-max, top-k, one transfer, heap."""
    values, ids = ordered_top_k(logits, min(budget, logits.shape[1]))
    log_probs = values - logits.logsumexp(-1, keepdim=True)
    return build_tree(0, log_probs.cpu(), ids.cpu(), budget)


def from_sorted_logits(logits: Tensor, budget: int) -> list[tuple[int, int]]:
    """The same by log-softmax, a sort of the vocabulary, and the textbook heap."""
    found = logits.log_softmax(-1).sort(dim=-1, descending=True, stable=True)
    return naive_heap(found.values[:, :budget], found.indices[:, :budget], budget)


def measure(case: str, budget: int, num_blocks: int, ours: Callable, other: Callable) -> Row:
    """Alternate the two and compare round by round."""
    for warm_up in (ours, other):
        warm_up()
    times = [(_seconds(ours), _seconds(other)) for _ in range(_NUM_ROUNDS)]
    per_block = 1e6 / num_blocks
    return Row(
        case,
        budget,
        num_blocks,
        round(statistics.median(a for a, _ in times) * per_block, 1),
        round(statistics.median(b for _, b in times) * per_block, 1),
        round(statistics.median(b / a for a, b in times), 2),
    )


def check_equal(logits: Tensor, budget: int, device: str) -> None:
    """All ways build one tree. The textbook heap orders equal scores by chance, so of its nodes only the set is compared."""
    exact = logits.double()
    log_probs, ids = exact.log_softmax(-1).topk(budget)
    parents = build_trees(log_probs.to(device), budget).parents.tolist()
    for n, block in enumerate(exact):
        tree = build_tree(0, log_probs[n], ids[n], budget)
        assert parents[n] == (tree.parents[1:] - 1).tolist()
        assert torch.equal(from_logits(block, budget).tokens, tree.tokens)
        wanted = _paths(list(zip(parents[n], tree.tokens[1:].tolist(), strict=True)))
        assert _paths(naive_heap(log_probs[n], ids[n], budget)) == wanted
        assert _paths(from_sorted_logits(block, budget)) == wanted


def _paths(nodes: list[tuple[int, int]]) -> set[tuple[int, ...]]:
    """The tokens from the root to each (parent, token)."""
    paths: list[tuple[int, ...]] = []
    for parent, token in nodes:
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return set(paths)


def rows_for(budget: int, device: str) -> list[Row]:
    generator = torch.Generator().manual_seed(budget)
    logits = 4 * torch.randn(_NUM_BLOCKS, _NUM_SLOTS, _VOCABULARY, generator=generator)
    log_probs, ids = torch.log_softmax(logits, dim=-1).topk(budget)
    on_device = log_probs.to(device)
    few = 4
    block = 4 * torch.randn(_NUM_SLOTS, _LOGITS_VOCABULARY, generator=generator)

    def heaps(count: int) -> list:
        return [build_tree(0, log_probs[n], ids[n], budget) for n in range(count)]

    def naive() -> list:
        return [naive_heap(log_probs[n], ids[n], budget) for n in range(few)]

    def batched() -> Tensor:
        return build_trees(on_device, budget).parents.cpu()  # waits for the device

    check_equal(logits[:few], budget, device)
    return [
        measure("build_tree vs naive heap", budget, few, lambda: heaps(few), naive),
        measure(
            "from logits vs sort and heap",
            budget,
            1,
            lambda: from_logits(block, budget),
            lambda: from_sorted_logits(block, budget),
        ),
        measure(
            f"build_trees ({device}) vs build_tree",
            budget,
            _NUM_BLOCKS,
            batched,
            lambda: heaps(_NUM_BLOCKS),
        ),
    ]


def machine(device: str) -> str:
    """What the numbers belong to, in one line."""
    chip = torch.cuda.get_device_name(device) if device != "cpu" else platform.machine()
    return f"{chip}, {os.cpu_count()} cores, 1 torch thread, torch {torch.__version__}"


def _seconds(run: Callable) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Side by side: build_tree, build_trees, a naive heap"
    )
    parser.add_argument("--output", type=Path, default=Path("outputs/bench/tree_build.json"))
    parser.add_argument("--device", default="cpu", help="where build_trees runs")
    parser.add_argument("--budgets", type=int, nargs="+", default=list(_BUDGETS))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = [row for budget in arguments.budgets for row in rows_for(budget, arguments.device)]
    result = {
        "name": "tree_build",
        "machine": machine(arguments.device),
        "rows": [asdict(row) for row in rows],
    }
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    write_json(arguments.output, result)
    print(f"{result['name']} on {result['machine']}")
    print(f"{'case':<34}{'budget':>7}{'blocks':>7}{'ours us':>9}{'other us':>10}{'ratio':>7}")
    for row in rows:
        print(
            f"{row.case:<34}{row.budget:>7}{row.num_blocks:>7}{row.ours_us_per_block:>9}"
            f"{row.other_us_per_block:>10}{row.ratio:>7}"
        )
    print(f"written to {arguments.output}")


if __name__ == "__main__":
    main()
