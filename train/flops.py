"""Floating-point operations that training needs, counted from shapes alone, and what a GPU could do at best. No torch.

A multiply-add counts as two. Matrix products only: norms, softmax, rotations and the optimizer are left out, as is usual.
Attention counts the query-key pairs that the mask shows. What is computed twice (activation checkpointing) or for nothing
(padding, masked scores) does not count, so that MFU says how well the hardware is used, as PaLM defined it
(arXiv:2204.02311, appendix B).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache

from drafter.config import DrafterConfig
from drafter.shapes import expected_shapes

PEAK_TFLOPS: tuple[tuple[str, float], ...] = (
    (r"\bGB200\b|\bGB300\b", 2500.0),
    (r"\bB200\b|\bB300\b", 2250.0),
    (r"\bH100 PCIe\b", 756.0),
    (r"\bH100 NVL\b", 835.0),
    (r"\bH200 NVL\b", 835.0),
    (r"\bH100\b|\bH200\b|\bGH200\b|\bH800\b", 989.4),
    (r"\bH20\b", 148.0),
    (r"\bA100\b|\bA800\b", 312.0),
    (r"\bL40S\b", 362.0),
    (r"\bL4\b", 121.0),
    (r"\bA40\b", 149.7),
    (r"\bA10\b", 125.0),
    (r"\bRTX 5090\b", 209.5),
    (r"\bRTX 4090\b", 165.2),
    (r"\bRTX 3090\b", 71.0),
)
"""Dense bf16 TFLOP/s by device name, the first match counts. Source: NVIDIA's data sheets (without sparsity)."""


@dataclass(frozen=True)
class Work:
    """What a batch asks of a drafter, padding left out; sums of batches are sums of these."""

    context_tokens: float
    blocks: float
    head_rows: float
    """Slots whose token is scored."""
    pairs: tuple[float, ...]
    """By layer: query-key pairs that the mask shows."""


@lru_cache(maxsize=65_536)
def block_pairs(anchor: float, block_size: int, window: int | None) -> float:
    """Pairs of one block whose anchor stands at position `anchor` of its document, by the rule of drafter/masks.py."""
    if window is None:
        return block_size * (anchor + block_size)
    context = sum(max(0.0, min(anchor, window - 1 - slot)) for slot in range(block_size))
    return context + sum(min(slot + 1, window) for slot in range(block_size))


def work_of_blocks(
    config: DrafterConfig, context_tokens: float, anchors: Sequence[float], num_slots: int
) -> Work:
    """Of blocks at these anchor positions, over so many context tokens. num_slots: scored a block, K-1."""
    windows = [config.window(layer) for layer in range(config.num_layers)]
    pairs = {
        window: sum(block_pairs(anchor, config.block_size, window) for anchor in anchors)
        for window in dict.fromkeys(windows)
    }
    return Work(
        context_tokens, len(anchors), len(anchors) * num_slots, tuple(pairs[w] for w in windows)
    )


def train_flops(
    config: DrafterConfig, work: Work, vocab_size: int, frozen: Collection[str] = ()
) -> float:
    """Forward and backward, drafter and head. `frozen`: parameters without a gradient, by name.

    A product costs its forward, the same for its weight's gradient if it is trained, and for its input's if anything before
    it is. The features and the blocks' embeddings are inputs; the head is frozen, so its backward is the hidden states' alone.
    """
    return _drafter_flops(config, work, frozen) + 2 * _head_flops(config, work, vocab_size)


def draft_flops(config: DrafterConfig, work: Work, vocab_size: int) -> float:
    """Forward alone, drafter and head."""
    alone = _drafter_flops(config, work, expected_shapes(config))
    return alone + _head_flops(config, work, vocab_size)


def _head_flops(config: DrafterConfig, work: Work, vocab_size: int) -> float:
    """Of a forward."""
    return 2 * config.hidden_size * vocab_size * work.head_rows


def _drafter_flops(config: DrafterConfig, work: Work, frozen: Collection[str]) -> float:
    hidden, slots = config.hidden_size, work.blocks * config.block_size
    context = "fc.weight" not in frozen
    fc_size = len(config.target_layer_ids) * hidden * hidden
    total = 2 * fc_size * work.context_tokens * (1 + context)
    context_flows = context or "hidden_norm.weight" not in frozen
    flows = False  # whether the block states that reach a layer need a gradient
    for index in range(config.num_layers):
        layer = _Layer(config, index, frozen)
        cost, flows = layer.flops(
            work.context_tokens, slots, work.pairs[index], flows, context_flows
        )
        total += cost
    return total


@dataclass(frozen=True)
class _Layer:
    config: DrafterConfig
    index: int
    frozen: Collection[str]

    def flops(
        self, context_tokens: float, slots: float, pairs: float, flows: bool, context_flows: bool
    ) -> tuple[float, bool]:
        """Its operations, and whether what leaves it needs a gradient."""
        config, hidden = self.config, self.config.hidden_size
        queries = config.num_attention_heads * config.head_dim
        keys = config.num_key_value_heads * config.head_dim
        normed = flows or self._trains("input_layernorm")
        total = self._product("self_attn.q_proj", hidden * queries, slots, normed)
        for name in ("self_attn.k_proj", "self_attn.v_proj"):
            total += self._product(name, hidden * keys, slots, normed)
            total += self._product(name, hidden * keys, context_tokens, context_flows)
        mixing = ("q_proj", "k_proj", "v_proj", "q_norm", "k_norm")
        mixed = normed or context_flows or any(self._trains(f"self_attn.{n}") for n in mixing)
        total += 4 * queries * pairs * (3 if mixed else 1)  # scores and weighted values
        total += self._product("self_attn.o_proj", queries * hidden, slots, mixed)
        flows = flows or mixed or self._trains("self_attn.o_proj")
        normed, inner = flows or self._trains("post_attention_layernorm"), config.intermediate_size
        for name in ("mlp.gate_proj", "mlp.up_proj"):
            total += self._product(name, hidden * inner, slots, normed)
        gated = normed or self._trains("mlp.gate_proj") or self._trains("mlp.up_proj")
        total += self._product("mlp.down_proj", inner * hidden, slots, gated)
        return total, gated or self._trains("mlp.down_proj")

    def _product(self, name: str, size: int, rows: float, input_flows: bool) -> float:
        return 2 * size * rows * (1 + self._trains(name) + input_flows)

    def _trains(self, name: str) -> bool:
        return f"layers.{self.index}.{name}.weight" not in self.frozen


def peak_tflops(device_name: str) -> float | None:
    """Dense bf16 TFLOP/s of a GPU by the name CUDA gives it; None for one that is not listed."""
    for pattern, peak in PEAK_TFLOPS:
        if re.search(pattern, device_name):
            return peak
    return None
