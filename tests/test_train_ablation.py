"""The ablation harness: who starts where, who is judged on what, the arithmetic of the table, and what a second start does."""

from __future__ import annotations

import json
import xml.etree.ElementTree
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from train_runs import ONE_RANK, make_config, write_features

from configs.load import load_config
from data.feature_shards import FeatureRow
from data.features import open_features
from drafter.folder import load_drafter, resolve_checkpoint
from evaluation.acceptance import PromptPasses
from evaluation.decoded import Decoded
from train.ablation.judge import (
    Judgement,
    divide_prompts,
    is_judged,
    is_trained,
    judge_run,
    judgement_path,
    read_judgement,
)
from train.ablation.live import (
    LiveJudgement,
    is_decoded,
    is_same_as_record,
    live_identity,
    live_path,
)
from train.ablation.live_table import _of_shared_prompts, live_markdown, live_rows
from train.ablation.pictures import draw_acceptance, draw_curves, mean_curve
from train.ablation.runs import AblationRun, variants, warmups
from train.ablation.settings import Ablation, read_ablation
from train.ablation.table import AblationRow, ablation_rows, markdown
from train.engine import join_process_group
from train.loop import train_drafter
from train.watch.log import read_run

ROOT = Path(__file__).parent.parent
FILES = sorted((ROOT / "configs" / "ablation").glob("*.yaml"))


def make_ablation(folder: Path, **changes: object) -> Ablation:
    make_config(folder)  # the recipe and its features
    values: dict[str, object] = {
        "recipe": folder / "tiny.yaml",
        "output_dir": folder / "ablation",
        "warmup_steps": 3,
        "steps": 4,
        "seeds": (0, 1),
        "variants": {"ce": ("train.loss=ce",), "tree": ("train.loss=tree",)},
        "baseline": "ce",
        "budgets": (4, 8),
        "headline_budget": 8,
        "fit_fraction": 0.5,
        "confirm_fraction": 0.0,
    }
    return Ablation.model_validate(values | changes)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_ablation_loads_and_so_does_every_variant(path: Path) -> None:
    ablation = read_ablation(path)
    assert ablation.output_dir.name == path.stem
    for overrides in ablation.variants.values():
        load_config(ROOT / ablation.recipe, [*ablation.overrides, *overrides])


def test_fewer_variants_are_the_same_comparison(tmp_path: Path) -> None:
    variants = {name: (f"train.loss={name}",) for name in ("auf", "ce", "kl", "tree")}
    ablation = make_ablation(tmp_path, variants=variants, confirm=("tree", "kl"))
    few = ablation.only(["tree"])
    assert (list(few.variants), few.confirm) == (["ce", "tree"], ("tree",))
    assert (
        few.model_copy(update={"variants": ablation.variants, "confirm": ablation.confirm})
        == ablation
    )
    for names, message in ((["ce"], "name a variant to hold against it"), (["tre"], "'tre' is no")):
        with pytest.raises(ValueError, match=message):
            ablation.only(names)


def test_a_variant_may_have_steps_of_its_own(tmp_path: Path) -> None:
    """The learning rate then falls to its own end, and it is trained when its own last step is."""
    long = ("train.loss=tree", "train.steps=6")
    ablation = make_ablation(
        tmp_path, seeds=(0,), variants={"ce": ("train.loss=ce",), "long": long}
    )
    for run in warmups(ablation):
        run.share_features()
        train_drafter(run.config(), ONE_RANK)
    short, longer = variants(ablation)
    assert (short.config().train.steps, longer.config().train.steps) == (4, 6)
    longer.share_features()
    train_drafter(longer.config(), ONE_RANK)
    assert is_trained(longer)
    equal = ablation.model_copy(update={"variants": {**ablation.variants, "long": long[:1]}})
    assert not is_trained(AblationRun(equal, "long", 0))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"baseline": "kl"}, "'kl' is no variant; choose from ce, tree"),
        ({"headline_budget": 64}, "headline_budget=64 is not in budgets"),
        ({"fit_fraction": 0.6, "confirm_fraction": 0.4}, "below 1"),
        ({"seed": 3}, "seed: Extra inputs"),
        ({"seeds": [1, 1]}, r"seeds=\[1, 1\] has a value twice"),
        ({"budgets": [16, 16]}, r"budgets=\[16, 16\] has a value twice"),
        ({"variants": {"ce": [], "../x": []}, "confirm": []}, "'../x' cannot name a variant"),
    ],
)
def test_mistakes_are_one_line(tmp_path: Path, change: dict[str, object], message: str) -> None:
    good = yaml.safe_load((ROOT / "configs" / "ablation" / "debug.yaml").read_text())
    path = tmp_path / "wrong.yaml"
    path.write_text(yaml.safe_dump(good | change))
    with pytest.raises(ValueError, match=message) as caught:
        read_ablation(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"[1]", b"\xff\xfe"])
def test_what_is_no_ablation_file_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "wrong.yaml"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"wrong\.yaml is "):
        read_ablation(path)


def test_prompt_sets_share_no_row_and_new_rows_move_no_old_one(tmp_path: Path) -> None:
    ablation = make_ablation(tmp_path, fit_fraction=0.3, confirm_fraction=0.3)
    features = open_features(tmp_path / "run" / "features")
    template = features.entries[0]
    features.entries = [
        replace(template, sample_id=f"row-{index}", split="test") for index in range(200)
    ]
    few = divide_prompts(features, ablation)
    sets = [{entry.sample_id for entry in rows} for rows in vars(few).values()]
    assert set.union(*sets) == {entry.sample_id for entry in features.entries}
    assert sum(map(len, sets)) == 200
    assert all(30 < len(rows) < 110 for rows in sets)
    features.entries += [
        replace(template, sample_id=f"more-{index}", split="test") for index in range(50)
    ]
    many = divide_prompts(features, ablation)
    for name, rows in vars(few).items():
        assert {entry.sample_id for entry in rows} <= {e.sample_id for e in vars(many)[name]}


def write_judgement(run: AblationRun, passes: dict[str, list[int]]) -> None:
    """Equal for chain and trees, before and after the fit."""
    keys = ["chain", "tree-4", "tree-8"]
    by_key = {prompt: dict.fromkeys(keys, emitted) for prompt, emitted in passes.items()}
    judgement = Judgement("x", (1.0,) * 4, dict.fromkeys(passes, "toy"), by_key, by_key)
    run.folder.mkdir(parents=True)
    judgement_path(run, "judge").write_text(json.dumps(vars(judgement)))


def test_the_table_averages_seeds_then_pairs_prompts(tmp_path: Path) -> None:
    """ce: prompts a and b accept 2 and 4 with both seeds; tree: 3 and 4, then 2 and 5."""
    ablation = make_ablation(tmp_path)
    for seed, tree in ((0, {"a": [3, 3], "b": [4]}), (1, {"a": [2], "b": [6, 4]})):
        write_judgement(AblationRun(ablation, "ce", seed), {"a": [2], "b": [3, 5]})
        write_judgement(AblationRun(ablation, "tree", seed), tree)
    rows = ablation_rows(ablation, "judge")
    assert len(rows) == 2 * 2 * 3  # variants, before and after, acceptors
    [row] = [r for r in rows if (r.variant, r.acceptor, r.fitted) == ("tree", "tree-8", True)]
    assert row.acceptance == pytest.approx((2.5 + 4.5) / 2)
    assert row.relative == pytest.approx(3.5 / 3 - 1)
    assert row.relative_by_seed == pytest.approx((3.5 / 3 - 1, 3.5 / 3 - 1))
    assert row.relative_ci95 is not None
    low, high = row.relative_ci95
    # both prompts are better, by 1/4 and by 1/8: so is every draw of them
    assert 0.12 < low <= row.relative <= high < 0.26
    [base] = [r for r in rows if (r.variant, r.acceptor, r.fitted) == ("ce", "tree-8", True)]
    assert (base.relative, base.relative_ci95) == (0, (0, 0))
    # all tokens over all passes: 22 in 6, against 20 in 6
    assert row.micro == pytest.approx(22 / 6)
    assert row.micro_relative == pytest.approx(row.micro / (20 / 6) - 1)
    assert row.micro_relative_ci95 is not None
    low, high = row.micro_relative_ci95
    assert low <= row.micro_relative <= high
    assert (base.micro_relative, base.micro_relative_ci95) == (0, (0, 0))
    assert "| `tree` | 3.500 | 3.500 | 3.500 | +16.7 % |" in markdown(ablation, rows)


def test_every_variant_continues_the_warmup_on_the_same_data_and_is_judged_once(
    tmp_path: Path,
) -> None:
    join_process_group(ONE_RANK)
    ablation = make_ablation(tmp_path, seeds=(1,))
    [warmup] = warmups(ablation)
    warmup.share_features()
    train_drafter(warmup.config(), ONE_RANK)
    start = resolve_checkpoint(warmup.folder / "checkpoints", "last")
    configs = {run.name: run.config() for run in variants(ablation)}
    assert {Path(str(config.train.init_from)) for config in configs.values()} == {start}
    assert {config.run.seed for config in configs.values()} == {1}
    shared = [config.train.model_dump(exclude={"loss"}) for config in configs.values()]
    assert shared[0] == shared[1]
    run = next(run for run in variants(ablation) if run.name == "tree")
    run.share_features()
    train_drafter(run.config(), ONE_RANK)
    first = json.loads((run.folder / "logs" / "train.jsonl").read_text().splitlines()[0])
    assert first["train/loss_share"] == 0
    before, after = (
        load_drafter(resolve_checkpoint(r.folder / "checkpoints", "last"), "cpu", torch.float32)
        for r in (warmup, run)
    )
    assert not before.fc.weight.equal(after.fc.weight)

    sets = divide_prompts(open_features(run.folder / "features"), ablation)
    assert not is_judged(run, "judge", sets)
    judge_run(run, "judge", ONE_RANK)
    assert is_judged(run, "judge", sets)
    longer = AblationRun(ablation.model_copy(update={"steps": 5}), "tree", 1)
    assert not is_trained(longer)
    path = judgement_path(run, "judge")
    made = path.stat().st_mtime_ns
    judge_run(run, "judge", ONE_RANK)
    assert path.stat().st_mtime_ns == made
    found = read_judgement(run, "judge")
    assert list(found.raw) == list(found.fitted) == [entry.sample_id for entry in sets.judge]
    assert {key for keys in found.raw.values() for key in keys} == {"chain", "tree-4", "tree-8"}
    # a temperature a slot never changes a slot's order: the chain is the same before and after
    assert [k["chain"] for k in found.raw.values()] == [k["chain"] for k in found.fitted.values()]
    # an edited variant is no finished run: the trainer then refuses its checkpoint with both values
    edited = {**ablation.variants, "tree": ("train.loss=tree", "train.tree_budget=4")}
    changed = AblationRun(ablation.model_copy(update={"variants": edited}), "tree", 1)
    assert not is_judged(changed, "judge", sets)
    with pytest.raises(ValueError, match=r"train\.tree_budget=8, this run has 4"):
        train_drafter(changed.config(), ONE_RANK)
    # so is a run whose features have changed since, the warm-up too
    overridden = ablation.model_copy(update={"overrides": ("train.weight_decay=0.1",)})
    assert is_trained(warmup)
    assert not is_trained(AblationRun(overridden, "warmup", 1))
    other = ablation.model_copy(update={"budgets": (8,)})
    judge_run(AblationRun(other, "tree", 1), "judge", ONE_RANK)
    assert path.stat().st_mtime_ns != made
    write_features(tmp_path / "run" / "features", seed=1)
    assert not is_trained(warmup)
    assert not is_judged(run, "judge", sets)


def test_the_features_of_another_base_folder_are_linked_anew(tmp_path: Path) -> None:
    ablation = make_ablation(tmp_path)
    run = AblationRun(ablation, "ce", 0)
    run.share_features()
    moved = ablation.model_copy(update={"overrides": (f"run.output_dir={tmp_path / 'other'}",)})
    AblationRun(moved, "ce", 0).share_features()
    for name in ("corpus", "features"):
        assert (run.folder / name).readlink() == tmp_path / "other" / name


def test_a_prompt_that_one_seed_ended_at_once_is_in_no_live_mean() -> None:
    def seed(**passes: list[int]) -> list[PromptPasses]:
        return [PromptPasses(name, "toy", tuple(emitted)) for name, emitted in passes.items()]

    ours, base = _of_shared_prompts(
        [seed(a=[2], b=[3, 1]), seed(a=[], b=[4])], [seed(a=[1], b=[1]), seed(a=[1], b=[2])]
    )
    assert ours.tolist() == [[2.0, 4.0]]
    assert base.tolist() == [[1.0, 2.0]]


def write_live(run: AblationRun, passes: dict[str, dict[str, list[int]]], identity: str) -> None:
    live = LiveJudgement(
        identity,
        0.0,
        dict.fromkeys(passes, "toy"),
        passes,
        {
            prompt: {key: sum(p) < 9 for key, p in by_key.items()}
            for prompt, by_key in passes.items()
        },
    )
    live_path(run).write_text(json.dumps(vars(live)))


def test_the_live_table_pairs_prompts_and_counts_what_agrees(tmp_path: Path) -> None:
    """Replay says 2 and 4 for ce. Live: the same but for one pass; tree is 3 and 4, all of it as replayed."""
    ablation = make_ablation(tmp_path, seeds=(0,), live_prompts=2)
    keys = ("chain", "tree-8")
    replayed = {"ce": {"a": [2, 2], "b": [4]}, "tree": {"a": [3, 3, 1], "b": [4]}}
    decoded = {"ce": {"a": [2, 1], "b": [4]}, "tree": {"a": [3, 3], "b": [4]}}
    for name, passes in replayed.items():
        run = AblationRun(ablation, name, 0)
        write_judgement(run, passes)
        live: dict[str, dict[str, list[int]]] = {
            prompt: dict.fromkeys(keys, emitted) for prompt, emitted in decoded[name].items()
        }
        write_live(run, live, "x")
    rows = {(row.variant, row.acceptor): row for row in live_rows(ablation)}
    assert rows.keys() == {(name, key) for name in replayed for key in keys}
    tree, ce = rows["tree", "tree-8"], rows["ce", "tree-8"]
    assert (ce.live, ce.replay) == (pytest.approx((1.5 + 4) / 2), 3.0)
    assert tree.live == pytest.approx(3.5)
    assert tree.relative == pytest.approx(3.5 / 2.75 - 1)
    # a row of two responses is replayed whole and decoded in its first: a prefix agrees
    assert (tree.num_as_replayed, tree.num_decodes) == (2, 2)
    assert (ce.num_as_replayed, ce.num_decodes) == (1, 2)
    assert ce.num_as_recorded == 2
    text = live_markdown(ablation, list(rows.values()))
    assert "6 of 8 decodes took the replay's passes, 8 gave the recorded tokens" in text
    assert "| `tree` |" in text
    assert live_rows(ablation.model_copy(update={"live_prompts": 0})) == []


def test_live_decoding_is_of_one_judgement_and_leaves_it_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ablation = make_ablation(tmp_path, seeds=(0,), live_prompts=1)
    run = AblationRun(ablation, "ce", 0)
    without = AblationRun(ablation.model_copy(update={"live_prompts": 0}), "ce", 0)
    sets = divide_prompts(open_features(tmp_path / "run" / "features"), ablation)
    monkeypatch.setattr("train.ablation.live.is_judged", lambda *_: True)
    monkeypatch.setattr(AblationRun, "config", lambda _: load_config(tmp_path / "tiny.yaml"))
    write_judgement(run, {"a": [2]})
    assert is_decoded(without, sets)
    assert not is_decoded(run, sets)
    write_live(run, {"a": {"chain": [2], "tree-8": [2]}}, "another judgement's")
    assert not is_decoded(run, sets)
    write_live(run, {"a": {"chain": [2], "tree-8": [2]}}, live_identity(run, sets))
    assert is_decoded(run, sets)
    # of more prompts, another budget or another judgement it is not
    for change in ({"live_prompts": 2}, {"headline_budget": 4}):
        other = AblationRun(ablation.model_copy(update=change), "ce", 0)
        assert not is_decoded(other, sets)
    path = judgement_path(run, "judge")
    path.write_text(path.read_text().replace('"identity": "x"', '"identity": "y"'))
    assert not is_decoded(run, sets)


@pytest.mark.parametrize(
    ("tokens", "is_equal"), [([7, 8], True), ([7, 8, 9], True), ([7, 9], False)]
)
def test_a_decode_is_held_against_the_first_response(tokens: list[int], is_equal: bool) -> None:
    row = FeatureRow(
        sample_id="r", source="s", task="t", split="test",
        input_ids=torch.tensor([1, 2, 7, 8, 9, 3, 7]),
        loss_mask=torch.tensor([0, 0, 1, 1, 1, 0, 1]).bool(),
        features=torch.zeros(7, 1, 1),
    )  # fmt: skip
    assert is_same_as_record(row, Decoded(tokens, [1], {}, [])) is is_equal


def test_the_pictures_hold_every_loss_and_mark_what_lies_far_off(tmp_path: Path) -> None:
    variants = {name: (f"train.loss={name}",) for name in ("ce", "tree", "kl")}
    ablation = make_ablation(tmp_path, variants=variants)
    rows = [
        AblationRow(
            name,
            key,
            True,
            9,
            2,
            4.0,
            relative,
            (relative - 0.01, relative + 0.01),
            (),
            4.0,
            0.0,
            None,
        )
        for name, relative in (("ce", 0.0), ("tree", 0.03), ("kl", -0.5))
        for key in ("chain", "tree-4", "tree-8")
    ]
    draw_acceptance(tmp_path / "a.svg", ablation, rows)
    root = xml.etree.ElementTree.parse(tmp_path / "a.svg").getroot()
    texts = [element.text for element in root.iter() if element.text]
    assert texts.count("-50 %") == 3
    assert "tree, tree-8: +3.0% (+2.0% to +4.0%)" in texts
    assert not [t for t in texts if t.startswith("ce,")]  # what the others are held against
    for seed, hits in ((0, 1.0), (1, 2.0)):
        for name in variants:
            folder = AblationRun(ablation, name, seed).folder / "logs"
            folder.mkdir(parents=True)
            lines = [{"step": s, "train/chain_hits": hits + s} for s in (1, 2 + seed, 4)]
            (folder / "train.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    draw_curves(tmp_path / "c.svg", ablation)
    markup = (tmp_path / "c.svg").read_text()
    assert all(f">{name}</text>" in markup for name in variants)
    runs = [read_run(AblationRun(ablation, "ce", seed).folder) for seed in (0, 1)]
    assert mean_curve(runs, "train/chain_hits") == [(1, 2.5), (4, 5.5)]
