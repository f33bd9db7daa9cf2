"""A drafter's `config.json`: every key written out, and whatever would make another drafter refused by name.

Released z-lab folders differ in which keys they carry: block_size at the top or in dflash_config, RoPE's base at the top
or in rope_parameters, layer_types absent. All of these are understood; two places that disagree are not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from drafter.config import FULL, SLIDING, DrafterConfig

Value = TypeVar("Value")

DTYPE_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}

FIXED: dict[str, tuple[Any, ...]] = {
    "architectures": (["DFlashDraftModel"],),
    "model_type": ("qwen3",),
    "attention_bias": (False,),
    "hidden_act": ("silu",),
    "attention_dropout": (0, None),
    "quantization_config": (None,),
    "input_embedding_scale": (1, None),
    "output_multiplier": (1, None),
    "final_logit_softcapping": (0, None),
    "partial_rotary_factor": (1, None),
}
"""Keys that change what a drafter computes, and the values under which it is the one this code runs; absent is fine."""

DFLASH_KEYS = {"block_size", "mask_token_id", "target_layer_ids", "is_causal", "causal", *FIXED}
"""What dflash_config may hold. DFlash2's conv_* and selector_* keys, projector types and so on are another model's."""


def config_json(config: DrafterConfig, dtype: torch.dtype) -> dict[str, Any]:
    """As transformers 5 writes a Qwen3Config, with DFlash's own keys; rope_theta and block_size also where older readers look."""
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "block_size": config.block_size,
        "dflash_config": {
            "block_size": config.block_size,
            "mask_token_id": config.mask_token_id,
            "target_layer_ids": list(config.target_layer_ids),
        },
        "dtype": DTYPE_NAMES[dtype],
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": config.intermediate_size,
        "layer_types": list(config.layer_types),
        "max_position_embeddings": config.max_position_embeddings,
        "max_window_layers": config.num_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_hidden_layers": config.num_layers,
        "num_key_value_heads": config.num_key_value_heads,
        "num_target_layers": config.num_target_layers,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "rope_scaling": None,
        "rope_theta": config.rope_theta,
        "sliding_window": config.sliding_window,
        "tie_word_embeddings": False,
        "use_cache": True,
        "use_sliding_window": config.sliding_window is not None,
        "vocab_size": config.vocab_size,
    }


def parse_config_json(values: Any) -> DrafterConfig:
    """The drafter that a config.json describes. Raises ValueError naming the key, without the file's path."""
    if not isinstance(values, dict) or not isinstance(values.get("dflash_config"), dict):
        raise ValueError("dflash_config is missing; this is not a DFlash drafter")
    dflash = values["dflash_config"]
    _refuse_other_models(values, dflash)
    layer_types = _layer_types(values)
    config = DrafterConfig(
        hidden_size=_whole(values, "hidden_size"),
        num_layers=_whole(values, "num_hidden_layers"),
        intermediate_size=_whole(values, "intermediate_size"),
        num_attention_heads=_whole(values, "num_attention_heads"),
        num_key_value_heads=_whole(values, "num_key_value_heads"),
        head_dim=_head_dim(values),
        vocab_size=_whole(values, "vocab_size"),
        block_size=_agreed("block_size", values, dflash, _whole),
        mask_token_id=_agreed("mask_token_id", values, dflash, _whole),
        target_layer_ids=_agreed("target_layer_ids", values, dflash, _ids),
        layer_types=layer_types,
        sliding_window=_sliding_window(values, layer_types),
        rope_theta=_rope_theta(values),
        rms_norm_eps=_number(values, "rms_norm_eps"),
        max_position_embeddings=_whole(values, "max_position_embeddings"),
        num_target_layers=_whole(values, "num_target_layers"),
    )
    _refuse_other_masks(values, dflash, layer_types)
    return config


def _refuse_other_models(values: dict[str, Any], dflash: dict[str, Any]) -> None:
    for key, allowed in FIXED.items():
        for place in (values, dflash):
            if key in place and place[key] not in allowed:
                raise ValueError(
                    f"{key}={place[key]!r} is not supported; it must be {allowed[0]!r}"
                )
    unknown = sorted(set(dflash) - DFLASH_KEYS)
    if unknown:
        raise ValueError(
            f"dflash_config.{unknown[0]}={dflash[unknown[0]]!r} belongs to another kind of drafter "
            "(DFlash2 and others); only plain DFlash is supported"
        )


def _refuse_other_masks(
    values: dict[str, Any], dflash: dict[str, Any], layer_types: tuple[str, ...]
) -> None:
    """is_causal overrides the mask of every layer in z-lab's code: only the value the rule gives anyway is accepted."""
    rule = {kind == SLIDING for kind in layer_types}
    for key, place in (("is_causal", values), ("is_causal", dflash), ("causal", dflash)):
        if place.get(key) is not None and {place[key]} != rule:
            raise ValueError(
                f"{key}={place[key]!r} breaks the mask rule (full layers see the whole block, sliding layers "
                f"are causal) for layer_types={list(layer_types)}; remove the key or retrain"
            )


def _layer_types(values: dict[str, Any]) -> tuple[str, ...]:
    types = values.get("layer_types")
    if types is None:
        if values.get("use_sliding_window"):
            raise ValueError("layer_types is missing although use_sliding_window=true; list them")
        return (FULL,) * _whole(values, "num_hidden_layers")
    if not isinstance(types, list) or not all(isinstance(kind, str) for kind in types):
        raise ValueError(f"layer_types={types!r} must be a list of names")
    return tuple(types)


def _sliding_window(values: dict[str, Any], layer_types: tuple[str, ...]) -> int | None:
    """transformers ignores sliding_window where use_sliding_window is false; so does this, unless a layer needs it."""
    if SLIDING not in layer_types:
        return None
    if values.get("use_sliding_window") is False:
        raise ValueError("use_sliding_window=false contradicts layer_types with sliding_attention")
    return _whole(values, "sliding_window")


def _rope_theta(values: dict[str, Any]) -> float:
    found: list[float] = []
    for key in ("rope_parameters", "rope_scaling"):
        rope = values.get(key)
        if rope is None:
            continue
        if not isinstance(rope, dict) or rope.get("rope_type", rope.get("type")) != "default":
            raise ValueError(f"{key}={rope!r} is not supported; only plain RoPE is")
        extra = sorted(set(rope) - {"rope_type", "type", "rope_theta"})
        if extra:
            raise ValueError(
                f"{key}.{extra[0]}={rope[extra[0]]!r} is not supported; only plain RoPE is"
            )
        found += [_number(rope, "rope_theta")] if "rope_theta" in rope else []
    found += [_number(values, "rope_theta")] if "rope_theta" in values else []
    if not found:
        raise ValueError("rope_theta is missing; state the base of RoPE")
    if len(set(found)) > 1:
        raise ValueError(f"rope_theta has two values, {found[0]} and {found[-1]}; make them equal")
    return found[0]


def _head_dim(values: dict[str, Any]) -> int:
    if "head_dim" in values:
        return _whole(values, "head_dim")
    return _whole(values, "hidden_size") // max(1, _whole(values, "num_attention_heads"))


def _agreed(
    key: str,
    values: dict[str, Any],
    dflash: dict[str, Any],
    read: Callable[[dict[str, Any], str], Value],
) -> Value:
    """A key that may stand at the top, in dflash_config or, equal, in both."""
    found = [read(place, key) for place in (dflash, values) if place.get(key) is not None]
    if not found:
        raise ValueError(f"{key} is missing; dflash_config must state it")
    if found[0] != found[-1]:
        raise ValueError(
            f"{key} is {found[0]} in dflash_config and {found[-1]} at the top; make them equal"
        )
    return found[0]


def _whole(values: dict[str, Any], key: str) -> int:
    value = values.get(key)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{key}={value!r} must be a whole number")
    return value


def _number(values: dict[str, Any], key: str) -> float:
    value = values.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{key}={value!r} must be a number")
    return float(value)


def _ids(values: dict[str, Any], key: str) -> tuple[int, ...]:
    ids = values[key]
    if not isinstance(ids, list) or any(isinstance(i, bool) or not isinstance(i, int) for i in ids):
        raise ValueError(f"{key}={ids!r} must be a list of layer numbers")
    return tuple(ids)
