"""speculators' format: what is written reads back with the same meaning, and nothing unexpected loads."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from drafter_cases import ALL_FULL, CONFIGS, TINY, tiny_drafter
from safetensors.torch import load_file, save_file

from common.files import write_json
from drafter.config import SLIDING, DrafterConfig
from drafter.folder import find_drafter_folder, load_drafter, read_drafter_config
from drafter.speculators_json import Verifier
from export.folder import Output, write_folder

VERIFIER = Verifier("owner/target", ("LlamaForCausalLM",))


def write(path: Path, config: DrafterConfig = TINY, dtype: torch.dtype = torch.float32) -> Path:
    state = tiny_drafter(config).state_dict()
    write_folder(path, config, state.__getitem__, dtype, Output("speculators", VERIFIER))
    return path


def values_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_written_reads_back(tmp_path, name, dtype):
    folder = write(tmp_path / "d", CONFIGS[name], dtype)
    found = find_drafter_folder(folder)
    assert (found.format, found.config, found.verifier) == ("speculators", CONFIGS[name], VERIFIER)
    state = load_drafter(folder, "cpu", dtype).state_dict()
    for key, tensor in tiny_drafter(CONFIGS[name]).state_dict().items():
        assert torch.equal(state[key], tensor.to(dtype)), key


def test_every_key_is_written_in_their_convention(tmp_path):
    values = values_of(write(tmp_path / "d"))
    assert values["aux_hidden_state_layer_ids"] == [2, 3, 5]  # taps 1, 2, 4
    assert values["draft_vocab_size"] == values["transformer_layer_config"]["vocab_size"] == 50
    assert values["sample_from_anchor"] is False
    assert values["sliding_window_non_causal"] is False
    method = values["speculators_config"]["proposal_methods"][0]
    assert method["speculative_tokens"] == 3  # of a block of 4
    assert values["speculators_config"]["verifier"]["name_or_path"] == "owner/target"
    layer = values["transformer_layer_config"]
    assert layer["layer_types"] == list(TINY.layer_types)
    assert (layer["sliding_window"], layer["use_sliding_window"]) == (3, True)
    # vLLM makes all layers causal unless it is true; without sliding layers the library ignores it
    assert values_of(write(tmp_path / "full", ALL_FULL))["sliding_window_non_causal"] is True


def test_a_folder_that_does_not_say_the_targets_depth_loads_without_it(tmp_path):
    folder = write(tmp_path / "d")
    values = values_of(folder)
    del values["num_target_layers"]
    write_json(folder / "config.json", values)
    assert read_drafter_config(folder) == replace(TINY, num_target_layers=None)


def test_what_is_worth_knowing_is_noted(tmp_path):
    folder = write(tmp_path / "d")
    values = values_of(folder)
    values["loss_decay"] = 4
    values["transformer_layer_config"]["rope_local"] = 1
    values["speculators_config"]["proposal_methods"][0]["speculative_tokens"] = 2
    write_json(folder / "config.json", values)
    notes = find_drafter_folder(folder).notes
    assert notes[0] == "loss_decay=4 is not known here and was left out"
    assert notes[1] == "transformer_layer_config.rope_local=1 is not known here and was left out"
    assert "counts from the slot" in notes[2]
    assert notes[3].startswith("speculative_tokens=2: vLLM drafts that many by default")


def changed(*path: str | int, to: Any = ...) -> Callable[[Path], None]:
    """A corruption: the value at `path` in config.json set, or removed where `to` is Ellipsis."""

    def corrupt(folder: Path) -> None:
        values = values_of(folder)
        place: Any = values
        for key in path[:-1]:
            place = place[key]
        if to is ...:
            del place[path[-1]]
        else:
            place[path[-1]] = to
        write_json(folder / "config.json", values)

    return corrupt


def tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def corrupt(folder: Path) -> None:
        state = load_file(folder / "model.safetensors")
        change(state)
        save_file(state, folder / "model.safetensors")

    return corrupt


LAYER, SPEC = "transformer_layer_config", "speculators_config"
CORRUPTIONS: dict[str, tuple[Callable[[Path], object], str]] = {
    "eagle3": (changed("speculators_model_type", to="eagle3"), r"is a mark of EAGLE-3"),
    "dflash2": (changed("speculators_model_type", to="dflash2"), r"is a mark of DFlash2"),
    "dspark": (changed("speculators_model_type", to="dspark"), r"is a mark of DSpark"),
    "mtp": (changed("speculators_model_type", to="mtp"), r"is a mark of multi-token prediction"),
    "unheard of": (changed("speculators_model_type", to="x"), r"_type='x' is not supported"),
    "no type": (changed("speculators_model_type", to=None), r"_type=None is not supported"),
    "markov head": (changed("markov_rank", to=64), r"markov_rank=64 is a mark of DSpark"),
    "no layer config": (changed(LAYER), r"transformer_layer_config is missing"),
    "layer config a list": (changed(LAYER, to=[]), r"transformer_layer_config is missing or no"),
    "another family": (changed(LAYER, "model_type", to="llama"), r"model_type='llama' is not sup"),
    "no heads": (changed(LAYER, "num_attention_heads"), r"num_attention_heads=None must be"),
    "no epsilon": (changed(LAYER, "rms_norm_eps"), r"rms_norm_eps=None must be"),
    "yarn": (
        changed(LAYER, "rope_parameters", to={"rope_type": "yarn", "rope_theta": 1e4}),
        r"only plain RoPE",
    ),
    "part of the vocabulary": (
        changed("draft_vocab_size", to=40),
        r"draft_vocab_size=40 of 50: a head over part of the vocabulary is not supported",
    ),
    "no vocabulary": (changed("draft_vocab_size"), r"draft_vocab_size=None must be"),
    "another width": (changed("target_hidden_size", to=64), r"it must be hidden_size=32"),
    "from the anchor": (changed("sample_from_anchor", to=True), r"sample_from_anchor=True is not"),
    "windows both ways": (
        changed("sliding_window_non_causal", to=True),
        r"sliding_window_non_causal=True is not supported",
    ),
    "no taps": (changed("aux_hidden_state_layer_ids", to=None), r"layer_ids=None must be a list"),
    "the embedding tapped": (
        changed("aux_hidden_state_layer_ids", to=[0, 2, 4]),
        r"0 is the embedding's output, not a layer's",
    ),
    "the last layer tapped": (
        changed("aux_hidden_state_layer_ids", to=[2, 3, 6]),
        r"target_layer_ids=\[1, 2, 5\]: .* the last one is never tapped",
    ),
    "taps out of order": (
        changed("aux_hidden_state_layer_ids", to=[3, 2, 5]),
        r"must be increasing",
    ),
    "other taps": (changed("aux_hidden_state_layer_ids", to=[2, 3]), r"fc.weight has shape"),
    "no mask token": (changed("mask_token_id", to=None), r"mask_token_id=None must be"),
    "mask token outside": (changed("mask_token_id", to=50), r"mask_token_id=50 is outside"),
    "a block of one": (changed("block_size", to=1), r"block_size=1 must be at least 2"),
    "no method": (changed(SPEC, "proposal_methods", to=[]), r"proposal_methods=\[\] names no"),
    "no speculators_config": (changed(SPEC), r"speculators_config is missing"),
    "no verifier": (changed(SPEC, "verifier"), r"verifier is missing"),
    "verifier a number": (changed(SPEC, "verifier", "name_or_path", to=3), r"name_or_path=3 must"),
    "map to the vocabulary": (
        tensors(lambda s: s.update({"d2t": torch.zeros(50), "t2d": torch.zeros(50)})),
        r"has a map to part of the vocabulary",
    ),
    "a confidence head": (
        tensors(lambda s: s.update({"confidence_head.weight": torch.zeros(1)})),
        r"'confidence_head.weight', a tensor of DSpark",
    ),
    "a tensor less": (tensors(lambda s: s.pop("fc.weight")), r"lack fc.weight \(1 missing\)"),
}


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_a_corrupted_folder_is_refused_in_one_clear_line(tmp_path, name):
    folder = write(tmp_path / "drafter")
    corrupt, message = CORRUPTIONS[name]
    corrupt(folder)
    with pytest.raises((ValueError, FileNotFoundError), match=message) as caught:
        load_drafter(folder, "cpu", torch.float32)
    assert "\n" not in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_a_wrong_causality_of_full_layers_changes_nothing(tmp_path):
    """Their library reads the key for sliding layers only."""
    folder = write(tmp_path / "d", ALL_FULL)
    changed("sliding_window_non_causal", to=False)(folder)
    assert read_drafter_config(folder) == ALL_FULL
    assert SLIDING not in ALL_FULL.layer_types
