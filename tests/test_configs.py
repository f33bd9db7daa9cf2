"""The run's YAML: every recipe loads, every mistake is one line that names the key, the value and the remedy."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from configs.load import load_config
from configs.schema import Config

ROOT = Path(__file__).parents[1]
RECIPES = sorted((ROOT / "configs").glob("*.yaml"))
DEBUG = ROOT / "configs" / "debug.yaml"


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.name)
def test_every_recipe_loads(path: Path) -> None:
    config = load_config(path)
    assert config.run.name == path.stem  # its run's folder says which recipe made it
    for source in config.data.sources:
        is_made = source.path is not None and source.path.startswith(f"{config.target.model}/")
        if source.kind == "jsonl" and source.path is not None and not is_made:
            assert (ROOT / source.path).is_file(), source.path


def test_reading_a_config_loads_no_torch() -> None:
    code = (
        "import sys, configs.load; configs.load.load_config(sys.argv[1]);"
        "sys.exit(any(m in sys.modules for m in ('torch', 'transformers', 'numpy')))"
    )
    subprocess.run([sys.executable, "-c", code, str(DEBUG)], cwd=ROOT, check=True)


def test_overrides_are_yaml_values() -> None:
    config = load_config(
        DEBUG,
        [
            "train.learning_rate=3e-4",
            "train.max_grad_norm=0.5",
            "target.revision=null",
            "evaluation.budgets=[4, 16]",
            "export.license=mit",
            "target.chat_template_kwargs={enable_thinking: true}",
        ],
    )
    assert config.train.learning_rate == 3e-4
    assert config.train.max_grad_norm == 0.5
    assert config.target.revision is None
    assert config.evaluation.budgets == (4, 16)
    assert config.export.license == "mit"  # a section the YAML does not have
    assert config.target.chat_template_kwargs == {"enable_thinking": True}


def test_the_run_folder_follows_the_name_or_is_stated() -> None:
    assert load_config(DEBUG).run.folder == Path("outputs/debug")
    assert load_config(DEBUG, ["run.output_dir=/tmp/x"]).run.folder == Path("/tmp/x")


def test_a_config_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="frozen"):
        load_config(DEBUG).train.steps = 3


MISTAKES = [
    (["evaluation.budgets=[]", "evaluation.live_budgets=[]"], r"evaluation\.budgets: .*at least 1"),
    (["train.learning_rate=.inf"], r"train\.learning_rate: .*finite"),
    (["evaluation.temperatures=[.nan]"], r"evaluation\.temperatures\.0: .*"),
    # unknown keys name the nearest valid one, at any depth
    (["train.learning_rat=1"], "unknown key 'train.learning_rat'; did you mean 'learning_rate'"),
    (["trian.steps=1"], "unknown key 'trian'; did you mean 'train'"),
    (["data.responses.temprature=1"], "'data.responses.temprature'; did you mean 'temperature'"),
    (["target.prepare.famly=llama"], "famly'; did you mean 'family'"),
    (["run.zzzz=1"], "valid here: cpu_threads, name, output_dir, seed"),
    # values out of bounds or of another type name the key and the value
    (["train.steps=0"], r"train.steps: .*greater than 0 \(got 0\)"),
    (["train.steps=many"], r"train.steps: .*integer.*\(got 'many'\)"),
    (["drafter.block_size=1"], r"drafter.block_size: .*\(got 1\)"),
    (["train.loss=hinge"], r"train.loss: .*'tree'.*\(got 'hinge'\)"),
    (["run.name=a/b"], r"run.name: .*\(got 'a/b'\)"),
    (["target.prepare.kind=wheel"], "'target.prepare.wheel.package' is required"),
    # overrides that are none
    (["train.steps"], "override 'train.steps' is not of the form section.key=value"),
    (["steps=3"], "is not of the form section.key=value"),
    (["train..steps=3"], "is not of the form section.key=value"),
    (["train.steps=[1"], "the value is not valid YAML"),
    (["train.steps.deep=1"], "'steps' is a value, not a section"),
    # relations between fields
    (["drafter.target_layer_ids=[1, 5]"], r"layer 5 cannot be tapped.*0\.\.5.*at most 4"),
    (["drafter.target_layer_ids=[2, 1]"], r"\[2, 1\] must be increasing"),
    (["drafter.target_layer_ids=[-1, 1]"], "must be increasing, from 0"),
    (["drafter.mask_token_id=320"], "mask_token_id=320 is outside the target's vocabulary of 320"),
    (["drafter.layer_types=[full_attention]"], "1 entries for drafter.num_layers=2"),
    (["drafter.sliding_window=null"], "sliding_window is required"),
    (["drafter.layer_types=null"], "sliding_window is set but no layer is sliding"),
    (["drafter.num_key_value_heads=3"], "num_attention_heads=4 is not a multiple.*=3"),
    (["train.micro_batch_samples=3"], "global_batch_samples=4 is not a multiple.*=3"),
    (["train.lr_warmup_fraction=0.9"], "train.lr_warmup_fraction . train.lr_decay_fraction exceed"),
    (["data.test_fraction=0.9"], "data.validation_fraction . data.test_fraction must be below 1"),
    (["evaluation.budgets=[8, 9000]"], r"evaluation\.budgets\.1: .*8192 \(got 9000\)"),
    (["train.tree_budget=9000"], r"train\.tree_budget: .*8192 \(got 9000\)"),
    (["evaluation.acceptors=[chain_rejection]"], r"nothing at evaluation\.temperatures=\[0\.0\]"),
    (["evaluation.live_budgets=[7]"], r"live_budgets \[7\] are not in evaluation.budgets"),
]


@pytest.mark.parametrize(("overrides", "message"), MISTAKES, ids=lambda v: str(v)[:40])
def test_a_mistake_is_one_line(overrides: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        load_config(DEBUG, overrides)
    assert "\n" not in str(caught.value)


def without(tree: dict[str, Any], section: str, key: str) -> dict[str, Any]:
    return {**tree, section: {k: v for k, v in tree[section].items() if k != key}}


def test_a_missing_key_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    tree = yaml.safe_load(DEBUG.read_text())
    path.write_text(yaml.safe_dump(without(tree, "drafter", "mask_token_id")))
    with pytest.raises(ValueError, match=r"'drafter.mask_token_id' is required"):
        load_config(path)
    assert isinstance(load_config(path, ["drafter.mask_token_id=259"]), Config)


def test_two_sources_of_one_name_are_refused(tmp_path: Path) -> None:
    tree = yaml.safe_load(DEBUG.read_text())
    tree["data"]["sources"] *= 2
    path = tmp_path / "x.yaml"
    path.write_text(yaml.safe_dump(tree))
    with pytest.raises(ValueError, match=r"equal names.*debug-prompts"):
        load_config(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a: [1", "not valid YAML"),
        (b"a: \xff", r"x\.yaml is not valid YAML"),
        (b"", "found NoneType"),
        (b"- 1\n", "found list"),
    ],
)
def test_a_file_that_is_no_recipe(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "x.yaml"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message) as caught:
        load_config(path)
    assert "\n" not in str(caught.value)


def test_true_is_the_usual_number_of_soft_labels_and_not_one() -> None:
    for given, wanted in (("true", 32), ("false", 0), ("16", 16)):
        assert load_config(DEBUG, [f"extract.soft_labels={given}"]).extract.soft_labels == wanted


def test_stored_labels_can_be_sharpened_and_not_flattened() -> None:
    soft = ["extract.soft_labels=8", "train.loss=kl", "extract.soft_label_temperature=0.5"]
    assert load_config(DEBUG, soft).soft_label_sharpness == 1
    assert (
        load_config(DEBUG, [*soft, "train.soft_label_temperature=0.25"]).soft_label_sharpness == 2
    )
    with pytest.raises(
        ValueError, match=r"train\.soft_label_temperature=1 is above .* extract again"
    ):
        load_config(DEBUG, [*soft, "train.soft_label_temperature=1"])


def test_a_missing_file_lists_the_recipes() -> None:
    with pytest.raises(FileNotFoundError, match=r"no config file nowhere.yaml.*debug.yaml"):
        load_config("nowhere.yaml")
