"""A conversation while the target answers it, turn by turn on its own history, and the corpus rows that come of it.

At every turn the target sees what a server would show it: the messages so far, rendered by the chat template and tokenised
as one text. A turn's generated ids are kept as they are. If the prompt of the next turn begins with the ids of the row so
far, the row goes on, with one run of loss_mask for every turn; if not (a template that strips earlier thinking, a response
whose ids are not the tokenizer's own spelling of its text), a new row starts with what the target sees now. So in every row
the masked ids were generated after exactly the ids before them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import numpy as np

from configs.schema import DataSection
from data.clean import content_hash, repetition
from data.conversations import Message
from data.corpus import CorpusRow
from data.prompts import Prompt
from data.replies import called_names
from data.template import ChatTemplate
from data.turns import Response, Row, Turn, first_context, next_assistant, pop_assistant

COMPLETE = "complete"


class Dialogue:
    """One prompt's conversation: `next_turn` says what to answer, `accept` takes the response, `rows` gives the result.

    It depends on the responses alone, so a recorded conversation is replayed by accepting its responses again.
    """

    def __init__(self, prompt: Prompt, template: ChatTemplate, data: DataSection):
        self.prompt, self._template, self._data = prompt, template, data
        self.history: list[Message] = list(first_context(prompt.messages, data.responses.turns))
        """What the turn that waits answers, the target's own replies among it."""
        self._script = list(prompt.messages[len(self.history) :])
        """What is still to come, recorded assistant turns included: their place and tool calls count, not their text."""
        self._prompt_ids: list[int] = prompt.prompt_ids.tolist()
        self.responses: list[Response] = []
        """All that were taken; the last one may be a bad one that no row has."""
        self.rows: list[Row] = []
        """Empty if the first turn was bad; `ended` says why."""
        self.ended: str | None = None
        """Why it takes no further turn: COMPLETE if every turn of the conversation was answered."""

    @property
    def num_generated_tokens(self) -> int:
        return sum(len(response.ids) for response in self.responses)

    @property
    def recorded(self) -> Message | None:
        """The corpus' own message at the turn that waits; None at the last, where `Prompt.response_ids` has its ids."""
        return self._script[0] if self._script else None

    def next_turn(self) -> Turn | None:
        """None when the conversation has ended."""
        if self.ended is not None:
            return None
        room = self._data.max_tokens - len(self._prompt_ids)
        return Turn(
            index=len(self.responses),
            prompt_ids=self._prompt_ids,
            max_new_tokens=min(self._data.responses.max_new_tokens, room),
            room=room,
        )

    def accept(self, response: Response) -> None:
        """Take the response of the turn that waits. A bad one ends the conversation before it: nothing is built on it."""
        assert self.ended is None
        self.responses.append(response)
        self.ended = _reject_reason(response, self._data)
        if self.ended is not None:
            return
        reply = self._template.reply(self._prompt_ids, response.ids, self.prompt.tools)
        recorded = pop_assistant(self._script)
        self.history.append(_with_recorded_ids(reply, recorded))
        self._keep(response)
        self.ended = self._end_after(reply, recorded, response.finished) or self._go_on()

    def give_up(self, reason: str) -> None:
        """End the conversation before the turn that waits: no response to it is to be had."""
        assert self.ended is None
        self.ended = reason

    def _keep(self, response: Response) -> None:
        row = self.rows[-1] if self.rows else None
        if row is None or self._prompt_ids[: len(row.input_ids)] != row.input_ids:
            row = Row([], [])
            self.rows.append(row)
        row.extend(self._prompt_ids[len(row.input_ids) :], response, self.history)

    def _end_after(self, reply: Message, recorded: list[Message], finished: bool) -> str | None:
        """Why the recorded conversation cannot go on after this reply, or None."""
        if not self._script:
            return COMPLETE
        if not finished:
            return "cut at the limit"
        called = called_names(reply) if reply.get("tool_calls") else []
        if self._script[0]["role"] != "tool":
            return "tool call without a recorded result" if called else None
        wanted = [name for message in recorded for name in called_names(message)]
        return None if called == wanted else "recorded results are of other tool calls"

    def _go_on(self) -> str | None:
        """Append the messages before the next assistant turn and render them; why that cannot be, or None."""
        end = next_assistant(self._script)
        self.history += self._script[:end]
        del self._script[:end]
        prompt = self.prompt
        ids = self._template.prompt_ids(self.history, prompt.where, prompt.tools, prompt.thinking)
        if len(ids) > self._data.max_tokens - self._data.min_response_tokens:
            return "no room for the next turn"
        self._prompt_ids = ids
        return None


def answer_from_corpus(dialogue: Dialogue, template: ChatTemplate) -> None:
    """Bring the conversation to its end with the corpus' own turns, cut at data.max_tokens, as if the target had made them.

    Raises ValueError if the template cannot render one as a continuation of its prompt.
    """
    prompt = dialogue.prompt
    while (turn := dialogue.next_turn()) is not None:
        if dialogue.recorded is not None:
            ids = template.response_ids(
                dialogue.history, dialogue.recorded, prompt.where, prompt.tools, prompt.thinking
            )
        else:
            assert prompt.response_ids is not None
            ids = prompt.response_ids.tolist()
        dialogue.accept(Response(ids[: turn.room], finished=len(ids) <= turn.room))


def corpus_rows(dialogue: Dialogue) -> Iterator[CorpusRow]:
    """The rows of an ended conversation. The first has the prompt's id, further ones derive theirs from it."""
    prompt = dialogue.prompt
    for index, row in enumerate(dialogue.rows):
        yield CorpusRow(
            sample_id=content_hash(prompt.sample_id, index) if index else prompt.sample_id,
            source=prompt.source,
            task=prompt.task,
            split=prompt.split,
            messages=json.dumps(row.messages, ensure_ascii=False),
            input_ids=np.array(row.input_ids, dtype=np.int32),
            loss_mask=np.array(row.loss_mask, dtype=bool),
            finished=row.finished,
            thinking=prompt.thinking,
        )


def _reject_reason(response: Response, data: DataSection) -> str | None:
    """Test rows are judged as all others: a loop is easy to draft and would flatter the acceptance length."""
    if len(response.ids) < data.min_response_tokens:
        return "response too short"
    if repetition(response.ids) > data.max_repetition:
        return "response repeats itself"
    return None


def _with_recorded_ids(reply: Message, recorded: list[Message]) -> Message:
    """Calls take the ids of the recorded ones, which the recorded results refer to."""
    calls = reply.get("tool_calls", [])
    given = [call.get("id") for message in recorded for call in message.get("tool_calls", [])]
    if not calls or len(given) != len(calls) or None in given:
        return reply
    named = [{**call, "id": id_} for call, id_ in zip(calls, given, strict=True)]
    return {**reply, "tool_calls": named}
