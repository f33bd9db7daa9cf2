"""Rows of any known shape become conversations of one shape: {role, content} in order, tools beside them.

What is understood: OpenAI messages (text parts, tool calls with their arguments as JSON text, `developer`), ShareGPT turns
{from, value}, bare prompts in a column or made of several. A row of another shape is `Malformed`, in one line that names
file, row and what was found; nothing is guessed.
"""

from __future__ import annotations

import json
import re
import string
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs.schema import Bounds, SourceSection
from data.packages import PACKAGES_FOLDER
from data.rows import Row
from data.sources import Places, read_blocks

Message = dict[str, Any]
"""At least `role` and `content`; of further keys those that chat templates read (see _TEMPLATE_KEYS)."""

_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "chatgpt": "assistant",
    "developer": "system",
    "function": "tool",
    "function_response": "tool",
    "observation": "tool",
}
# sets of real people's chats carry addresses and browsers beside the text: none of that belongs in a corpus
_TEMPLATE_KEYS = ("name", "reasoning_content", "tool_calls", "tool_call_id")
_KNOWN_ROLES = ("system", "user", "assistant", "tool")


class Malformed(ValueError):
    """A row that is of no known shape."""


@dataclass(frozen=True)
class Conversation:
    where: str
    """File and row, for messages to the user."""
    messages: tuple[Message, ...]
    license: str
    tools: tuple[dict[str, Any], ...] = ()
    """Function schemas for the chat template."""


def read_conversations(
    source: SourceSection, offline: bool = False, packages_folder: Path = PACKAGES_FOLDER
) -> Iterator[Conversation]:
    """Every row of a source, in its order; rows that source.filter leaves out are not given.

    Raises FileNotFoundError for a missing file and Malformed for a row of the wrong shape.
    """
    for block in read_blocks(source, Places(offline=offline, packages_folder=packages_folder)):
        for row in block.rows():
            columns = columns_of(row)
            if passes_filter(columns, row.where, source):
                yield conversation_of(row, columns, source)


def columns_of(row: Row) -> dict[str, Any]:
    """The row's columns. Raises Malformed if it is a line that is no JSON object."""
    if isinstance(row.value, dict):
        return row.value
    try:
        value = json.loads(row.value.decode())
    except (ValueError, RecursionError) as error:  # no UTF-8, no JSON, a number too long
        raise Malformed(
            f"{row.where}: not valid JSON ({error}); one JSON object a line, in UTF-8, is expected"
        ) from error
    if not isinstance(value, dict):
        raise Malformed(
            f"{row.where}: expected a JSON object, found {type(value).__name__} {_shown(value)}"
        )
    return value


def passes_filter(columns: dict[str, Any], where: str, source: SourceSection) -> bool:
    """Whether every column of source.filter holds what it may. Raises Malformed if a column is not there."""
    for column, allowed in source.filter.items():
        if column not in columns:
            raise Malformed(
                f"{where}: data.sources {source.name!r} filters by column {column!r}, the row has {sorted(columns)}"
            )
        value = columns[column]
        if not isinstance(allowed, Bounds):
            if value not in allowed:
                return False
        elif not _is_within(value, allowed):
            return False
    return True


def conversation_of(row: Row, columns: dict[str, Any], source: SourceSection) -> Conversation:
    """Raises Malformed, naming file, row and columns."""
    if source.prompt_column is not None or source.prompt_template is not None:
        messages = _bare_messages(columns, row.where, source)
    else:
        messages = _given_messages(columns, row.where, source)
    if source.system_column is not None and messages[0]["role"] != "system":
        system = _text_in(columns, source.system_column, row.where, source, may_be_empty=True)
        messages = ({"role": "system", "content": system}, *messages) if system else messages
    tools = () if source.tools_column is None else _tools_of(columns, row.where, source)
    _require_json([messages, tools], row.where)
    return Conversation(row.where, messages, row.license or source.license, tools)


def _is_within(value: Any, bounds: Bounds) -> bool:
    value = _number_in(value) if isinstance(value, str) else value
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return (bounds.min is None or value >= bounds.min) and (
        bounds.max is None or value <= bounds.max
    )


def _number_in(text: str) -> float | None:
    """CSV files hold text only."""
    try:
        return float(text)
    except ValueError:
        return None


def _bare_messages(
    columns: dict[str, Any], where: str, source: SourceSection
) -> tuple[Message, ...]:
    if source.prompt_template is not None:
        prompt = _filled(source.prompt_template, columns, where, source)
    else:
        prompt = _text_in(columns, source.prompt_column or "", where, source)
    messages: tuple[Message, ...] = ({"role": "user", "content": prompt},)
    if source.response_column is not None:
        answer = _text_in(columns, source.response_column, where, source)
        messages += ({"role": "assistant", "content": answer},)
    return messages


def _filled(template: str, columns: dict[str, Any], where: str, source: SourceSection) -> str:
    """Braces as in str.format, column names only; doubled ones stand for themselves."""
    text = ""
    for literal, column, _, _ in string.Formatter().parse(template):
        cell = "" if column is None else _text_in(columns, column, where, source, may_be_empty=True)
        text += literal + cell
    return re.sub(r"\n{3,}", "\n\n", text).strip()


def _text_in(
    columns: dict[str, Any],
    column: str,
    where: str,
    source: SourceSection,
    may_be_empty: bool = False,
) -> str:
    text = columns.get(column)
    if text is None and may_be_empty and column in columns:
        return ""
    if isinstance(text, list) and text and all(isinstance(turn, str) for turn in text):
        text = text[
            0
        ]  # the user's turns without answers, as MT-Bench has them: the first can be answered
    if not isinstance(text, str):
        raise _shape_error(where, source, f"no text in column {column!r}", columns)
    return text


def _given_messages(
    columns: dict[str, Any], where: str, source: SourceSection
) -> tuple[Message, ...]:
    column = source.messages_column
    if column not in columns and column == "messages":
        column = "conversations"
    turns = columns.get(column)
    if isinstance(turns, str):
        turns = _parsed(turns)
    if not isinstance(turns, list) or not turns:
        raise _shape_error(where, source, f"no conversation in column {column!r}", columns)
    return tuple(_message_of(turn, where, source) for turn in turns)


def _parsed(text: str) -> Any:
    """Parquet files often hold a conversation as JSON text; None if this is no JSON that can be read."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):  # a number of thousands of digits, brackets without end
        return None


def _message_of(turn: Any, where: str, source: SourceSection) -> Message:
    if not isinstance(turn, dict):
        raise _shape_error(where, source, "a turn is not {role, content}", turn)
    # Parquet gives every turn the keys of all turns, with None for those it has not
    given = {key: value for key, value in turn.items() if value is not None}
    role = given.pop("role", None) or given.pop("from", None)
    content = given.pop("content", None)
    if content is None:
        content = given.pop("value", None)
    if content is None and given.get("tool_calls"):
        content = ""
    if isinstance(content, list) and all(isinstance(part, dict) for part in content):
        content = _joined_parts(content)
    if not isinstance(role, str) or not isinstance(content, str):
        raise _shape_error(where, source, "a turn is not {role, content} with text", turn)
    role = _ROLES.get(role, role)
    if role not in _KNOWN_ROLES:
        raise _shape_error(where, source, f"unknown role {role!r}", turn)
    if given.get("tool_calls"):
        given["tool_calls"] = _tool_calls_of(given["tool_calls"], where, source)
    kept = {key: given[key] for key in _TEMPLATE_KEYS if key in given}
    if no_text := [k for k, v in kept.items() if k != "tool_calls" and not isinstance(v, str)]:
        raise _shape_error(where, source, f"{no_text[0]!r} of a turn is not text", turn)
    return {"role": role, "content": content, **kept}


def _tool_calls_of(calls: Any, where: str, source: SourceSection) -> list[dict[str, Any]]:
    calls = _parsed(calls) if isinstance(calls, str) else calls
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise _shape_error(where, source, "tool_calls is not a list of objects", calls)
    return [_tool_call_of(call, where, source) for call in calls]


def _tool_call_of(call: dict[str, Any], where: str, source: SourceSection) -> dict[str, Any]:
    """Arguments as an object: servers give them as JSON text, chat templates go through their items."""
    inner = call.get("function")
    function = call if inner is None else inner
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise _shape_error(where, source, "a tool call names no function", call)
    arguments = function.get("arguments")
    if arguments is None or arguments == "":
        arguments = {}
    elif isinstance(arguments, str):
        arguments = _parsed(arguments)
    if not isinstance(arguments, dict):
        raise _shape_error(where, source, "a tool call's arguments are no JSON object", call)
    if "arguments" in function:
        function = {**function, "arguments": arguments}
    return function if inner is None else {**call, "function": function}


def _tools_of(
    columns: dict[str, Any], where: str, source: SourceSection
) -> tuple[dict[str, Any], ...]:
    tools = columns.get(source.tools_column or "")
    if tools is None or tools == "":
        return ()
    tools = _parsed(tools) if isinstance(tools, str) else tools
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise _shape_error(
            where, source, f"no list of function schemas in column {source.tools_column!r}", columns
        )
    return tuple(tools)


def _require_json(value: Any, where: str) -> None:
    """JSON can spell half a surrogate pair, which no tokenizer takes; Parquet can hold times and bytes in a schema or a call."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise Malformed(
            f"{where}: its text is no Unicode ({error}); correct or remove the row"
        ) from error
    except (TypeError, ValueError, RecursionError) as error:
        raise Malformed(
            f"{where}: it holds what JSON cannot say ({error}); correct or remove the row"
        ) from error


def _joined_parts(parts: list[dict[str, Any]]) -> str | None:
    """Text of [{type: text, text: ...}, ...]; None if a part is not text."""
    texts = [part.get("text") for part in parts if part.get("type", "text") == "text"]
    found = [text for text in texts if isinstance(text, str)]
    return "".join(found) if len(found) == len(parts) else None


def _shape_error(where: str, source: SourceSection, problem: str, example: Any) -> Malformed:
    columns = f"messages_column={source.messages_column!r}, prompt_column={source.prompt_column!r}"
    return Malformed(
        f"{where}: {problem}; expected a list of {{role, content}} (data.sources {source.name!r}: {columns}), found "
        f"{_shown(example)}"
    )


def _shown(example: Any) -> str:
    """Its start as JSON, halves of surrogate pairs written out: lists of rejected rows are UTF-8."""
    text = json.dumps(example, ensure_ascii=False, default=str)
    text = text if len(text) <= 200 else f"{text[:200]}..."
    return text.encode(errors="backslashreplace").decode()
