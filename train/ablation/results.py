"""What an ablation leaves when all its runs are judged: table, rows, curves and pictures, in its folder."""

from __future__ import annotations

from dataclasses import asdict

from common.files import atomic_path, write_json
from train.ablation.judge import PromptSet
from train.ablation.live_table import live_markdown, live_rows
from train.ablation.pictures import draw_acceptance, draw_curves
from train.ablation.settings import Ablation
from train.ablation.table import ablation_rows, markdown, to_json, training_curves


def write_results(ablation: Ablation, prompts: PromptSet, name: str) -> str:
    """Write NAME.md, .json and .svg, and when judging curves.json and .svg; gives the tables as text.

    Raises FileNotFoundError naming a run that is not judged, or not decoded live where that is asked for.
    """
    folder = ablation.output_dir
    rows = ablation_rows(ablation, prompts)
    live = live_rows(ablation) if prompts == "judge" else []
    tables = markdown(ablation, rows) + live_markdown(ablation, live)
    result = {
        "name": name,
        "settings": ablation.model_dump(mode="json"),
        "rows": to_json(rows),
        "live": [asdict(row) for row in live],
    }
    write_json(folder / f"{name}.json", result)
    with atomic_path(folder / f"{name}.md") as aside:
        aside.write_text(tables, encoding="utf-8")
    draw_acceptance(folder / f"{name}.svg", ablation, rows)
    if prompts == "judge":  # a confirmation is of some variants only, and no other training
        write_json(folder / "curves.json", training_curves(ablation))
        draw_curves(folder / "curves.svg", ablation)
    return tables
