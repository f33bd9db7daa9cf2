"""A prompt: what a row of a source is once it was chosen to get a label."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from common.files import atomic_path
from configs.schema import Config
from data.conversations import Message
from data.corpus import Split


@dataclass(frozen=True)
class Prompt:
    sample_id: str
    source: str
    task: str
    split: Split
    where: str
    license: str
    messages: tuple[Message, ...]
    """Without the last label. Earlier assistant turns are the corpus' own, whether or not they are to be answered anew."""
    prompt_ids: np.ndarray
    """(P,) int32, of the first turn that gets a label."""
    response_ids: np.ndarray | None
    """The corpus' own last label, with its EOS; None if the target is to answer."""
    tools: tuple[dict[str, Any], ...] = ()
    """Function schemas that the chat template is given."""
    thinking: bool | None = None
    """Overrides the template's `enable_thinking`; None: as target.chat_template_kwargs say."""


@dataclass
class SourceCounts:
    """What became of a source's rows. `read` equals the sum of the rest once the corpus is written."""

    read: int = 0
    done: Counter[str] = field(default_factory=Counter)
    """By split."""
    rejected: Counter[str] = field(default_factory=Counter)
    """By reason."""
    rows: int = 0
    """Corpus rows that the done ones gave: more than one where the template rewrites a conversation's history."""
    ended_early: Counter[str] = field(default_factory=Counter)
    """Of the done ones, conversations whose later turns got no label, by reason."""


def write_prompts(file: Path, prompts: Sequence[Prompt], config: Config) -> None:
    """The chosen prompts as JSON lines, for a look before labelling; it is also how the shipped demo prompts were made."""
    recipes = {s.name: s.path for s in config.data.sources if s.kind == "packages"}
    with atomic_path(file) as aside, aside.open("w", encoding="utf-8") as out:
        for prompt in sorted(prompts, key=lambda p: (p.source, p.where)):
            row = {
                "recipe": recipes.get(prompt.source, prompt.source),
                "row": prompt.where.partition(" ")[2] or prompt.where,
                "license": prompt.license,
                "messages": list(prompt.messages),
            }
            out.write(json.dumps(row, ensure_ascii=False) + "\n")
