"""corpus.html: one file that stands alone, from which a person decides whether to spend GPU days on this corpus.

What is in it, how long it is, what was dropped and why, what is double, what held a test prompt, and samples to read.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.files import atomic_path, read_json
from data.corpus import CorpusManifest, read_corpus_manifest
from data.page_style import STYLE, bars, histogram, number, percent, table, text
from data.summary import Lengths, RejectedExample, Sample, Summary, summarise

_NUM_HITS = 40


@dataclass(frozen=True)
class Wanted:
    """What the recipe asked of a source."""

    take: int | None
    license: str
    is_unverified: bool
    """Nobody has checked the licence."""


def page_path(folder: Path) -> Path:
    return folder / "corpus.html"


def write_page(folder: Path, name: str, wanted: Mapping[str, Wanted]) -> Path:
    """The page of the finished corpus in `folder`. `wanted` has the recipe's sources by name."""
    manifest = read_corpus_manifest(folder)
    summary = summarise(folder, manifest)
    findings = read_json(folder / "findings.json", "run the data stage again")
    parts = [
        f"<header><h1>{text(name)}: the corpus</h1><p>{_subtitle(manifest)}</p></header>",
        _cards(manifest, summary),
        _shortfalls(manifest, wanted),
        _mix(manifest, summary, wanted),
        _lengths(summary),
        _drops(manifest),
        _doubles(findings),
        _contamination(folder),
        _samples(summary),
        _rejected_samples(summary),
        _about(manifest),
    ]
    path = page_path(folder)
    with atomic_path(path) as aside:
        aside.write_text(_document(name, "".join(parts)), encoding="utf-8")
    return path


def _document(name: str, body: str) -> str:
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{text(name)}: corpus</title><style>{STYLE}</style></head><body><main>{body}</main></body></html>\n"
    )


def _subtitle(manifest: CorpusManifest) -> str:
    settings = manifest.settings
    return (
        f"answered by {text(settings['model'])} · chat template {settings['chat_template'][:12]} · "
        f"tokenizer {settings['tokenizer'][:12]} · corpus {manifest.fingerprint[:12]}"
    )


def _cards(manifest: CorpusManifest, summary: Summary) -> str:
    total = manifest.counts["total"]
    done, rejected = sum(total["done"].values()), total["rejected"]
    doubles = rejected.get("duplicate", 0) + rejected.get("near duplicate", 0)
    finished = summary.total.num_finished / max(summary.total.num_rows, 1)
    cards = [
        ("conversations", number(done), f"of {number(total['read'])} rows read"),
        (
            "tokens",
            number(manifest.num_tokens),
            f"{number(manifest.num_response_tokens)} generated",
        ),
        ("doubles removed", number(doubles), percent(doubles / max(total["read"], 1))),
        (
            "held a test prompt",
            number(rejected.get("contaminated by a test prompt", 0)),
            "taken out of training",
        ),
        ("finished answers", percent(finished), "the rest was cut at a limit"),
        (
            "held out",
            number(total["done"]["validation"] + total["done"]["test"]),
            "validation, test",
        ),
    ]
    return (
        '<div class="cards">'
        + "".join(
            f"<div><b>{value}</b><span>{text(title)}</span><i>{text(note)}</i></div>"
            for title, value, note in cards
        )
        + "</div>"
    )


def _shortfalls(manifest: CorpusManifest, wanted: Mapping[str, Wanted]) -> str:
    """Sources that gave less than they were to give."""
    short = [
        f"{text(name)} has {number(done)} of {number(want.take)}"
        for name, want in wanted.items()
        if want.take is not None
        and (done := sum(manifest.counts[name]["done"].values())) < want.take
    ]
    if not short:
        return '<p class="good">Every source gave the samples that the recipe asks for.</p>'
    return (
        f'<p class="bad">Short of the recipe: {"; ".join(short)}. Read more of them (data.sources[].read), raise '
        "data.spare_fraction, or lower their take.</p>"
    )


def _mix(manifest: CorpusManifest, summary: Summary, wanted: Mapping[str, Wanted]) -> str:
    head = "source,category,read,kept,train,valid,test,rows,tokens,tokens a row,generated,finished,thinking,licence"
    rows = []
    for name, entry in manifest.counts.items():
        if name == "total":
            continue
        mix, lengths = manifest.mix.get(name, {}), summary.by_source.get(name, Lengths())
        done = entry["done"]
        rows.append(
            [
                f"<b>{text(name)}</b>",
                text(mix.get("category", "-")),
                number(entry["read"]),
                number(sum(done.values())),
                *(number(done[split]) for split in ("train", "validation", "test")),
                number(lengths.num_rows),
                number(mix.get("tokens", 0)),
                number(mix.get("tokens", 0) / max(lengths.num_rows, 1)),
                percent(mix.get("response_tokens", 0) / max(mix.get("tokens", 0), 1)),
                percent(lengths.num_finished / max(lengths.num_rows, 1)),
                percent(mix.get("thinking_rows", 0) / max(lengths.num_rows, 1)),
                _license(mix, wanted.get(name)),
            ]
        )
    categories: dict[str, float] = {}
    for mix in manifest.mix.values():
        categories[mix["category"]] = categories.get(mix["category"], 0) + mix["tokens"]
    note = (
        "Bars: tokens by category. Rows are what is trained on; a conversation gives several where the chat template "
        "rewrites its history. Generated: share of tokens that the target made."
    )
    return _section(
        "Mix", note, bars("share of tokens", categories) + table(head.split(","), rows, 2)
    )


def _license(mix: Mapping[str, Any], want: Wanted | None) -> str:
    found = ", ".join(mix.get("licenses", {})) or (want.license if want else "-")
    return text(found) + (" (unverified)" if want and want.is_unverified else "")


def _lengths(summary: Summary) -> str:
    categories = summary.by_category if len(summary.by_category) > 1 else {}
    charts = "".join(
        f'<div class="pair">{histogram(f"{name}: context tokens", lengths.prompt)}'
        f"{histogram(f'{name}: generated tokens', lengths.response)}</div>"
        for name, lengths in [("all", summary.total), *sorted(categories.items())]
    )
    rows = [
        [
            text(name),
            *(number(lengths.prompt_at(q)) for q in (0.5, 0.9, 0.99, 1.0)),
            *(number(lengths.response_at(q)) for q in (0.5, 0.9, 0.99, 1.0)),
        ]
        for name, lengths in summary.by_source.items()
    ]
    head = ["source", *(f"context {q}" for q in ("p50", "p90", "p99", "max"))]
    head += [f"generated {q}" for q in ("p50", "p90", "p99", "max")]
    note = (
        "Rows by power-of-two bins; percentiles are upper ends of bins an eighth of an octave wide."
    )
    return _section("Lengths", note, f'<div class="charts">{charts}</div>{table(head, rows, 1)}')


def _drops(manifest: CorpusManifest) -> str:
    total = manifest.counts["total"]
    reasons = sorted(total["rejected"], key=lambda reason: -total["rejected"][reason])
    rows = [
        [
            f"<b>{text(name)}</b>",
            number(entry["read"]),
            number(sum(entry["done"].values())),
            *(number(entry["rejected"].get(reason, 0), blank_zero=True) for reason in reasons),
        ]
        for name, entry in manifest.counts.items()
    ]
    note = "Every row that was read is kept or here: read = kept + all reasons. rejected.parquet lists each one."
    chart = bars("rows dropped", {r: total["rejected"][r] for r in reasons})
    return _section(
        "What was dropped", note, chart + table(["source", "read", "kept", *reasons], rows, 1)
    )


def _doubles(findings: Mapping[str, Any]) -> str:
    found = findings["doubles_of"]
    rows = [
        [text(name), text(reason), text(of), number(count)]
        for name, reasons in found.items()
        for reason, counts in reasons.items()
        for of, count in counts.items()
    ]
    if not rows:
        return _section("Doubles", "None were found.", "")
    pairs = "".join(
        f"<details><summary>similarity {pair['similarity']:.2f}: {text(pair['sources'][0])} dropped for "
        f'{text(pair["sources"][1])}</summary><div class="pair"><pre>{text(pair["texts"][0])}</pre>'
        f"<pre>{text(pair['texts'][1])}</pre></div></details>"
        for pair in findings["near_pairs"]
    )
    note = "Whose double a source's rows are. Below, near-doubles nearest to the threshold: are they the same question?"
    return _section(
        "Doubles", note, table(["source", "kind", "of source", "rows"], rows, 3) + pairs
    )


def _contamination(folder: Path) -> str:
    with (folder / "decontamination.jsonl").open(encoding="utf-8") as file:
        hits = [json.loads(line) for line in file]
    rows = [
        [
            text(h["source"]),
            text(h["row"]),
            text(h["test_source"]),
            text(h["test_where"]),
            text(h["ngram"]),
        ]
        for h in hits[:_NUM_HITS]
    ]
    if not rows:
        return _section("Test prompts in training data", "None were found.", "")
    note = f"{len(hits)} rows shared words with a test prompt and were taken out; decontamination.jsonl lists all."
    head = ["source", "row", "test set", "test prompt", "shared words"]
    return _section("Test prompts in training data", note, table(head, rows, 5))


def _samples(summary: Summary) -> str:
    blocks = "".join(
        f"<h3>{text(name)}</h3>" + "".join(_sample(sample) for sample in samples)
        for name, samples in summary.samples.items()
    )
    return _section(
        "Samples", "The first ones of each source in corpus order, so chosen by hash.", blocks
    )


def _sample(sample: Sample) -> str:
    marks = [f"{sample.num_tokens} tokens, {sample.num_response_tokens} generated", sample.split]
    marks += ["finished" if sample.finished else "cut"]
    if sample.thinking is not None:
        marks.append("thinking" if sample.thinking else "not thinking")
    first = next((m["content"] for m in sample.messages if m["role"] == "user"), "")
    turns = "".join(
        f'<div class="turn {text(m["role"])}"><b>{text(m["role"])}</b><pre>{text(m["content"])}</pre></div>'
        for m in sample.messages
    )
    return f"<details><summary>{text(first[:110])} <i>{text(' · '.join(marks))}</i></summary>{turns}</details>"


def _rejected_samples(summary: Summary) -> str:
    blocks = "".join(
        f"<h3>{text(reason)}</h3>{table(['source', 'row', 'detail', 'text'], _reject_rows(found), 4)}"
        for reason, found in summary.rejected.items()
    )
    return _section("Dropped rows", "A few of each reason: is the filter right?", blocks)


def _reject_rows(found: Sequence[RejectedExample]) -> list[list[str]]:
    return [[text(r.source), text(r.row), text(r.detail[:200]), text(r.text)] for r in found]


def _about(manifest: CorpusManifest) -> str:
    rows = [[text(key), text(json.dumps(value))] for key, value in _settings(manifest)]
    return _section(
        "Recipe", "What decides the corpus' bytes.", table(["setting", "value"], rows, 2)
    )


def _settings(manifest: CorpusManifest) -> Iterator[tuple[str, Any]]:
    for key, value in manifest.settings.items():
        if key != "recipe":
            yield key, value
    yield from manifest.settings["recipe"].items()


def _section(title: str, note: str, body: str) -> str:
    return f"<section><h2>{text(title)}</h2><p>{text(note)}</p>{body}</section>"
