"""Generated text as an assistant's message: thinking, answer and tool calls apart, as servers' parsers hand it to clients.

Two spellings of a tool call are read, both inside <tool_call> ... </tool_call>: a JSON object {name, arguments} (Qwen2.5,
Qwen3, Hermes), and <function=name> with <parameter=key> blocks (Qwen3-Coder, Qwen3.5, Qwen3.6). A text with a call that is
neither stays plain text, as it does in a server.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from data.conversations import Message

_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
_FUNCTION = re.compile(r"<function=([^>\n]+)>\n?(.*?)\n?</function>", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)


def reply_of_text(
    text: str, knows_thinking: bool, thinking_opened: bool, tools: Sequence[Mapping[str, Any]] = ()
) -> Message:
    """The message of a generated `text` without its special tokens.

    knows_thinking: the template reads `reasoning_content`, so thinking leaves the content. thinking_opened: the prompt ended
    inside a thinking block, so a text that never closes it is all thinking. tools: their schemas type the arguments.
    """
    message: Message = {"role": "assistant"}
    if knows_thinking and (thinking_opened or "</think>" in text):
        thinking, _, text = text.partition("</think>")
        message["reasoning_content"] = thinking.split("<think>")[-1].strip("\n")
        text = text.lstrip("\n")
    calls = _calls_of(text, tools)
    if calls:
        text = text[: text.index("<tool_call>")].rstrip()
        message["tool_calls"] = calls
    return {**message, "content": text}


def called_names(message: Message) -> list[str]:
    """Names of the functions that an assistant's turn calls, in order; [] for a plain answer.

    Conversations that spell their calls in the text (Hermes) are read like generated text.
    """
    calls = message.get("tool_calls") or _calls_of(message["content"], ())
    return [call.get("function", call)["name"] for call in calls]


def _calls_of(text: str, tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Every call of the text; [] if there is none or one of them is malformed."""
    bodies = _CALL.findall(text)
    if len(bodies) != text.count("<tool_call>"):
        return []
    found = [
        _json_call(body) if body.startswith("{") else _tagged_call(body, tools) for body in bodies
    ]
    calls = [call for call in found if call is not None]
    return (
        [{"type": "function", "function": call} for call in calls]
        if len(calls) == len(found)
        else []
    )


def _json_call(body: str) -> dict[str, Any] | None:
    try:
        call = _json_of(body)
    except ValueError:
        return None
    if not isinstance(call.get("name"), str) or not isinstance(call.get("arguments", {}), dict):
        return None
    return {"name": call["name"], "arguments": call.get("arguments", {})}


def _tagged_call(body: str, tools: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    match = _FUNCTION.fullmatch(body)
    if match is None:
        return None
    name = match[1].strip()
    types = _parameter_types(name, tools)
    arguments = {
        key.strip(): _typed(value, types.get(key.strip()))
        for key, value in _PARAMETER.findall(match[2])
    }
    return {"name": name, "arguments": arguments}


def _parameter_types(name: str, tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    for tool in tools:
        schema = tool.get("function", tool)
        if schema.get("name") == name:
            properties = (schema.get("parameters") or {}).get("properties") or {}
            return {key: value.get("type") for key, value in properties.items()}
    return {}


def _typed(value: str, kind: Any) -> Any:
    """Tags carry text only; a parameter that its schema says is no string is read as JSON."""
    if kind in (None, "string"):
        return value
    try:
        return _json_of(value)
    except ValueError:
        return value


def _json_of(text: str) -> Any:
    """Raises ValueError for what is no JSON, or cannot be said again in UTF-8: half a surrogate pair, brackets without end."""
    try:
        value = json.loads(text)
        json.dumps(value, ensure_ascii=False).encode()
    except RecursionError as error:
        raise ValueError(str(error)) from error
    return value
