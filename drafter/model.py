"""The DFlash drafter: a block of [anchor, mask x (K-1)] attends to target features and drafts K-1 tokens in one pass.

B sequences, S context tokens, N anchors, K block size, D taps, H hidden, V vocabulary. Source: arXiv:2602.06036.
Neither embedding nor head is inside: both are the target's, frozen.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from drafter.attention import Attend, make_attend
from drafter.config import DrafterConfig
from drafter.layers import Layer, Rotation, rotation
from drafter.masks import BlockLayout, slot_positions

__all__ = ["BlockLayout", "Drafter", "block_embeddings"]

INIT_STD = 0.02


class Drafter(nn.Module):
    """Parameters are named as z-lab's folders name them. Initialised from torch's global generator: seed it before."""

    def __init__(self, config: DrafterConfig):
        super().__init__()
        self.config = config
        self.activation_checkpointing = False
        """Recompute each layer in backward: memory of one layer instead of all, a third more time."""
        taps = len(config.target_layer_ids)
        self.fc = nn.Linear(taps * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=INIT_STD)

    def forward(
        self,
        features: Tensor,
        block_embeddings: Tensor,
        layout: BlockLayout,
        attention: str = "auto",
    ) -> Tensor:
        """Hidden states for the target's head, (B, N, K, H); slot k predicts the token at anchor + k, slot 0 nothing.

        features: (B, S, D, H) target features, any float dtype, finite also where padded.
        block_embeddings: (B, N, K, H), see `block_embeddings`; K may be shorter than the config's block_size.
        attention: auto (flex on CUDA; structured elsewhere, chunked for large batches), structured, chunked, flex or dense.
        """
        context = self.project_features(features)  # (B, S, H)
        context_rotate = self.rotation(layout.context_positions)
        block_size = block_embeddings.shape[2]
        rotate = self.rotation(slot_positions(layout, block_size))
        attends = {
            window: make_attend(attention, layout, block_size, window)
            for window in dict.fromkeys(self.windows)
        }
        x = block_embeddings.to(context.dtype)
        for layer, window in zip(self.layers, self.windows, strict=True):
            x = self._run(cast(Layer, layer), x, context, context_rotate, rotate, attends[window])
        return self.norm(x)

    @property
    def windows(self) -> list[int | None]:
        """Each layer's sliding window, None for full attention."""
        return [self.config.window(i) for i in range(self.config.num_layers)]

    def project_features(self, features: Tensor) -> Tensor:
        """(..., D, H) target features to the context states (..., H) that all layers share."""
        return self.hidden_norm(self.fc(features.flatten(-2).to(self.fc.weight.dtype)))

    def rotation(self, positions: Tensor) -> Rotation:
        config = self.config
        return rotation(positions, config.head_dim, config.rope_theta, self.fc.weight.dtype)

    def _run(
        self,
        layer: Layer,
        x: Tensor,
        context: Tensor,
        context_rotate: Rotation,
        rotate: Rotation,
        attend: Attend,
    ) -> Tensor:
        if not (self.activation_checkpointing and torch.is_grad_enabled()):
            return layer(x, context, context_rotate, rotate, attend)
        return cast(
            Tensor,
            checkpoint(layer, x, context, context_rotate, rotate, attend, use_reentrant=False),
        )


def block_embeddings(
    embedding: Tensor, anchor_tokens: Tensor, mask_token_id: int, block_size: int
) -> Tensor:
    """Inputs of the blocks: the anchor's embedding, then the mask token's K-1 times.

    embedding: (V, H) of the target; anchor_tokens: (B, N) int64. Returns (B, N, K, H).
    """
    anchors = embedding[anchor_tokens][:, :, None]  # (B, N, 1, H)
    masks = embedding[mask_token_id].expand(*anchor_tokens.shape, block_size - 1, -1)
    return torch.cat([anchors, masks], 2)
