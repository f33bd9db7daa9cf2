"""The stage on a tiny run: resumes from its records, shares them among ranks, refuses what does not belong together."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from common.distributed import Ranks
from common.files import write_json
from configs.load import load_config
from configs.schema import Config
from data.build import build_corpus
from data.features import RowEntry
from drafter.config import drafter_config
from drafter.folder import write_drafter
from evaluation.inputs import DrafterSource, find_drafter, open_test_features, random_drafter
from evaluation.live import choose_prompts
from evaluation.lossless import run_lossless
from evaluation.pairing import compare_evaluations, read_evaluation
from evaluation.records import RecordKind, make_missing, replay_from_json
from evaluation.stage import Work, plan_work, run_evaluation
from evaluation.summary import lossless_lines, summary_lines
from extract.run import run_extract

MakeConfig = Callable[..., Config]
ONE_RANK = Ranks(0, 1, 0, torch.device("cpu"))
SPEEDS = ("tokens_per_s", "stage_share")


SPLITS = ["data.validation_fraction=0.0", "data.test_fraction=0.4"]


@dataclass(frozen=True)
class TinyRun:
    config: Config
    recipe: Path
    work: Work
    report: dict[str, Any]

    def with_overrides(self, *overrides: str) -> Config:
        return load_config(self.recipe, [*SPLITS, *overrides])


@pytest.fixture(scope="module")
def tiny_run(tiny_config: MakeConfig) -> TinyRun:
    """Corpus and features made by their own stages, a random drafter, one evaluation."""
    config = tiny_config("llama", SPLITS)
    build_corpus(config, ONE_RANK)
    run_extract(config, ONE_RANK, ignore_disk=True)
    work = plan_work(config, ONE_RANK, random_drafter(config))
    report = run_evaluation(work)
    assert report is not None
    return TinyRun(config, config.run.folder.parent / "tiny.yaml", work, report)


def without_speeds(report: dict[str, Any]) -> dict[str, Any]:
    rows = [{k: v for k, v in row.items() if k not in SPEEDS} for row in report["rows"]]
    return report | {"rows": rows}


def test_report_has_the_promised_names_and_a_sound_result(tiny_run: TinyRun) -> None:
    path = tiny_run.work.folder / "report.json"
    report = json.loads(path.read_text())
    assert report == tiny_run.report
    assert set(report) >= {
        "target",
        "drafter",
        "config",
        "rows",
        "lossless",
        "calibration",
        "survival",
    }
    for row in report["rows"]:
        assert list(row) == [
            "task",
            "acceptor",
            "budget",
            "temperature",
            "mode",
            "num_prompts",
            "num_passes",
            "acceptance_macro",
            "acceptance_micro",
            "ci95",
            "micro_ci95",
            "tokens_per_s",
            "stage_share",
        ]
    assert report["lossless"]["num_equal"] == report["lossless"]["num_prompts"] == 2
    assert report["parity"]["num_equal"] == report["parity"]["num_passes"] > 0
    kinds = {(row["mode"], row["acceptor"], row["budget"]) for row in report["rows"]}
    assert kinds == {
        ("replay", "chain", None),
        ("replay", "tree", 4),
        ("replay", "tree", 8),
        ("replay", "tree_spine", 4),
        ("replay", "tree_spine", 8),
        ("replay", "tree_cost", 8),
        ("live", "plain", None),
        ("live", "chain", None),
        ("live", "tree", 8),
        ("live", "tree_spine", 8),
        ("live", "tree_cost", 8),
    }
    [share] = [row["stage_share"] for row in report["rows"] if _is(row, "live", "tree", "all")]
    assert sum(share.values()) == pytest.approx(1)


def _is(row: dict[str, Any], mode: str, acceptor: str, task: str) -> bool:
    return (row["mode"], row["acceptor"], row["task"]) == (mode, acceptor, task)


def test_page_is_self_contained_and_shows_the_numbers(tiny_run: TinyRun) -> None:
    page = (tiny_run.work.folder / "report.html").read_text()
    for needle in ("http://", "https://", "<script", "<link", "@import", "url("):
        assert needle not in page
    [chain] = [row for row in tiny_run.report["rows"] if _is(row, "replay", "chain", "all")]
    assert f"{chain['acceptance_macro']:.2f}" in page
    assert page.count("<svg") >= 5
    assert any(line.startswith("chain") for line in summary_lines(tiny_run.report))


def test_a_run_compared_with_itself_differs_by_nothing(tiny_run: TinyRun) -> None:
    """Through the files: report.json, and the prompts.jsonl that it vouches for."""
    one, two = (read_evaluation(place) for place in (tiny_run.config.run.folder, tiny_run.work.folder))  # fmt: skip
    assert {record.prompt_id for record in one.records if record.mode == "replay"} == {entry.sample_id for entry in tiny_run.work.replay_entries}  # fmt: skip
    result = compare_evaluations(one, two)
    assert {row["mode"] for row in result["rows"]} == {"replay", "live"}
    assert all(row["difference"] == 0 for row in result["rows"])


def test_records_are_kept_and_lost_ones_made_again(tiny_run: TinyRun) -> None:
    kind = tiny_run.work.records("replay")
    paths = [kind.path(entry) for entry in tiny_run.work.replay_entries]
    before = [path.stat().st_mtime_ns for path in paths]
    wanted = paths[1].read_bytes()
    paths[1].unlink()
    again = run_evaluation(tiny_run.work)
    assert again is not None
    assert without_speeds(again) == without_speeds(tiny_run.report)
    assert paths[1].read_bytes() == wanted
    assert [p.stat().st_mtime_ns for p in (paths[0], *paths[2:])] == [before[0], *before[2:]]


def test_another_drafter_or_setting_has_records_of_its_own(tiny_run: TinyRun) -> None:
    def folder(*overrides: str) -> Path:
        config = tiny_run.with_overrides(*overrides)
        return plan_work(config, ONE_RANK, random_drafter(config)).records("live").folder

    same = tiny_run.work.records("live").folder
    assert folder("evaluation.live_prompts=7") == same
    assert folder("evaluation.drafter_temperature=0.7") != same
    assert folder("run.seed=5") != same


def test_two_ranks_make_each_record_once(tmp_path: Path, tiny_run: TinyRun) -> None:
    entries, made = tiny_run.work.features.of_split("test"), []
    kind = RecordKind("replay", tmp_path)

    def make(group: Sequence[RowEntry]) -> list[dict[str, Any]]:
        made.extend(entry.sample_id for entry in group)
        return [{} for _ in group]

    for rank in range(2):
        make_missing(kind, entries, Ranks(rank, 2, rank, torch.device("cpu")), make)
    assert sorted(made) == sorted(entry.sample_id for entry in entries)


def test_losslessness_command_covers_both_drafters(tiny_run: TinyRun) -> None:
    other = DrafterSource(None, drafter_config(tiny_run.config), seed=9)
    result = run_lossless(tiny_run.work, [tiny_run.work.source, other], num_prompts=2)
    assert result is not None
    # 2 prompts, 2 drafters; both chains, and one tree of each kind
    assert (result["num_prompts"], result["num_equal"], result["num_decodes"]) == (2, 2, 20)
    assert "2 of 2 prompts" in lossless_lines(result)[0]


def test_prompts_are_spread_over_tasks_and_more_prompts_keep_the_first() -> None:
    entries = [
        RowEntry(f"{task}{index}", "s", task, "test", 9, 5, "shard", index)
        for task, count in (("a", 20), ("b", 3), ("c", 1))
        for index in range(count)
    ]
    five = choose_prompts(entries, 5, seed=1)
    assert [entry.task for entry in five] == ["a", "b", "c", "a", "b"]
    assert choose_prompts(entries, 9, seed=1)[:5] == five
    assert choose_prompts(entries, 9, seed=2)[:5] != five
    assert len(choose_prompts(entries, 99, seed=1)) == len(entries)


def test_features_of_other_taps_or_another_target_are_refused(tiny_run: TinyRun) -> None:
    config = tiny_run.with_overrides("drafter.target_layer_ids=[1,3,4]")
    with pytest.raises(ValueError, match=r"target_layer_ids=\[1, 2, 4\].*\[1, 3, 4\].*extract"):
        open_test_features(config)
    config = tiny_run.with_overrides("target.chat_template_kwargs={enable_thinking: false}")
    with pytest.raises(ValueError, match=r"chat_template_kwargs=\{\}.*enable_thinking"):
        open_test_features(config)


def test_features_without_test_rows_are_refused(tiny_config: MakeConfig) -> None:
    config = tiny_config("llama", ["data.test_fraction=0.0"])
    build_corpus(config, ONE_RANK)
    run_extract(config, ONE_RANK, ignore_disk=True)
    with pytest.raises(ValueError, match=r"no test rows; raise data\.test_fraction"):
        open_test_features(config)


def test_a_drafter_that_does_not_fit_is_refused(tiny_run: TinyRun, tmp_path: Path) -> None:
    drafter = tiny_run.work.source.load(torch.device("cpu"), torch.float32)
    write_drafter(tmp_path / "d", drafter.config, drafter.state_dict(), torch.float32)
    assert find_drafter(tiny_run.config, tmp_path / "d").folder == tmp_path / "d"
    config = tiny_run.with_overrides("drafter.block_size=7")
    with pytest.raises(ValueError, match=r"block_size=4, this run has 7; give --drafter"):
        find_drafter(config, tmp_path / "d")
    with pytest.raises(FileNotFoundError, match=r"launch\.sh train"):
        find_drafter(tiny_run.config, None)


def test_a_broken_record_names_its_remedy(tiny_run: TinyRun, tmp_path: Path) -> None:
    entry = tiny_run.work.replay_entries[0]
    kind = RecordKind("replay", tmp_path)
    write_json(kind.path(entry), {})
    kind.path(entry).write_text("{")
    with pytest.raises(ValueError, match=r"not valid JSON; remove it .* evaluate"):
        kind.read(entry, replay_from_json)
    write_json(kind.path(entry), {})
    with pytest.raises(ValueError, match=r"does not hold what it should.*; remove it .* evaluate"):
        kind.read(entry, replay_from_json)


def test_an_acceptor_that_cannot_be_replayed_alone_is_decoded_live(tiny_run: TinyRun) -> None:
    config = tiny_run.with_overrides(
        "evaluation.acceptors=[chain_rejection]", "evaluation.temperatures=[0, 0.8]"
    )
    work = plan_work(config, ONE_RANK, random_drafter(config))
    report = run_evaluation(work)
    assert report is not None
    rows = [row for row in report["rows"] if row["task"] == "all"]
    found = {(row["mode"], row["acceptor"], row["temperature"]) for row in rows}
    assert found == {
        ("live", "plain", 0.0),
        ("live", "plain", 0.8),
        ("live", "chain_rejection", 0.8),
    }
    assert any(line.startswith("chain_rejection") for line in summary_lines(report))


def test_costs_of_another_batch_size_are_refused(tiny_run: TinyRun, tmp_path: Path) -> None:
    costs = tmp_path / "costs.json"
    costs.write_bytes(tiny_run.work.tuning.costs.read_bytes())
    given = f"evaluation.cost_file={costs}"
    plan_work(tiny_run.with_overrides(given), ONE_RANK, tiny_run.work.source)
    config = tiny_run.with_overrides(given, "evaluation.live_batch_size=3")
    with pytest.raises(ValueError, match=r"costs of 1 prompts.*live_batch_size=3"):
        plan_work(config, ONE_RANK, tiny_run.work.source)


@pytest.mark.parametrize(
    "options",
    [
        ["--drafter", "x", "--random-drafter"],
        ["--lossless", "2", "--random-drafter"],
        ["--lossless", "2", "--report-only"],
    ],
)
def test_options_that_exclude_each_other_are_refused(options: list[str]) -> None:
    command = [sys.executable, "-m", "evaluation", "configs/debug.yaml", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("error: --")
    assert "exclude each other" in done.stderr
    assert done.stderr.count("\n") == 1


def test_another_end_of_text_is_another_evaluation(tiny_run: TinyRun) -> None:
    ends = Path(tiny_run.config.target.model) / "generation_config.json"
    before = ends.read_bytes()
    try:
        ends.write_text(json.dumps(json.loads(before) | {"eos_token_id": [7]}))
        changed = plan_work(tiny_run.config, ONE_RANK, random_drafter(tiny_run.config))
    finally:
        ends.write_bytes(before)
    assert changed.records("live").folder != tiny_run.work.records("live").folder
