"""The released packages of others read our folders and we theirs: z-lab's dflash 0.1.0 and speculators 0.9.0, on the CPU.

They are set up by `./launch.sh setup`; where a package index lacks them, these tests are skipped and say so.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from drafter_cases import tiny_drafter
from evaluation_cases import GREEDY, Case, make_case
from torch import Tensor, nn

from common.files import write_json
from configs.schema import Config
from drafter.config import FULL, SLIDING, DrafterConfig
from drafter.folder import Format, find_drafter_folder, load_drafter
from drafter.masks import BlockLayout, dense_mask
from drafter.model import Drafter, block_embeddings
from drafter.own_head import require_targets_own
from drafter.speculators_json import Verifier
from evaluation.acceptors import CHAIN
from evaluation.decode import decode_plain, decode_with_tree
from export.folder import Output, write_folder
from export.target_files import verifier_of
from target.head import TargetHead
from target.load import Target

NOT_HERE = "{} is not installed: ./launch.sh setup brings it where the package index has it"
zlab: Any = pytest.importorskip("dflash.model", reason=NOT_HERE.format("dflash 0.1.0"))
speculators: Any = pytest.importorskip("speculators", reason=NOT_HERE.format("speculators 0.9.0"))
readers: Any = pytest.importorskip("bench.readers")

LAYERS = {
    "full": ((FULL, FULL), None),
    "mixed": ((SLIDING, FULL), 100),  # wider than any row: see the narrow windows below
    "sliding": ((SLIDING, SLIDING), 100),
}
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def case(tiny_config: Callable[..., Config], tiny_target: Callable[..., Target]) -> Case:
    """A full-attention drafter that is right now and then, and its target."""
    return make_case(tiny_config("llama"), tiny_target("llama"), num_prompts=4)


@pytest.fixture(scope="module")
def target_folder(tiny_config: Callable[..., Config]) -> Path:
    return Path(tiny_config("llama").target.model)


def with_layers(case: Case, name: str, window: int | None = None) -> Drafter:
    """The drafter's weights under other layer types."""
    types, wide = LAYERS[name]
    drafter = Drafter(
        replace(case.drafter.config, layer_types=types, sliding_window=window or wide)
    )
    drafter.load_state_dict(case.drafter.state_dict())
    return drafter.eval()


def export(
    path: Path,
    drafter: Drafter,
    target: Path,
    form: Format,
    dtype: torch.dtype = torch.float32,
    head: TargetHead | None = None,
) -> Path:
    output = Output(form, verifier_of(str(target), target), head)
    write_folder(path, drafter.config, drafter.state_dict().__getitem__, dtype, output)
    return path


def our_logits(drafter: Drafter, case: Case, row: int, anchors: list[int]) -> Tensor:
    """(n, K-1, V) by the training code."""
    config, record = drafter.config, case.rows[row]
    where = torch.tensor([anchors])
    places = torch.arange(len(record.input_ids))[None]
    layout = BlockLayout(places, places * 0, where, where * 0)
    blocks = block_embeddings(
        case.head.embedding, record.input_ids[where], config.mask_token_id, config.block_size
    )
    with torch.no_grad():
        hidden = drafter(record.features[None].float(), blocks, layout)[0]
        return hidden[:, 1:] @ case.head.head.T


def by_zlab(folder: Path, case: Case, row: int, anchors: list[int]) -> Tensor:
    record = case.rows[row]
    model = readers.load_zlab(folder)
    return readers.zlab_logits(model, case.target, record.input_ids, record.features, anchors)


def by_speculators(model: Any, case: Case, row: int, anchors: list[int]) -> Tensor:
    record = case.rows[row]
    return readers.speculators_logits(model, record.input_ids, record.features, anchors)


def difference(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).abs().max() / wanted.abs().max())


ANCHORS = [3, 9, 14, 20]


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_both_packages_give_our_logits(tmp_path, case, target_folder, name, dtype):
    drafter = with_layers(case, name)
    theirs = export(tmp_path / "zlab", drafter, target_folder, "zlab", dtype)
    others = export(tmp_path / "speculators", drafter, target_folder, "speculators", dtype)
    rounded = load_drafter(theirs, "cpu", torch.float32)
    wanted = our_logits(rounded, case, 3, ANCHORS)
    assert difference(by_zlab(theirs, case, 3, ANCHORS), wanted) <= TOLERANCE
    model = readers.load_speculators(others)
    found = by_speculators(model, case, 3, ANCHORS)
    assert difference(found, wanted) <= TOLERANCE


@pytest.mark.parametrize("name", ["mixed", "sliding"])
def test_a_narrow_window_is_the_same_rule_as_z_labs(tmp_path, case, target_folder, name):
    drafter = with_layers(case, name, window=5)
    folder = export(tmp_path / "zlab", drafter, target_folder, "zlab")
    wanted = our_logits(drafter, case, 3, ANCHORS)
    assert difference(by_zlab(folder, case, 3, ANCHORS), wanted) <= TOLERANCE
    assert difference(our_logits(with_layers(case, name), case, 3, ANCHORS), wanted) > 1e-3


def test_speculators_window_differs_by_what_its_note_says_and_nothing_else(
    tmp_path, case, target_folder, monkeypatch
):
    """Their training counts the window from the anchor; with it counted from the slot, as servers do, logits are ours."""
    drafter = with_layers(case, "sliding", window=5)
    folder = export(tmp_path / "folder", drafter, target_folder, "speculators")
    model = readers.load_speculators(folder)
    wanted = our_logits(drafter, case, 3, ANCHORS)
    found = by_speculators(model, case, 3, ANCHORS)
    assert difference(found, wanted) > 1e-3
    assert "counts from the slot" in " ".join(find_drafter_folder(folder).notes)

    def served_mask(
        document_ids: Tensor, total_seq_len: int, anchor_positions: Tensor, **_: object
    ):
        places = torch.arange(total_seq_len)[None]
        layout = BlockLayout(
            places, document_ids, anchor_positions[None], anchor_positions[None] * 0
        )
        hidden = ~dense_mask(layout, model.block_size, 5)
        return torch.zeros(hidden.shape).masked_fill_(hidden, -torch.inf)[:, None]

    monkeypatch.setattr(model, "_create_attention_mask", served_mask)
    found = by_speculators(model, case, 3, ANCHORS)
    assert difference(found, wanted) <= TOLERANCE


@pytest.mark.parametrize("name", LAYERS)
def test_greedy_chains_accept_the_same_tokens_everywhere(tmp_path, case, target_folder, name):
    drafter, length = with_layers(case, name), 20
    theirs = export(tmp_path / "zlab", drafter, target_folder, "zlab")
    others = readers.load_speculators(
        export(tmp_path / "spec", drafter, target_folder, "speculators")
    )
    z_labs, ours = readers.load_zlab(theirs), load_drafter(theirs, "cpu", torch.float32).eval()
    all_passes = []
    for index in range(len(case.prompts)):
        prompt, settings = case.ids(index), case.settings(max_new_tokens=length, sampling=GREEDY)
        plain = decode_plain(case.verifier, prompt, settings)
        decoded = decode_with_tree(case.verifier, ours, case.head, prompt, CHAIN, settings)
        assert decoded.tokens == plain.tokens
        wanted = (decoded.tokens, decoded.passes)
        assert readers.zlab_decode(z_labs, case.target, prompt, length) == wanted
        assert readers.speculators_decode(others, case.target, prompt, length) == wanted
        all_passes += decoded.passes
    assert max(all_passes) > 1, "the drafter is never right: nothing was compared"


@pytest.mark.parametrize("form", ["zlab", "speculators"])
def test_self_contained_folders_load_in_both_with_the_targets_head(
    tmp_path, case, target_folder, form
):
    folder = export(tmp_path / "own", case.drafter, target_folder, form, head=case.head)
    require_targets_own(folder, lambda: case.head)
    wanted = our_logits(load_drafter(folder, "cpu", torch.float32), case, 3, ANCHORS)
    assert difference(wanted, our_logits(case.drafter, case, 3, ANCHORS)) == 0
    if form == "zlab":
        found = by_zlab(folder, case, 3, ANCHORS)
    else:
        found = by_speculators(readers.load_speculators(folder), case, 3, ANCHORS)
    assert difference(found, wanted) <= TOLERANCE


def speculators_folder(path: Path, config: DrafterConfig, model: str = "DFlash") -> Path:
    """Made and saved by their code alone, as their trainer does; `model` is one of their kinds."""
    from speculators.proposals.greedy import GreedyTokenProposalConfig
    from transformers import Qwen3Config

    layer = Qwen3Config(
        hidden_size=config.hidden_size,
        num_hidden_layers=config.num_layers,
        intermediate_size=config.intermediate_size,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        vocab_size=config.vocab_size,
        layer_types=list(config.layer_types),
        sliding_window=config.sliding_window,
        use_sliding_window=config.sliding_window is not None,
        rms_norm_eps=config.rms_norm_eps,
        max_position_embeddings=config.max_position_embeddings,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
    )
    layer._attn_implementation = "eager"
    method = GreedyTokenProposalConfig(speculative_tokens=config.block_size - 1)
    made = vars(speculators)[f"{model}SpeculatorConfig"](
        transformer_layer_config=layer,
        draft_vocab_size=config.vocab_size,
        block_size=config.block_size,
        aux_hidden_state_layer_ids=[tap + 1 for tap in config.target_layer_ids],
        mask_token_id=config.mask_token_id,
        speculators_config=speculators.SpeculatorsConfig(
            algorithm=model.lower(),
            proposal_methods=[method],
            default_proposal_method="greedy",
            verifier=speculators.VerifierConfig(name_or_path=None, architectures=["Llama"]),
        ),
        **({"conv_group_size": 16, "selector_top_k": 4} if model == "DFlash2" else {}),
    )
    drafter = vars(speculators)[f"{model}DraftModel"](made)
    with torch.no_grad():
        for parameter in drafter.parameters():
            nn.init.normal_(parameter)
    drafter.save_pretrained(path)
    return path


@pytest.mark.parametrize("name", LAYERS)
def test_a_folder_saved_by_speculators_loads_here(tmp_path, case, name):
    config = replace(with_layers(case, name).config, num_target_layers=None)
    folder = speculators_folder(tmp_path / "theirs", config)
    ours = load_drafter(folder, "cpu", torch.float32)
    assert ours.config == config
    theirs = readers.load_speculators(folder).state_dict()
    assert all(torch.equal(tensor, theirs[n]) for n, tensor in ours.state_dict().items())


@pytest.mark.parametrize("name", LAYERS)
def test_a_folder_saved_by_z_lab_loads_here(tmp_path, case, target_folder, name):
    """Saved by their class, so with transformers' own way of writing config.json."""
    drafter = with_layers(case, name)
    ours = export(tmp_path / "ours", drafter, target_folder, "zlab", torch.bfloat16)
    theirs = zlab.DFlashDraftModel.from_pretrained(ours, dtype=torch.bfloat16)
    theirs.save_pretrained(tmp_path / "theirs")
    back = load_drafter(tmp_path / "theirs", "cpu", torch.bfloat16)
    assert back.config == drafter.config
    state = load_drafter(ours, "cpu", torch.bfloat16).state_dict()
    assert all(torch.equal(t, state[n]) for n, t in back.state_dict().items())


def test_speculators_converter_agrees_with_ours(tmp_path, case, target_folder):
    """Their own conversion of our z-lab folder has the meaning of our speculators folder."""
    from speculators.convert.dflash.converter import DFlashConverter

    ours = export(tmp_path / "zlab", case.drafter, target_folder, "zlab", torch.bfloat16)
    converter = DFlashConverter()
    source = find_drafter_folder(ours).values
    made = converter._build_config(dict(source), str(target_folder), None)
    made.transformer_layer_config._attn_implementation = "eager"
    made.save_pretrained(tmp_path / "theirs")
    converted = find_drafter_folder(tmp_path / "theirs")
    assert replace(converted.config, num_target_layers=6) == case.drafter.config
    assert converted.verifier == verifier_of(str(target_folder), target_folder)


def test_the_round_trip_keeps_every_byte_and_meaning(tmp_path, case, target_folder):
    """import -> export: z-lab's folder to speculators' and back."""
    first = export(tmp_path / "1", case.drafter, target_folder, "zlab", torch.bfloat16)
    there = load_drafter(first, "cpu", torch.bfloat16)
    second = export(tmp_path / "2", there, target_folder, "speculators", torch.bfloat16)
    back = load_drafter(second, "cpu", torch.bfloat16)
    third = export(tmp_path / "3", back, target_folder, "zlab", torch.bfloat16)
    for name in ("model.safetensors", "config.json"):
        assert (first / name).read_bytes() == (third / name).read_bytes()
    assert (second / "model.safetensors").read_bytes() == (first / "model.safetensors").read_bytes()


@pytest.mark.parametrize("model", ["DFlash2", "DSpark", "XPress"])
def test_other_kinds_made_by_speculators_are_refused_by_name(tmp_path, case, model):
    config = replace(case.drafter.config, num_target_layers=None)
    folder = speculators_folder(tmp_path / "other", config, model)
    with pytest.raises(ValueError, match=rf"is a mark of {model}.*nothing of it was loaded"):
        load_drafter(folder, "cpu", torch.float32)


def test_dflash2_made_by_z_lab_is_refused_also_without_its_keys(tmp_path, case, target_folder):
    ours = export(tmp_path / "ours", case.drafter, target_folder, "zlab")
    values = dict(find_drafter_folder(ours).values)
    extra = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 8, "selector_top_k": 4}
    values["dflash_config"] = values["dflash_config"] | extra
    config = zlab.Qwen3Config.from_dict(values)
    zlab.DFlash2DraftModel(config).save_pretrained(tmp_path / "theirs")
    with pytest.raises(ValueError, match="is a mark of DFlash2"):
        load_drafter(tmp_path / "theirs", "cpu", torch.float32)
    write_json(tmp_path / "theirs" / "config.json", dict(find_drafter_folder(ours).values))
    with pytest.raises(ValueError, match="a tensor of DFlash2"):
        load_drafter(tmp_path / "theirs", "cpu", torch.float32)


def test_z_labs_random_drafter_of_another_shape_loads(tmp_path, case):
    """Nothing of the shape is ours: one layer, one tap, a block of 8."""
    config = replace(
        case.drafter.config, num_layers=1, layer_types=(FULL,), target_layer_ids=(3,), block_size=8
    )
    drafter = tiny_drafter(config)
    output = Output("zlab", Verifier("x/y", ()))
    write_folder(tmp_path / "a", config, drafter.state_dict().__getitem__, torch.float32, output)
    theirs = zlab.DFlashDraftModel.from_pretrained(tmp_path / "a", dtype=torch.float32)
    assert (theirs.block_size, list(theirs.target_layer_ids)) == (8, [3])
    one_tap = replace(case, rows=[replace(row, features=row.features[:, 2:]) for row in case.rows])
    wanted = our_logits(drafter, one_tap, 3, ANCHORS[:2])
    assert difference(by_zlab(tmp_path / "a", one_tap, 3, ANCHORS[:2]), wanted) <= TOLERANCE
