"""What vLLM 0.33.0 and SGLang 0.5.23 make of an export: their rules, in a few lines each, give this very drafter.

docs/serving.md lists the keys; the list and this file hold each other.
"""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from drafter_cases import ALL_FULL, CONFIGS, TINY, tiny_drafter
from transformers import AutoConfig

from drafter.config import SLIDING, DrafterConfig
from drafter.folder import Format
from drafter.speculators_json import Verifier
from export.folder import Output, write_folder
from export.serve import serve_commands

ALL_SLIDING = replace(TINY, layer_types=(SLIDING,) * 3)
SHAPES = {**CONFIGS, "sliding": ALL_SLIDING}
QWEN = replace(TINY, block_size=16)
DOCS = Path(__file__).parent.parent / "docs" / "serving.md"
Mask = tuple[int | None, bool]
"""A layer's window in tokens, and whether its block is causal."""


def written(path: Path, config: DrafterConfig, form: Format = "zlab") -> dict[str, Any]:
    output = Output(form, Verifier("owner/target", ("LlamaForCausalLM",)))
    state = tiny_drafter(config).state_dict()
    write_folder(path, config, state.__getitem__, torch.bfloat16, output)
    return json.loads((path / "config.json").read_text())


def rule(config: DrafterConfig) -> list[Mask]:
    """drafter/masks.py: sliding layers are causal inside the block, full ones are not."""
    return [(config.window(i), config.window(i) is not None) for i in range(config.num_layers)]


def vllm_masks(values: dict[str, Any]) -> list[Mask]:
    """models/qwen3_dflash.py: an explicit causality is for all layers; else sliding layers are causal."""
    dflash = values["dflash_config"]
    masks: list[Mask] = []
    for kind in values["layer_types"]:
        slides = kind == SLIDING
        window = dflash.get("swa_window_size", values["sliding_window"]) if slides else None
        causal = values.get("is_causal")
        causal = dflash.get("causal") if causal is None else causal
        masks.append((window, slides if causal is None else causal))
    return masks


def vllm_from_speculators(values: dict[str, Any]) -> dict[str, Any]:
    """configs/speculators/algos.py, update_dflash."""
    taps = values["aux_hidden_state_layer_ids"]
    return values["transformer_layer_config"] | {
        "dflash_config": {
            "mask_token_id": values["mask_token_id"],
            "target_layer_ids": [tap - 1 for tap in taps],
            "causal": not values.get("sliding_window_non_causal", True),
        }
    }


def sglang_masks(values: dict[str, Any]) -> list[Mask]:
    """models/dflash.py; dflash_utils.py keeps W - 1, the tokens to the left of the query."""
    masks: list[Mask] = []
    for kind in values["layer_types"]:
        slides = kind == SLIDING
        left = values["sliding_window"] - 1 if slides else None
        causal = values.get("is_causal")
        masks.append((None if left is None else left + 1, slides if causal is None else causal))
    return masks


@pytest.mark.parametrize("name", SHAPES)
def test_both_servers_give_every_layer_the_mask_it_was_trained_with(tmp_path, name):
    values = written(tmp_path, SHAPES[name])
    assert vllm_masks(values) == rule(SHAPES[name])
    assert sglang_masks(values) == rule(SHAPES[name])


@pytest.mark.parametrize("name", SHAPES)
def test_the_speculators_caveat_is_there_exactly_where_vllm_is_wrong(tmp_path, name):
    config = SHAPES[name]
    served = vllm_masks(vllm_from_speculators(written(tmp_path, config, "speculators")))
    caveats = serve_commands("target", "drafter", config, "speculators").caveats
    warned = any("Do not serve this folder with vLLM 0.33.0" in caveat for caveat in caveats)
    assert (served != rule(config)) == warned
    assert warned == (0 < sum(t == SLIDING for t in config.layer_types) < config.num_layers)


def values_of_keys(config: DrafterConfig) -> dict[str, Any]:
    """Every key that a server reads, and what it must be."""
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "dflash_config.block_size": config.block_size,
        "dflash_config.mask_token_id": config.mask_token_id,
        "dflash_config.target_layer_ids": list(config.target_layer_ids),
        "num_target_layers": config.num_target_layers,
        "layer_types": list(config.layer_types),
        "sliding_window": config.sliding_window,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "num_hidden_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.rms_norm_eps,
        "hidden_act": "silu",
        "attention_bias": False,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_position_embeddings,
    }


def at(values: Any, key: str) -> Any:
    for part in key.split("."):
        values = values[part]
    return values


@pytest.mark.parametrize("name", SHAPES)
def test_every_listed_key_is_explicit_and_right(tmp_path, name):
    listed = re.findall(r"^\| (?:vLLM|SGLang) \| `([\w.]+)` \|", DOCS.read_text(), re.MULTILINE)
    wanted = values_of_keys(SHAPES[name])
    assert set(listed) == set(wanted), "docs/serving.md and this test name different keys"
    values = written(tmp_path, SHAPES[name])
    assert {key: at(values, key) for key in wanted} == wanted
    assert "is_causal" not in values
    assert "causal" not in values["dflash_config"]


@pytest.mark.parametrize("name", SHAPES)
def test_transformers_hands_the_servers_what_was_written(tmp_path, name):
    """Both read config.json through transformers, which has been known to null a window or to default a key."""
    values, config = written(tmp_path, SHAPES[name]), SHAPES[name]
    read = AutoConfig.from_pretrained(tmp_path).to_dict()
    for key, value in values_of_keys(config).items():
        assert at(read, key) == value, key
    assert at(read, "num_target_layers") == values["num_target_layers"]


def test_the_drafted_tokens_and_the_block_are_counted_as_each_server_counts():
    commands = serve_commands("owner/target", "owner/drafter", QWEN, "zlab")
    vllm = shlex.split(commands.vllm)
    speculative = json.loads(vllm[vllm.index("--speculative-config") + 1])
    assert speculative == {
        "method": "dflash",
        "model": "owner/drafter",
        "num_speculative_tokens": 15,
    }
    assert vllm[:3] == ["vllm", "serve", "owner/target"]
    assert commands.sglang is not None
    sglang = shlex.split(commands.sglang)
    assert sglang[sglang.index("--speculative-num-draft-tokens") + 1] == "16"
    assert sglang[sglang.index("--speculative-algorithm") + 1] == "DFLASH"
    assert "trust-remote-code" not in commands.vllm + commands.sglang
    assert serve_commands("t", "d", QWEN, "speculators").sglang is None


def test_caveats_are_those_of_this_drafter():
    def text(config: DrafterConfig, form: Format = "zlab") -> str:
        return " ".join(serve_commands("t", "d", config, form).caveats)

    assert "V2 model runner" in text(TINY)
    assert "V2 model runner" not in text(ALL_FULL)
    assert "V2 model runner" not in text(ALL_SLIDING)
    assert "vllm#50169" in text(ALL_SLIDING)
    assert "sliding_window_non_causal is true" in text(ALL_FULL, "speculators")
