"""A drafter layer: attention over [context ; own block] and a SwiGLU, with the tensor names servers know.

B sequences, S context tokens, N anchors, K block size, H hidden, A query heads, G key-value heads, E head size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drafter.attention import Attend, KeysValues
from drafter.config import DrafterConfig


@dataclass(frozen=True)
class Rotation:
    """RoPE's cosines and sines of some positions, (..., 1, E/2), broadcast over heads."""

    cos: Tensor
    sin: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        """Rotate-half RoPE of (..., heads, E): element i is paired with i + E/2."""
        first, second = x.chunk(2, -1)
        return torch.cat(
            [first * self.cos - second * self.sin, second * self.cos + first * self.sin], -1
        )


def rotation(positions: Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> Rotation:
    """Of absolute positions, of any shape. Angles in float32, as transformers computes them."""
    exponents = torch.arange(0, head_dim, 2, device=positions.device).float() / head_dim
    angles = positions[..., None, None].float() * theta**-exponents
    return Rotation(angles.cos().to(dtype), angles.sin().to(dtype))


class Attention(nn.Module):
    def __init__(self, config: DrafterConfig):
        super().__init__()
        self.head_dim = config.head_dim
        query_size = config.num_attention_heads * config.head_dim
        key_size = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, query_size, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, key_size, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, key_size, bias=False)
        self.o_proj = nn.Linear(query_size, config.hidden_size, bias=False)
        self.q_norm = nn.RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = nn.RMSNorm(config.head_dim, config.rms_norm_eps)

    def keys_values(self, x: Tensor, rotate: Rotation) -> KeysValues:
        """Of context (B, S, H) or normed block states (B, N, K, H), at the positions of `rotate`."""
        keys = self.k_norm(self._heads(self.k_proj(x)))
        return KeysValues(rotate(keys), self._heads(self.v_proj(x)))

    def forward(self, x: Tensor, context: KeysValues, rotate: Rotation, attend: Attend) -> Tensor:
        """x: (B, N, K, H) normed block states. Returns the same shape."""
        queries = rotate(self.q_norm(self._heads(self.q_proj(x))))
        mixed = attend(queries, context, self.keys_values(x, rotate))
        return self.o_proj(mixed.flatten(-2))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim))


class Mlp(nn.Module):
    def __init__(self, config: DrafterConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, config: DrafterConfig):
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = Mlp(config)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self,
        x: Tensor,
        context: Tensor,
        context_rotate: Rotation,
        rotate: Rotation,
        attend: Attend,
    ) -> Tensor:
        """x: (B, N, K, H) block states; context: (B, S, H), which skips this layer's input norm."""
        return self.over(x, self.self_attn.keys_values(context, context_rotate), rotate, attend)

    def over(self, x: Tensor, context: KeysValues, rotate: Rotation, attend: Attend) -> Tensor:
        """The same over context keys and values that are at hand already."""
        x = x + self.self_attn(self.input_layernorm(x), context, rotate, attend)
        return x + self.mlp(self.post_attention_layernorm(x))
