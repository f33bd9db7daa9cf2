"""Conversion both ways: the same bytes, the same meaning, everything left out listed, and nothing overwritten."""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from drafter_cases import tiny_drafter
from safetensors.torch import load_file, save_file

from common.files import write_json
from configs.schema import Config
from drafter.config import DrafterConfig, drafter_config
from drafter.folder import find_drafter_folder, load_drafter, write_drafter
from drafter.own_head import require_targets_own
from export.conversion import TargetName, convert_folder, find_target
from export.convert import main, parser
from export.target_files import own_head, read_target_facts, require_same_head
from target.head import TargetHead
from target.load import Target


@pytest.fixture(scope="module")
def config(tiny_config: Callable[..., Config]) -> Config:
    return tiny_config("llama")


@pytest.fixture(scope="module")
def target(config: Config) -> TargetName:
    return find_target(config.target.model, with_weights=True)


def zlab(path: Path, config: DrafterConfig, dtype: torch.dtype = torch.bfloat16) -> Path:
    write_drafter(path, config, tiny_drafter(config).state_dict(), dtype)
    (path / "tokenizer.json").write_text("{}")
    (path / "state.json").write_text("{}")
    return path


def test_there_and_back_is_every_byte(tmp_path, config, target):
    source = zlab(tmp_path / "zlab", drafter_config(config))
    there = convert_folder(source, tmp_path / "spec", "speculators", target)
    assert find_drafter_folder(there.folder).format == "speculators"
    back = convert_folder(there.folder, tmp_path / "back", "zlab")
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        assert (back.folder / name).read_bytes() == (source / name).read_bytes()
    assert there.notes == ["state.json was not copied"]
    again = convert_folder(back.folder, tmp_path / "again", "speculators", target)
    for name in ("config.json", "model.safetensors"):
        assert (again.folder / name).read_bytes() == (there.folder / name).read_bytes()


def test_a_checkpoint_in_float32_becomes_bf16_as_asked(tmp_path, config):
    drafter = drafter_config(config)
    source = zlab(tmp_path / "step-00000006", drafter, torch.float32)
    convert_folder(source, tmp_path / "out", "zlab", dtype=torch.bfloat16)
    written = load_file(tmp_path / "out" / "model.safetensors")
    state = tiny_drafter(drafter).state_dict()
    assert all(torch.equal(t, state[n].bfloat16()) for n, t in written.items())
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


def test_self_contained_and_back(tmp_path, config, target, tiny_target):
    model: Target = tiny_target("llama")
    head = TargetHead(model.embed_tokens, model.lm_head)
    source = zlab(tmp_path / "zlab", drafter_config(config))
    whole = convert_folder(source, tmp_path / "whole", "speculators", target, self_contained=True)
    tensors = load_file(whole.folder / "model.safetensors")
    assert torch.equal(tensors["embed_tokens.weight"], model.embed_tokens)
    assert torch.equal(tensors["lm_head.weight"], model.lm_head)
    require_targets_own(whole.folder, lambda: head)
    back = convert_folder(whole.folder, tmp_path / "back", "zlab", target)
    assert (back.folder / "model.safetensors").read_bytes() == (
        source / "model.safetensors"
    ).read_bytes()
    assert any(
        "embed_tokens.weight, lm_head.weight: copies of the target's" in n for n in back.notes
    )


def test_the_targets_depth_comes_from_the_target(tmp_path, config, target):
    source = zlab(tmp_path / "zlab", drafter_config(config))
    spec = convert_folder(source, tmp_path / "spec", "speculators", target).folder
    values = json.loads((spec / "config.json").read_text())
    del values["num_target_layers"]
    write_json(spec / "config.json", values)
    with pytest.raises(ValueError, match=r"num_target_layers is not known.*--target"):
        convert_folder(spec, tmp_path / "no", "zlab")
    assert convert_folder(spec, tmp_path / "yes", "zlab", target).config.num_target_layers == 6
    assert not (tmp_path / "no").exists()


def test_refusals_leave_nothing(tmp_path, config, target, tiny_config):
    source = zlab(tmp_path / "zlab", drafter_config(config))
    other = TargetName("other", tmp_path / "other")
    facts = {"num_hidden_layers": 9, "hidden_size": 64, "vocab_size": 320, "architectures": []}
    other.folder.mkdir()
    write_json(other.folder / "config.json", facts)
    out = tmp_path / "out"
    with pytest.raises(ValueError, match=r"num_hidden_layers=6, other has 9; name its own target"):
        convert_folder(source, out, "zlab", other)
    with pytest.raises(ValueError, match=r"speculators' format names the drafter's target.*--targ"):
        convert_folder(source, out, "speculators")
    with pytest.raises(ValueError, match=r"holds the target's embedding and head: --target"):
        convert_folder(source, out, "zlab", self_contained=True)
    with pytest.raises(FileNotFoundError, match=r"--target no/such is no folder here"):
        find_target("no/such", with_weights=False)
    whole = convert_folder(source, tmp_path / "whole", "zlab", target, self_contained=True).folder
    state = load_file(whole / "model.safetensors")
    state["lm_head.weight"][5] += 1
    save_file(state, whole / "model.safetensors")
    with pytest.raises(
        ValueError, match=r"lm_head.weight is not the target's \(they differ at tok"
    ):
        convert_folder(whole, out, "zlab", target)
    assert not out.exists()
    assert not list(tmp_path.glob(".*"))
    with pytest.raises(ValueError, match="exists already; give a folder that does not"):
        convert_folder(source, whole, "zlab")


def test_a_speculators_folder_warm_starts_and_is_evaluated(tmp_path, config, target, tiny_config):
    """What `train.init_from` and `evaluate --drafter` read of it."""
    from evaluation.inputs import find_drafter
    from train.initialise import initial_drafter

    wanted = drafter_config(config)
    source = zlab(tmp_path / "zlab", wanted, torch.float32)
    spec = convert_folder(source, tmp_path / "spec", "speculators", target).folder
    values = json.loads((spec / "config.json").read_text())
    del values["num_target_layers"]  # as their own code writes it
    write_json(spec / "config.json", values)
    started = initial_drafter(tiny_config("llama", [f"train.init_from={spec}"]))
    state = tiny_drafter(wanted).state_dict()
    assert all(torch.equal(t, state[n]) for n, t in started.state_dict().items())
    write_drafter(tmp_path / "checkpoint", started.config, started.state_dict(), torch.float32)
    assert load_drafter(tmp_path / "checkpoint", "cpu", torch.float32).config == wanted
    found = find_drafter(config, spec)
    assert found.config == replace(wanted, num_target_layers=None)


def test_own_head_reads_tied_nested_and_sharded_targets(tmp_path):
    """By name alone, under any prefix, of the text part."""
    embedding, head = torch.randn(20, 8), torch.randn(20, 8)
    text = {"num_hidden_layers": 4, "hidden_size": 8, "vocab_size": 20}
    prefix = "model.language_model."
    save_file(
        {f"{prefix}embed_tokens.weight": embedding, "model.visual.embed_tokens.weight": head[:3]},
        tmp_path / "model-00001-of-00002.safetensors",
    )
    save_file({"lm_head.weight": head}, tmp_path / "model-00002-of-00002.safetensors")
    names = {
        f"{prefix}embed_tokens.weight": "model-00001-of-00002.safetensors",
        "model.visual.embed_tokens.weight": "model-00001-of-00002.safetensors",
        "lm_head.weight": "model-00002-of-00002.safetensors",
    }
    write_json(tmp_path / "model.safetensors.index.json", {"weight_map": names})
    values = {"architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": text}
    write_json(tmp_path / "config.json", values)
    assert read_target_facts(tmp_path).architectures == ("Qwen3_5ForConditionalGeneration",)
    found = own_head(tmp_path)
    assert torch.equal(found.embedding, embedding)
    assert torch.equal(found.head, head)
    require_same_head(TargetHead(embedding.bfloat16(), head.bfloat16()), tmp_path)
    with pytest.raises(ValueError, match=r"the features' head is not that of .* differ at token 0"):
        require_same_head(TargetHead(embedding, embedding), tmp_path)
    write_json(tmp_path / "config.json", values | {"tie_word_embeddings": True})
    assert torch.equal(own_head(tmp_path).head, embedding)
    write_json(tmp_path / "config.json", values | {"text_config": text | {"vocab_size": 21}})
    with pytest.raises(ValueError, match="has no embedding under a name that is known here"):
        own_head(tmp_path)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ('{"weight_map": ', "index.json is not valid JSON; name the target's folder"),
        ('{"weight_map": {"lm_head.weight": 3}}', "index.json does not hold what it should"),
        ('{"weight_map": {"a": "gone.safetensors"}}', "gone.safetensors is missing, a shard"),
    ],
)
def test_a_broken_index_of_the_target_is_named(tmp_path, index, message):
    values = {"num_hidden_layers": 4, "hidden_size": 8, "vocab_size": 20}
    write_json(tmp_path / "config.json", values)
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        own_head(tmp_path)


def test_the_command_converts_and_describes(tmp_path, config, target, capsys):
    def run(*arguments: str | Path) -> str:
        main(parser().parse_args(list(map(str, arguments))))
        return capsys.readouterr().out

    source = zlab(tmp_path / "zlab", drafter_config(config))
    out = run(source, tmp_path / "out", "--to", "speculators", "--target", target.name)
    assert "read back and found equal\n  note: state.json was not copied" in out
    assert '"num_speculative_tokens": 3' in out
    assert "SGLang 0.5.23 does not read speculators' format" in out
    shown = run(tmp_path / "out")
    assert "a DFlash drafter in speculators format" in shown
    assert "taps: [1, 2, 4] (0-based outputs)" in shown
    with pytest.raises(ValueError, match="--to names the format of OUT"):
        run(source, tmp_path / "other")
    for option in (("--to", "zlab"), ("--self-contained",)):
        with pytest.raises(ValueError, match=f"{option[0]} is about OUT, and none is given"):
            run(source, *option)


def test_a_mistake_is_one_line(tmp_path, config):
    source = zlab(tmp_path / "zlab", drafter_config(config))
    (source / "model.safetensors").write_bytes(b"")
    line = [sys.executable, "-m", "export.convert", str(source)]
    wrong = subprocess.run(line, capture_output=True, text=True, check=False)
    assert wrong.returncode == 2
    assert len(wrong.stderr.strip().splitlines()) == 1
    assert wrong.stderr.startswith(f"error: {source}/model.safetensors is damaged or cut short")
