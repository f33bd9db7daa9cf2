"""The losslessness command: every acceptor must give the target's own greedy tokens, for any drafter.

In float32, with the trained and with a random drafter, at every live budget. A difference is a fault of the code unless
the target's two best logits tie at that token (`target_gap`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch

from common.distributed import raise_together
from common.files import remove_leftovers, write_json
from data.features import RowEntry
from drafter.model import Drafter
from evaluation.acceptors import CHAIN_REJECTION, PLAIN, Acceptor
from evaluation.inputs import DrafterSource
from evaluation.live import (
    LivePrompt,
    LiveSetup,
    choose_prompts,
    decode_by,
    first_difference,
    prompt_of,
)
from evaluation.loading import LiveTarget
from evaluation.records import make_missing, read_all
from evaluation.stage import Work, settle_tuning

NEARLY_GREEDY = 1e-5
"""A temperature that leaves the target's argmax alone wherever its logits are more than 1e-3 ahead."""


def run_lossless(
    work: Work, sources: Sequence[DrafterSource], num_prompts: int
) -> dict[str, Any] | None:
    """Decode `num_prompts` test prompts; writes lossless.json. The result on the main rank, None on others. Collective.

    `work` is planned for float32.
    """
    assert work.config.evaluation.dtype == "float32"
    entries = choose_prompts(work.features.of_split("test"), num_prompts, work.config.run.seed)
    kind = work.records("lossless")
    with raise_together(work.ranks):
        if work.ranks.is_main:
            remove_leftovers(kind.folder)
    with raise_together(work.ranks):
        trained = sources[0].load(work.drafter_device, torch.float32)
        live = LiveTarget(work.config, work.ranks, trained, work.config.evaluation.dtype)
    settle_tuning(work, live)
    with raise_together(work.ranks):
        setups = _setups(live.setup(work.tuning.read()), trained, sources)

        def make(group: Sequence[RowEntry]) -> list[dict[str, Any]]:
            return check_prompts(setups, [prompt_of(work.features.read(e)) for e in group])

        make_missing(kind, entries, work.ranks, make, work.group_size)
    result = None
    with raise_together(work.ranks):
        if work.ranks.is_main:
            records = list(read_all(kind, entries, lambda value: value))
            result = {"num_asked": num_prompts} | _summary(records)
            write_json(work.folder / "lossless.json", result)
    return result


def check_prompts(
    setups: dict[str, LiveSetup], prompts: Sequence[LivePrompt]
) -> list[dict[str, Any]]:
    """Every drafter and acceptor against plain greedy decoding; a record a prompt."""
    first = next(iter(setups.values()))
    plain = [decoded.tokens for decoded in decode_by(first, prompts, PLAIN, 0.0)]
    differing: list[list[dict[str, Any]]] = [[] for _ in prompts]
    num_decodes = 0
    for name, setup in setups.items():
        for acceptor, temperature in _greedy_acceptors(setup):
            num_decodes += 1
            for index, decoded in enumerate(decode_by(setup, prompts, acceptor, temperature)):
                found = first_difference(setup, prompts[index], plain[index], decoded.tokens)
                if found is not None:
                    where = {"drafter": name, "acceptor": acceptor.key}
                    differing[index].append(where | asdict(found))
    return [
        {
            "prompt_id": prompt.prompt_id,
            "num_tokens": len(plain[index]),
            "num_decodes": num_decodes,
            "differing": differing[index],
        }
        for index, prompt in enumerate(prompts)
    ]


def _greedy_acceptors(setup: LiveSetup) -> list[tuple[Acceptor, float]]:
    """With the temperature of each: chain_rejection samples, and is greedy in the limit only."""
    found = [(acceptor, 0.0) for acceptor in setup.acceptors(0.0)]
    if CHAIN_REJECTION.name in setup.section.acceptors:
        found.append((CHAIN_REJECTION, NEARLY_GREEDY))
    return found


def _setups(
    first: LiveSetup, trained: Drafter, sources: Sequence[DrafterSource]
) -> dict[str, LiveSetup]:
    """By drafter name; one target and one verifier serve all. `trained` is the first source's, loaded already."""
    device = trained.fc.weight.device
    others = {source.name: source.load(device, torch.float32) for source in sources[1:]}
    loaded = {sources[0].name: trained, **others}
    return {name: dataclasses.replace(first, drafter=drafter) for name, drafter in loaded.items()}


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
