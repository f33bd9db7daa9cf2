"""The page of a training run: it shows whatever was logged, stands alone, survives any log, and lays runs over each other."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
import time
import xml.etree.ElementTree
from collections.abc import Iterable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_evaluation_page import HOSTILE, Page, assert_alone

from evaluation.charts import Axis
from train.tracking import METRICS, metric_pattern
from train.watch.axes import log_axis, numbers_axis, share_axis
from train.watch.log import RunLog, read_run, read_runs
from train.watch.page import page_path, write_page, write_run_page
from train.watch.panels import SHAPES
from train.watch.picture import write_picture
from train.watch.shapes import all_panels
from train.watch.thinning import spread, thinned

ROOT = Path(__file__).parent.parent
BUDGETS, SLOTS = (4, 16), 5


def example(pattern: str) -> list[str]:
    """Names that METRICS' pattern stands for."""
    numbers = {
        "validation/tree_acceptance_*": BUDGETS,
        "calibration/tree_ratio_*": BUDGETS,
        "recall/top_*_slot_*": (1, 4, 16, 64),
    }
    first = numbers.get(pattern, (16,))
    if pattern.count("*") == 2:
        head, middle, _ = pattern.split("*")
        return [f"{head}{k}{middle}{slot:02d}" for k in first for slot in range(1, SLOTS + 1)]
    if pattern.endswith(("depth_*", "emits_*", "bin_*")):
        return [pattern.replace("*", f"{slot:02d}") for slot in range(1, SLOTS + 1)]
    return [pattern.replace("*", str(number)) for number in first] if "*" in pattern else [pattern]


def write_log(
    folder: Path, *, patterns: Iterable[str] = tuple(METRICS), steps: int = 8, value: float = 0.5
) -> Path:
    """A log of every metric: training's each step, the others each second one; each value is its own."""
    names = [name for pattern in patterns for name in example(pattern)]
    lines = []
    for step in range(1, steps + 1):
        own = [n for n in names if n.startswith(("train/", "speed/"))]
        evaluated = [n for n in names if n not in own] if step % 2 == 0 else []
        for group in (own, evaluated):
            if group:
                shares = {n: value * step / (steps + i) for i, n in enumerate(group)}
                lines.append(json.dumps({"step": step, **shares}))
    (folder / "logs").mkdir(parents=True)
    (folder / "logs" / "train.jsonl").write_text("".join(line + "\n" for line in lines))
    return folder


def write_facts(folder: Path, name: str, **settings_: object) -> None:
    about = {"name": name, "settings": {f"train.{k}": v for k, v in settings_.items()}}
    (folder / "logs" / "run.json").write_text(json.dumps(about))


def page_of(runs: list[RunLog], path: Path) -> tuple[str, Page]:
    write_page(path, runs)
    markup = path.read_text(encoding="utf-8")
    return markup, Page(markup)


def test_every_logged_metric_is_on_the_page(tmp_path: Path) -> None:
    folder = write_log(tmp_path / "run")
    run = read_run(folder)
    panels = all_panels([run])
    over_steps = {name for panel in panels for name in panel.names}
    assert over_steps == {name for name in run.names if metric_pattern(name) not in SHAPES}
    titles = [panel.title for panel in panels]
    assert len(set(titles)) == len(titles)
    for title in ("Survival by depth", "Recall of each slot", "Is the drafter's confidence true?",
                  "Tokens that a verify pass emits", "Tokens that a pass emits, over training"):  # fmt: skip
        assert title in titles
    markup, page = page_of([run], tmp_path / "page.html")
    assert_alone(markup, page)
    assert page.tags.count("svg") == len(panels)


def test_a_metric_nobody_thought_of_gets_a_chart_of_its_own(tmp_path: Path) -> None:
    folder = write_log(tmp_path / "run", patterns=["train/loss"])
    file = folder / "logs" / "train.jsonl"
    file.write_text(file.read_text() + '{"step": 9, "speed/of_light": 3.0}\n')
    assert "of light" in [panel.title for panel in all_panels([read_run(folder)])] or any(
        "speed/of_light" in panel.names for panel in all_panels([read_run(folder)])
    )


@pytest.mark.parametrize(
    "patterns",
    [
        ["train/loss"],
        ["validation/chain_acceptance"],
        ["train/loss", "validation/tree_acceptance_*"],
        [name for name in METRICS if name.startswith(("train/", "validation/"))],
    ],
)
def test_logs_with_fewer_metrics_make_a_page_and_a_picture(
    patterns: list[str], tmp_path: Path
) -> None:
    run = read_run(write_log(tmp_path / "run", patterns=patterns))
    markup, page = page_of([run], tmp_path / "page.html")
    assert_alone(markup, page)
    write_picture(tmp_path / "run.svg", [run])
    assert "older than logs/run.json" in page.text


@pytest.mark.parametrize("value", [0.0, -1.0, 1e-30, 1e30, math.nan, math.inf])
def test_any_value_makes_a_page(value: float, tmp_path: Path) -> None:
    folder = write_log(tmp_path / "run", value=value)
    file = folder / "logs" / "train.jsonl"
    file.write_text(file.read_text() + '{"step": 9, "train/loss": 2.0}\n')
    markup, _ = page_of([read_run(folder)], tmp_path / "page.html")
    assert not re.search(r'="-?(nan|inf)', markup)


def test_a_line_being_written_is_left_out_and_a_broken_one_is_named(tmp_path: Path) -> None:
    folder = write_log(tmp_path / "run", patterns=["train/loss"])
    file = folder / "logs" / "train.jsonl"
    whole = file.read_text()
    file.write_text(whole + '{"step": 9, "train/lo')
    assert read_run(folder).step == 8
    huge = f'{{"step": 9, "a": {"9" * 400}}}\n'
    for broken in (
        *('{"step": 9, "train/lo\n', "[1]\n", '{"loss": 1}\n', '{"step": 9, "a": "b"}\n', huge),
        *('{"step": NaN}\n', '{"step": Infinity, "a": 1}\n', "\n", "\0\0\n", "\udcff\n"),
    ):
        file.write_bytes((whole + broken).encode(errors="surrogateescape"))
        with pytest.raises(ValueError, match=r"train\.jsonl line 9 is no record of a step"):
            read_run(folder)
    with pytest.raises(FileNotFoundError, match="is no folder of a run that has trained"):
        read_run(tmp_path)


def test_cards_say_the_last_and_the_best(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    (folder / "logs").mkdir(parents=True)
    accepted = {10: 2.5, 20: 4.25, 30: 3.75}
    lines = [{"step": s, "validation/tree_acceptance_64": v} for s, v in accepted.items()]
    lines += [{"step": 30, "train/loss": 1.5, "train/step_s": 2.0}]
    (folder / "logs" / "train.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    write_facts(folder, "a run", steps=90, tree_budget=64)
    write_run_page(folder)
    markup = page_path(folder).read_text()
    text = Page(markup).text
    assert "3.75tokens a pass; best 4.25 at step 20" in text
    assert "30of 90, about 2m00s left" in text
    assert 'http-equiv="refresh"' in markup
    write_facts(folder, "a run", steps=30, tree_budget=64)
    write_run_page(folder)
    assert 'http-equiv="refresh"' not in page_path(folder).read_text()


def test_runs_are_laid_over_each_other_and_told_apart(tmp_path: Path) -> None:
    folders = [write_log(tmp_path / name, value=v) for name, v in (("a", 0.5), ("b", 0.7))]
    older = write_log(tmp_path / "old", patterns=["train/loss"])
    for folder, loss in zip(folders, ("ce", "tree"), strict=True):
        write_facts(folder, "same", loss=loss, steps=8, tree_budget=16)
    runs = read_runs([*folders, older])
    assert len({run.name for run in runs}) == 3
    panels = {panel.title: panel for panel in all_panels(runs)}
    drawn = panels["Acceptance length on validation rows: tree 16"]
    assert [name for name, _, _ in drawn.legend] == [runs[0].name, runs[1].name]
    assert len(panels["Training loss"].legend) == 3
    markup, page = page_of(runs, tmp_path / "page.html")
    assert_alone(markup.replace(str(tmp_path), ""), page)
    differing = markup[markup.index("What differs") :]
    assert "train.loss" in differing
    for line in re.findall(r"<tr>(.*?)</tr>", differing):
        cells = re.findall(r"<td>(.*?)</td>", line)
        assert not cells or len(set(cells[1:])) > 1


def test_names_and_settings_cannot_become_markup(tmp_path: Path) -> None:
    folder = write_log(tmp_path / "run")
    write_facts(folder, HOSTILE, loss=HOSTILE)
    run = read_run(folder)
    markup, page = page_of([run, run], tmp_path / "page.html")
    assert "<script" not in markup
    assert "script" not in page.tags
    write_picture(tmp_path / "run.svg", [run, run])
    xml.etree.ElementTree.parse(tmp_path / "run.svg")


def test_the_picture_is_one_small_file_for_light_and_dark(tmp_path: Path) -> None:
    run = read_run(write_log(tmp_path / "run", steps=1000))
    write_picture(tmp_path / "run.svg", [run])
    markup = (tmp_path / "run.svg").read_text()
    root = xml.etree.ElementTree.fromstring(markup)
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert "prefers-color-scheme: dark" in markup
    assert not re.search(r"href|@import|url\(|<script|foreignObject", markup)
    assert len(markup) < 250_000
    titles = [e.text for e in root.iter() if e.get("class") == "title"]
    assert titles[:2] == ["Acceptance length on validation rows", "Training loss"]
    assert len(titles) == 6
    with pytest.raises(ValueError, match=r"let it end in \.svg"):
        write_picture(tmp_path / "run.png", [run])


values = st.floats(-1e6, 1e6)


@given(st.lists(values, min_size=1, max_size=700), st.integers(1, 50))
@settings(deadline=None, max_examples=60)
def test_thinning_keeps_means_and_every_extreme(ys: list[float], most: int) -> None:
    points = [(float(step), y) for step, y in enumerate(ys)]
    means, band = thinned(points, most)
    assert len(means) <= most
    if not band:
        assert means == points
        return
    assert min(low for low, _ in band) == min(ys)
    assert max(high for _, high in band) == max(ys)
    assert all(low <= y + 1e-6 and y <= high + 1e-6 for (_, y), (low, high) in zip(means, band, strict=True))  # fmt: skip
    assert [x for x, _ in means] == sorted(x for x, _ in means)


@given(st.integers(0, 300), st.integers(2, 20))
def test_a_spread_has_both_ends_and_no_more_than_asked(count: int, most: int) -> None:
    chosen = spread(count, most)
    assert chosen == sorted(set(chosen))
    assert len(chosen) == min(count, most)
    assert not count or (chosen[0], chosen[-1]) == (0, count - 1)


@given(st.lists(st.floats(1e-9, 1e9), min_size=1, max_size=20))
@settings(deadline=None)
def test_a_logarithmic_axis_holds_its_values_and_has_ticks_inside(values: list[float]) -> None:
    assert_axis(log_axis("", values), min(values), max(values))


@given(st.integers(1, 200), st.floats(0, 1))
def test_the_other_axes_hold_their_values(last: int, highest: float) -> None:
    assert_axis(numbers_axis("", last), 1, last)
    assert_axis(share_axis("", highest), 0, highest)


def assert_axis(axis: Axis, low: float, high: float) -> None:
    assert axis.low <= low * (1 + 1e-6)
    assert axis.high >= high * (1 - 1e-6)
    assert axis.low < axis.high
    assert axis.ticks == sorted(set(axis.ticks))
    assert all(axis.low <= tick <= axis.high for tick in axis.ticks)
    assert len(axis.ticks) <= 20


def test_the_command_needs_no_torch_and_ends_with_the_run(tmp_path: Path) -> None:
    folder = write_log(tmp_path / "run", patterns=["train/loss"])
    write_facts(folder, "watched", steps=9)
    check = (
        f"import sys, runpy; sys.argv = ['watch', {str(folder)!r}, '--every', '0.1'];"
        "runpy.run_module('train.watch', run_name='__main__'); assert 'torch' not in sys.modules"
    )
    process = subprocess.Popen([sys.executable, "-c", check], cwd=ROOT, stdout=subprocess.PIPE)
    deadline = time.monotonic() + 60
    while not page_path(folder).exists():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert process.poll() is None, "one step is missing"
    with (folder / "logs" / "train.jsonl").open("a") as file:
        file.write('{"step": 9, "train/loss": 0.25}\n')
    output = process.communicate(timeout=60)[0].decode()
    assert process.returncode == 0, output
    assert "watched at step 8" in output
    assert "step 9 of 9" in page_path(folder).read_text()


def test_mistakes_are_one_line(tmp_path: Path) -> None:
    folder = write_log(tmp_path / "run", patterns=["train/loss"])
    for arguments, message in (
        ([str(tmp_path)], "is no folder of a run that has trained"),
        ([str(folder), "--every", "0"], "--every 0: give seconds above 0"),
        ([str(folder), "--picture", "x.png"], "let it end in .svg"),
    ):
        done = subprocess.run(
            [sys.executable, "-m", "train.watch", *arguments],
            cwd=ROOT, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 2
        assert message in done.stderr
        assert len(done.stderr.splitlines()) == 1
