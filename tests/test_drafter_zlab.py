"""z-lab's own code loads our folder and computes the same hidden states. Runs where the `dflash` package is installed."""

from pathlib import Path
from typing import Any

import pytest
import torch
from drafter_cases import ALL_FULL, CONFIGS, random_inputs, tiny_drafter

from drafter.config import DrafterConfig
from drafter.folder import load_drafter, write_drafter
from drafter.model import BlockLayout

zlab: Any = pytest.importorskip("dflash.model")


def both(folder: Path, config: DrafterConfig, dtype: torch.dtype) -> float:
    """Largest difference of hidden states over anchors 1, 5 and 11 of a sequence, relative to their size."""
    write_drafter(folder, config, tiny_drafter(config).state_dict(), dtype)
    theirs = zlab.DFlashDraftModel.from_pretrained(folder, dtype=torch.float32).eval()
    ours = load_drafter(folder, "cpu", torch.float32)
    assert (theirs.block_size, theirs.mask_token_id) == (config.block_size, config.mask_token_id)
    assert list(theirs.target_layer_ids) == list(config.target_layer_ids)
    anchors = torch.tensor([[1, 5, 11]])
    places = torch.arange(12)[None]
    layout = BlockLayout(places, torch.zeros_like(places), anchors, torch.zeros_like(anchors))
    features, embeddings = random_inputs(config, layout)
    with torch.no_grad():
        wanted = ours(features, embeddings, layout)
        differences = [
            theirs(
                position_ids=torch.arange(anchor + config.block_size)[None],
                noise_embedding=embeddings[:, block],
                target_hidden=features[:, :anchor].flatten(-2),
            )
            - wanted[:, block]
            for block, anchor in enumerate(anchors[0].tolist())
        ]
    return float(torch.cat(differences).abs().max() / wanted.abs().max())


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equal_hidden_states_full_and_sliding(tmp_path, name, dtype):
    assert both(tmp_path / "drafter", CONFIGS[name], dtype) <= 1e-5


def test_z_labs_own_folder_loads_here(tmp_path):
    """Saved by their class, so with transformers' own way of writing config.json."""
    write_drafter(tmp_path / "ours", ALL_FULL, tiny_drafter(ALL_FULL).state_dict(), torch.bfloat16)
    theirs = zlab.DFlashDraftModel.from_pretrained(tmp_path / "ours", dtype=torch.bfloat16)
    theirs.save_pretrained(tmp_path / "theirs")
    back = load_drafter(tmp_path / "theirs", "cpu", torch.bfloat16)
    assert back.config == ALL_FULL
    ours = load_drafter(tmp_path / "ours", "cpu", torch.bfloat16).state_dict()
    assert all(torch.equal(t, ours[n]) for n, t in back.state_dict().items())
