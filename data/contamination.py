"""Test prompts inside training data: n-grams of words that tell a test prompt, and which rows hold one.

The words inside a prompt that its whole benchmark shares do not count (data/clean.py `telling_grams`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.files import read_json, write_json
from data.clean import telling_grams, user_texts, words

_START = 2


@dataclass(frozen=True)
class TestPrompt:
    __test__ = False  # no test class, whatever pytest thinks of the name

    source: str
    where: str
    texts: tuple[str, ...]
    """User turns."""


@dataclass(frozen=True)
class Hit:
    ngram: str
    test_source: str
    test_where: str


class Evidence:
    """All n-grams that tell a test prompt. About 100 bytes each; a benchmark of a thousand prompts has some 50,000."""

    def __init__(self, n: int, origins: dict[str, list[str]]):
        """origins: n-gram, its words joined by spaces -> [source, where] of the first test prompt that it tells."""
        self.n, self._origins = n, origins
        # two words settle most places of a text without making its n-gram
        self._starts = {" ".join(gram.split(" ", _START)[:_START]) for gram in origins}

    @classmethod
    def of(cls, prompts: Iterable[TestPrompt], n: int) -> Evidence:
        by_source: dict[str, list[TestPrompt]] = {}
        for prompt in prompts:
            by_source.setdefault(prompt.source, []).append(prompt)
        origins: dict[str, list[str]] = {}
        for source, tests in by_source.items():
            found = telling_grams([test.texts for test in tests], n)
            for test, grams in zip(tests, found, strict=True):
                for gram in sorted(" ".join(gram) for gram in grams):
                    origins.setdefault(gram, [source, test.where])
        return cls(n, origins)

    @property
    def num_grams(self) -> int:
        return len(self._origins)

    def hit(self, messages: Sequence[Mapping[str, Any]]) -> Hit | None:
        """The first n-gram of a user turn that tells a test prompt."""
        for text in user_texts(messages):
            found = words(text)
            for i in range(len(found) - self.n + 1):
                if " ".join(found[i : i + _START]) not in self._starts:
                    continue
                gram = " ".join(found[i : i + self.n])
                if gram in self._origins:
                    return Hit(gram, *self._origins[gram])
        return None

    def write(self, path: Path) -> None:
        write_json(path, {"n": self.n, "origins": self._origins})

    @classmethod
    def read(cls, path: Path) -> Evidence:
        stored = read_json(path, "remove the corpus' units folder and run the data stage again")
        return cls(stored["n"], stored["origins"])


def hit_line(source: str, where: str, hit: Hit) -> str:
    """A line of the report that lists what was taken out of training."""
    listed = {"source": source, "row": where, **vars(hit)}
    return json.dumps(listed, ensure_ascii=False) + "\n"
