"""config.json of a drafter folder in z-lab's format: every key written out; on reading, nothing taken that is not understood.

block_size, mask_token_id and target_layer_ids stand at the top, in dflash_config or, equal, in both. Keys that would make
another drafter are refused by name; keys that are not known here are left out and listed in the notes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from drafter.config import SLIDING, DrafterConfig
from drafter.decoder_json import (
    DTYPE_NAMES,
    USED,
    WITHOUT_EFFECT,
    decoder_json,
    parse_decoder,
)
from drafter.json_values import (
    Values,
    require_neutral,
    section,
    shown,
    whole,
    whole_numbers,
)
from drafter.kinds import KIND_KEYS, refuse_other_kinds

Value = TypeVar("Value")

NEUTRAL: dict[str, tuple[object, ...]] = {
    "input_embedding_scale": (1, None),
    "output_multiplier": (1, None),
    "final_logit_softcapping": (0, None),
    "use_aux_hidden_state": (True,),
    "sample_from_anchor": (False,),
    "use_swa": (False,),
}
"""Beside the decoder's: keys of z-lab's code, vLLM and SGLang that change what a drafter computes, at the top or nested."""
AGREED = {"block_size", "mask_token_id", "target_layer_ids"}
TOP = {
    "architectures",
    "dflash_config",
    "num_target_layers",
    "is_causal",
    "draft_vocab_size",
    "target_hidden_size",
    "eagle_aux_hidden_state_layer_ids",
    "quantization_config",
}
NESTED = {"is_causal", "causal", "swa_window_size", "num_target_layers"}


@dataclass(frozen=True)
class Described:
    """What a config.json describes."""

    config: DrafterConfig
    notes: tuple[str, ...]
    """What was left out or is worth knowing, a line each."""


def config_json(config: DrafterConfig, dtype: torch.dtype) -> dict[str, Any]:
    """The whole config.json. Raises ValueError if `num_target_layers` is not known."""
    if config.num_target_layers is None:
        raise ValueError(
            "num_target_layers is not known, and z-lab's format states it; name the target: --target"
        )
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": config.block_size,
        "dflash_config": {
            "block_size": config.block_size,
            "mask_token_id": config.mask_token_id,
            "target_layer_ids": list(config.target_layer_ids),
        },
        "dtype": DTYPE_NAMES[dtype],
        "num_target_layers": config.num_target_layers,
        **decoder_json(config),
    }


def parse_config_json(values: Any) -> Described:
    """The drafter that a config.json in z-lab's format describes. Raises ValueError naming the key, without the file's path."""
    why = "this is no DFlash drafter"
    if not isinstance(values, dict):
        raise ValueError(f"dflash_config is missing or no object; {why}")
    dflash = section(values, "dflash_config", why)
    refuse_other_kinds(values, dflash)
    if values.get("architectures", ["DFlashDraftModel"]) != ["DFlashDraftModel"]:
        raise ValueError(
            f"architectures={shown(values['architectures'])} is not supported; it must be ['DFlashDraftModel']"
        )
    require_neutral(values, NEUTRAL)
    require_neutral(dflash, NEUTRAL)
    decoder = parse_decoder(values)
    config = DrafterConfig(
        **vars(decoder),
        block_size=_agreed("block_size", values, dflash, whole),
        mask_token_id=_agreed("mask_token_id", values, dflash, whole),
        target_layer_ids=_agreed("target_layer_ids", values, dflash, whole_numbers),
        num_target_layers=_agreed("num_target_layers", values, dflash, whole),
    )
    refuse_other_masks(values, dflash, decoder.layer_types)
    _require_agreement(values, dflash, config)
    return Described(config, _notes(values, dflash))


def refuse_other_masks(values: Values, dflash: Values, layer_types: tuple[str, ...]) -> None:
    """is_causal and causal override the mask of every layer: only the value that the rule gives anyway is accepted."""
    rule = {kind == SLIDING for kind in layer_types}
    for key, place in (("is_causal", values), ("is_causal", dflash), ("causal", dflash)):
        causal = place.get(key)
        if causal is not None and not (isinstance(causal, bool) and {causal} == rule):
            raise ValueError(
                f"{key}={shown(causal)} breaks the mask rule (full layers see the whole block, sliding layers "
                f"are causal) for layer_types={shown(list(layer_types))}; remove the key or retrain"
            )


def _require_agreement(values: Values, dflash: Values, config: DrafterConfig) -> None:
    """Second spellings of what is known already. vLLM prefers some of them, so a wrong one would be served."""
    counted_from_1 = [tap + 1 for tap in config.target_layer_ids]
    for key, place, wanted in (
        ("draft_vocab_size", values, config.vocab_size),
        ("target_hidden_size", values, config.hidden_size),
        ("eagle_aux_hidden_state_layer_ids", values, counted_from_1),
        ("swa_window_size", dflash, config.sliding_window),
    ):
        if place.get(key) is not None and place[key] != wanted:
            raise ValueError(
                f"{key}={shown(place[key])} contradicts the rest of the file, which makes it {wanted!r}"
            )


def _notes(values: Values, dflash: Values) -> tuple[str, ...]:
    notes = []
    if "auto_map" in values:
        notes.append("auto_map names code of the folder's own, which is never run")
    both = AGREED | KIND_KEYS | set(NEUTRAL)
    notes += unknown_keys("", values, both | USED | WITHOUT_EFFECT | TOP | {"auto_map"})
    notes += unknown_keys("dflash_config.", dflash, both | NESTED)
    return tuple(notes)


def unknown_keys(where: str, values: Values, known: set[str]) -> list[str]:
    """A line for each key that is not `known`."""
    return [
        f"{where}{shown(key)[1:-1]}={shown(values[key])} is not known here and was left out"
        for key in sorted(set(values) - known)
    ]


def _agreed(
    key: str, values: Values, dflash: Values, read: Callable[[Values, str], Value]
) -> Value:
    """A key that may stand at the top, in dflash_config or, equal, in both."""
    found = [read(place, key) for place in (dflash, values) if place.get(key) is not None]
    if not found:
        raise ValueError(f"{key} is missing; state it")
    if found[0] != found[-1]:
        raise ValueError(
            f"{key} is {found[0]} in dflash_config and {found[-1]} at the top; make them equal"
        )
    return found[0]
