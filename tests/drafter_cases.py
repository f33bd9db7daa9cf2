"""Tiny drafters and batches that the drafter's and the export's tests share."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from drafter.config import FULL, SLIDING, DrafterConfig
from drafter.model import BlockLayout, Drafter

TINY = DrafterConfig(
    hidden_size=32,
    num_layers=3,
    intermediate_size=48,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    vocab_size=50,
    block_size=4,
    mask_token_id=3,
    target_layer_ids=(1, 2, 4),
    layer_types=(SLIDING, FULL, SLIDING),
    sliding_window=3,
    rope_theta=1e4,
    rms_norm_eps=1e-6,
    max_position_embeddings=128,
    num_target_layers=6,
)
ALL_FULL = replace(TINY, layer_types=(FULL,) * 3, sliding_window=None)
WIDE = replace(TINY, sliding_window=6)
CONFIGS = {"mixed": TINY, "full": ALL_FULL, "wide window": WIDE}


def tiny_drafter(config: DrafterConfig = TINY, seed: int = 0) -> Drafter:
    """Norm weights are moved off 1, so that a norm that is left out shows."""
    torch.manual_seed(seed)
    drafter = Drafter(config)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return drafter


def packed_layout() -> BlockLayout:
    """Row 0: two documents of 7 and 5 tokens. Row 1: one of 9 tokens, 3 padding tokens, a padding block."""
    return BlockLayout(
        context_positions=torch.tensor([[*range(7), *range(5)], [*range(9), 0, 0, 0]]),
        context_documents=torch.tensor([[0] * 7 + [1] * 5, [0] * 9 + [-1] * 3]),
        anchor_positions=torch.tensor([[2, 6, 0, 4], [1, 5, 8, 3]]),
        anchor_documents=torch.tensor([[0, 0, 1, 1], [0, 0, 0, -1]]),
    )


def random_inputs(
    config: DrafterConfig, layout: BlockLayout, seed: int = 1
) -> tuple[Tensor, Tensor]:
    """Features (B, S, D, H) and block embeddings (B, N, K, H)."""
    generator = torch.Generator().manual_seed(seed)
    taps, hidden = len(config.target_layer_ids), config.hidden_size
    features = torch.randn(*layout.context_positions.shape, taps, hidden, generator=generator)
    shape = (*layout.anchor_positions.shape, config.block_size, hidden)
    return features, torch.randn(shape, generator=generator)
