"""The page: well-formed, alone, safe against the texts it shows, and telling whatever acceptors there are."""

from __future__ import annotations

import copy
import dataclasses
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from report_cases import Made, drawn_tree, make_evaluation

from configs.schema import AcceptorName
from evaluation.compare import write_comparison
from evaluation.drawing import DrawnTree
from evaluation.html import STYLE, text, visible
from evaluation.page import write_page
from evaluation.pairing import Evaluation, compare_evaluations
from evaluation.report import build_report
from evaluation.summary import summary_lines
from evaluation.sums import ReplaySums
from evaluation.tree_chart import MAX_NODES, num_left_out, tree_chart

HOSTILE = "<script>alert('1')</script>\"&\x00\x1b\u202e\u2066\u200b\ud800 end"


class Page(HTMLParser):
    """Every tag closed by its own; texts, classes and everything that could load something."""

    def __init__(self, markup: str):
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.texts: list[str] = []
        self.classes: set[str] = set()
        self.links: list[str] = []
        self.feed(markup)
        self.close()
        assert self.open == [], f"not closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._note(tag, attrs)
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._note(tag, attrs)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    def _note(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            assert not name.startswith("on"), f"{tag} has a handler {name}"
            if name == "class":
                self.classes |= set((value or "").split())
            if name in ("src", "href", "xlink:href", "action", "data", "srcset", "poster"):
                self.links.append(f"{tag} {name}={value}")

    @property
    def text(self) -> str:
        return "".join(self.texts)


def report_of(made: Made) -> dict[str, Any]:
    return build_report(made.identity, made.measured, made.measured.prompt_records())


def page_of(
    report: dict[str, Any], folder: Path, trees: list[DrawnTree] | None = None
) -> tuple[str, Page]:
    write_page(folder / "report.html", report, trees or [], folder)
    markup = (folder / "report.html").read_text(encoding="utf-8")
    return markup, Page(markup)


@pytest.fixture(scope="module")
def made() -> Made:
    return make_evaluation(has_fit=True)


@pytest.fixture(scope="module")
def report(made: Made) -> dict[str, Any]:
    return report_of(made)


def assert_alone(markup: str, page: Page) -> None:
    assert page.links == []
    assert not {"script", "link", "iframe", "img", "object", "base"} & set(page.tags)
    assert not re.search(r"(https?:)?//|@import|url\(", markup)
    assert markup.startswith("<!doctype html>")
    assert "width=device-width" in markup


def test_page_is_well_formed_and_alone(report: dict[str, Any], tmp_path: Path) -> None:
    log = [{"step": s, "train/loss": 3.0 / s, "validation/chain_acceptance": 1.0, "validation/tree_acceptance_8": 1.5} for s in (1, 2)]  # fmt: skip
    lines = "".join(json.dumps(line) + "\n" for line in log)
    (tmp_path / "train.jsonl").write_text(lines + '{"step": 3, "train/lo')  # cut by a kill
    markup, page = page_of(report, tmp_path, [drawn_tree(), drawn_tree(kind="typical")])
    assert_alone(markup, page)
    assert page.tags.count("svg") >= 9
    assert "Acceptance while training" in page.text


def test_every_colour_is_defined_for_light_and_dark(report: dict[str, Any], tmp_path: Path) -> None:
    _, page = page_of(report, tmp_path, [drawn_tree()])
    styled = set(re.findall(r"\.([a-z][a-z0-9]*)", STYLE))
    assert page.classes <= styled
    light, dark = re.findall(r":root \{(.*?)\}", STYLE, re.DOTALL)
    names = set(re.findall(r"(--[a-z0-9-]+):", light))
    assert names == set(re.findall(r"(--[a-z0-9-]+):", dark))
    assert set(re.findall(r"var\((--[a-z0-9-]+)\)", STYLE)) <= names
    # no drawing names a colour of its own
    assert not re.search(r'(fill|stroke)="#', (tmp_path / "report.html").read_text())


@pytest.mark.parametrize("where", ["task", "token", "context", "run", "drafter"])
def test_hostile_text_stays_text(where: str, tmp_path: Path) -> None:
    tasks = ("chat", HOSTILE) if where == "task" else ("chat", "code")
    report = report_of(make_evaluation(num_prompts=6, num_live=2, tasks=tasks))
    tree = drawn_tree([HOSTILE[:9], "b", "\x07", "\u202e"] if where == "token" else None)
    if where == "context":
        tree = dataclasses.replace(tree, context=HOSTILE)
    if where in ("run", "drafter"):
        report["facts"][where] = HOSTILE
    markup, page = page_of(report, tmp_path, [tree])
    assert_alone(markup.replace("&lt;script&gt;alert(&#x27;1&#x27;)&lt;/script&gt;", ""), page)
    assert all(char.isprintable() or char == "\n" for char in markup)
    if where != "token":
        assert visible(HOSTILE) in page.text


@given(st.text())
@settings(deadline=None)
def test_text_reads_back_as_what_can_be_seen(value: str) -> None:
    page = Page(f"<p>{text(value)}</p>")
    assert page.tags == ["p"]
    assert page.text == visible(value)
    assert all(char.isprintable() or char in "\n\t" for char in page.text)


def test_numbers_of_the_report_are_on_the_page(report: dict[str, Any], tmp_path: Path) -> None:
    _, page = page_of(report, tmp_path)
    shown = [row for row in report["rows"] if row["mode"] == "replay" or row["task"] == "all"]
    assert len(shown) > 30
    for row in shown:
        low, high = row["ci95"]
        assert f"{row['acceptance_macro']:.2f} {low:.2f}\u2013{high:.2f}" in page.text
    for row in report["modelled"]:
        assert f"{row['speedup']:.2f}" in page.text
    for task in {row["task"] for row in report["rows"]}:
        assert task in page.text


def test_an_acceptor_of_any_name_is_shown_like_the_others(
    report: dict[str, Any], tmp_path: Path
) -> None:
    renamed = json.loads(json.dumps(report).replace('"tree_spine"', '"tree_novel"'))
    before, after = page_of(report, tmp_path)[1], page_of(renamed, tmp_path)[1]
    assert before.text.replace("tree_spine", "tree_novel") == after.text
    assert "tree_novel 16" in after.text
    lines = summary_lines(renamed)
    assert sum(line.startswith("tree_novel") for line in lines) == 4


def test_the_console_has_a_row_an_acceptor_with_intervals(report: dict[str, Any]) -> None:
    lines = summary_lines(report)
    [row] = [r for r in report["rows"] if (r["mode"], r["acceptor"], r["task"]) == ("replay", "tree_cost", "all")]  # fmt: skip
    [line] = [line for line in lines if line.startswith("tree_cost 16")]
    low, high = row["ci95"]
    assert f"{row['acceptance_macro']:.2f} [{low:.2f}, {high:.2f}]" in line
    assert lines[0].split()[-1] == "modelled"
    assert lines[1].startswith("plain")


def test_cards_say_what_a_person_decides_by(report: dict[str, Any], tmp_path: Path) -> None:
    _, page = page_of(report, tmp_path)
    best = max(report["modelled"], key=lambda row: row["speedup"])
    assert f"Fastest: {best['acceptor']} {best['budget']}{best['speedup']:.2f}x" in page.text
    assert "drafting does not pay on this machine" in page.text
    assert "Lossless: yes6 of 6" in page.text
    assert "Over-confident" in page.text
    assert "1.10, 1.10, 1.10, 1.10; loss 2.0000 to 1.9000 nats a token on 3 validation" in page.text
    assert "measured on a machine" in page.text


def test_a_lossy_run_an_odd_pass_and_a_weak_task_are_not_hidden(
    report: dict[str, Any], tmp_path: Path
) -> None:
    bad = copy.deepcopy(report)
    bad["lossless"] = {
        "num_prompts": 6,
        "num_equal": 5,
        "differing": [
            {"prompt_id": "p", "acceptor": "tree", "budget": 4, "index": 7, "target_gap": 2.5}
        ],
    }
    bad["parity"] |= {"num_equal": bad["parity"]["num_passes"] - 1}
    bad["parity"]["differing"] = [{"prompt_id": "p", "acceptor": "tree", "budget": 4, "anchor": 3, "live": 1, "replay": 2, "gap_nats": 0.5, "is_near_tie": False}]  # fmt: skip
    for row in bad["rows"]:
        if (row["mode"], row["task"], row["acceptor"]) == ("replay", "code", "tree"):
            row["ci95"] = [1.0, 1.1]
    _, page = page_of(bad, tmp_path)
    assert "Lossless: NO5 of 6" in page.text
    assert "token 7, target's two best logits 2.5e+00 apart" in page.text
    assert "1 of the others are no near-tie" in page.text
    assert "NOT a near-tie" in page.text
    assert "code ▼" in page.text
    assert "wholly below the mean: code" in page.text
    for row in bad["rows"]:
        row["num_prompts"] = 4
    _, page = page_of(bad, tmp_path)
    assert "code ▼" not in page.text, "four prompts say too little"


@pytest.mark.parametrize("num_live", [0, 6])
def test_parts_that_were_not_measured_are_left_out_or_said(num_live: int, tmp_path: Path) -> None:
    made = make_evaluation(num_prompts=0 if num_live else 6, num_live=0, has_cost=bool(num_live))
    if num_live:
        other = make_evaluation(num_prompts=num_live, num_live=num_live)
        made = dataclasses.replace(made, measured=dataclasses.replace(made.measured, live=other.measured.live))  # fmt: skip
    report = report_of(made)
    markup, page = page_of(report, tmp_path)
    assert_alone(markup, page)
    assert "modelled" not in page.text
    assert ("not checked" in page.text) == (num_live == 0)
    assert summary_lines(report)


@pytest.mark.parametrize("names", [("chain",), ("tree",), ("tree_cost",)])
def test_any_choice_of_acceptors_makes_a_page(
    names: tuple[AcceptorName, ...], made: Made, tmp_path: Path
) -> None:
    options = dataclasses.replace(made.measured.options, names=names)
    keys = tuple(acceptor.key for acceptor in options.acceptors)
    whole = made.measured.sums
    kept = [whole.acceptors.index(key) for key in keys]
    per_acceptor = ("acceptance", "survived", "predicted", "realised", "num_nodes")

    def cut(sums: ReplaySums) -> ReplaySums:
        fewer = {name: sums.__dict__[name][kept] for name in per_acceptor}
        return dataclasses.replace(sums, acceptors=keys, **fewer)

    replayed = [dataclasses.replace(row, sums=cut(row.sums), unfitted=cut(row.sums)) for row in made.measured.replayed]  # fmt: skip
    measured = dataclasses.replace(made.measured, options=options, replayed=replayed, sums=cut(whole), live=[])  # fmt: skip
    report = report_of(dataclasses.replace(made, measured=measured))
    markup, page = page_of(report, tmp_path)
    assert_alone(markup, page)
    assert {row["acceptor"] for row in report["rows"]} == set(names)
    assert len(summary_lines(report)) == 1 + len(keys)


def test_a_single_prompt_has_no_interval(tmp_path: Path) -> None:
    report = report_of(make_evaluation(num_prompts=1, num_live=1, tasks=("chat",)))
    assert {row["ci95"] for row in report["rows"] if row["ci95"] is None} == {None}
    assert all(row["ci95"] is None for row in report["rows"])
    page_of(report, tmp_path)
    assert summary_lines(report)


def test_the_comparison_page_is_alone_and_safe(tmp_path: Path) -> None:
    made = [make_evaluation(flatness=f, run=HOSTILE[:8], tasks=("chat", HOSTILE), num_prompts=8, num_live=2) for f in (2.0, 1.0)]  # fmt: skip
    sides = [Evaluation(Path("r.json"), report_of(m), m.measured.prompt_records()) for m in made]
    result = compare_evaluations(*sides)
    write_comparison(tmp_path / "c.html", result)
    markup = (tmp_path / "c.html").read_text(encoding="utf-8")
    page = Page(markup)
    assert_alone(markup.replace("&lt;script&gt;alert(&#x27;1&#x27;)&lt;/script&gt;", ""), page)
    for row in result["rows"]:
        if row["task"] == "all":
            assert f"{row['difference']:.3f}" in page.text


def test_tree_drawing_marks_the_path_and_the_bonus_and_escapes_tokens() -> None:
    chart = tree_chart(dataclasses.replace(drawn_tree(["<a>", "b", "\n", "d"]), accepted=[0, 2]))
    page = Page(chart)
    assert "<a>" not in chart
    assert page.text.startswith("<a>")
    assert "↵ #2" in page.text  # the accepted node is the drafter's second choice
    assert chart.count('font-weight="700"') == 3  # root, the accepted node, the bonus token
    assert "bonus token" in page.text
    assert chart.count("<path") == 4


@given(st.integers(0, 400), st.integers(0, 10**6))
@settings(deadline=None, max_examples=30)
def test_large_trees_are_pruned_to_the_likeliest_and_the_accepted_path(
    num_nodes: int, seed: int
) -> None:
    """Any tree whose parents come first; the accepted path goes down to a random node."""
    numbers = [(seed * 2654435761 + 40503 * node) % 2**32 for node in range(1, num_nodes + 1)]
    parents = [-1, *(number % node for node, number in enumerate(numbers, start=1))]
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    path = [seed % (num_nodes + 1)]
    while parents[path[-1]] >= 0:
        path.append(parents[path[-1]])
    names = [f"n{node}" for node in range(num_nodes + 1)]
    tree = DrawnTree("p", "tree-9", "longest", "", names, parents, depths, [0] * len(names), [-0.1] * len(names), path[::-1], "bonus", len(path))  # fmt: skip
    chart = tree_chart(tree)
    shown = re.findall(r'font-weight="700">(\w+)', chart)
    assert shown == [*(f"n{node}" for node in sorted(path)), "bonus"]
    drawn = chart.count("<text")
    assert drawn == len(names) - num_left_out(tree) + 1
    assert drawn <= MAX_NODES + 1 + len(path) + 1
    assert chart.count("<path") == drawn - 1
