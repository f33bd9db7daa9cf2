"""Labels: the target answers every prompt, in work units that survive a kill and that any number of ranks share.

A unit is a fixed set of prompts, decoded in fixed batches with a generator of its own, so its bytes depend on nothing
but the plan and the unit's index. A finished unit is a file, `unit-00012.json`; double work would write the same one.
Token ids are kept as the target produced them, never tokenised again from text.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from common.distributed import Ranks, barrier, raise_together
from common.files import atomic_path, read_json
from common.progress import Progress
from configs.schema import Config, DataSection
from data.plan import Plan
from target.generate import Sampling, generate_batch
from target.load import Target, load_target

UNITS_PER_CHUNK = 32
"""Prompts are sorted by length within a chunk: batches pad little, and the corpus order stays mixed."""


@dataclass(frozen=True)
class Unit:
    index: int
    chunk: int
    rows: tuple[int, ...]
    """Places in the chunk, longest prompt first."""

    def file(self, folder: Path) -> Path:
        return folder / f"unit-{self.index:05d}.json"


@dataclass(frozen=True)
class Response:
    ids: list[int]
    finished: bool
    """Ends with an EOS token of the target."""


def units_of_chunk(chunk: int, lengths: Sequence[int], unit_size: int) -> list[Unit]:
    """The chunk's units. Longest first, so that ranks that take every n-th unit end at about the same time."""
    rows = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    return [
        Unit(chunk * UNITS_PER_CHUNK + number, chunk, tuple(rows[start : start + unit_size]))
        for number, start in enumerate(range(0, len(rows), unit_size))
    ]


def label_units(config: Config, plan: Plan, ranks: Ranks) -> None:
    """Finish this rank's share of the units that are not done. All ranks enter; they wait for each other at the end.

    An error stops this rank at once, not after the others' hours: the launcher stops them, and their finished units stay.
    """
    data = config.data
    pending = [
        unit for unit in plan_units(plan, data.responses.unit_size) if not _is_done(unit, plan)
    ]
    barrier()  # every rank has the same list before a first unit is finished
    mine = pending[ranks.rank :: ranks.world_size]
    target: Target | None = None
    with raise_together(ranks):
        if mine:
            target = load_target(config.target, ranks.device)
    if target is not None:
        progress = Progress("labels", sum(len(unit.rows) for unit in mine), "prompts")
        num_tokens = 0
        for unit in mine:
            chunk = plan.chunk(unit.chunk)
            prompts = [chunk[row].prompt_ids.tolist() for row in unit.rows]
            responses = answer_unit(target, prompts, data, config.run.seed, unit.index)
            _write_unit(unit, plan, responses)
            num_tokens += sum(len(response.ids) for response in responses)
            progress.advance(len(unit.rows), f"{num_tokens} response tokens on this rank")
        progress.finish(f"{num_tokens} response tokens on this rank")
    barrier()


def plan_units(plan: Plan, unit_size: int) -> list[Unit]:
    units = []
    for chunk in range(plan.num_chunks):
        lengths = [len(prompt.prompt_ids) for prompt in plan.chunk(chunk)]
        units += units_of_chunk(chunk, lengths, unit_size)
    return units


def answer_unit(
    target: Target, prompts: Sequence[list[int]], data: DataSection, seed: int, unit_index: int
) -> list[Response]:
    """The responses of a unit's prompts; those that would pass data.max_tokens are cut there."""
    settings = data.responses
    sampling = Sampling(settings.temperature, settings.top_p, settings.top_k)
    generator = torch.Generator(target.device).manual_seed(_unit_seed(seed, unit_index))
    responses = []
    for start in range(0, len(prompts), settings.batch_size):
        batch = prompts[start : start + settings.batch_size]
        rooms = [data.max_tokens - len(prompt) for prompt in batch]
        longest = min(settings.max_new_tokens, max(rooms))
        answers = generate_batch(target, batch, longest, sampling, generator)
        kept = [ids[:room] for ids, room in zip(answers, rooms, strict=True)]
        responses += [Response(ids, ids[-1] in target.eos_token_ids) for ids in kept]
    return responses


def read_chunk_responses(plan: Plan, chunk: int, unit_size: int) -> list[Response]:
    """The responses of a chunk, in corpus order. Raises FileNotFoundError if a unit is not done."""
    lengths = [len(prompt.prompt_ids) for prompt in plan.chunk(chunk)]
    found: dict[int, Response] = {}
    for unit in units_of_chunk(chunk, lengths, unit_size):
        if not _is_done(unit, plan):
            raise FileNotFoundError(
                f"work unit {unit.file(plan.folder)} is missing; run the data stage again, it makes what is missing"
            )
        stored = read_json(unit.file(plan.folder), "remove it and run the data stage again")
        for row, ids, finished in zip(
            unit.rows, stored["responses"], stored["finished"], strict=True
        ):
            found[row] = Response(ids, finished)
    return [found[row] for row in range(len(lengths))]


def _unit_seed(seed: int, unit_index: int) -> int:
    return int(hashlib.sha256(f"labels:{seed}:{unit_index}".encode()).hexdigest()[:15], 16)


def _is_done(unit: Unit, plan: Plan) -> bool:
    file = unit.file(plan.folder)
    if not file.is_file():
        return False
    stored = read_json(file, "remove it and run the data stage again")
    return stored["fingerprint"] == plan.fingerprint


def _write_unit(unit: Unit, plan: Plan, responses: Sequence[Response]) -> None:
    stored = {
        "fingerprint": plan.fingerprint,
        "rows": list(unit.rows),
        "responses": [response.ids for response in responses],
        "finished": [response.finished for response in responses],
    }
    with atomic_path(unit.file(plan.folder)) as aside:
        aside.write_text(json.dumps(stored, separators=(",", ":")), encoding="utf-8")
