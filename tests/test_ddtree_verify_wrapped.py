"""A family that transformers has with a vision tower only: the whole wrapper is loaded, tapped and verified by trees."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from ddtree_cases import ROPE, randomise, shaped_tree
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

from configs.schema import Config
from ddtree.verify import TreeVerifier
from target.load import load_target
from target.taps import forward_with_taps


def test_a_wrapper_without_a_text_only_class(
    tiny_config: Callable[..., Config], tmp_path: Path
) -> None:
    text = {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 128, "head_dim": 32}
    text |= {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
    text |= {"rope_parameters": ROPE | {"mrope_section": [6, 5, 5], "partial_rotary_factor": 1.0}}
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2}
    vision |= {"out_hidden_size": 64, "num_position_embeddings": 16, "patch_size": 4}
    vision |= {"deepstack_visual_indexes": [0]}
    nested = Qwen3VLForConditionalGeneration(Qwen3VLConfig(text_config=text, vision_config=vision))
    randomise(nested)
    nested.eval().save_pretrained(tmp_path / "nested")
    section = tiny_config().target
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(Path(section.model) / name, tmp_path / "nested")
    changes = {"model": str(tmp_path / "nested"), "prepare": None, "num_layers": 3}
    target = load_target(section.model_copy(update=changes), "cpu")
    assert json.loads((tmp_path / "nested/config.json").read_text())["architectures"] == [
        type(target.model).__name__
    ]
    ids = torch.arange(12)
    with torch.inference_mode():
        expected = nested(input_ids=ids[None], output_hidden_states=True)
    tapped = forward_with_taps(target, ids[None], torch.tensor([12]), (0, 1), True)
    for tap in (0, 1):
        assert torch.equal(tapped.features[:, :, tap], expected.hidden_states[tap + 1])
    verifier = TreeVerifier(target, (0, 1))
    verifier.prefill(ids)
    tree = shaped_tree("random", 10, torch.Generator().manual_seed(0))
    logits = verifier.verify([tree]).logits[0]
    path = torch.cat([ids, tree.tokens[tree.path(9)]])
    with torch.inference_mode():
        plain = nested(input_ids=path[None]).logits[0, -1]
    assert float((logits[9] - plain).abs().max() / plain.abs().max()) < 1e-4
