"""What servers have answered so far, by place of the prompt in the plan; it outlives any kill.

corpus/units/answers.journal     a line a turn: place, turn, token ids, finished, and whether the conversation ended with it
"""

from __future__ import annotations

from array import array
from collections import Counter
from pathlib import Path
from typing import Any

from common.progress import Progress
from configs.schema import DataSection
from data.dialogue import Dialogue
from data.journal import Journal
from data.plan import Plan
from data.prompts import Prompt
from data.template import ChatTemplate
from data.turns import Response


def answers_path(plan: Plan) -> Path:
    return plan.folder / "answers.journal"


class Answers:
    """Open for reading and recording; some 100 bytes of memory a prompt, the answers themselves stay on disk."""

    def __init__(self, plan: Plan, template: ChatTemplate, data: DataSection):
        """Raises ValueError if the journal is damaged or another plan's."""
        self._template, self._data = template, data
        self._journal = Journal(answers_path(plan), plan.fingerprint)
        self._offsets: dict[int, array[int]] = {}
        self._ended: set[int] = set()
        self.failed: dict[int, str] = {}
        """Prompts that got no answer to one of their turns, by place, with the reason. Not recorded: a later run tries again."""
        self.num_tokens = 0
        progress = Progress("reading answers", plan.num_prompts, "prompts")
        for entry in self._journal.entries():
            self._add(entry.value, entry.offset)
            progress.advance(int(entry.value["is_last"]))

    @property
    def num_ended(self) -> int:
        return len(self._ended)

    def has_ended(self, place: int) -> bool:
        return place in self._ended

    def record(self, place: int, turn: int, response: Response, is_last: bool) -> None:
        """Write a turn's response. is_last: the conversation ended with it."""
        value = {"place": place, "turn": turn, **vars(response), "is_last": is_last}
        self._add(value, self._journal.append(value))

    def dialogue(self, place: int, prompt: Prompt) -> Dialogue:
        """The conversation as far as it was answered; ended if it failed in this run."""
        dialogue = Dialogue(prompt, self._template, self._data)
        for offset in self._offsets.get(place, ()):
            stored = self._journal.read(offset)
            assert stored["turn"] == len(dialogue.responses), stored
            dialogue.accept(Response(stored["ids"], stored["finished"]))
        if dialogue.ended is None and place in self.failed:
            dialogue.give_up(self.failed[place])
        return dialogue

    def account(self, num_prompts: int) -> str:
        """One line: answered and failed by reason add up to the prompts of the plan. Call when nothing is left to do."""
        assert self.num_ended + len(self.failed) == num_prompts, "a prompt was lost"
        reasons = ", ".join(f"{reason} {n}" for reason, n in Counter(self.failed.values()).items())
        failed = f"{len(self.failed)} without an answer" + (f" ({reasons})" if reasons else "")
        return f"{num_prompts} prompts = {self.num_ended} answered to their end + {failed}"

    def close(self) -> None:
        self._journal.close()

    def _add(self, value: dict[str, Any], offset: int) -> None:
        place = value["place"]
        self._offsets.setdefault(place, array("q")).append(offset)
        self.num_tokens += len(value["ids"])
        if value["is_last"]:
            self._ended.add(place)
