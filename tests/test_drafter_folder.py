"""The drafter folder: what is written comes back bit for bit, and nothing unexpected in a folder loads."""

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from drafter_cases import ALL_FULL, TINY, tiny_drafter
from safetensors.torch import load_file, save_file

from common.files import sha256_file, write_json
from configs.schema import Config
from drafter.config import FULL, DrafterConfig, drafter_config
from drafter.folder import (
    check_drafter,
    drafter_fingerprint,
    load_drafter,
    read_drafter_config,
    resolve_checkpoint,
    write_drafter,
)
from drafter.model import Drafter
from drafter.own_head import require_targets_own
from drafter.weights import expected_shapes
from target.head import TargetHead


def write(path: Path, config: DrafterConfig = TINY, dtype: torch.dtype = torch.float32) -> Path:
    write_drafter(path, config, tiny_drafter(config).state_dict(), dtype)
    return path


@pytest.mark.parametrize("config", [TINY, ALL_FULL], ids=["sliding", "full"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_round_trip_is_equal_byte_for_byte(tmp_path, config, dtype):
    first = write(tmp_path / "first", config, dtype)
    drafter = load_drafter(first, "cpu", dtype)
    assert drafter.config == config
    for name, tensor in tiny_drafter(config).state_dict().items():
        assert torch.equal(drafter.state_dict()[name], tensor.to(dtype)), name
    write_drafter(tmp_path / "second", drafter.config, drafter.state_dict(), dtype)
    for file in ("config.json", "model.safetensors"):
        assert (first / file).read_bytes() == (tmp_path / "second" / file).read_bytes()
        assert (first / file).stat().st_mode & 0o044 == 0o044, "readable for a server's user"
    assert sorted(p.name for p in first.iterdir()) == ["config.json", "model.safetensors"]


def test_a_loaded_drafter_trains_and_computes_the_same(tmp_path):
    drafter = load_drafter(write(tmp_path / "d"), "cpu", torch.float32)
    assert all(p.requires_grad for p in drafter.parameters())
    features = torch.randn(1, 3, 3, 32)
    assert torch.equal(
        drafter.project_features(features), tiny_drafter().project_features(features)
    )


def test_every_key_that_a_server_reads_is_written(tmp_path):
    values = json.loads((write(tmp_path / "d") / "config.json").read_text())
    assert values["architectures"] == ["DFlashDraftModel"]
    assert values["block_size"] == values["dflash_config"]["block_size"] == 4
    assert values["dflash_config"]["target_layer_ids"] == [1, 2, 4]
    assert values["dflash_config"]["mask_token_id"] == 3
    assert values["rope_theta"] == values["rope_parameters"]["rope_theta"] == 1e4
    assert values["layer_types"] == ["sliding_attention", FULL, "sliding_attention"]
    assert (values["sliding_window"], values["use_sliding_window"]) == (3, True)
    assert values["num_target_layers"] == 6
    assert values["tie_word_embeddings"] is False
    assert "is_causal" not in values


RELEASED: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
    "attention_bias": False,
    "block_size": 16,
    "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]},
    "dtype": "bfloat16",
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "max_position_embeddings": 40960,
    "max_window_layers": 5,
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_hidden_layers": 5,
    "num_key_value_heads": 8,
    "num_target_layers": 36,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
"""What the released Qwen3-4B-DFlash-b16 states; block_size and rope_theta only at the top, no layer_types."""


@pytest.mark.parametrize("form", ["as released", "rope in parameters", "block in dflash_config"])
def test_the_config_of_a_released_drafter_is_understood(tmp_path, form):
    values = json.loads(json.dumps(RELEASED))
    if form == "rope in parameters":
        values["rope_parameters"] = {"rope_type": "default", "rope_theta": values.pop("rope_theta")}
    if form == "block in dflash_config":
        values["dflash_config"]["block_size"] = values.pop("block_size")
    write_json(tmp_path / "config.json", values)
    config = read_drafter_config(tmp_path)
    assert (config.block_size, config.rope_theta, config.mask_token_id) == (16, 1e6, 151669)
    assert config.target_layer_ids == (1, 9, 17, 25, 33)
    assert config.layer_types == (FULL,) * 5
    assert config.sliding_window is None


def changed(**changes: Any) -> Callable[[Path], None]:
    """A corruption: keys of config.json set, or removed where the value is Ellipsis; `dflash__x` is dflash_config.x."""

    def corrupt(folder: Path) -> None:
        values = json.loads((folder / "config.json").read_text())
        for key, value in changes.items():
            place = values["dflash_config"] if key.startswith("dflash__") else values
            name = key.removeprefix("dflash__")
            if value is ...:
                del place[name]
            else:
                place[name] = value
        write_json(folder / "config.json", values)

    return corrupt


def tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def corrupt(folder: Path) -> None:
        state = load_file(folder / "model.safetensors")
        change(state)
        save_file(state, folder / "model.safetensors")

    return corrupt


def cut_short(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def cut_in_header(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:50])


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def shard(folder: Path, index: dict[str, Any] | None = None) -> None:
    """The same tensors in two files, as transformers shards them; `index` replaces what the index file says."""
    state = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    weight_map = {}
    for number, names in enumerate((sorted(state)[:9], sorted(state)[9:]), 1):
        file = f"model-0000{number}-of-00002.safetensors"
        save_file({name: state[name] for name in names}, folder / file)
        weight_map |= dict.fromkeys(names, file)
    content = {"weight_map": weight_map} if index is None else index
    (folder / "model.safetensors.index.json").write_text(json.dumps(content))


def reindex(folder: Path, **places: str) -> None:
    """Sharded, with an index that says of some tensors something else."""
    shard(folder)
    index = folder / "model.safetensors.index.json"
    said = json.loads(index.read_text())["weight_map"]
    index.write_text(json.dumps({"weight_map": said | places}))


def index_beside_a_single_file(folder: Path) -> None:
    shutil.copy(folder / "model.safetensors", folder / "copy")
    shard(folder)
    (folder / "copy").rename(folder / "model.safetensors")


def lose_a_shard(folder: Path) -> None:
    shard(folder)
    (folder / "model-00002-of-00002.safetensors").unlink()


def repeat_a_tensor(folder: Path) -> None:
    shard(folder)
    second = folder / "model-00002-of-00002.safetensors"
    save_file(load_file(second) | {"fc.weight": torch.zeros(32, 96)}, second)


def deep_json(folder: Path) -> None:
    (folder / "config.json").write_text("[" * 100_000)


def huge_json(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({"dflash_config": "x" * 2_000_000}))


def huge_header(folder: Path) -> None:
    """A safetensors header that claims 2**60 bytes."""
    file = folder / "model.safetensors"
    file.write_bytes((2**60).to_bytes(8, "little") + file.read_bytes()[8:])


def deepspeed_checkpoint(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "latest").write_text("global_step300")
    (folder / "mp_rank_00_model_states.pt").write_bytes(b"\x80\x02")


def poison(value: float) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(state: dict[str, torch.Tensor]) -> None:
        state["layers.1.mlp.up_proj.weight"][2, 3] = value

    return change


FC, NORM = "fc.weight", "norm.weight"
CORRUPTIONS: dict[str, tuple[Callable[[Path], object], str]] = {
    "no folder": (shutil.rmtree, r"drafter folder .* does not exist"),
    "no config": (lambda f: (f / "config.json").unlink(), r"config.json is missing; give a"),
    "config not json": (lambda f: (f / "config.json").write_text("{"), r"is not valid JSON"),
    "config a list": (lambda f: (f / "config.json").write_text("[]"), r"dflash_config is missing"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), r"model.safetensors is missing"),
    "truncated": (cut_short, r"damaged or cut short"),
    "truncated header": (cut_in_header, r"damaged or cut short"),
    "pickle": (pickled, r"pytorch_model.bin is a pickle and is not opened"),
    "pickle beside an index": (
        lambda f: shard(f, {"weight_map": {FC: "pytorch_model.bin"}}),
        r"names 'pytorch_model.bin'; only .safetensors files beside it",
    ),
    "shard elsewhere": (
        lambda f: shard(f, {"weight_map": {FC: "../other.safetensors"}}),
        r"names '\.\./other.safetensors'; only .safetensors files beside it",
    ),
    "index without a map": (lambda f: shard(f, {}), r"index.json does not hold"),
    "empty index": (lambda f: shard(f, {"weight_map": {}}), r"names no file"),
    "a shard is missing": (lose_a_shard, r"model-00002-of-00002.safetensors is missing, a shard"),
    "a tensor of the index is nowhere": (
        lambda f: reindex(f, **{"extra.weight": "model-00001-of-00002.safetensors"}),
        r"says 'extra.weight' is in 'model-00001-of-00002.safetensors', it is in None",
    ),
    "a tensor in another shard than the index says": (
        lambda f: reindex(f, **{FC: "model-00002-of-00002.safetensors"}),
        r"says 'fc.weight' is in 'model-00002-.*', it is in 'model-00001-",
    ),
    "an index beside a single file": (
        index_beside_a_single_file,
        r"has both model.safetensors and model.safetensors.index.json",
    ),
    "zeros": (tensors(lambda s: s[FC].zero_()), r"fc.weight is all zero, as after a broken copy"),
    "a tensor twice": (repeat_a_tensor, r"repeats 'fc.weight' of model-00001"),
    "DeepSpeed's pickles": (deepspeed_checkpoint, r"is a checkpoint of DeepSpeed's own"),
    "mask embedding": (
        lambda f: (f / "mask_embedding.pt").write_bytes(b"\x80"),
        r"mask_embedding.pt is a mask embedding of the drafter's own",
    ),
    "config nested too deep": (deep_json, r"nested too deep"),
    "config of megabytes": (huge_json, r"is larger than 1,000,000 bytes"),
    "header of 2**60 bytes": (huge_header, r"damaged or cut short"),
    "empty file": (
        lambda f: (f / "model.safetensors").write_bytes(b""),
        r"damaged or cut short",
    ),
    "unknown tensor": (
        tensors(lambda s: s.update({"adapter.weight": torch.ones(2)})),
        r"has 'adapter.weight', a tensor of another model",
    ),
    "head of another vocabulary": (
        tensors(lambda s: s.update({"lm_head.weight": torch.ones(50, 16)})),
        r"lm_head.weight has shape \[50, 16\], config.json makes it \[50, 32\]",
    ),
    "DFlash2 tensor": (
        tensors(lambda s: s.update({"layers.0.mlp_conv.base_kernel": torch.ones(2)})),
        r"has 'layers.0.mlp_conv.base_kernel', a tensor of DFlash2",
    ),
    "part of the vocabulary": (
        tensors(lambda s: s.update({"d2t": torch.zeros(10)})),
        r"has a map to part of the vocabulary",
    ),
    "missing tensor": (tensors(lambda s: s.pop(NORM)), r"lack norm.weight \(1 missing\)"),
    "swapped layer": (
        tensors(
            lambda s: s.update(
                {"layers.0.mlp.up_proj.weight": s["layers.0.mlp.down_proj.weight"].clone()}
            )
        ),
        r"layers.0.mlp.up_proj.weight has shape \[32, 48\], config.json makes it \[48, 32\]",
    ),
    "a layer more": (
        changed(num_hidden_layers=4, layer_types=[FULL] * 4),
        r"lack layers.3.input_layernorm.weight \(11 missing\)",
    ),
    "a billion layers": (changed(num_hidden_layers=10**9), r"must be from 1 to 1024"),
    "hidden size beyond memory": (changed(hidden_size=10**12), r"hidden_size=1000000000000 is out"),
    "wrong shape": (
        tensors(lambda s: s.update({FC: torch.ones(32, 64)})),
        r"fc.weight has shape \[32, 64\], config.json makes it \[32, 96\]",
    ),
    "NaN": (tensors(poison(torch.nan)), r"layers.1.mlp.up_proj.weight has NaN or infinite"),
    "infinite": (tensors(poison(torch.inf)), r"layers.1.mlp.up_proj.weight has NaN or infinite"),
    "float64": (
        tensors(lambda s: s.update({n: t.double() for n, t in s.items()})),
        r"holds float64, config.json says dtype='float32'",
    ),
    "mixed dtypes": (
        tensors(lambda s: s.update({NORM: s[NORM].bfloat16()})),
        r"norm.weight is torch.bfloat16, fc.weight is torch.float32",
    ),
    "dtype disagrees": (
        changed(dtype="bfloat16"),
        r"holds float32, config.json says dtype='bfloat16'",
    ),
    "DFlash2 key": (
        changed(dflash__conv_kernel_size=2),
        r"dflash_config.conv_kernel_size=2 is a mark of DFlash2",
    ),
    "selector": (
        changed(dflash__selector_rank=8),
        r"dflash_config.selector_rank=8 is a mark of DFlash2",
    ),
    "DFlash2 class": (changed(architectures=["DFlash2DraftModel"]), r"architectures=\['DFlash2"),
    "no dflash_config": (changed(dflash_config=...), r"dflash_config is missing"),
    "no mask token": (changed(dflash__mask_token_id=...), r"mask_token_id is missing"),
    "mask token outside": (changed(dflash__mask_token_id=50), r"mask_token_id=50 is outside"),
    "two block sizes": (
        changed(block_size=8),
        r"block_size is 4 in dflash_config and 8 at the top",
    ),
    "no block size": (changed(block_size=..., dflash__block_size=...), r"block_size is missing"),
    "no taps": (changed(dflash__target_layer_ids=...), r"target_layer_ids is missing"),
    "taps too deep": (changed(dflash__target_layer_ids=[1, 2, 6]), r"the target has layers 0\.\.5"),
    "other taps": (changed(dflash__target_layer_ids=[1, 2]), r"fc.weight has shape"),
    "causal": (changed(is_causal=True), r"is_causal=True breaks the mask rule"),
    "not causal": (changed(dflash__causal=False), r"causal=False breaks the mask rule"),
    "two RoPE bases": (changed(rope_theta=5e5), r"rope_theta has two values, 10000.0 and 500000.0"),
    "no RoPE base": (changed(rope_theta=..., rope_parameters=...), r"rope_theta is missing"),
    "yarn": (
        changed(rope_scaling={"rope_type": "yarn", "factor": 4.0}),
        r"rope_scaling=.*yarn.* only plain RoPE",
    ),
    "biases": (changed(attention_bias=True), r"attention_bias=True is not supported"),
    "soft-capping": (changed(final_logit_softcapping=30.0), r"final_logit_softcapping=30.0 is not"),
    "layer types": (changed(layer_types=[FULL] * 2), r"layer_types has 2 entries for 3 layers"),
    "layer type": (changed(layer_types=[FULL, FULL, "linear"]), r"layer_types has 'linear'"),
    "window off": (changed(use_sliding_window=False), r"use_sliding_window=false contradicts"),
    "no window": (changed(sliding_window=None), r"sliding_window=None must be a whole number"),
    "not a number": (changed(hidden_size="32"), r"hidden_size='32' must be a whole number"),
    "another vocabulary": (changed(draft_vocab_size=40), r"draft_vocab_size=40 contradicts"),
    "taps the other way": (
        changed(eagle_aux_hidden_state_layer_ids=[1, 2, 4]),
        r"eagle_aux_hidden_state_layer_ids=\[1, 2, 4\] contradicts .* \[2, 3, 5\]",
    ),
    "last layer tapped": (changed(dflash__target_layer_ids=[1, 2, 5]), r"the last one is never"),
    "taps out of order": (changed(dflash__target_layer_ids=[2, 1, 4]), r"must be increasing"),
    "no head size": (changed(head_dim=...), r"head_dim is missing; readers disagree"),
    "no key heads": (changed(num_key_value_heads=...), r"num_key_value_heads=None must be"),
    "epsilon not a number": (changed(rms_norm_eps=float("nan")), r"rms_norm_eps=nan must be a fin"),
    "causal no boolean": (changed(is_causal=[1]), r"is_causal=\[1\] breaks the mask rule"),
    "scaled embedding": (changed(dflash__input_embedding_scale=2.0), r"input_embedding_scale=2.0"),
    "scaled logits": (changed(dflash__output_multiplier=0.5), r"output_multiplier=0.5 is not"),
    "rotary pairs": (changed(is_neox_style=False), r"is_neox_style=False is not supported"),
    "part of the heads rotated": (
        changed(rope_parameters={"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1]}),
        r"rope_parameters.mrope_section=\[1\] is not supported",
    ),
    "drafts from the anchor": (
        changed(dflash__sample_from_anchor=True),
        r"sample_from_anchor=True",
    ),
    "windows everywhere": (changed(dflash__use_swa=True), r"use_swa=True is not supported"),
    "another window": (changed(dflash__swa_window_size=9), r"swa_window_size=9 contradicts"),
    "Domino": (changed(dflash__projector_type="domino"), r"projector_type='domino' is a mark of D"),
    "attention sinks": (changed(dflash__attention_sink_bias=True), r"is a mark of MiMo's DFlash"),
    "DSpark": (changed(markov_rank=256), r"markov_rank=256 is a mark of DSpark"),
    "heads": (changed(num_key_value_heads=3), r"num_attention_heads=4 is not a multiple"),
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


def test_sharded_weights_are_the_same_drafter(tmp_path):
    folder = write(tmp_path / "drafter")
    shard(folder)
    state = load_drafter(folder, "cpu", torch.float32).state_dict()
    assert all(torch.equal(t, state[n]) for n, t in tiny_drafter().state_dict().items())
    assert drafter_fingerprint(folder) == drafter_fingerprint(folder)


def test_what_is_left_out_is_listed(tmp_path, caplog):
    folder = write(tmp_path / "drafter")
    changed(auto_map={"AutoModel": "x.Y"}, swa_sinks="yes\nno", dflash__mask_token="<m>")(folder)
    tensors(lambda s: s.update({"embed_tokens.weight": torch.ones(50, 32)}))(folder)
    assert load_drafter(folder, "cpu", torch.float32).config == TINY
    said = [record.getMessage().removeprefix(f"{folder}: ") for record in caplog.records]
    assert said == [
        "auto_map names code of the folder's own, which is never run",
        "swa_sinks='yes\\nno' is not known here and was left out",
        "dflash_config.mask_token='<m>' is not known here and was left out",
        "embed_tokens.weight: copies of the target's own, not read; the run's target is used",
    ]


def test_transformers_bookkeeping_and_neutral_values_are_no_notes(tmp_path, caplog):
    folder = write(tmp_path / "drafter")
    changed(bos_token_id=1, conv_kernel_size=0, logit_scale=1.0, dflash__causal=None)(folder)
    load_drafter(folder, "cpu", torch.float32)
    assert not caplog.records


def test_a_copy_of_the_targets_head_must_be_the_targets(tmp_path):
    folder = write(tmp_path / "drafter")
    target = TargetHead(torch.randn(50, 32), torch.randn(50, 32))
    require_targets_own(folder, lambda: target)  # none is carried
    own = {"embed_tokens.weight": target.embedding, "lm_head.weight": target.head}
    tensors(lambda s: s.update(own))(folder)
    require_targets_own(folder, lambda: target)
    other = target.head.clone()
    other[7, 0] += 1
    with pytest.raises(ValueError, match=r"lm_head.weight is not the target's .*differ at token 7"):
        require_targets_own(folder, lambda: TargetHead(target.embedding, other))


def test_other_weights_files_are_listed_but_not_a_checkpoints_moments(tmp_path):
    """vLLM loads every safetensors file that it finds in a folder."""
    folder = write(tmp_path / "drafter")
    (folder / "optimizer.safetensors").touch()
    assert check_drafter(folder) == []
    for name in ("adapter_model.safetensors", "pytorch_model.bin"):
        (folder / name).touch()
    [note] = check_drafter(folder)
    assert note.startswith("adapter_model.safetensors, pytorch_model.bin: not read")


@pytest.mark.parametrize("config", [TINY, ALL_FULL], ids=["sliding", "full"])
def test_expected_shapes_are_those_of_the_module(config):
    module = {name: tuple(p.shape) for name, p in Drafter(config).named_parameters()}
    assert expected_shapes(config) == module


def test_causal_is_accepted_where_it_is_what_the_rule_gives_anyway(tmp_path):
    folder = write(tmp_path / "full", ALL_FULL)
    changed(is_causal=False)(folder)
    assert read_drafter_config(folder) == ALL_FULL


def checkpoints(folder: Path) -> dict[str, Any]:
    entries = []
    for step in (400, 800):
        path = write(folder / f"step-{step:08d}")
        sums = {p.name: sha256_file(p) for p in sorted(path.iterdir())}
        entries.append({"folder": path.name, "step": step, "sha256": sums, "tree_acceptance": 1.0})
    index = {"checkpoints": entries, "last": "step-00000800", "best": "step-00000400"}
    write_json(folder / "index.json", index)
    return index


def test_checkpoints_are_found_by_the_index_only(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"index.json is missing; train first"):
        resolve_checkpoint(tmp_path, "last")
    index = checkpoints(tmp_path)
    (tmp_path / "step-00001200").mkdir()  # killed in mid-save: never listed
    assert resolve_checkpoint(tmp_path, "last") == tmp_path / "step-00000800"
    assert resolve_checkpoint(tmp_path, "best") == tmp_path / "step-00000400"
    write_json(tmp_path / "index.json", {**index, "best": None})
    with pytest.raises(ValueError, match=r"no 'best' checkpoint yet; .*export.checkpoint=last"):
        resolve_checkpoint(tmp_path, "best")


@pytest.mark.parametrize(
    "index",
    [[], {}, {"last": "step-1"}, {"last": "step-1", "checkpoints": 3},
     {"last": "step-1", "checkpoints": [{}]}, {"last": "step-1", "checkpoints": []}],
)  # fmt: skip
def test_an_index_of_another_content_is_one_line(tmp_path, index):
    write_json(tmp_path / "index.json", index)
    with pytest.raises(ValueError, match=r"index\.json does not hold.*train first"):
        resolve_checkpoint(tmp_path, "last")


def test_a_damaged_checkpoint_is_named(tmp_path):
    checkpoints(tmp_path)
    with (tmp_path / "step-00000800" / "model.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x01")
    with pytest.raises(
        ValueError, match=r"step-00000800/model.safetensors differs from its sha256"
    ):
        resolve_checkpoint(tmp_path, "last")
    shutil.rmtree(tmp_path / "step-00000400")
    with pytest.raises(FileNotFoundError, match=r"listed in index.json but missing"):
        resolve_checkpoint(tmp_path, "best")


def test_a_recipe_describes_its_drafter(tiny_config: Callable[..., Config]):
    config = drafter_config(tiny_config())
    assert (config.hidden_size, config.vocab_size, config.num_target_layers) == (64, 320, 6)
    assert config.layer_types == (FULL, FULL)
    assert asdict(config)["target_layer_ids"] == (1, 2, 4)
