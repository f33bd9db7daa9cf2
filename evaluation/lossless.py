"""The losslessness command: greedy chain and tree must give the target's own greedy tokens, for any drafter.

In float32, with the trained and with a random drafter, the chain and every live budget. A difference is a fault of the
code unless the target's two best logits tie at that token (`target_gap`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch

from common.distributed import raise_together
from common.files import remove_leftovers, write_json
from data.features import RowEntry
from evaluation.decode import PLAIN, decode_plain
from evaluation.inputs import DrafterSource
from evaluation.live import (
    LivePrompt,
    LiveSetup,
    choose_prompts,
    decode_drafted,
    first_difference,
    make_setup,
    prompt_of,
    settings_for,
)
from evaluation.records import make_missing, read_all
from evaluation.stage import Work, live_setup


def run_lossless(
    work: Work, sources: Sequence[DrafterSource], num_prompts: int
) -> dict[str, Any] | None:
    """Decode `num_prompts` test prompts; writes lossless.json. The result on the main rank, None on others. Collective."""
    entries = choose_prompts(work.features.of_split("test"), num_prompts, work.config.run.seed)
    kind = work.records("lossless")
    with raise_together(work.ranks):
        if work.ranks.is_main:
            remove_leftovers(kind.folder)
    with raise_together(work.ranks):
        setups = _setups(work, sources)

        def make(entry: RowEntry) -> dict[str, Any]:
            return check_prompt(setups, prompt_of(work.features.read(entry)))

        make_missing(kind, entries, work.ranks, make)
    result = None
    with raise_together(work.ranks):
        if work.ranks.is_main:
            records = list(read_all(kind, entries, lambda value: value))
            result = _summary(records)
            write_json(work.folder / "lossless.json", result)
    return result


def check_prompt(setups: dict[str, LiveSetup], prompt: LivePrompt) -> dict[str, Any]:
    """Every drafter and acceptor against plain greedy decoding of one prompt."""
    first = next(iter(setups.values()))
    ids = torch.tensor(prompt.tokens, device=first.target.device)
    plain = decode_plain(first.verifier, ids, settings_for(first, prompt, PLAIN, 0.0)).tokens
    differing, num_decodes = [], 0
    for name, setup in setups.items():
        for acceptor, decoded in decode_drafted(setup, prompt, 0.0):
            num_decodes += 1
            difference = first_difference(setup, prompt, plain, decoded.tokens)
            if difference is not None:
                differing.append({"drafter": name, "acceptor": acceptor.key} | asdict(difference))
    return {
        "prompt_id": prompt.prompt_id,
        "num_tokens": len(plain),
        "num_decodes": num_decodes,
        "differing": differing,
    }


def _setups(work: Work, sources: Sequence[DrafterSource]) -> dict[str, LiveSetup]:
    """By drafter name; one target serves all."""
    loaded = {source.name: source.load(work.ranks.device, torch.float32) for source in sources}
    first = live_setup(work.config, work.ranks, next(iter(loaded.values())), "float32")
    return {
        name: make_setup(first.target, drafter, first.section, first.seed)
        for name, drafter in loaded.items()
    }


def _summary(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {
        "num_prompts": len(records),
        "num_equal": sum(not record["differing"] for record in records),
        "num_tokens": sum(record["num_tokens"] for record in records),
        "num_decodes": sum(record["num_decodes"] for record in records),
        "differing": [
            {"prompt_id": record["prompt_id"]} | item
            for record in records
            for item in record["differing"]
        ],
    }
