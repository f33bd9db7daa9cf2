"""One row of a source: a prompt that may get a label, or the reason why not. Nothing here looks at other rows."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from configs.schema import DataSection, SourceSection
from data.clean import content_hash, split_of, user_texts
from data.conversations import (
    Conversation,
    Malformed,
    Message,
    columns_of,
    conversation_of,
    passes_filter,
)
from data.filters import broken_unicode, other_language, repeats_itself, wrong_order
from data.prompts import Prompt
from data.rows import Row
from data.template import ChatTemplate
from data.turns import first_context

MALFORMED = "unknown shape"
EXCERPT_CHARS = 200


@dataclass(frozen=True)
class Reject:
    where: str
    reason: str
    detail: str
    text: str
    """The start of its last user turn, for a person who wants to see what is dropped."""


def judge(
    row: Row, source: SourceSection, data: DataSection, template: ChatTemplate
) -> Prompt | Reject:
    """Raises Malformed for a row of an unknown shape if data.max_malformed is 0."""
    try:
        columns = columns_of(row)
        if not passes_filter(columns, row.where, source):
            return Reject(row.where, "filtered out", ", ".join(source.filter), "")
        conversation = conversation_of(row, columns, source)
        return _judged(conversation, source, data, template)
    except Malformed as error:
        if data.max_malformed == 0:
            raise
        return Reject(row.where, MALFORMED, str(error), "")


def excerpt(messages: Sequence[Message]) -> str:
    texts = user_texts(messages)
    return texts[-1][:EXCERPT_CHARS] if texts else ""


def _judged(
    row: Conversation, source: SourceSection, data: DataSection, template: ChatTemplate
) -> Prompt | Reject:
    context, answer = _parted(row, data.responses.generate)
    found = _fault(context, source, data)
    if found is not None:
        return Reject(row.where, *found, excerpt(context))
    prompt = _prompt(row, context, answer, source, data, template)
    found = _wrong_length(len(prompt.prompt_ids), source, data)
    return prompt if found is None else Reject(row.where, *found, excerpt(context))


def _parted(row: Conversation, generate: bool) -> tuple[tuple[Message, ...], Message | None]:
    """The context, and the label of a corpus that brings its own. A trailing answer is dropped if the target answers."""
    end = len(row.messages)
    while end and row.messages[end - 1]["role"] == "assistant":
        end -= 1
    context, answers = row.messages[:end], row.messages[end:]
    if not user_texts(context):
        raise Malformed(
            f"{row.where}: the conversation has no user turn to answer; every row needs one, remove or correct this row"
        )
    if generate:
        return context, None
    if len(answers) != 1:
        raise Malformed(
            f"{row.where}: the conversation has no response (it must end with one assistant turn, found {len(answers)}); "
            "correct the row, or set data.responses.generate=true to let the target answer"
        )
    return context, answers[0]


def _fault(
    context: Sequence[Message], source: SourceSection, data: DataSection
) -> tuple[str, str] | None:
    """(reason, detail) of the first filter that rejects; cheap ones first."""
    texts = user_texts(context)
    if not all(text.strip() for text in texts):
        return "empty user turn", ""
    if detail := wrong_order(context):
        return "role order", detail
    whole = "\n".join(message["content"] for message in context)
    if data.reject_broken_unicode and (detail := broken_unicode(whole)):
        return "broken unicode", detail
    if source.languages and (detail := other_language("\n".join(texts), source.languages)):
        return "other language", detail
    if data.max_prompt_repetition < 1 and (
        detail := repeats_itself(texts, data.max_prompt_repetition)
    ):
        return "prompt repeats itself", detail
    return None


def _wrong_length(
    num_tokens: int, source: SourceSection, data: DataSection
) -> tuple[str, str] | None:
    # the response needs room for its minimum
    longest = min(
        source.max_prompt_tokens or data.max_prompt_tokens,
        data.max_tokens - data.min_response_tokens,
    )
    if num_tokens > longest:
        return "prompt too long", f"{num_tokens} tokens"
    if num_tokens < source.min_prompt_tokens:
        return "prompt too short", f"{num_tokens} tokens"
    return None


def _prompt(
    row: Conversation,
    context: tuple[Message, ...],
    answer: Message | None,
    source: SourceSection,
    data: DataSection,
    template: ChatTemplate,
) -> Prompt:
    thinking = thinking_of(context, source)
    first = first_context(context, data.responses.turns)
    mode: tuple[Any, ...] = () if thinking is None else (thinking,)
    try:
        prompt_ids = template.prompt_ids(first, row.where, row.tools, thinking)
        response_ids = (
            None
            if answer is None
            else template.response_ids(context, answer, row.where, row.tools, thinking)
        )
    except Malformed:
        raise
    except ValueError as error:  # the chat template refuses the conversation
        raise Malformed(str(error)) from error
    return Prompt(
        sample_id=content_hash(source.name, context, *_tools_part(row), *mode),
        source=source.name,
        task=source.task or source.name,
        split=source.split
        if source.split != "auto"
        else split_of(context, data.validation_fraction, data.test_fraction),
        where=row.where,
        license=row.license,
        messages=context,
        prompt_ids=np.array(prompt_ids, dtype=np.int32),
        response_ids=None if response_ids is None else np.array(response_ids, dtype=np.int32),
        tools=row.tools,
        thinking=thinking,
    )


def _tools_part(row: Conversation) -> tuple[str, ...]:
    return (json.dumps(row.tools, sort_keys=True),) if row.tools else ()


def thinking_of(context: Sequence[Message], source: SourceSection) -> bool | None:
    """The row's mode; a share is drawn by content, so that it depends neither on order nor on other rows."""
    if source.thinking is None or isinstance(source.thinking, bool):
        return source.thinking
    return int(content_hash("thinking", context), 16) / 16**32 < source.thinking
