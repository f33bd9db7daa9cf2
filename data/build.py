"""The data stage: sources -> prompts -> labels -> corpus shards. Any kill resumes; any number of ranks gives the same bytes."""

from __future__ import annotations

import contextlib
import logging
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from common.distributed import Ranks, raise_together
from common.files import only_writer, remove_leftovers
from common.fingerprint import fingerprint, require_equal
from configs.schema import Config
from data.assemble import assemble
from data.corpus import CorpusManifest, manifest_path, read_corpus_manifest
from data.labels import CorpusLabels, Labels, TargetLabels
from data.packages import PACKAGES_FOLDER
from data.plan import Plan, plan_path, read_plan
from data.prompts import write_prompts
from data.scan import read_scan_settings
from data.selection import select_prompts
from data.served import ServedLabels, answer_rules
from data.settings import data_recipe
from data.sources import source_identity
from data.template import ChatTemplate
from target.identity import target_identity
from target.load import load_tokenizer
from target.prepare import prepare_target

logger = logging.getLogger(__name__)

_LOCK_PATIENCE_S = 15.0
"""Ranks whose launcher was killed end within seconds."""

ALONE = Ranks(0, 1, 0, torch.device("cpu"))


@dataclass(frozen=True)
class BuiltCorpus:
    manifest: CorpusManifest
    was_complete: bool
    """Found as it is; this run did nothing."""


def build_corpus(
    config: Config, ranks: Ranks, packages_folder: Path = PACKAGES_FOLDER
) -> BuiltCorpus:
    """Bring the run's corpus folder to completion. All ranks enter, each with the same result.

    Raises ValueError if the folder holds a corpus, finished or begun, of other settings, or if another run works on it.
    """
    with contextlib.ExitStack() as held:
        with raise_together(ranks):
            if ranks.is_main:
                lock = config.run.folder / ".data.lock"
                held.enter_context(only_writer(lock, _LOCK_PATIENCE_S))
        return _build(config, ranks, packages_folder)


def _build(config: Config, ranks: Ranks, packages_folder: Path) -> BuiltCorpus:
    folder = config.run.folder / "corpus"
    prepare_plan(config, folder, packages_folder, ranks)
    if manifest_path(folder).is_file():
        return BuiltCorpus(read_corpus_manifest(folder), was_complete=True)
    plan = read_plan(folder / "units")
    labels = _labels(config, plan)
    labels.make(ranks)
    with raise_together(ranks):
        if ranks.is_main:
            assemble(folder, plan, config.data, labels)
    return BuiltCorpus(read_corpus_manifest(folder), was_complete=False)


def select_only(config: Config, file: Path, packages_folder: Path = PACKAGES_FOLDER) -> int:
    """Write the prompts that would be labelled to `file`; returns how many."""
    if file.is_dir():
        raise ValueError(f"{file} is a folder; give the name of a file to write the prompts to")
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=file.parent, prefix=f".{file.name}.") as aside:
        prepare_plan(config, Path(aside), packages_folder)
        plan = read_plan(Path(aside) / "units")
        prompts = [prompt for chunk in range(plan.num_chunks) for prompt in plan.chunk(chunk)]
        write_prompts(file, prompts, config)
        return len(prompts)


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


def prepare_plan(
    config: Config,
    folder: Path,
    packages_folder: Path = PACKAGES_FOLDER,
    ranks: Ranks = ALONE,
) -> None:
    """Have a finished corpus of these settings in `folder`, or a plan of them. All ranks enter.

    Raises ValueError if the folder holds another one.
    """
    units = folder / "units"
    settings: dict[str, Any] = {}
    with raise_together(ranks):
        if ranks.is_main:
            prepare_target(config)
            settings = corpus_settings(config)
            _check_begun(folder, settings)
    if not manifest_path(folder).is_file() and not plan_path(units).is_file():
        select_prompts(config, units, settings, ranks, packages_folder)


def _check_begun(folder: Path, settings: dict[str, Any]) -> None:
    """Refuse what was begun or finished with other settings; clear what kills left."""
    units = folder / "units"
    for place in (folder, units):
        if place.is_dir():
            remove_leftovers(place)
    if manifest_path(folder).is_file():
        _require_same(folder, read_corpus_manifest(folder).settings, settings)
        shutil.rmtree(units, ignore_errors=True)  # a kill may have come between manifest and this
    elif plan_path(units).is_file():
        _require_same(folder, read_plan(units).settings, settings)
        shutil.rmtree(units / "scan", ignore_errors=True)  # likewise
        logger.info("continuing the corpus in %s", folder)
    elif (begun := read_scan_settings(units / "scan")) and begun["settings"] != settings:
        # minutes of reading, and most often the correction of what stopped it: nothing worth a refusal
        logger.info("the recipe or a source has changed since the selection began: it begins anew")
        shutil.rmtree(units)


def _require_same(folder: Path, found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    remedy = f"undo the change, remove {folder}, or choose another run.output_dir"
    what = f"the corpus in {folder}"
    for part in ("recipe", None):  # the recipe's own keys say more than the fingerprint
        left = found[part] if part else found
        right = wanted[part] if part else wanted
        keys = dict.fromkeys([*right, *left])
        require_equal(what, left, {key: right.get(key) for key in keys}, remedy)


def _labels(config: Config, plan: Plan) -> Labels:
    tokenizer = load_tokenizer(config.target)
    template = ChatTemplate(tokenizer, config.target.chat_template_kwargs)
    if not config.data.responses.generate:
        return CorpusLabels(config, plan, template)
    if config.data.responses.server is not None:
        return ServedLabels(config, plan, template, answer_rules(config, tokenizer))
    return TargetLabels(config, plan, template)
