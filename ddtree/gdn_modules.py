"""What is known of transformers' Gated-DeltaNet modules: the parts a tree's forward uses, and where the families differ.

Everything here depends on the transformers version; a module that is put together otherwise is refused by name.
Shapes: R rows, T nodes, H hidden, C convolution channels, Hv value heads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn


class GatedDeltaNet(Protocol):
    """The attributes that the known modules share."""

    forward: Callable[..., Tensor]
    conv1d: nn.Conv1d
    norm: Callable[[Tensor, Tensor], Tensor]
    """(hidden, gate) -> normed and gated"""
    out_proj: Callable[[Tensor], Tensor]
    A_log: Tensor
    dt_bias: Tensor
    activation: str
    conv_kernel_size: int
    conv_dim: int
    key_dim: int
    value_dim: int
    num_v_heads: int
    head_k_dim: int
    head_v_dim: int


Projected = tuple[Tensor, Tensor, Tensor, Tensor]
"""(R, T, C) before the convolution, output gate (R, T, ...), beta's and the decay's inputs (R, T, Hv)."""


def known_module(module: nn.Module) -> GatedDeltaNet:
    """The module itself. Raises ValueError if it is of an unknown class or make, or its weights are offloaded."""
    name = type(module).__name__
    if name not in _FAMILIES:
        raise ValueError(
            f"the target's linear attention is a {name}, which trees cannot be verified on; known modules: "
            f"{', '.join(_FAMILIES)}"
        )
    expected = _FAMILIES[name][1] | {"conv1d", "norm", "out_proj"}
    found = {child for child, _ in module.named_children()}
    if found != expected:
        raise ValueError(
            f"{name} consists of {', '.join(sorted(found))} and not of {', '.join(sorted(expected))}; install the "
            "transformers version of the constraints file"
        )
    if any(parameter.is_meta for parameter in module.parameters()):
        raise ValueError(
            f"target.device_map leaves a {name} on the CPU or on disk, where trees cannot be verified; give the target "
            "more GPUs, or set target.device_map=null"
        )
    return cast(GatedDeltaNet, module)


def project(module: GatedDeltaNet, hidden: Tensor) -> Projected:
    """hidden (R, T, H), already normed, through the module's own projections."""
    return _FAMILIES[type(module).__name__][0](module, hidden)


def _project_apart(module: Any, hidden: Tensor) -> Projected:
    return (
        module.in_proj_qkv(hidden),
        module.in_proj_z(hidden),
        module.in_proj_b(hidden),
        module.in_proj_a(hidden),
    )


def _project_packed(module: Any, hidden: Tensor) -> Projected:
    """One matrix interleaves the key heads' q, k, v, z; the module's own method sorts them."""
    *mixed, gate, beta, decay = module.fix_query_key_value_ordering(
        module.in_proj_qkvz(hidden), module.in_proj_ba(hidden)
    )
    return torch.cat([part.flatten(2) for part in mixed], dim=-1), gate, beta, decay


_APART = (_project_apart, {"in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"})
_FAMILIES: dict[str, tuple[Callable[[Any, Tensor], Projected], set[str]]] = {
    "Qwen3_5GatedDeltaNet": _APART,
    "Qwen3_5MoeGatedDeltaNet": _APART,
    "Qwen3NextGatedDeltaNet": (_project_packed, {"in_proj_qkvz", "in_proj_ba"}),
}
"""By class name: how a family projects, and with which sub-modules."""
