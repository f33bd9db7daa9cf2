"""training.html: a run while it trains or after, or several laid over each other; one file that stands alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from common.progress import format_duration
from evaluation.charts import HEIGHT, WIDTH, legend, svg
from evaluation.html import card, facts, heading, section, table, text, write_html
from train.watch.log import RunLog, read_run
from train.watch.panels import Panel
from train.watch.shapes import all_panels

RELOAD_S = 30
"""A page of a run that is not at its end reads its file again this often."""


def page_path(folder: Path) -> Path:
    """Of a run's own page."""
    return folder / "logs" / "training.html"


def write_run_page(folder: Path) -> None:
    """Write the page of the run in `folder` beside its log; a log without a single line has none."""
    run = read_run(folder)
    if run.lines:
        write_page(page_path(folder), [run])


def write_page(path: Path, runs: Sequence[RunLog]) -> None:
    """Raises ValueError if no run has a logged step."""
    if not any(run.lines for run in runs):
        raise ValueError(
            f"nothing is logged yet in {runs[0].path}; wait for the first train.log_every steps"
        )
    is_alone = len(runs) == 1
    title = f"{runs[0].name}: training" if is_alone else f"{len(runs)} runs compared"
    below = runs[0].path.parent.parent if is_alone else ", ".join(run.name for run in runs)
    body = [
        heading(title, f"{below} · {_state(runs)}"),
        f'<div class="cards">{_cards(runs[0])}</div>' if is_alone else "",
        '<div class="grid">',
        "" if is_alone else section("Where they are", [], _comparison(runs), "wide"),
        *(_chart(panel) for panel in all_panels(runs)),
        "" if is_alone else section("What differs", [], _differences(runs), "wide"),
        section("This run", [], facts(_settings(runs[0]))) if is_alone else "",
        "</div>",
    ]
    is_running = not all(run.is_finished for run in runs)
    write_html(path, title, "".join(body), RELOAD_S if is_running else None)


def _chart(panel: Panel) -> str:
    body = svg(panel.title, WIDTH, HEIGHT, panel.parts) + legend(panel.legend)
    return section(panel.title, [panel.note], body)


def _state(runs: Sequence[RunLog]) -> str:
    newest = max(run.written for run in runs)
    steps = ", ".join(_step_of(run) for run in runs) if len(runs) == 1 else ""
    return f"{steps}{' · ' * bool(steps)}last line written {newest:%Y-%m-%d %H:%M:%S} UTC"


def _step_of(run: RunLog) -> str:
    return f"step {run.step}" + (f" of {run.num_steps}" if run.num_steps else "")


def _cards(run: RunLog) -> str:
    cards = [card("step", str(run.step), _time_left(run))]
    loss = run.last("train/loss")
    if loss is not None:
        cards.append(card("training loss", f"{loss:.3f}", "nats a slot"))
    for name, title in _acceptances(run):
        best = run.best(name)
        if best is not None:
            last = run.curve(name)[-1][1]
            cards.append(
                card(title, f"{last:.2f}", f"tokens a pass; best {best[1]:.2f} at step {best[0]:g}")
            )
    error = run.last("calibration/ece")
    if error is not None:
        cards.append(card("calibration error", f"{error:.3f}", "path probabilities, 0 is true"))
    speed = run.last("train/tokens_per_s")
    if speed is not None:
        utilisation = run.last("speed/mfu")
        below = "document tokens a second" + (
            "" if utilisation is None else f", MFU {utilisation:.1%}"
        )
        cards.append(card("speed", f"{speed:,.0f}", below))
    return "".join(cards)


def _acceptances(run: RunLog) -> list[tuple[str, str]]:
    """Metric and title of the chain and of the tree that checkpoints are compared at."""
    found = [("validation/chain_acceptance", "chain, validation rows")]
    if run.tree_budget is not None:
        name = f"validation/tree_acceptance_{run.tree_budget}"
        found.append((name, f"tree of {run.tree_budget}, validation rows"))
    return found


def _time_left(run: RunLog) -> str:
    if run.num_steps is None:
        return "the run does not say of how many"
    seconds = run.last("train/step_s")
    if run.is_finished or seconds is None:
        return f"of {run.num_steps}"
    left = format_duration(seconds * (run.num_steps - run.step))
    return f"of {run.num_steps}, about {left} left without evaluations"


def _comparison(runs: Sequence[RunLog]) -> str:
    budgets = sorted({budget for run in runs for budget in run.budgets})
    trees = [(f"validation/tree_acceptance_{budget}", f"tree {budget}") for budget in budgets]
    columns = [
        ("train/loss", "loss"),
        ("validation/chain_acceptance", "chain"),
        *trees,
        ("calibration/ece", "calibration error"),
        ("train/tokens_per_s", "tokens/s"),
    ]
    rows = [
        [text(run.name), text(_step_of(run)), *(_cell(run.last(name)) for name, _ in columns)]
        for run in runs
    ]
    return table(["run", "step", *(title for _, title in columns)], rows)


def _cell(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3f}"


def _differences(runs: Sequence[RunLog]) -> str:
    """Settings that are not the same in all runs."""
    named = dict.fromkeys(key for run in runs for key in run.settings)
    rows = []
    for key in named:
        values = [_spelt(run, key) for run in runs]
        if len(set(values)) > 1:
            rows.append([text(value) for value in (key, *values)])
    if not rows:
        return facts([("settings", "the same, as far as the runs say")])
    return table(["setting", *(run.name for run in runs)], rows)


def _spelt(run: RunLog, key: str) -> str:
    return str(run.settings[key]) if key in run.settings else "not said"


def _settings(run: RunLog) -> list[tuple[str, str]]:
    if not run.settings:
        return [("settings", "this run is older than logs/run.json and does not say them")]
    return [(key, str(value)) for key, value in run.settings.items() if value is not None]
