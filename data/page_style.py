"""The corpus page's look: numbers, tables, bars and histograms as plain HTML and SVG, light and dark, without a script."""

from __future__ import annotations

import html
import math
from collections import Counter
from collections.abc import Mapping, Sequence

STYLE = """
:root{--ink:#1d2433;--soft:#5d6778;--line:#dfe3ea;--card:#fff;--page:#f5f6f9;--bar:#3f6fd8;--good:#1f7a4d;--bad:#b3371f}
@media (prefers-color-scheme:dark){:root{--ink:#e6e9f0;--soft:#9aa5b8;--line:#2d3543;--card:#171c26;--page:#0f131a;
--bar:#6f9bf5;--good:#58c48f;--bad:#f08a6f}}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);font:15px/1.5 system-ui,"Segoe UI",Roboto,sans-serif}
main{max-width:1180px;margin:0 auto;padding:28px 20px 60px}
h1{font-size:26px;margin:0}h2{font-size:19px;margin:0 0 4px}h3{font-size:15px;margin:18px 0 6px}
header p,section>p{color:var(--soft);margin:2px 0 12px}
section{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:18px 20px;margin:16px 0;overflow-x:auto}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(160px,1fr));gap:12px;margin:16px 0}
.cards div{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:12px 14px}
.cards b{display:block;font-size:23px}.cards span{display:block}.cards i{color:var(--soft);font-style:normal;font-size:13px}
.good{color:var(--good)}.bad{color:var(--bad);font-weight:600}
table{border-collapse:collapse;font-size:13px;margin:10px 0;min-width:60%}
th{color:var(--soft);font-weight:600;text-align:right;vertical-align:bottom}
th,td{padding:4px 9px;border-bottom:1px solid var(--line)}
td{text-align:right;font-variant-numeric:tabular-nums;vertical-align:top}
th.l,td.l{text-align:left;overflow-wrap:anywhere}td b{white-space:nowrap}
svg{max-width:100%;height:auto;display:block}svg text{fill:var(--soft);font-size:11px}
svg .bar{fill:var(--bar)}svg .axis{stroke:var(--line)}svg .name{fill:var(--ink);font-size:12px}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(520px,1fr));gap:6px 22px}
.pair{display:grid;grid-template-columns:1fr 1fr;gap:12px}
details{border-top:1px solid var(--line);padding:5px 0}summary{cursor:pointer;overflow-wrap:anywhere}
summary i{color:var(--soft);font-style:normal;font-size:12px}
pre{white-space:pre-wrap;overflow-wrap:anywhere;margin:4px 0;font:12.5px/1.45 ui-monospace,Menlo,Consolas,monospace}
.turn{border-left:3px solid var(--line);padding-left:10px;margin:8px 0}.turn.assistant{border-color:var(--bar)}
.turn b{font-size:12px;color:var(--soft)}
"""
_WIDTH, _HEIGHT = 340, 120


def text(value: object) -> str:
    return html.escape(str(value))


def number(value: float, blank_zero: bool = False) -> str:
    if blank_zero and not value:
        return ""
    return f"{value:,.0f}" if value == int(value) or value >= 100 else f"{value:,.1f}"


def percent(share: float) -> str:
    return f"{share:.1%}" if 0 < share < 0.1 else f"{share:.0%}"


def table(head: Sequence[str], rows: Sequence[Sequence[str]], num_left: int) -> str:
    """Cells are HTML. The first `num_left` columns are text, the others numbers; the last too if it is named licence."""

    def row(cells: Sequence[str], tag: str) -> str:
        return "".join(
            f"<{tag}{' class=l' if i < num_left or head[i] == 'licence' else ''}>{cell}</{tag}>"
            for i, cell in enumerate(cells)
        )

    body = "".join(f"<tr>{row(cells, 'td')}</tr>" for cells in rows)
    return f"<table><tr>{row([text(name) for name in head], 'th')}</tr>{body}</table>"


def bars(title: str, values: Mapping[str, float]) -> str:
    """Horizontal bars, longest first, each with its value and share."""
    total = sum(values.values())
    if not total:
        return ""
    ordered = sorted(values.items(), key=lambda item: (-item[1], item[0]))
    longest = ordered[0][1]
    lines = "".join(
        f'<text class="name" x="0" y="{22 * i + 15}">{text(name)}</text>'
        f'<rect class="bar" x="210" y="{22 * i + 3}" width="{max(1.0, 420 * value / longest):.1f}" height="15" rx="2"/>'
        f'<text x="{216 + max(1.0, 420 * value / longest):.1f}" y="{22 * i + 15}">{number(value)} · {percent(value / total)}</text>'
        for i, (name, value) in enumerate(ordered)
    )
    return f'<svg viewBox="0 0 780 {22 * len(ordered) + 4}" width="780" role="img" aria-label="{text(title)}">{lines}</svg>'


def histogram(title: str, counts: Counter[int], bins_per_octave: int = 8) -> str:
    """Rows by length, an octave a bar; `counts` by finer bins (data/summary.py)."""
    octaves: Counter[int] = Counter()
    for number_of_bin, count in counts.items():
        octaves[max(0, number_of_bin - 1) // bins_per_octave] += count
    if not octaves:
        return ""
    first, last, most = min(octaves), max(octaves), max(octaves.values())
    width = min(60.0, (_WIDTH - 10) / (last - first + 1))
    parts = [f'<text class="name" x="4" y="13">{text(title)}</text>']
    for place, octave in enumerate(range(first, last + 1)):
        count = octaves[octave]
        height = 0.0 if not count else max(1.0, (_HEIGHT - 50) * count / most)
        x, y = 5 + place * width, _HEIGHT - 18 - height
        hint = f"{2**octave:,} to {2 ** (octave + 1) - 1:,} tokens: {count:,} rows"
        parts.append(
            f'<rect class="bar" x="{x:.1f}" y="{y:.1f}" width="{max(1.0, width - 3):.1f}" height="{height:.1f}" rx="2">'
            f"<title>{hint}</title></rect>"
        )
        parts.append(f'<text x="{x:.1f}" y="{_HEIGHT - 5}">{_short(2**octave)}</text>')
        if count and math.isclose(count, most):
            parts.append(f'<text x="{x:.1f}" y="{y - 4:.1f}">{count:,}</text>')
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" role="img" aria-label="{text(title)}">{"".join(parts)}</svg>'


def _short(value: int) -> str:
    return f"{value // 1024}k" if value >= 1024 else str(value)
