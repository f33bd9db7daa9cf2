"""The data stage: sources -> prompts -> labels -> corpus shards. Any kill resumes; any number of ranks gives the same bytes."""

from __future__ import annotations

import itertools
import json
import logging
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from common.distributed import Ranks, raise_together
from common.files import remove_leftovers
from common.fingerprint import fingerprint, require_equal
from configs.schema import Config, DataSection
from data.clean import repetition
from data.conversations import source_identity
from data.corpus import (
    CorpusManifest,
    CorpusRow,
    manifest_path,
    read_corpus_manifest,
    write_corpus,
)
from data.labels import UNITS_PER_CHUNK, Response, label_units, read_chunk_responses
from data.packages import PACKAGES_FOLDER
from data.plan import Plan, plan_path, read_plan, write_plan
from data.prompts import Prompt, SourceCounts, select_prompts, write_prompts
from data.settings import data_recipe
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
    if config.data.responses.generate:
        label_units(config, plan, ranks)
    with raise_together(ranks):
        if ranks.is_main:
            tokenizer = load_tokenizer(config.target)
            _assemble(folder, plan, config.data, ChatTemplate(tokenizer, {}))
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


def _assemble(folder: Path, plan: Plan, data: DataSection, template: ChatTemplate) -> None:
    counts: dict[str, Any] = {}
    rows = _rows(plan, data, template, counts)
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


def _rows(
    plan: Plan, data: DataSection, template: ChatTemplate, counts: dict[str, Any]
) -> Iterator[CorpusRow]:
    """The corpus in order; after the last row `counts` holds what became of every row that was read."""
    tally = plan.counts
    for index in range(plan.num_chunks):
        prompts = plan.chunk(index)
        if data.responses.generate:
            responses = read_chunk_responses(plan, index, data.responses.unit_size)
        else:
            responses = [_own_response(prompt, data.max_tokens) for prompt in prompts]
        for prompt, response in zip(prompts, responses, strict=True):
            reason = _reject_reason(response, data)
            if reason is None:
                tally[prompt.source].done[prompt.split] += 1
                yield _row(prompt, response, template)
            else:
                tally[prompt.source].rejected[reason] += 1
    counts.update(_summary(tally))


def _own_response(prompt: Prompt, max_tokens: int) -> Response:
    assert prompt.response_ids is not None
    ids = prompt.response_ids.tolist()
    room = max_tokens - len(prompt.prompt_ids)
    return Response(ids[:room], finished=len(ids) <= room)


def _reject_reason(response: Response, data: DataSection) -> str | None:
    """Test rows are judged as all others: a loop is easy to draft and would flatter the acceptance length."""
    if len(response.ids) < data.min_response_tokens:
        return "response too short"
    if repetition(response.ids) > data.max_repetition:
        return "response repeats itself"
    return None


def _row(prompt: Prompt, response: Response, template: ChatTemplate) -> CorpusRow:
    answer = {"role": "assistant", "content": template.text(response.ids)}
    num_prompt = len(prompt.prompt_ids)
    input_ids = np.concatenate([prompt.prompt_ids, np.array(response.ids, dtype=np.int32)])
    return CorpusRow(
        sample_id=prompt.sample_id,
        source=prompt.source,
        task=prompt.task,
        split=prompt.split,
        messages=json.dumps([*prompt.messages, answer], ensure_ascii=False),
        input_ids=input_ids,
        loss_mask=np.arange(len(input_ids)) >= num_prompt,
        finished=response.finished,
    )


def _summary(tally: Mapping[str, SourceCounts]) -> dict[str, Any]:
    counts = {name: _entry(source) for name, source in tally.items()}
    total = SourceCounts()
    for source in tally.values():
        total.read += source.read
        total.done += source.done
        total.rejected += source.rejected
    return {**counts, "total": _entry(total)}


def _entry(source: SourceCounts) -> dict[str, Any]:
    assert source.read == source.done.total() + source.rejected.total(), source
    return {
        "read": source.read,
        "done": {split: source.done[split] for split in ("train", "validation", "test")},
        "rejected": dict(sorted(source.rejected.items())),
    }
