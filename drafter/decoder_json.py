"""The decoder's keys of a config.json, as transformers writes a Qwen3Config: read strictly, written out one by one.

z-lab's folders have them at the top, speculators' in transformer_layer_config. Released folders differ in which they
carry: RoPE's base at the top or in rope_parameters, layer_types absent. All of these are understood; two places that
disagree are not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from drafter.config import FULL, SLIDING, DrafterConfig
from drafter.json_values import Values, number, require_neutral, shown, whole

DTYPE_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
MOST_LAYERS = 1024

NEUTRAL: dict[str, tuple[object, ...]] = {
    "model_type": ("qwen3",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "hidden_act": ("silu",),
    "attention_dropout": (0, None),
    "quantization_config": (None,),
    "partial_rotary_factor": (1, None),
    "is_neox_style": (True, None),
    "rope_is_neox_style": (True, None),
    "logit_scale": (1, None),
    "embedding_multiplier": (1, None),
}
"""Keys that change what a drafter computes, and the values under which it is the one this code runs; absent is fine."""

USED = {
    "hidden_size",
    "num_hidden_layers",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "layer_types",
    "sliding_window",
    "use_sliding_window",
    "rope_theta",
    "rope_parameters",
    "rope_scaling",
    "rms_norm_eps",
    "max_position_embeddings",
    *NEUTRAL,
}
WITHOUT_EFFECT = {
    "transformers_version",
    "initializer_range",
    "use_cache",
    "max_window_layers",
    "tie_word_embeddings",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "dtype",
    "torch_dtype",
    "_name_or_path",
    "_attn_implementation",
    "chunk_size_feed_forward",
    "id2label",
    "is_encoder_decoder",
    "label2id",
    "output_attentions",
    "output_hidden_states",
    "problem_type",
    "return_dict",
}
"""transformers' own bookkeeping: nothing of a drafter's function or of its loading depends on it here.

tie_word_embeddings among it: a drafter has neither embedding nor head, its target's are used. The dtype is checked
against the weights (drafter/weights.py).
"""


@dataclass(frozen=True)
class DecoderFields:
    """The fields of a DrafterConfig that the decoder's keys give."""

    hidden_size: int
    num_layers: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    layer_types: tuple[str, ...]
    sliding_window: int | None
    rope_theta: float
    rms_norm_eps: float
    max_position_embeddings: int


def decoder_json(config: DrafterConfig) -> dict[str, Any]:
    """Every key that a reader of either format uses, explicitly; RoPE's base also where older readers look."""
    return {
        "attention_bias": False,
        "attention_dropout": 0.0,
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


def parse_decoder(values: Values) -> DecoderFields:
    """Raises ValueError naming the key, without the file's path."""
    require_neutral(values, NEUTRAL)
    num_layers = whole(values, "num_hidden_layers")
    if not 0 < num_layers <= MOST_LAYERS:
        raise ValueError(f"num_hidden_layers={num_layers} must be from 1 to {MOST_LAYERS}")
    layer_types = _layer_types(values, num_layers)
    return DecoderFields(
        hidden_size=whole(values, "hidden_size"),
        num_layers=num_layers,
        intermediate_size=whole(values, "intermediate_size"),
        num_attention_heads=whole(values, "num_attention_heads"),
        num_key_value_heads=whole(values, "num_key_value_heads"),
        head_dim=_head_dim(values),
        vocab_size=whole(values, "vocab_size"),
        layer_types=layer_types,
        sliding_window=_sliding_window(values, layer_types),
        rope_theta=_rope_theta(values),
        rms_norm_eps=number(values, "rms_norm_eps"),
        max_position_embeddings=whole(values, "max_position_embeddings"),
    )


def _layer_types(values: Values, num_layers: int) -> tuple[str, ...]:
    types = values.get("layer_types")
    if types is None:
        if values.get("use_sliding_window"):
            raise ValueError("layer_types is missing although use_sliding_window=true; list them")
        return (FULL,) * num_layers
    if not isinstance(types, list) or not all(isinstance(kind, str) for kind in types):
        raise ValueError(f"layer_types={shown(types)} must be a list of names")
    return tuple(types)


def _sliding_window(values: Values, layer_types: tuple[str, ...]) -> int | None:
    """transformers ignores sliding_window where use_sliding_window is false; so does this, unless a layer needs it."""
    if SLIDING not in layer_types:
        return None
    if values.get("use_sliding_window") is False:
        raise ValueError("use_sliding_window=false contradicts layer_types with sliding_attention")
    return whole(values, "sliding_window")


def _rope_theta(values: Values) -> float:
    found: list[float] = []
    for key in ("rope_parameters", "rope_scaling"):
        rope = values.get(key)
        if rope is None:
            continue
        if not isinstance(rope, dict) or rope.get("rope_type", rope.get("type")) != "default":
            raise ValueError(f"{key}={shown(rope)} is not supported; only plain RoPE is")
        extra = sorted(set(rope) - {"rope_type", "type", "rope_theta"})
        if extra:
            raise ValueError(
                f"{key}.{extra[0]}={shown(rope[extra[0]])} is not supported; only plain RoPE is"
            )
        found += [number(rope, "rope_theta")] if "rope_theta" in rope else []
    found += [number(values, "rope_theta")] if "rope_theta" in values else []
    if not found:
        raise ValueError("rope_theta is missing; state the base of RoPE")
    if len(set(found)) > 1:
        raise ValueError(f"rope_theta has two values, {found[0]} and {found[-1]}; make them equal")
    return found[0]


def _head_dim(values: Values) -> int:
    if "head_dim" not in values:
        raise ValueError(
            "head_dim is missing; readers disagree on its default (128, or hidden_size / num_attention_heads): state it"
        )
    return whole(values, "head_dim")
