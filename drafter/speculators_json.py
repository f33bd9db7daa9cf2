"""config.json of a drafter folder in the format of the `speculators` library, version 0.9.0, both ways.

The decoder's keys stand in `transformer_layer_config`; taps count from 1 (`aux_hidden_state_layer_ids`: i + 1 is the output
of 0-based layer i); `speculators_config` names the verifier, which is the target. Its blocks are as here when
`sample_from_anchor` is false. `num_target_layers` is no key of theirs; it is written besides, which they allow.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from drafter.config import SLIDING, DrafterConfig
from drafter.config_json import Described, unknown_keys
from drafter.decoder_json import (
    DTYPE_NAMES,
    USED,
    WITHOUT_EFFECT,
    DecoderFields,
    decoder_json,
    parse_decoder,
)
from drafter.json_values import Values, require_neutral, section, shown, whole, whole_numbers
from drafter.kinds import KIND_KEYS, refuse_other_kinds

FORMAT_VERSION = "0.9.0"
WHY = "this is no drafter in speculators' format"
KEYS = {
    "architectures",
    "auto_map",
    "aux_hidden_state_layer_ids",
    "block_size",
    "draft_vocab_size",
    "mask_token_id",
    "num_target_layers",
    "sample_from_anchor",
    "sliding_window_non_causal",
    "speculators_config",
    "speculators_model_type",
    "speculators_version",
    "target_hidden_size",
    "transformer_layer_config",
}


@dataclass(frozen=True)
class Verifier:
    """The target, as speculators' format names it."""

    name_or_path: str
    """Where their library and vLLM load embedding and head from: a hub id or a folder."""
    architectures: tuple[str, ...]
    """Of its config.json."""


def speculators_json(
    config: DrafterConfig, dtype: torch.dtype, verifier: Verifier
) -> dict[str, Any]:
    """The whole config.json, with every key explicit."""
    method = {
        "accept_tolerance": 0.0,
        "proposal_type": "greedy",
        "speculative_tokens": config.block_size - 1,
        "verifier_accept_k": 1,
    }
    return {
        "architectures": ["DFlashDraftModel"],
        "aux_hidden_state_layer_ids": [tap + 1 for tap in config.target_layer_ids],
        "block_size": config.block_size,
        "draft_vocab_size": config.vocab_size,
        "dtype": DTYPE_NAMES[dtype],
        "mask_token_id": config.mask_token_id,
        "num_target_layers": config.num_target_layers,
        "sample_from_anchor": False,
        # without sliding layers their library ignores it, and vLLM 0.33.0 makes all layers causal unless it is true
        "sliding_window_non_causal": SLIDING not in config.layer_types,
        "speculators_config": {
            "algorithm": "dflash",
            "default_proposal_method": "greedy",
            "proposal_methods": [method],
            "verifier": {
                "architectures": list(verifier.architectures),
                "name_or_path": verifier.name_or_path,
            },
        },
        "speculators_model_type": "dflash",
        "speculators_version": FORMAT_VERSION,
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        "transformer_layer_config": {**decoder_json(config), "model_type": "qwen3"},
    }


def parse_speculators_json(values: Values) -> tuple[Described, Verifier | None]:
    """The drafter and the target it names, if it names one. Raises ValueError naming the key, without the file's path."""
    refuse_other_kinds(values, {})
    if values.get("speculators_model_type") != "dflash":
        found = shown(values.get("speculators_model_type"))
        raise ValueError(f"speculators_model_type={found} is not supported; it must be 'dflash'")
    layer = section(values, "transformer_layer_config", WHY)
    decoder = parse_decoder(layer)
    _require_plain(values, decoder)
    config = DrafterConfig(
        **vars(decoder),
        block_size=whole(values, "block_size"),
        mask_token_id=whole(values, "mask_token_id"),
        target_layer_ids=_taps(values),
        num_target_layers=_num_target_layers(values),
    )
    notes = _notes(values, layer, config)
    return Described(config, notes), _verifier(values)


def _require_plain(values: Values, decoder: DecoderFields) -> None:
    """What would make it another drafter: its own head and vocabulary, another width, other masks, other slots."""
    require_neutral(values, {"sample_from_anchor": (False, None), "quantization_config": (None,)})
    vocabulary = whole(values, "draft_vocab_size")
    if vocabulary != decoder.vocab_size:
        raise ValueError(
            f"draft_vocab_size={vocabulary} of {decoder.vocab_size}: a head over part of the vocabulary is not "
            "supported; drafters here use the target's own head"
        )
    width = values.get("target_hidden_size")
    if width not in (None, decoder.hidden_size):
        raise ValueError(
            f"target_hidden_size={shown(width)} is not supported; it must be hidden_size={decoder.hidden_size}"
        )
    if SLIDING in decoder.layer_types:
        require_neutral(values, {"sliding_window_non_causal": (False,)})


def _taps(values: Values) -> tuple[int, ...]:
    """0-based. Raises ValueError for id 0, which is the embedding's output and no layer's."""
    ids = whole_numbers(values, "aux_hidden_state_layer_ids")
    if 0 in ids:
        raise ValueError(
            f"aux_hidden_state_layer_ids={list(ids)}: 0 is the embedding's output, not a layer's; it is not supported"
        )
    return tuple(i - 1 for i in ids)


def _num_target_layers(values: Values) -> int | None:
    return None if values.get("num_target_layers") is None else whole(values, "num_target_layers")


def _verifier(values: Values) -> Verifier | None:
    found = section(section(values, "speculators_config", WHY), "verifier", WHY)
    name, architectures = found.get("name_or_path"), found.get("architectures")
    if not isinstance(architectures, list) or not all(isinstance(a, str) for a in architectures):
        raise ValueError(f"verifier.architectures={shown(architectures)} must be a list of names")
    if name is None:
        return None
    if not isinstance(name, str):
        raise ValueError(f"verifier.name_or_path={shown(name)} must be a name or a path")
    return Verifier(name, tuple(architectures))


def _notes(values: Values, layer: Values, config: DrafterConfig) -> tuple[str, ...]:
    notes = unknown_keys("", values, KEYS | KIND_KEYS | WITHOUT_EFFECT)
    notes += unknown_keys("transformer_layer_config.", layer, USED | WITHOUT_EFFECT)
    if values.get("auto_map"):
        notes.append("auto_map names code of the folder's own, which is never run")
    if config.sliding_window is not None:
        notes.append(
            f"speculators trains with a window of {config.sliding_window} tokens before the anchor for every slot; here, "
            "as in vLLM and SGLang, it counts from the slot, the slot included"
        )
    drafted = _speculative_tokens(values)
    if drafted != config.block_size - 1:
        notes.append(
            f"speculative_tokens={drafted}: vLLM drafts that many by default, not block_size - 1 = {config.block_size - 1}"
        )
    return tuple(notes)


def _speculative_tokens(values: Values) -> int:
    methods = section(values, "speculators_config", WHY).get("proposal_methods")
    if not isinstance(methods, list) or not methods or not isinstance(methods[0], dict):
        raise ValueError(f"speculators_config.proposal_methods={shown(methods)} names no method")
    return whole(methods[0], "speculative_tokens")
