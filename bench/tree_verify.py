"""What a verify pass over a tree costs, against decoding as many tokens one by one and against a forked state a branch.

    python -m bench.tree_verify [--size tiny] [--nodes 16 64 256 512] [--device cpu] [--output outputs/bench/tree_verify.json]

A hybrid with random weights (what they are does not matter to time), trees as a drafter of 15 slots makes them, the
committed context as given. The sides of a row run alternately in this process; times are medians over rounds, ratios the
medians of each round's ratio. A sequential step is transformers' own one-token forward with a cache that grows in place;
a fork copies the cache for every branch and runs that branch in one forward of transformers.
"""

from __future__ import annotations

import argparse
import copy
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache, Qwen3_5ForCausalLM, Qwen3_5TextConfig

from common.files import write_json
from ddtree.build import build_tree
from ddtree.tree import DraftTree, chain_tree
from ddtree.verify import TreeVerifier
from target.byte_tokenizer import byte_tokenizer
from target.cache import growing_cache
from target.load import Target, layer_types

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_NUM_SLOTS, _STEPS_A_ROUND, _OFTEN_FORKED = 15, 16, 64
_SIZES = {
    "tiny": {
        "vocab_size": 2048,
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 6,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
    },
    "small": {
        "vocab_size": 8192,
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 12,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
    },
    "qwen3.6-27b": {
        "vocab_size": 248_320,
        "hidden_size": 5120,
        "intermediate_size": 17_408,
        "num_hidden_layers": 4,  # of 64: three Gated DeltaNet, one full attention
        "num_attention_heads": 24,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 48,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
    },
}


@dataclass(frozen=True)
class Row:
    nodes: int
    """Of the tree, root included."""
    depth: int
    branches: int
    verify_ms: float
    commit_ms: float
    """Of the deepest path."""
    step_ms: float
    """One token by transformers; the ratios count `nodes` of them."""
    one_node_ms: float
    """The same token as a tree of one node, verified and committed: plain decoding as evaluation times it."""
    fork_ms: float
    """All branches."""
    steps_ratio: float
    """nodes x step / verify; above 1: the tree is faster."""
    fork_ratio: float
    verify_in_steps: float
    """What a verify pass costs in tokens of plain decoding."""


class Bench:
    """A target with random weights behind a committed context, and its tree verifier."""

    def __init__(self, size: str, context: int, device: torch.device, dtype: torch.dtype):
        self.device, self.generator = device, torch.Generator().manual_seed(0)
        self.target = random_hybrid(size, device, dtype)
        self.prompt = self._tokens(context)
        self.verifier = TreeVerifier(self.target, (1,))
        self.verifier.prefill(self.prompt)
        self.cache = self._after_prompt(growing_cache(self.target.model.config))
        self.fork_from = self._after_prompt(DynamicCache(config=self.target.model.config))

    def row(self, num_nodes: int, num_rounds: int) -> Row:
        """Verify, commit, steps and forks of one tree, in turn."""
        tree = drafted_tree(num_nodes, self.target.vocab_size, self.generator)
        parents = tree.parents.tolist()
        branches = [tree.path(leaf) for leaf in set(range(len(tree))) - set(parents)]
        deepest = max(branches, key=len)
        one = chain_tree(tree.tokens[:1])
        for warm_up in (lambda: self._verify(tree), self._step, lambda: self._verify(one)):
            warm_up()
        times: list[dict[str, float]] = []
        for number in range(num_rounds):
            verify = self._ms(lambda: self._verify(tree))
            commit = self._ms(lambda: self.verifier.commit([deepest]))
            steps = [
                (self._ms(self._step), self._ms(lambda: self._one(one)))
                for _ in range(_STEPS_A_ROUND)
            ]
            found = {"verify": verify, "commit": commit}
            found["step"] = statistics.median(step for step, _ in steps)
            found["one"] = statistics.median(own for _, own in steps)
            if number == 0 or num_nodes <= _OFTEN_FORKED:
                found["fork"] = self._ms(lambda: self._fork(tree, branches))
            times.append(found)
            self._rewind()
        return _summary(num_nodes, tree, len(branches), times)

    def _verify(self, tree: DraftTree) -> None:
        self.verifier.verify([tree])

    def _one(self, tree: DraftTree) -> None:
        self.verifier.verify([tree])
        self.verifier.commit([[0]])

    @torch.inference_mode()
    def _step(self) -> None:
        self.target.model(input_ids=self.prompt[None, :1], cache=self.cache, use_cache=True)

    @torch.inference_mode()
    def _fork(self, tree: DraftTree, branches: list[list[int]]) -> None:
        for branch in branches:
            forked = copy.deepcopy(self.fork_from)
            ids = tree.tokens[branch].to(self.device)
            self.target.model(input_ids=ids[None], cache=forked, use_cache=True)

    @torch.inference_mode()
    def _after_prompt(self, cache: DynamicCache) -> DynamicCache:
        self.target.model(
            input_ids=self.prompt[None], cache=cache, use_cache=True, logits_to_keep=1
        )
        return cache

    def _rewind(self) -> None:
        """Every round starts behind the same context."""
        self.verifier.prefill(self.prompt)
        self.cache = self._after_prompt(growing_cache(self.target.model.config))

    def _tokens(self, count: int) -> torch.Tensor:
        ids = torch.randint(self.target.vocab_size, (count,), generator=self.generator)
        return ids.to(self.device)

    def _ms(self, run: Callable[[], None]) -> float:
        return milliseconds(run, self.device)


def random_hybrid(size: str, device: torch.device, dtype: torch.dtype) -> Target:
    """A qwen3_5 text model of that size, made on the device."""
    torch.manual_seed(0)
    config = Qwen3_5TextConfig(**_SIZES[size], max_position_embeddings=1 << 18)  # pyright: ignore[reportArgumentType]
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            model = Qwen3_5ForCausalLM(config).eval().requires_grad_(False)
    finally:
        torch.set_default_dtype(default)
    return Target(
        model=model,
        tokenizer=byte_tokenizer(),
        hidden_size=config.hidden_size,
        num_layers=config.num_hidden_layers,
        vocab_size=config.vocab_size,
        layer_types=layer_types(config),
        dtype=dtype,
        device=device,
        eos_token_ids=(0,),
    )


def drafted_tree(num_nodes: int, vocab_size: int, generator: torch.Generator) -> DraftTree:
    """Slots whose best token has 55 to 95 % and each next one the same share of the rest: trees 8 to 15 deep."""
    if num_nodes == 1:
        return chain_tree(torch.ones(1))
    best = 0.55 + 0.4 * torch.rand(_NUM_SLOTS, 1, generator=generator)
    log_probs = best.log() + torch.arange(num_nodes) * torch.log1p(-best)
    ids = torch.stack([torch.randperm(vocab_size, generator=generator) for _ in range(_NUM_SLOTS)])
    return build_tree(1, log_probs, ids[:, :num_nodes], num_nodes - 1)


def milliseconds(run: Callable[[], object], device: torch.device) -> float:
    """Of one call, the device's work included."""
    _wait(device)
    start = time.perf_counter()
    run()
    _wait(device)
    return 1e3 * (time.perf_counter() - start)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _summary(
    num_nodes: int, tree: DraftTree, num_branches: int, times: list[dict[str, float]]
) -> Row:
    def median(of: Callable[[dict[str, float]], float], only: str = "verify") -> float:
        return round(statistics.median(of(found) for found in times if only in found), 2)

    return Row(
        nodes=num_nodes,
        depth=int(tree.depths.max()),
        branches=num_branches,
        verify_ms=median(lambda t: t["verify"]),
        commit_ms=median(lambda t: t["commit"]),
        step_ms=median(lambda t: t["step"]),
        one_node_ms=median(lambda t: t["one"]),
        fork_ms=median(lambda t: t["fork"], "fork"),
        steps_ratio=median(lambda t: num_nodes * t["step"] / t["verify"]),
        fork_ratio=median(lambda t: t["fork"] / t["verify"], "fork"),
        verify_in_steps=median(lambda t: t["verify"] / t["step"]),
    )


def machine(device: torch.device) -> str:
    """What the numbers belong to, in one line."""
    chip = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    return f"{chip}, {os.cpu_count()} cores, 1 torch thread, torch {torch.__version__}"


def report(
    output: Path, name: str, device: torch.device, rows: list[Any], **settings: object
) -> None:
    """The JSON, and the same as a table."""
    result = {"name": name, "machine": machine(device), **settings}
    output.parent.mkdir(parents=True, exist_ok=True)
    write_json(output, result | {"rows": [asdict(row) for row in rows]})
    print(f"{name} on {result['machine']}")
    print("  ".join(asdict(rows[0])))
    for row in rows:
        print("  ".join(f"{value:>{len(name)}}" for name, value in asdict(row).items()))
    print(f"written to {output}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--size", choices=list(_SIZES), default="tiny")
    parser.add_argument(
        "--nodes", type=int, nargs="+", default=[16, 64, 256, 512], help="root included"
    )
    parser.add_argument("--context", type=int, default=256, help="committed tokens")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    parser.add_argument("--dtype", choices=list(DTYPES), default="float32")
    parser.add_argument("--output", type=Path, default=Path("outputs/bench/tree_verify.json"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    size, context, dtype = arguments.size, arguments.context, arguments.dtype
    bench = Bench(size, context, arguments.device, DTYPES[dtype])
    rows = [bench.row(n, arguments.rounds) for n in arguments.nodes]
    settings = {"size": size, "context": context, "dtype": dtype}
    report(arguments.output, "tree_verify", arguments.device, rows, **settings)


if __name__ == "__main__":
    main()
