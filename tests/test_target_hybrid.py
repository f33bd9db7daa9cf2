"""The trained hybrid: what it learns from, that stopping leaves no trace, and every room's use of a Gated-DeltaNet target."""

from __future__ import annotations

import ast
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import HYBRID
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

from configs.schema import Config, HybridTarget, TargetSection
from target import language_model
from target.byte_tokenizer import EOS_ID, MASK_ID, SPECIAL_TOKENS, byte_tokenizer, learn_merges
from target.generate import Sampling, generate_batch
from target.head import load_target_head, save_target_head
from target.hybrid import write_hybrid_target
from target.identity import target_identity
from target.load import Target, load_target
from target.python_text import Passage, read_passages
from target.taps import forward_with_taps

MakeConfig = Callable[..., Config]
MakeTarget = Callable[..., Target]

MINIATURE = HybridTarget(
    steps=8, batch_rows=2, row_tokens=48, learning_rate=1e-2, cpu_threads=1, save_every=3
)


def section_at(folder: Path, **changes: object) -> TargetSection:
    section = TargetSection(
        model=str(folder),
        prepare=MINIATURE,
        hidden_size=64,
        num_layers=4,
        vocab_size=300,
        dtype="float32",
    )
    return section.model_copy(update=changes)


def passages(count: int = 40) -> list[Passage]:
    return [
        Passage(
            "code" if i % 4 else "docs",
            f"file{i}",
            f"def add_{i}(value):",
            f"    total = value + {i}\n    return total",
            is_held_out=i % 5 == 0,
        )
        for i in range(count)
    ]


def make(folder: Path, hybrid: HybridTarget = MINIATURE, **changes: object) -> TargetSection:
    folder.mkdir()
    section = section_at(folder, **changes)
    state = write_hybrid_target(folder, section, hybrid, passages(), folder.parent / "training")
    state.unlink()  # as prepare_target does, once the folder has its name
    return section


def files_of(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


class Stopped(Exception):
    pass


def test_a_training_that_was_killed_ends_with_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = files_of(Path(make(tmp_path / "whole").model))
    advance = language_model._Training.advance

    def stop_at_step_five(self: language_model._Training, rows: torch.Tensor) -> None:
        if self.step == 5:
            raise Stopped
        advance(self, rows)

    with monkeypatch.context() as patch:
        patch.setattr(language_model._Training, "advance", stop_at_step_five)
        with pytest.raises(Stopped):
            make(tmp_path / "stopped")
    assert len(list((tmp_path / "training").iterdir())) == 1  # the state after step three
    steps = []

    def count(self: language_model._Training, rows: torch.Tensor) -> None:
        steps.append(self.step)
        advance(self, rows)

    monkeypatch.setattr(language_model._Training, "advance", count)
    (tmp_path / "stopped").rmdir()
    assert files_of(Path(make(tmp_path / "stopped").model)) == whole
    assert steps == [3, 4, 5, 6, 7]
    assert not list((tmp_path / "training").iterdir())


def test_a_damaged_state_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "state.safetensors"
    file.write_bytes(b"cut short")
    section = make(tmp_path / "target")
    model = load_target(section, "cpu").model
    with pytest.raises(ValueError, match=r"state.safetensors is damaged .*delete it"):
        language_model.fit(model, torch.zeros(4, 9), torch.zeros(1, 9), MINIATURE, file)


def test_another_seed_is_another_model_and_the_loss_falls(tmp_path: Path) -> None:
    first = make(tmp_path / "first")
    other = make(tmp_path / "other", MINIATURE.model_copy(update={"seed": 1}))
    longer = make(tmp_path / "longer", MINIATURE.model_copy(update={"steps": 40}))
    assert target_identity(first)["weights"] != target_identity(other)["weights"]
    nats = [
        json.loads((Path(s.model) / "training.json").read_text())["held_out_nats"]
        for s in (first, longer)
    ]
    # a uniform guess costs log 300 = 5.7
    assert nats[1] < 0.7 * nats[0] < 0.7 * 5.7


def test_every_epoch_reads_every_row_once(tmp_path: Path) -> None:
    steps = 3 * 7  # three epochs of 7 rows are 21 rows: 10.5 steps of 2
    drawn = torch.cat([language_model._batch(7, MINIATURE, step) for step in range(steps)])
    epochs = drawn[: 7 * (len(drawn) // 7)].view(-1, 7)
    assert torch.equal(epochs.sort().values, torch.arange(7).expand(len(epochs), 7))
    assert len({tuple(epoch.tolist()) for epoch in epochs}) > 1


def test_prompts_are_the_held_out_passages_and_the_template_is_that_of_training(
    tmp_path: Path,
) -> None:
    folder = Path(make(tmp_path / "target").model)
    found = {
        (file.stem, row["prompt"])
        for file in folder.glob("prompts-*.jsonl")
        for row in map(json.loads, file.read_text().splitlines())
    }
    assert found == {(f"prompts-{p.task}", p.prompt) for p in passages() if p.is_held_out}


def test_a_made_hybrid_loads_with_its_layers_and_ends(tmp_path: Path) -> None:
    target = load_target(make(tmp_path / "target"), "cpu")
    assert target.layer_types == ("linear_attention",) * 3 + ("full_attention",)
    assert target.eos_token_ids == (EOS_ID,)
    assert target.vocab_size == len(target.tokenizer) == 300
    assert target.tokenizer.convert_tokens_to_ids(SPECIAL_TOKENS[3]) == MASK_ID


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 260}, r"target.vocab_size=260: .* more than 260"),
        ({"vocab_size": 4096}, r"target.vocab_size=4096: the text gives only"),
        ({"hidden_size": 96}, r"target.hidden_size=96: .* multiple of 64"),
    ],
)
def test_sizes_that_make_no_hybrid_are_named(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make(tmp_path / "target", MINIATURE, **changes)


def test_passages_are_whole_functions_cut_after_their_signature() -> None:
    found = read_passages()
    code = [p for p in found if p.task == "code"]
    assert len({p.name for p in found}) == len(found) > 2000
    held_out = {p.name.partition(":")[0] for p in code if p.is_held_out}
    assert held_out.isdisjoint({p.name.partition(":")[0] for p in code if not p.is_held_out})
    assert 0.1 < sum(p.is_held_out for p in found) / len(found) < 0.3
    for passage in code[::40]:
        (function,) = ast.parse(f"{passage.prompt}\n{passage.response}").body
        assert isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        assert function.body[0].lineno > 1 or function.body[0].col_offset > 0
        assert len(passage.prompt.splitlines()) >= function.lineno


@settings(deadline=None, max_examples=50)
@given(st.text(max_size=60))
def test_the_byte_tokenizer_gives_every_text_back(text: str) -> None:
    for special in SPECIAL_TOKENS:
        text = text.replace(special, "")
    for merges in ([], MERGES):
        tokenizer = byte_tokenizer(merges)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert tokenizer.decode(ids) == text
        assert all(i < 256 or i >= 260 for i in ids)


MERGES = learn_merges(["def value(self):\n    return self.value\n"] * 9, 30)


@pytest.fixture
def nested(tiny_config: MakeConfig, tmp_path: Path) -> tuple[TargetSection, Target]:
    """A `*ForConditionalGeneration` checkpoint of the tiny hybrid, as Qwen3.6 is published, and the plain target."""
    config = tiny_config(HYBRID)
    plain = load_target(config.target, "cpu")
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2}
    vision |= {"out_hidden_size": 64, "num_position_embeddings": 16}
    model = Qwen3_5ForConditionalGeneration(
        Qwen3_5Config(text_config=plain.model.config.to_dict(), vision_config=vision)  # type: ignore[arg-type]
    )
    model.get_decoder().load_state_dict(plain.text_model.state_dict())
    model.lm_head.load_state_dict({"weight": plain.lm_head})
    folder = tmp_path / "nested"
    model.eval().save_pretrained(folder)
    for file in Path(config.target.model).iterdir():
        if file.name not in ("config.json", "model.safetensors"):
            shutil.copy(file, folder)
    return config.target.model_copy(update={"model": str(folder), "prepare": None}), plain


def test_a_nested_checkpoint_is_the_plain_hybrid(
    nested: tuple[TargetSection, Target], tmp_path: Path
) -> None:
    """Layers, taps, greedy text, head file and identity, whichever way the text model is wrapped."""
    section, plain = nested
    target = load_target(section, "cpu")
    ids, lengths = torch.arange(60).view(2, 30), torch.tensor([30, 12])
    taps = [forward_with_taps(t, ids, lengths, (1, 3, 4), True) for t in (target, plain)]
    assert torch.equal(taps[0].features, taps[1].features)
    prompts = [[5, 6, 7], list(range(40)), [9]]
    texts = [generate_batch(t, prompts, 20, Sampling()) for t in (target, plain)]
    assert texts[0] == texts[1]
    assert target.layer_types == plain.layer_types
    assert target.eos_token_ids == plain.eos_token_ids
    save_target_head(tmp_path / "head.safetensors", target)
    head = load_target_head(tmp_path / "head.safetensors", "cpu", torch.float32)
    assert torch.equal(head.head, plain.lm_head)
    assert target_identity(section)["weights"]


def test_padding_never_enters_the_state(tiny_target: MakeTarget) -> None:
    """Left padding of any length, and a row beside it, leave a greedy answer as it is; the state would carry it for ever."""
    target = tiny_target(HYBRID)
    short, long = [7, 8, 9], list(range(20, 150))
    alone = generate_batch(target, [short], 24, Sampling())[0]
    for neighbour in (long[:5], long[:64], long):
        assert generate_batch(target, [short, neighbour], 24, Sampling())[0] == alone
