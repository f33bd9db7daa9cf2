"""What keeps a corpus honest: identities and splits by content, doubles, test prompts inside training data, loops."""

from __future__ import annotations

import hashlib
import json
import re
import unicodedata
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from data.corpus import Split

REPETITION_NGRAM = 8
_BOILERPLATE_NGRAM = 5
# Han, kana and Thai are written without spaces: a character counts as a word there
_WORDS = re.compile(
    r"[\u0e00-\u0e7f\u3040-\u30ff\u3400-\u9fff]|[^\W\u0e00-\u0e7f\u3040-\u30ff\u3400-\u9fff]+"
)


def content_hash(*parts: Any) -> str:
    """32 hex digits of the JSON of `parts`; a sample's id is that of its source and prompt messages."""
    text = json.dumps(parts, ensure_ascii=False, sort_keys=True)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def normalised(text: str) -> str:
    """Unicode form, case and spacing levelled; signs stay, since 3 + 5 is not 3 - 5."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def double_key(messages: Sequence[Mapping[str, Any]]) -> str:
    """Equal for prompts that are the same after normalisation."""
    return content_hash(*((m["role"], normalised(m["content"])) for m in messages))


def split_of(
    messages: Sequence[Mapping[str, Any]], validation_fraction: float, test_fraction: float
) -> Split:
    """By hash of the first user turn, whatever source or seed: all cuts of one conversation fall on the same side."""
    first = next(m["content"] for m in messages if m["role"] == "user")
    place = int(content_hash("split", normalised(first)), 16) / 16**32
    if place < test_fraction:
        return "test"
    return "validation" if place < test_fraction + validation_fraction else "train"


def words(text: str) -> list[str]:
    return _WORDS.findall(normalised(text))


def ngrams(items: Sequence[Any], n: int) -> Iterator[tuple[Any, ...]]:
    return (tuple(items[i : i + n]) for i in range(len(items) - n + 1))


def user_texts(messages: Sequence[Mapping[str, Any]]) -> list[str]:
    return [m["content"] for m in messages if m["role"] == "user"]


def telling_grams(prompts: Sequence[Sequence[str]], n: int) -> list[set[tuple[str, ...]]]:
    """For each of one source's test prompts (a list of user texts), the n-grams of words that tell it.

    Boilerplate does not count: words inside a 5-gram that half of the prompts share (and at least two) are cut out, and
    no n-gram spans the cut. Otherwise an instruction that wraps every prompt of a benchmark would ban it from training.
    """
    tokenised = [[words(text) for text in texts] for texts in prompts]
    shared: Counter[tuple[str, ...]] = Counter()
    for texts in tokenised:
        shared.update({gram for text in texts for gram in ngrams(text, _BOILERPLATE_NGRAM)})
    often = {gram for gram, count in shared.items() if count >= max(2, len(prompts) / 2)}
    return [
        {gram for text in texts for run in _without(text, often) for gram in ngrams(run, n)}
        for texts in tokenised
    ]


def evidence_grams(prompts: Sequence[Sequence[str]], n: int) -> set[tuple[str, ...]]:
    """The n-grams that tell any of the test prompts of one source."""
    return set().union(*telling_grams(prompts, n))


def is_contaminated(
    messages: Sequence[Mapping[str, Any]], evidence: set[tuple[str, ...]], n: int
) -> bool:
    """True if a user turn shares an n-gram with `evidence`."""
    return any(gram in evidence for text in user_texts(messages) for gram in ngrams(words(text), n))


def repetition(items: Sequence[int] | Sequence[str]) -> float:
    """Share of 8-grams (of token ids, or of words) that occurred before in the same text; 0 for texts shorter than one 8-gram."""
    num_grams = len(items) - REPETITION_NGRAM + 1
    if num_grams <= 0:
        return 0.0
    return 1.0 - len(set(ngrams(items, REPETITION_NGRAM))) / num_grams


def _without(text: list[str], boilerplate: set[tuple[str, ...]]) -> list[list[str]]:
    """The runs of words left when those inside a boilerplate n-gram are cut out."""
    cut = [False] * len(text)
    for i, gram in enumerate(ngrams(text, _BOILERPLATE_NGRAM)):
        if gram in boilerplate:
            cut[i : i + _BOILERPLATE_NGRAM] = [True] * _BOILERPLATE_NGRAM
    runs: list[list[str]] = [[]]
    for word, is_cut in zip(text, cut, strict=True):
        if is_cut:
            runs.append([])
        else:
            runs[-1].append(word)
    return runs
