"""Pairwise comparison: antisymmetric, zero for equal runs, covering; and refused where it would not be the drafters'."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from report_cases import Made, make_evaluation

from common.files import write_json
from evaluation.acceptance import PromptPasses
from evaluation.comparison import Comparison, compare_prompts
from evaluation.pairing import compare_evaluations, read_evaluation
from evaluation.prompt_records import write_prompt_records
from evaluation.report import build_report

Passes = list[list[int]]
some_passes = st.lists(st.lists(st.integers(1, 6), max_size=5), min_size=1, max_size=12)


def prompts(passes: Passes) -> list[PromptPasses]:
    return [PromptPasses(f"p{i}", "task", tuple(found)) for i, found in enumerate(passes)]


def compared(first: Passes, second: Passes) -> Comparison:
    found = compare_prompts(prompts(first), prompts(second))
    assert found is not None
    return found


def test_difference_by_hand() -> None:
    found = compared([[2, 2], [1, 3], [4]], [[3, 3], [2], [1]])
    assert (found.first, found.second) == pytest.approx((8 / 3, 2.0))
    assert found.difference == pytest.approx(-2 / 3)
    assert found.relative == pytest.approx(-1 / 4)
    assert (found.num_better, found.num_worse, found.num_prompts) == (1, 1, 3)


@settings(deadline=None, max_examples=25)
@given(some_passes, st.randoms(use_true_random=False))
def test_swapping_the_two_negates_everything(first: Passes, random: Any) -> None:
    second = [[random.randint(1, 6) for _ in found] for found in first]
    one = compare_prompts(prompts(first), prompts(second))
    two = compare_prompts(prompts(second), prompts(first))
    if one is None or two is None:
        assert one is two
        assert not any(first)
        return
    assert one.difference == -two.difference
    assert (one.num_better, one.num_worse) == (two.num_worse, two.num_better)
    if one.ci95 is None or two.ci95 is None:
        assert one.ci95 is two.ci95
        assert one.num_prompts == 1
        return
    assert one.ci95 == pytest.approx((-two.ci95[1], -two.ci95[0]), abs=1e-12)
    opposite = {"better": "worse", "worse": "better"}
    assert one.verdict == opposite.get(two.verdict, two.verdict)


def test_equal_runs_differ_by_exactly_nothing() -> None:
    passes = [[1 + i % 4, 2, 1 + i % 3] for i in range(15)]
    found = compared(passes, passes)
    assert (found.difference, found.ci95, found.relative_ci95) == (0.0, (0.0, 0.0), (0.0, 0.0))
    assert (found.num_better, found.num_worse) == (0, 0)
    assert found.verdict == "no difference shown"


def test_order_of_prompts_is_nothing() -> None:
    first, second = [[1], [2, 5], [3]], [[2], [2], [4, 4]]
    pairs = compare_prompts(prompts(first), prompts(second)[::-1])
    assert pairs == compared(first, second)


def test_pairing_takes_the_prompts_own_level_out() -> None:
    """Easy and hard prompts differ by far more than the drafters do; only the paired interval sees the gain of 0.1."""
    generator = np.random.default_rng(5)
    level = generator.uniform(10, 60, 40).round().astype(int)
    first = [[int(value)] * 10 for value in level]
    second = [[int(value)] * 9 + [int(value) + 1] for value in level]
    found = compared(first, second)
    assert found.verdict == "better"
    assert found.ci95 == pytest.approx((0.1, 0.1))


def test_the_paired_interval_covers_the_true_gain() -> None:
    generator, hits, runs = np.random.default_rng(6), 0, 200
    for _ in range(runs):
        level = generator.integers(2, 9, 12)
        gain = generator.normal(0.3, 0.5, 12)
        first = [[int(v) * 1000] for v in level]
        second = [[int(v * 1000 + 1000 * g)] for v, g in zip(level, gain, strict=True)]
        ends = compared(first, second).ci95
        assert ends is not None
        hits += ends[0] <= 300 <= ends[1]
    assert hits / runs == pytest.approx(0.95, abs=0.046)


def test_other_prompts_are_refused() -> None:
    with pytest.raises(ValueError, match="2 prompts, p1 among them"):
        compare_prompts(prompts([[1]]), prompts([[1], [2], [3]]))


def write_evaluation(folder: Path, made: Made) -> Path:
    records = made.measured.prompt_records()
    report = build_report(made.identity, made.measured, records)
    report["prompts"] = write_prompt_records(folder / "evaluation", records)
    write_json(folder / "evaluation" / "report.json", report)
    return folder


@pytest.fixture(scope="module")
def two_runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """B's records are drawn from what its drafter believes, A's from something flatter: B accepts more."""
    folder = tmp_path_factory.mktemp("runs")
    a = write_evaluation(folder / "a", make_evaluation(flatness=2.5, run="a"))
    b = write_evaluation(folder / "b", make_evaluation(flatness=1.0, run="b"))
    return a, b


def test_reports_are_compared_for_every_acceptor_task_and_mode(two_runs: tuple[Path, Path]) -> None:
    a, b = (read_evaluation(path) for path in two_runs)
    result = compare_evaluations(a, b)
    wanted = [row for row in a.report["rows"] if row["acceptor"] != "plain"]
    names = ("task", "mode", "temperature", "acceptor", "budget")
    assert {tuple(r[n] for n in names) for r in result["rows"]} == {tuple(r[n] for n in names) for r in wanted}  # fmt: skip
    for row in wanted:
        [found] = [r for r in result["rows"] if all(r[n] == row[n] for n in names)]
        assert found["first"] == pytest.approx(row["acceptance_macro"])
    assert all(row["verdict"] == "better" for row in result["rows"] if row["task"] == "all" and row["mode"] == "replay")  # fmt: skip
    mirrored = compare_evaluations(b, a)
    for one, two in zip(result["rows"], mirrored["rows"], strict=True):
        assert one["difference"] == -two["difference"]


def test_a_report_is_found_by_run_folder_evaluation_folder_or_file(
    two_runs: tuple[Path, Path],
) -> None:
    run = two_runs[0]
    places = [run, run / "evaluation", run / "evaluation" / "report.json"]
    assert len({read_evaluation(place).path for place in places}) == 1
    with pytest.raises(FileNotFoundError, match=r"no report\.json in .*evaluate the run first"):
        read_evaluation(run / "checkpoints")


def test_acceptors_of_one_side_are_named_and_left_out(
    two_runs: tuple[Path, Path], tmp_path: Path
) -> None:
    made = make_evaluation()
    options = dataclasses.replace(made.measured.options, names=("chain",))
    measured = dataclasses.replace(made.measured, options=options, live=[])
    records = measured.prompt_records()
    other = read_evaluation(two_runs[0])
    result = compare_evaluations(other, dataclasses.replace(other, records=records))
    assert {row["acceptor"] for row in result["rows"]} == {"chain"}
    assert {row["acceptor"] for row in result["only_first"] if row["mode"] == "replay"} == {"tree", "tree_spine", "tree_cost"}  # fmt: skip
    assert result["only_second"] == []


def test_trees_sized_by_other_costs_are_told(two_runs: tuple[Path, Path]) -> None:
    a, b = (read_evaluation(path) for path in two_runs)
    assert compare_evaluations(a, b)["notes"] == []
    report = {**b.report, "settled": {"temperatures": None, "costs": {"machine": "another"}}}
    [note] = compare_evaluations(a, dataclasses.replace(b, report=report))["notes"]
    assert "evaluation.cost_file" in note


def changed_settings(report: dict[str, Any]) -> None:
    report["settings"]["evaluation.max_new_tokens"] = 99


def changed_target(report: dict[str, Any]) -> None:
    report["settings"]["target weights"] = "others"


def without_settings(report: dict[str, Any]) -> None:
    del report["settings"]


def without_prompts(report: dict[str, Any]) -> None:
    del report["prompts"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (changed_settings, r"evaluation\.max_new_tokens=64.* has 99; evaluate both"),
        (changed_target, r"target weights='w'.* has 'others'; evaluate both"),
        (without_settings, r"settings.*launch\.sh report"),
        (lambda report: report.update(settings=[]), r"should.*launch\.sh report"),
        (lambda report: report.update(settled={}), r"'costs'.*launch\.sh report"),
        (lambda report: report.update(facts=None), r"should.*launch\.sh report"),
        (lambda report: report.update(drafter=None), r"drafter.*launch\.sh report"),
        (without_prompts, r"prompts.*launch\.sh report"),
    ],
)
def test_what_does_not_compare_is_refused_in_one_line(
    two_runs: tuple[Path, Path],
    tmp_path: Path,
    change: Callable[[dict[str, Any]], None],
    message: str,
) -> None:
    for file in (two_runs[1] / "evaluation").glob("*.json*"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    report = json.loads((tmp_path / "report.json").read_text())
    change(report)
    write_json(tmp_path / "report.json", report)
    with pytest.raises(ValueError, match=message) as error:
        compare_evaluations(read_evaluation(two_runs[0]), read_evaluation(tmp_path))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (make_evaluation(num_prompts=19), "20 replay prompts.* has 19, 19 of them the same"),
        (make_evaluation(num_live=5), r"6 live prompts.* has 5, .*evaluation\.live_prompts"),
        (make_evaluation(tasks=("chat", "maths")), r"prompt prompt-001 is \('code', 13\)"),
    ],
)
def test_other_prompts_or_records_are_refused(
    two_runs: tuple[Path, Path], tmp_path: Path, made: Made, message: str
) -> None:
    write_evaluation(tmp_path, made)
    with pytest.raises(ValueError, match=message):
        compare_evaluations(read_evaluation(two_runs[0]), read_evaluation(tmp_path))


def test_prompt_records_of_another_report_are_refused(
    two_runs: tuple[Path, Path], tmp_path: Path
) -> None:
    write_evaluation(tmp_path, make_evaluation())
    path = tmp_path / "evaluation" / "prompts.jsonl"
    path.write_bytes((two_runs[0] / "evaluation" / "prompts.jsonl").read_bytes())
    with pytest.raises(ValueError, match=r"not the one that report\.json was written with"):
        read_evaluation(tmp_path)
    path.unlink()
    with pytest.raises(FileNotFoundError, match=r"is missing; .*launch\.sh report"):
        read_evaluation(tmp_path)


def test_prompt_records_without_passes_are_refused(tmp_path: Path) -> None:
    write_evaluation(tmp_path, make_evaluation())
    path, report = (tmp_path / "evaluation" / name for name in ("prompts.jsonl", "report.json"))
    first, *rest = path.read_text().splitlines()
    path.write_text("\n".join([json.dumps(json.loads(first) | {"passes": None}), *rest]) + "\n")
    value = json.loads(report.read_text())
    value["prompts"]["sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()
    report.write_text(json.dumps(value))
    with pytest.raises(ValueError, match=r"does not hold what it should \(passes of prompt"):
        read_evaluation(tmp_path)


def test_a_comparison_loads_no_torch() -> None:
    code = "import sys, evaluation.compare; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def run_compare(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "evaluation.compare", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_command_prints_a_table_and_writes_page_and_json(
    two_runs: tuple[Path, Path], tmp_path: Path
) -> None:
    done = run_compare(*two_runs, "--output", tmp_path)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert any(line.startswith("replay  0  tree 16") and line.endswith("better") for line in lines)
    [json_file], [page] = tmp_path.glob("*.json"), tmp_path.glob("*.html")
    result = json.loads(json_file.read_text())
    assert result == compare_evaluations(*(read_evaluation(path) for path in two_runs))
    assert f"page: {page}" in lines


def test_the_command_refuses_in_one_line(two_runs: tuple[Path, Path], tmp_path: Path) -> None:
    done = run_compare(two_runs[0], tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("error: no report.json in")
    assert done.stderr.count("\n") == 1
