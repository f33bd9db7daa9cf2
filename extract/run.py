"""The stage: any number of workers bring `features/` of a run to completion, each for itself, sharing only the folder.

A worker claims a shard, makes it, and takes the next that is free (extract/claims.py, extract/board.py). All end when the set is
complete: who has nothing left to make waits for the others, and makes what a dead one left. The manifest is written by whoever
comes first, once every shard is there.
"""

from __future__ import annotations

import logging
import time
from collections import Counter

from common.distributed import Ranks
from common.files import only_writer
from common.wandb_run import WandbRun, has_key, start_run
from configs.schema import Config
from data.corpus_rows import CorpusRows
from data.feature_manifest import FeatureManifest
from extract.batches import shard_tokens
from extract.board import Board
from extract.checks import FIRST_ROWS, FirstRows, measure_first_rows, require_parity
from extract.claims import BEATS_A_LEASE, Claims, clear_claims
from extract.plan import plan_extract, raw_bytes_per_token
from extract.reporter import Reporter
from extract.selected_rows import rows_kind, stored_rows
from extract.stream import Stream, fill_ring, open_stream
from extract.work import (
    ExtractWork,
    clear_sidecars,
    finish_work,
    is_complete,
    open_work,
    plan_work,
    require_same_start,
    save_head,
)
from extract.worker import Tools, make_free_shards
from target.load import Target, load_target
from target.prepare import prepare_target

logger = logging.getLogger(__name__)

START, FINISH = "start", "finish"  # claims of what one worker does at a time
PREPARE_PATIENCE_S = 3600.0


def run_extract(config: Config, ranks: Ranks, ignore_disk: bool = False) -> None:
    """Work on `features/` until it is complete; the same command continues what was stopped, and helps what is running.

    `ranks`: which device, and whether to speak; ranks do not wait for each other.
    """
    with only_writer(config.run.folder / ".prepare.lock", PREPARE_PATIENCE_S):
        prepare_target(config)
    work = plan_work(config)
    stream = open_stream(config, work) if config.train.source == "stream" else None
    if is_complete(work):
        _leave(work)
        if stream is None or stream.is_trained():
            logger.info("%s is complete with these settings: nothing to do", work.storage.url)
            return
    else:
        _begin(config, work, stream, ignore_disk)
    target = load_target(config.target, ranks.device)
    first = check_target(config, work, target)
    if not is_complete(work):
        _make_shards(config, work, target, first, ranks)
    if stream is not None:
        fill_ring(stream, target, first.tap_rms)


def _make_shards(
    config: Config, work: ExtractWork, target: Target, first: FirstRows, ranks: Ranks
) -> None:
    stored = stored_rows(work.corpus_folder, work.corpus, rows_kind(config.train))
    plan = plan_extract(config, work.corpus)
    cuts = stored.cut(shard_tokens(config.extract.shard_bytes, raw_bytes_per_token(plan)))
    curve = _start_curve(config) if ranks.is_main else None
    with Claims(work.storage, config.extract.lease_s) as claims:
        with claims.wait_for(START):
            open_work(work)
            save_head(work, target)
        with Reporter(work, cuts, curve) as reporter:
            board = Board(work, claims, cuts)
            tools = Tools(
                config,
                work,
                claims,
                board,
                stored.rows,
                target,
                first.tap_rms,
                reporter,
                first.to_json(),
            )
            manifest = _work_to_the_end(tools)
    if manifest:
        _describe(work, manifest)
    _leave(work)
    if curve:
        curve.finish()


def _begin(config: Config, work: ExtractWork, stream: Stream | None, ignore_disk: bool) -> None:
    plan = plan_extract(config, work.corpus)
    if not ignore_disk and stream is not None:
        stream.require_disk(plan)
    elif not ignore_disk and config.train.source == "shards":
        plan.require_disk()
    for line in plan.lines():
        logger.info("%s", line)
    require_same_start(work)


def check_target(config: Config, work: ExtractWork, target: Target) -> FirstRows:
    """The usual RMS of each tap, and how well the corpus' answers are the target's. Every worker checks the same first rows of
    the whole corpus: its own device, kernels and weights. Raises ValueError if the target is not the one that the corpus is of."""
    corpus = CorpusRows(work.corpus_folder, work.corpus)
    rows = corpus.read(0, min(FIRST_ROWS, len(corpus.lengths)))
    recipe = work.corpus.settings["recipe"]
    first = measure_first_rows(
        target,
        rows,
        config.drafter.target_layer_ids,
        config.extract.batch_tokens,
        recipe["data.responses.temperature"] or 1.0,
    )
    logger.info("%s", require_parity(first, recipe, config.extract.min_greedy_match))
    return first


def _work_to_the_end(tools: Tools) -> FeatureManifest | None:
    """The manifest, if it was this worker that wrote it."""
    wait_s = 0.05
    while not tools.board.is_finished():
        make_free_shards(tools)
        if tools.board.is_all_done:
            return _finish(tools)
        time.sleep(wait_s)  # for what others are at
        wait_s = min(2 * wait_s, tools.claims.lease_s / BEATS_A_LEASE, 5.0)
    return None


def _finish(tools: Tools) -> FeatureManifest | None:
    with tools.claims.wait_for(FINISH):
        if tools.board.is_finished():
            return None
        save_head(tools.work, tools.target)
        manifest = finish_work(
            tools.work, tools.board.cuts, tools.config.extract.max_quarantined, tools.first_rows
        )
    tools.board.refresh()
    return manifest or _work_to_the_end(tools)


def _start_curve(config: Config) -> WandbRun | None:
    """With a key only: an extraction has its lines, and nobody looks for an offline run of it."""
    if not has_key():
        return None
    logs = config.run.folder / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    settings = config.model_dump(mode="json")
    return start_run(
        config.train.wandb_project, config.run.name, logs, settings, job_type="extract"
    )


def _leave(work: ExtractWork) -> None:
    """Sidecars and claims of a finished set: left if a kill fell between the manifest and their removal, or by a worker that
    did not know yet."""
    clear_sidecars(work)
    clear_claims(work.storage)


def _describe(work: ExtractWork, manifest: FeatureManifest) -> None:
    logger.info(
        "%s: %d rows, %d tokens, %.1f MB in %d shards, %d rows quarantined",
        work.storage.url,
        manifest.num_rows,
        manifest.num_tokens,
        sum(shard.num_bytes for shard in manifest.shards) / 1e6,
        len(manifest.shards),
        len(manifest.quarantined),
    )
    for reason, count in Counter(row.reason for row in manifest.quarantined).most_common(10):
        logger.warning("quarantined %d rows: %s", count, reason)
