"""Labels: who answers the prompts, behind one interface; and the target in this process, in work units that survive a kill.

A unit is a fixed set of prompts, decoded in fixed batches with a generator of its own, so its bytes depend on nothing
but the plan and the unit's index; any number of ranks shares the units. A finished unit is a file, `unit-00012.json`;
double work would write the same one. Conversations of several turns are answered in rounds, each turn on the target's own
history. Token ids are kept as the target produced them, never tokenised again from text.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from common.distributed import Ranks, barrier, raise_together
from common.files import atomic_path, read_json
from common.progress import Progress
from configs.schema import Config, DataSection
from data.dialogue import Dialogue, answer_from_corpus
from data.plan import Plan
from data.template import ChatTemplate
from data.turns import Response
from target.generate import Sampling, generate_batch
from target.load import Target, load_target

UNITS_PER_CHUNK = 32
"""Prompts are sorted by length within a chunk: batches pad little, and the corpus order stays mixed."""


class Labels(Protocol):
    """Answers every prompt of a plan and keeps the answers on disk, so that a killed run continues where it was."""

    def make(self, ranks: Ranks) -> None:
        """Bring every conversation to its end. All ranks enter, and leave when all is done."""
        ...

    def dialogues(self, chunk: int) -> Iterator[Dialogue]:
        """The chunk's conversations in corpus order, each ended. Call after `make`, on any rank."""
        ...


class CorpusLabels:
    """The corpus' own assistant turns are the labels; there is nothing to make."""

    def __init__(self, config: Config, plan: Plan, template: ChatTemplate):
        self._data, self._plan, self._template = config.data, plan, template

    def make(self, ranks: Ranks) -> None:
        pass

    def dialogues(self, chunk: int) -> Iterator[Dialogue]:
        for prompt in self._plan.chunk(chunk):
            dialogue = Dialogue(prompt, self._template, self._data)
            answer_from_corpus(dialogue, self._template)
            yield dialogue


class TargetLabels:
    """The target in this process, its units shared by the ranks."""

    def __init__(self, config: Config, plan: Plan, template: ChatTemplate):
        self._config, self._plan, self._template = config, plan, template

    def make(self, ranks: Ranks) -> None:
        label_units(self._config, self._plan, ranks)

    def dialogues(self, chunk: int) -> Iterator[Dialogue]:
        recorded = read_chunk_responses(self._plan, chunk, self._config.data.responses.unit_size)
        for prompt, responses in zip(self._plan.chunk(chunk), recorded, strict=True):
            dialogue = Dialogue(prompt, self._template, self._config.data)
            for response in responses:
                dialogue.accept(response)
            yield dialogue


@dataclass(frozen=True)
class Unit:
    index: int
    chunk: int
    rows: tuple[int, ...]
    """Places in the chunk, longest prompt first."""

    def file(self, folder: Path) -> Path:
        return folder / f"unit-{self.index:05d}.json"


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
        template = ChatTemplate(target.tokenizer, config.target.chat_template_kwargs)
        progress = Progress("labels", sum(len(unit.rows) for unit in mine), "prompts")
        num_tokens = 0
        for unit in mine:
            chunk = plan.chunk(unit.chunk)
            dialogues = [Dialogue(chunk[row], template, data) for row in unit.rows]
            answer_unit(target, dialogues, data, config.run.seed, unit.index)
            _write_unit(unit, plan, dialogues)
            num_tokens += sum(dialogue.num_generated_tokens for dialogue in dialogues)
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
    target: Target, dialogues: Sequence[Dialogue], data: DataSection, seed: int, unit_index: int
) -> None:
    """Answer every turn of a unit's conversations; those that would pass data.max_tokens are cut there."""
    settings = data.responses
    sampling = Sampling(settings.temperature, settings.top_p, settings.top_k)
    generator = torch.Generator(target.device).manual_seed(_unit_seed(seed, unit_index))
    for start in range(0, len(dialogues), settings.batch_size):
        batch = dialogues[start : start + settings.batch_size]
        while _answer_round(target, batch, sampling, generator):
            pass


def _answer_round(
    target: Target, batch: Sequence[Dialogue], sampling: Sampling, generator: torch.Generator
) -> bool:
    """One turn of each conversation that goes on; false if none does."""
    waiting = [(d, turn) for d in batch if (turn := d.next_turn()) is not None]
    if not waiting:
        return False
    prompts = [turn.prompt_ids for _, turn in waiting]
    longest = max(turn.max_new_tokens for _, turn in waiting)
    answers = generate_batch(target, prompts, longest, sampling, generator)
    for (dialogue, turn), answer in zip(waiting, answers, strict=True):
        ids = answer[: turn.max_new_tokens]
        dialogue.accept(Response(ids, ids[-1] in target.eos_token_ids))
    return True


def read_chunk_responses(plan: Plan, chunk: int, unit_size: int) -> list[list[Response]]:
    """Every turn's response of a chunk's prompts, in corpus order. Raises FileNotFoundError if a unit is not done."""
    lengths = [len(prompt.prompt_ids) for prompt in plan.chunk(chunk)]
    found: dict[int, list[Response]] = {}
    for unit in units_of_chunk(chunk, lengths, unit_size):
        if not _is_done(unit, plan):
            raise FileNotFoundError(
                f"work unit {unit.file(plan.folder)} is missing; run the data stage again, it makes what is missing"
            )
        stored = read_json(unit.file(plan.folder), "remove it and run the data stage again")
        for row, turns in zip(unit.rows, stored["turns"], strict=True):
            found[row] = [Response(turn["ids"], turn["finished"]) for turn in turns]
    return [found[row] for row in range(len(lengths))]


def _unit_seed(seed: int, unit_index: int) -> int:
    return int(hashlib.sha256(f"labels:{seed}:{unit_index}".encode()).hexdigest()[:15], 16)


def _is_done(unit: Unit, plan: Plan) -> bool:
    file = unit.file(plan.folder)
    if not file.is_file():
        return False
    stored = read_json(file, "remove it and run the data stage again")
    return stored["fingerprint"] == plan.fingerprint


def _write_unit(unit: Unit, plan: Plan, dialogues: Sequence[Dialogue]) -> None:
    stored = {
        "fingerprint": plan.fingerprint,
        "rows": list(unit.rows),
        "turns": [[vars(response) for response in d.responses] for d in dialogues],
    }
    with atomic_path(unit.file(plan.folder)) as aside:
        aside.write_text(json.dumps(stored, separators=(",", ":")), encoding="utf-8")
