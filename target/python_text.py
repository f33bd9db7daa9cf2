"""Text that every machine has: functions of Python's standard library and its language reference, each cut in two.

The first part is what a user shows, the second what follows it. It differs from one Python version to another.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import sysconfig
import textwrap
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

_SKIPPED_FOLDERS = {"site-packages", "test", "tests", "idle_test", "__pycache__", "encodings"}
"""Tests dwarf the rest and repeat themselves; encodings are tables."""
_FEWEST_LINES = 4
_FEWEST_CHARACTERS, _MOST_CHARACTERS = 60, 1200
_HELD_OUT_SHARE = 5


@dataclass(frozen=True)
class Passage:
    task: Literal["code", "docs"]
    name: str
    """File and function, or topic and paragraph; unique."""
    prompt: str
    response: str
    is_held_out: bool
    """One file or topic in five: no model made here is trained on it."""


def read_passages() -> list[Passage]:
    """All of them, in an order that depends on their text alone and mixes files.

    Raises FileNotFoundError if this Python comes without its sources.
    """
    passages = [*_code_passages(), *_docs_passages()]
    return sorted(passages, key=lambda passage: _number("order", passage.prompt, passage.response))


def _code_passages() -> Iterator[Passage]:
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = [
        file
        for file in sorted(folder.rglob("*.py"))
        if not _SKIPPED_FOLDERS & set(file.relative_to(folder).parts)
    ]
    if not files:
        raise FileNotFoundError(
            f"target.prepare.kind=hybrid trains on Python's own sources, but {folder} has no .py file; use a Python that "
            "brings them"
        )
    for file in files:
        name = file.relative_to(folder).as_posix()
        try:
            yield from _functions(name, file.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue  # a template or a sample of wrong code


def _functions(file: str, text: str) -> Iterator[Passage]:
    """Functions and methods, not those inside functions: these are in the text of the outer one."""
    with warnings.catch_warnings(action="ignore"):
        module = ast.parse(text)
    lines = text.splitlines()
    for node in _outer_functions(module):
        first = min(node.lineno, *(d.lineno for d in node.decorator_list), node.lineno) - 1
        body = node.body[0].lineno - 1
        assert node.end_lineno is not None
        own = textwrap.dedent("\n".join(lines[first : node.end_lineno])).splitlines()
        # between the signature and half of the body
        name = f"{file}:{node.lineno} {node.name}"
        room = max(1, (len(own) - (body - first)) // 2)
        cut = max(1, body - first) + _number("cut", name) % room
        if len(own) >= _FEWEST_LINES:
            yield from _passage("code", file, name, "\n".join(own[:cut]), "\n".join(own[cut:]))


def _outer_functions(
    node: ast.Module | ast.ClassDef,
) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for child in node.body:
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield child
        elif isinstance(child, ast.ClassDef):
            yield from _outer_functions(child)


def _docs_passages() -> Iterator[Passage]:
    """The language reference as `help()` shows it: a paragraph, and the two after it."""
    topics: Mapping[str, str] = importlib.import_module("pydoc_data.topics").topics
    for topic, text in sorted(topics.items()):
        paragraphs = [p.strip("\n") for p in text.split("\n\n") if p.strip()]
        for i in range(0, len(paragraphs) - 1, 3):
            response = "\n\n".join(paragraphs[i + 1 : i + 3])
            yield from _passage("docs", topic, f"{topic} {i}", paragraphs[i], response)


def _passage(
    task: Literal["code", "docs"], origin: str, name: str, prompt: str, response: str
) -> Iterator[Passage]:
    if (
        len(response) >= _FEWEST_CHARACTERS
        and len(prompt) + len(response) <= _MOST_CHARACTERS
        and prompt.strip()
    ):
        yield Passage(
            task, name, prompt, response, _number("held out", task, origin) % _HELD_OUT_SHARE == 0
        )


def _number(*parts: str) -> int:
    return int(hashlib.sha256("\0".join(parts).encode()).hexdigest()[:15], 16)
