"""Which adapter each layer of a target gets. A layer type that no adapter knows is refused by name, never approximated."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from transformers import Cache
from transformers.cache_utils import LinearAttentionLayer

from ddtree.adapters import LAYER_ADAPTERS, FullAttention, LayerAdapter, Rows
from ddtree.gdn_layers import DeltaNetLayers
from target.load import Target

_DELTA_NET = "linear_attention"


def make_layers(target: Target, rows: Rows) -> tuple[list[LayerAdapter], list[DeltaNetLayers]]:
    """An adapter a layer, and the Gated-DeltaNet layers, those of a device together.

    Raises ValueError for a layer that trees cannot be verified on.
    """
    known = [*LAYER_ADAPTERS, _DELTA_NET]
    for kind in target.layer_types:
        if kind not in known:
            raise ValueError(
                f"target {target.model.config.model_type} has layers of type {kind!r}, which trees cannot be verified on; "
                f"known types: {', '.join(known)}"
            )
    on_device: dict[torch.device, list[nn.Module]] = {}
    place: dict[int, tuple[torch.device, int]] = {}  # of each Gated-DeltaNet layer in its group
    for i, kind in enumerate(target.layer_types):
        if kind == _DELTA_NET:
            module = target.layers[i].get_submodule("linear_attn")
            device = next(module.parameters()).device
            group = on_device.setdefault(device, [])
            place[i] = device, len(group)
            group.append(module)
    groups = {d: DeltaNetLayers(modules, len(rows.lengths)) for d, modules in on_device.items()}
    config = target.model.config.get_text_config()
    layers: list[LayerAdapter] = []
    for i, kind in enumerate(target.layer_types):
        if i in place:
            device, index = place[i]
            layers.append(groups[device].layer(index))
        else:
            layers.append(LAYER_ADAPTERS[kind](config, rows))
    return layers, list(groups.values())


def verify_cache(layers: Sequence[LayerAdapter]) -> Cache:
    """What the model is handed in a verify pass; no Gated-DeltaNet layer looks into it then."""
    return Cache(
        layers=[
            layer if isinstance(layer, FullAttention) else LinearAttentionLayer()
            for layer in layers
        ]
    )
