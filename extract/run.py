"""The stage: the target's forward over the corpus, one feature shard after another, on any number of ranks.

Rank r of W extracts shards r, r+W, ... of the corpus' own cut. Threads encode and write shards while the next one is in
the target, so a rank holds at most three shards of raw features. Legend: S tokens, D taps, H hidden.
"""

from __future__ import annotations

import itertools
import logging
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch

from common.distributed import Ranks, barrier, raise_together
from common.files import atomic_path, remove_leftovers, sha256_file
from common.progress import Progress
from configs.schema import Config
from data.corpus import CorpusRow, iter_corpus
from data.feature_manifest import QuarantinedRow, ShardEntry
from data.feature_shards import FeatureLayout, FeatureRow, write_shard
from data.soft_labels import SoftLabels
from extract.batches import CorpusSlice, cut_shards, length_batches, shard_tokens
from extract.checks import (
    FIRST_ROWS,
    features_problem,
    ids_problem,
    measure_first_rows,
    padded_batch,
    require_greedy_match,
)
from extract.plan import plan_extract, raw_bytes_per_token
from extract.soft_labels import soft_labels_of
from extract.work import (
    HEAD_FILE,
    ExtractWork,
    ShardRecord,
    clear_sidecars,
    finish_work,
    is_complete,
    is_greedy,
    is_intact,
    open_work,
    plan_work,
    read_records,
    require_few,
    require_same_start,
    shard_name,
    write_record,
)
from target.head import save_target_head
from target.load import Target, load_target
from target.prepare import prepare_target
from target.taps import forward_with_taps

logger = logging.getLogger(__name__)

NUM_WRITERS = 2  # one thread compresses some 8,000 tokens/s of a 27B target's bf16-planes, less than an H200 prefills


@dataclass(frozen=True)
class Extracted:
    """A slice of the corpus with its features, in corpus order."""

    index: int
    rows: list[FeatureRow]
    quarantined: list[QuarantinedRow]


def run_extract(config: Config, ranks: Ranks, ignore_disk: bool = False) -> None:
    """Bring `features/` of the run to completion. All ranks enter; the same command continues what was stopped."""
    with raise_together(ranks):
        if ranks.is_main:
            prepare_target(config)
    with raise_together(ranks):
        work = plan_work(config)
        complete = is_complete(work)
    if complete:
        if ranks.is_main:
            clear_sidecars(work.folder)  # left if a kill fell between manifest and their removal
            logger.info("%s is complete with these settings: nothing to do", work.folder)
        return
    with raise_together(ranks):
        if ranks.is_main:
            _begin(config, work, ignore_disk)
    with raise_together(ranks):
        target = load_target(config.target, ranks.device)
        tap_rms = _check_target(config, work, target)
        if ranks.is_main:
            open_work(work)
            save_target_head(work.folder / HEAD_FILE, target)
    num_shards = _extract_all(config, work, target, tap_rms, ranks)
    _wait_for_all()
    with raise_together(ranks):
        if ranks.is_main:
            _end(config, work, num_shards)


def _begin(config: Config, work: ExtractWork, ignore_disk: bool) -> None:
    plan = plan_extract(config, work.corpus)
    if not ignore_disk:
        plan.require_disk()
    for line in plan.lines():
        logger.info("%s", line)
    work.folder.mkdir(parents=True, exist_ok=True)
    remove_leftovers(work.folder)
    require_same_start(work)


def _check_target(config: Config, work: ExtractWork, target: Target) -> torch.Tensor:
    """(D,) usual RMS of each tap. Every rank checks the same first rows: its own device, kernels and weights."""
    rows = list(itertools.islice(iter_corpus(work.corpus_folder, work.corpus), FIRST_ROWS))
    first = measure_first_rows(
        target, rows, config.drafter.target_layer_ids, config.extract.batch_tokens
    )
    if is_greedy(work.corpus):
        require_greedy_match(first, config.extract.min_greedy_match)
        logger.info(
            "the target's argmax is %.1f%% of %d recorded greedy tokens",
            100 * first.greedy_match,
            first.num_tokens,
        )
    return first.tap_rms


def _extract_all(
    config: Config, work: ExtractWork, target: Target, tap_rms: torch.Tensor, ranks: Ranks
) -> int:
    """Extract this rank's unfinished shards; gives the number of shards of the corpus."""
    done = _done(work, ranks)
    progress = Progress(
        "extract",
        work.corpus.num_tokens,
        "tokens",
        done=sum(record.shard.num_tokens for record in done.values()),
    )
    quarantined = [row for record in done.values() for row in record.quarantined]
    num_shards = 0
    with _Writers(config, work) as writers:
        for part in _slices(config, work):
            num_shards += 1
            if shard_name(part.index) in done:
                continue
            if part.index % ranks.world_size == ranks.rank:
                extracted = extract_slice(config, target, part, tap_rms)
                quarantined += extracted.quarantined
                # only this rank's rows: finish_work counts them all
                require_few(quarantined, work.corpus.num_rows, config.extract.max_quarantined)
                writers.submit(extracted)
            progress.advance(part.num_tokens)  # other ranks keep about the same pace
    progress.finish(f"{num_shards} shards")
    return num_shards


def _wait_for_all() -> None:
    """Not raise_together: a rank that fails must leave at once, not after the others' last shard."""
    try:
        barrier()
    except RuntimeError as error:
        raise ValueError(
            "another rank stopped before its shards were done; see its message"
        ) from error


def _done(work: ExtractWork, ranks: Ranks) -> dict[str, ShardRecord]:
    """Finished shards by name. A rank reads its own through to compare sums; of the others' it looks at the size."""
    records = read_records(work)
    barrier()  # nobody writes before all have looked
    own = [name for name in records if _index(name) % ranks.world_size == ranks.rank]
    progress = Progress("check finished shards", len(own), "shards")
    for name in own:
        if not is_intact(work, records[name]):
            logger.warning("%s differs from its sum and is made again", work.folder / name)
            del records[name]
        progress.advance()
    return records


def _index(name: str) -> int:
    return int(name.removeprefix("shard-").removesuffix(".parquet"))


def _slices(config: Config, work: ExtractWork) -> Iterator[CorpusSlice]:
    plan = plan_extract(config, work.corpus)
    tokens = shard_tokens(config.extract.shard_bytes, raw_bytes_per_token(plan))
    return cut_shards(iter_corpus(work.corpus_folder, work.corpus), tokens)


def extract_slice(
    config: Config, target: Target, part: CorpusSlice, tap_rms: torch.Tensor
) -> Extracted:
    """Features of a slice's rows on the CPU, in corpus order; rows that fail a check are set apart with the reason."""
    problems = [ids_problem(row, target.vocab_size) for row in part.rows]
    readable = [index for index, problem in enumerate(problems) if problem is None]
    features: dict[int, FeatureRow] = {}
    lengths = [part.rows[index].num_tokens for index in readable]
    for batch in length_batches(lengths, config.extract.batch_tokens):
        members = [readable[i] for i in batch]
        rows = [part.rows[index] for index in members]
        input_ids, row_lengths = padded_batch(rows, target.device)
        output = forward_with_taps(
            target,
            input_ids,
            row_lengths,
            config.drafter.target_layer_ids,
            need_last_hidden=config.extract.soft_labels > 0,
        )
        for place, (index, row) in enumerate(zip(members, rows, strict=True)):
            fed_ids = input_ids[place, : row.num_tokens].cpu()
            found = output.features[place, : row.num_tokens]  # (S, D, H)
            problems[index] = features_problem(row, fed_ids, found, tap_rms)
            if problems[index] is None:
                soft = None
                if output.last_hidden is not None:
                    soft = soft_labels_of(target, row, output.last_hidden[place], config.extract)
                features[index] = _feature_row(row, fed_ids, found.cpu(), soft)
    return Extracted(
        part.index,
        [features[index] for index in sorted(features)],
        [
            QuarantinedRow(row.sample_id, shard_name(part.index), problem)
            for row, problem in zip(part.rows, problems, strict=True)
            if problem is not None
        ],
    )


def _feature_row(
    row: CorpusRow, fed_ids: torch.Tensor, features: torch.Tensor, soft: SoftLabels | None
) -> FeatureRow:
    return FeatureRow(
        sample_id=row.sample_id,
        source=row.source,
        task=row.task,
        split=row.split,
        input_ids=fed_ids,
        loss_mask=torch.tensor(row.loss_mask),
        features=features,
        soft_labels=soft,
    )


class _Writers:
    """Threads that encode and write shards; `submit` waits while all are busy and raises what went wrong with one."""

    def __init__(self, config: Config, work: ExtractWork):
        self.work = work
        self.layout = FeatureLayout(
            config.extract.codec,
            len(config.drafter.target_layer_ids),
            config.target.hidden_size,
            config.extract.soft_labels,
        )
        self.pool = ThreadPoolExecutor(NUM_WRITERS, thread_name_prefix="write-shard")
        self.writing: deque[Future[None]] = deque()

    def __enter__(self) -> _Writers:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.pool.shutdown(wait=True)
        while kind is None and self.writing:
            self.writing.popleft().result()

    def submit(self, extracted: Extracted) -> None:
        if len(self.writing) == NUM_WRITERS:
            self.writing.popleft().result()
        self.writing.append(self.pool.submit(write_extracted, self.work, self.layout, extracted))


def write_extracted(work: ExtractWork, layout: FeatureLayout, extracted: Extracted) -> None:
    """The shard, whole or not at all, then its sidecar."""
    path = work.folder / shard_name(extracted.index)
    with atomic_path(path) as aside:
        write_shard(aside, extracted.rows, layout)
        entry = ShardEntry(
            file=path.name,
            num_rows=len(extracted.rows),
            num_tokens=sum(len(row.input_ids) for row in extracted.rows),
            num_bytes=aside.stat().st_size,
            sha256=sha256_file(aside),
            rows=[_entry_row(row) for row in extracted.rows],
        )
    write_record(work, ShardRecord(entry, extracted.quarantined))


def _entry_row(row: FeatureRow) -> dict[str, str | int]:
    return {
        "sample_id": row.sample_id,
        "source": row.source,
        "task": row.task,
        "split": row.split,
        "num_tokens": len(row.input_ids),
        "num_response_tokens": int(row.loss_mask.sum()),
    }


def _end(config: Config, work: ExtractWork, num_shards: int) -> None:
    manifest = finish_work(work, num_shards, config.extract.max_quarantined)
    num_bytes = sum(shard.num_bytes for shard in manifest.shards)
    logger.info(
        "%s: %d rows, %d tokens, %.1f MB in %d shards, %d rows quarantined",
        work.folder,
        sum(shard.num_rows for shard in manifest.shards),
        sum(shard.num_tokens for shard in manifest.shards),
        num_bytes / 1e6,
        len(manifest.shards),
        len(manifest.quarantined),
    )
    for reason, count in Counter(row.reason for row in manifest.quarantined).most_common(10):
        logger.warning("quarantined %d rows: %s", count, reason)
