"""Turns of a conversation: which ones get a label, what a turn's response is, and the rows that responses add up to.

Shapes: S tokens of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from data.conversations import Message

Turns = Literal["every", "last"]


@dataclass(frozen=True)
class Response:
    """What the target generated at one turn."""

    ids: list[int]
    finished: bool
    """Ends with an EOS token of the target; false: cut at a limit (`finish_reason=length`)."""


@dataclass(frozen=True)
class Turn:
    """A turn that waits for its response."""

    index: int
    """0 for the first turn that the target answers."""
    prompt_ids: list[int]
    max_new_tokens: int
    room: int
    """Tokens left under data.max_tokens."""


@dataclass
class Row:
    """Everything the target saw and made while its view only grew."""

    input_ids: list[int]
    """(S,)"""
    loss_mask: list[bool]
    """(S,) true on generated tokens."""
    messages: list[Message] = field(default_factory=list)
    """Up to the last generated turn."""
    finished: bool = True
    """Of the last generated turn."""

    def extend(
        self, context: Sequence[int], response: Response, messages: Sequence[Message]
    ) -> None:
        """Add a turn: what the target saw since the last one, and what it made. `messages` end with this turn."""
        self.input_ids += [*context, *response.ids]
        self.loss_mask += [False] * len(context) + [True] * len(response.ids)
        self.messages = list(messages)
        self.finished = response.finished


def first_context(messages: Sequence[Message], turns: Turns) -> tuple[Message, ...]:
    """The messages before the first turn that gets a label; `messages` end where the last one is due.

    every: up to the first assistant turn after a user turn. last: all of them.
    """
    return tuple(messages[: _first_slot(messages)] if turns == "every" else messages)


def _first_slot(messages: Sequence[Message]) -> int:
    """Place of the first assistant turn after a user turn: an opening greeting is context."""
    users = [i for i, message in enumerate(messages) if message["role"] == "user"]
    if not users:
        return len(messages)
    return users[0] + next_assistant(messages[users[0] :])


def next_assistant(messages: Sequence[Message]) -> int:
    places = (i for i, message in enumerate(messages) if message["role"] == "assistant")
    return next(places, len(messages))


def pop_assistant(script: list[Message]) -> list[Message]:
    """Take the recorded assistant turn off; some corpora write one turn as several messages."""
    popped = []
    while script and script[0]["role"] == "assistant":
        popped.append(script.pop(0))
    return popped
