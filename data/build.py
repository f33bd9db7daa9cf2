"""The data stage: sources -> prompts -> labels -> corpus shards. Any kill resumes; any number of ranks gives the same bytes."""

from __future__ import annotations

import itertools
import logging
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.distributed import Ranks, raise_together
from common.files import remove_leftovers
from common.fingerprint import fingerprint, require_equal
from configs.schema import Config, DataSection
from data.corpus import (
    CorpusManifest,
    CorpusRow,
    manifest_path,
    read_corpus_manifest,
    write_corpus,
)
from data.dialogue import COMPLETE, corpus_rows
from data.labels import UNITS_PER_CHUNK, CorpusLabels, Labels, TargetLabels
from data.packages import PACKAGES_FOLDER
from data.plan import Plan, plan_path, read_plan, write_plan
from data.prompts import SourceCounts, select_prompts, write_prompts
from data.served import ServedLabels, answer_rules
from data.settings import data_recipe
from data.sources import source_identity
from data.template import ChatTemplate
from target.identity import target_identity
from target.load import load_tokenizer
from target.prepare import prepare_target

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class BuiltCorpus:
    manifest: CorpusManifest
    was_complete: bool
    """Found as it is; this run did nothing."""


def build_corpus(
    config: Config, ranks: Ranks, packages_folder: Path = PACKAGES_FOLDER
) -> BuiltCorpus:
    """Bring the run's corpus folder to completion. All ranks enter, each with the same result.

    Raises ValueError if the folder holds a corpus, finished or begun, of other settings.
    """
    folder = config.run.folder / "corpus"
    with raise_together(ranks):
        if ranks.is_main:
            prepare_target(config)
            prepare_plan(config, folder, packages_folder)
    if manifest_path(folder).is_file():
        return BuiltCorpus(read_corpus_manifest(folder), was_complete=True)
    plan = read_plan(folder / "units")
    labels = _labels(config, plan)
    labels.make(ranks)
    with raise_together(ranks):
        if ranks.is_main:
            _assemble(folder, plan, config.data, labels)
    return BuiltCorpus(read_corpus_manifest(folder), was_complete=False)


def select_only(config: Config, file: Path, packages_folder: Path = PACKAGES_FOLDER) -> int:
    """Write the prompts that would be labelled to `file`; returns how many."""
    prepare_target(config)
    selection = select_prompts(config, load_tokenizer(config.target), packages_folder)
    write_prompts(file, selection, config)
    return len(selection.prompts)


def corpus_settings(config: Config) -> dict[str, Any]:
    """What decides the corpus' bytes: the target's identity, and the recipe with every source's content."""
    recipe = {
        "run.seed": config.run.seed,
        "run.cpu_threads": config.run.cpu_threads,
        "target.dtype": config.target.dtype,
        "target.attention": config.target.attention,
        **data_recipe(config.data),
    }
    for source in config.data.sources:
        recipe[f"data.sources.{source.name}.content"] = source_identity(source)
    return {**target_identity(config.target), "data": fingerprint(recipe), "recipe": recipe}


def format_counts(counts: Mapping[str, Any]) -> str:
    """A table, a line a source: rows read, done by split, rejected by reason. The columns add up."""
    lines = [
        f"{'source':<16}{'read':>9}{'train':>9}{'valid':>9}{'test':>9}{'rejected':>10}  reasons"
    ]
    for name, entry in counts.items():
        done, rejected = entry["done"], entry["rejected"]
        reasons = ", ".join(f"{reason} {num}" for reason, num in rejected.items())
        lines.append(
            f"{name:<16}{entry['read']:>9}{done['train']:>9}{done['validation']:>9}{done['test']:>9}"
            f"{sum(rejected.values()):>10}  {reasons}"
        )
    return "\n".join(lines)


def prepare_plan(config: Config, folder: Path, packages_folder: Path = PACKAGES_FOLDER) -> None:
    """Have a finished corpus of these settings in `folder`, or a plan of them. Main rank only.

    Raises ValueError if the folder holds another one.
    """
    units = folder / "units"
    for place in (folder, units):
        if place.is_dir():
            remove_leftovers(place)
    settings = corpus_settings(config)
    if manifest_path(folder).is_file():
        _require_same(folder, read_corpus_manifest(folder).settings, settings)
        shutil.rmtree(units, ignore_errors=True)  # a kill may have come between manifest and this
        return
    if plan_path(units).is_file():
        _require_same(folder, read_plan(units).settings, settings)
        logger.info("continuing the corpus in %s", folder)
        return
    selection = select_prompts(config, load_tokenizer(config.target), packages_folder)
    if not selection.prompts:
        raise ValueError(
            "no prompt is left after the filters; see data.max_prompt_tokens and data.sources: "
            + "; ".join(f"{n}: {dict(c.rejected)}" for n, c in selection.counts.items())
        )
    chunk_size = config.data.responses.unit_size * UNITS_PER_CHUNK
    write_plan(units, settings, selection, chunk_size)
    logger.info(
        "%d prompts chosen from %d rows",
        len(selection.prompts),
        sum(c.read for c in selection.counts.values()),
    )


def _require_same(folder: Path, found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    remedy = f"undo the change, remove {folder}, or choose another run.output_dir"
    what = f"the corpus in {folder}"
    for part in ("recipe", None):  # the recipe's own keys say more than the fingerprint
        left = found[part] if part else found
        right = wanted[part] if part else wanted
        keys = dict.fromkeys([*right, *left])
        require_equal(what, left, {key: right.get(key) for key in keys}, remedy)


def _assemble(folder: Path, plan: Plan, data: DataSection, labels: Labels) -> None:
    counts: dict[str, Any] = {}
    rows = _rows(plan, labels, counts)
    first = next(rows, None)
    if first is None:
        # labels of this recipe would refuse a corrected one
        shutil.rmtree(plan.folder)
        raise ValueError(
            f"no sample is left: {counts['total']['rejected']}; change what rejected them (data.responses, "
            "data.min_response_tokens, data.max_repetition, data.max_prompt_tokens) or add sources"
        )
    write_corpus(folder, itertools.chain([first], rows), plan.settings, counts, data.rows_per_shard)
    shutil.rmtree(plan.folder)


def _labels(config: Config, plan: Plan) -> Labels:
    tokenizer = load_tokenizer(config.target)
    template = ChatTemplate(tokenizer, config.target.chat_template_kwargs)
    if not config.data.responses.generate:
        return CorpusLabels(config, plan, template)
    if config.data.responses.server is not None:
        return ServedLabels(config, plan, template, answer_rules(config, tokenizer))
    return TargetLabels(config, plan, template)


def _rows(plan: Plan, labels: Labels, counts: dict[str, Any]) -> Iterator[CorpusRow]:
    """The corpus in order; after the last row `counts` holds what became of every row that was read."""
    tally = plan.counts
    for index in range(plan.num_chunks):
        for dialogue in labels.dialogues(index):
            source, ended = tally[dialogue.prompt.source], dialogue.ended
            assert ended is not None
            if not dialogue.rows:
                source.rejected[ended] += 1
                continue
            source.done[dialogue.prompt.split] += 1
            source.rows += len(dialogue.rows)
            if ended != COMPLETE:
                source.ended_early[ended] += 1
            yield from corpus_rows(dialogue)
    counts.update(_summary(tally))


def _summary(tally: Mapping[str, SourceCounts]) -> dict[str, Any]:
    counts = {name: _entry(source) for name, source in tally.items()}
    total = SourceCounts()
    for source in tally.values():
        total.read += source.read
        total.done += source.done
        total.rejected += source.rejected
        total.rows += source.rows
        total.ended_early += source.ended_early
    return {**counts, "total": _entry(total)}


def _entry(source: SourceCounts) -> dict[str, Any]:
    assert source.read == source.done.total() + source.rejected.total(), source
    return {
        "read": source.read,
        "done": {split: source.done[split] for split in ("train", "validation", "test")},
        "rejected": dict(sorted(source.rejected.items())),
        "rows": source.rows,
        "ended_early": dict(sorted(source.ended_early.items())),
    }
