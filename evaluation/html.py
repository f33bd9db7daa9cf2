"""Pieces of a page that is one file: no script, no network, light or dark as the reader's system is, narrow or wide.

Text of datasets, tokenizers and paths goes through `text`: it can neither become markup nor turn the line around.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from common.files import atomic_path

COLOURS = """
:root { color-scheme: light dark; --page: #f4f6f9; --card: #fff; --line: #e2e8f0; --ink: #1a202c; --soft: #556072;
  --good: #0f766e; --bad: #b91c1c; --warn: #b45309; --grid: #e6eaf0; --on-fill: #fff;
  --c0: #c2410c; --c1: #0f766e; --c2: #1d4ed8; --c3: #9333ea; --c4: #be185d; --c5: #4d7c0f; --c6: #0e7490; --c7: #64748b; }
@media (prefers-color-scheme: dark) { :root { --page: #0f141b; --card: #171e28; --line: #2b3544; --ink: #e5eaf1;
  --soft: #9aa7b8; --good: #4fd1c0; --bad: #ff8a80; --warn: #fbbf24; --grid: #2a3342; --on-fill: #0f141b;
  --c0: #fb923c; --c1: #4fd1c0; --c2: #7ea8ff; --c3: #c99bff; --c4: #f990c0; --c5: #a8d65c; --c6: #67d4ea; --c7: #94a3b8; } }
"""
"""Light and dark, as the reader's system is; a picture in SVG takes them too."""
CHART_STYLE = """
.c0 { color: var(--c0); } .c1 { color: var(--c1); } .c2 { color: var(--c2); } .c3 { color: var(--c3); }
.c4 { color: var(--c4); } .c5 { color: var(--c5); } .c6 { color: var(--c6); } .c7 { color: var(--c7); }
.hollow { fill: var(--card); } .on { fill: var(--on-fill); } .gridline { stroke: var(--grid); } .axis { stroke: var(--soft); }
"""
_PAGE_STYLE = """
* { box-sizing: border-box; }
body { font: 15px/1.5 system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; color: var(--ink);
  background: var(--page); margin: 0; }
main { max-width: 1320px; margin: 0 auto; padding: 28px 24px 60px; }
h1 { font-size: 25px; line-height: 1.25; margin: 0 0 4px; } h2 { font-size: 17px; margin: 0 0 4px; }
.sub { color: var(--soft); margin: 0 0 20px; overflow-wrap: anywhere; }
.note { color: var(--soft); font-size: 13px; margin: 0 0 10px; } .note + .note { margin-top: -6px; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(188px, 1fr)); gap: 14px; margin-bottom: 16px; }
.card, section { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 16px 18px;
  min-width: 0; }
.card h2 { font-size: 13px; font-weight: 600; color: var(--soft); }
.card b { display: block; font-size: 27px; line-height: 1.2; font-variant-numeric: tabular-nums; }
.card span { color: var(--soft); font-size: 13px; overflow-wrap: anywhere; }
.good b, b.good { color: var(--good); } .bad b, b.bad { color: var(--bad); } .warn b, b.warn { color: var(--warn); }
.grid { display: grid; grid-auto-flow: dense; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 16px; }
.wide { grid-column: 1 / -1; }
@media (max-width: 900px) { .grid { grid-template-columns: minmax(0, 1fr); } main { padding: 16px 12px 40px; } }
svg { display: block; font: 12px system-ui, "DejaVu Sans", sans-serif; fill: var(--soft); }
.chart { overflow-x: auto; } .chart svg { width: 100%; min-width: 480px; max-width: 760px; }
.scroll { overflow-x: auto; } .tree svg { font-family: ui-monospace, "DejaVu Sans Mono", monospace; }
.accepted { color: var(--good); } .drafted { color: var(--soft); }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: 5px 10px; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }
section:not(.wide) :is(th, td) { padding: 5px 6px; }
th { color: var(--soft); font-weight: 600; font-size: 13px; vertical-align: bottom; }
th:first-child, td:first-child { text-align: left; } td b { font-weight: 600; } td small { color: var(--soft); }
.legend { display: flex; flex-wrap: wrap; gap: 4px 16px; font-size: 13px; color: var(--soft); margin-top: 6px; }
.legend i { display: inline-block; width: 12px; height: 12px; border-radius: 3px; margin-right: 6px; vertical-align: -1px;
  background: currentColor; }
.legend span span { color: var(--soft); }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 3px 18px; margin: 0; }
dt { color: var(--soft); } dd { margin: 0; overflow-wrap: anywhere; }
@media (max-width: 560px) { dl { grid-template-columns: minmax(0, 1fr); } dd { margin-bottom: 6px; } }
pre { margin: 0 0 8px; white-space: pre-wrap; overflow-wrap: anywhere; font: 12px/1.5 ui-monospace, "DejaVu Sans Mono",
  monospace; direction: ltr; unicode-bidi: isolate; color: var(--soft); }
pre b { color: var(--good); }
"""
STYLE = COLOURS + CHART_STYLE + _PAGE_STYLE


def text(value: str) -> str:
    """Safe between tags and in quoted attributes; what cannot be seen is spelt out."""
    return escape(visible(value))


def visible(value: str) -> str:
    """Control, bidi, zero-width and surrogate characters as <hex>; newline and tab stay."""
    return "".join(
        char if char.isprintable() or char in "\n\t" else f"<{ord(char):02x}>" for char in value
    )


def write_html(path: Path, title: str, body: str, reload_s: int | None = None) -> None:
    """A whole page, atomically. `body` is markup; with `reload_s` an open page reads its file again every so many seconds."""
    reload = "" if reload_s is None else f'<meta http-equiv="refresh" content="{reload_s}">'
    with atomic_path(path) as aside:
        aside.write_text(
            '<!doctype html><html lang="en"><head><meta charset="utf-8">'
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            f"{reload}<title>{text(title)}</title><style>{STYLE}</style></head>"
            f"<body><main>{body}</main></body></html>\n",
            encoding="utf-8",
        )


def heading(title: str, below: str) -> str:
    return f'<h1>{text(title)}</h1><p class="sub">{text(below)}</p>'


def section(title: str, notes: Sequence[str], body: str, kind: str = "") -> str:
    """Notes are text; body is markup."""
    lines = "".join(f'<p class="note">{text(note)}</p>' for note in notes if note)
    return f'<section class="{kind}"><h2>{text(title)}</h2>{lines}{body}</section>'


def card(title: str, number: str, below: str, kind: str = "") -> str:
    """kind: good, bad, warn or nothing."""
    return (
        f'<div class="card {kind}"><h2>{text(title)}</h2><b>{text(number)}</b>'
        f"<span>{text(below)}</span></div>"
    )


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Head is text; cells are markup."""
    names = "".join(f"<th>{text(name)}</th>" for name in head)
    lines = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="scroll"><table><tr>{names}</tr>{lines}</table></div>'


def facts(lines: Sequence[tuple[str, str]]) -> str:
    """Names and values, both text."""
    return "<dl>" + "".join(f"<dt>{text(a)}</dt><dd>{text(b)}</dd>" for a, b in lines) + "</dl>"


def with_interval(value: float, ci95: Sequence[float] | None, digits: int = 2) -> str:
    """Markup: the value, and its interval small behind it."""
    if ci95 is None:
        return f"{value:.{digits}f}"
    return f"{value:.{digits}f} <small>{ci95[0]:.{digits}f}&ndash;{ci95[1]:.{digits}f}</small>"
