"""Doubles and near-doubles among millions of prompts, in a few bytes a row.

Signatures are MinHash (Broder 1997, by the rensa library) over the set of 5-grams of words and signs; two of them agree in a
share of places that estimates the Jaccard similarity of the sets, with a standard error of at most 0.05 (128 places). Pairs
are found by banding (Leskovec, Rajaraman, Ullman, Mining of Massive Datasets, 3.4): rows that agree in all places of one of
the bands meet in a bucket, and are then compared by their whole signatures. A band is sorted at a time, so memory is
8 bytes a row beside the verdicts, and time is that of the sorts.

Shapes: R rows, P places of a signature.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from data.clean import normalised

PLACES = 128
_SEED = 1
_SHINGLE = 5
_MISS = 0.01
_MAX_ROUNDS = 64
"""A bucket's rows are compared with its first 64 unlike ones: buckets of thousands of unlike rows stay linear."""
_COMPARE_ROWS = 65_536
# signs count: 3 + 5 is not 3 - 5. Scripts without spaces give a token a character
_TOKENS = re.compile(
    r"[\u0e00-\u0e7f\u3040-\u30ff\u3400-\u9fff]|[^\W\u0e00-\u0e7f\u3040-\u30ff\u3400-\u9fff]+|[^\w\s]"
)

Signatures = npt.NDArray[np.uint32]


@dataclass(frozen=True)
class Bands:
    count: int
    width: int
    """Places a band."""

    def miss_rate(self, similarity: float) -> float:
        """Chance that two rows of this similarity never meet."""
        return float((1 - similarity**self.width) ** self.count)


def bands_for(similarity: float) -> Bands:
    """The widest bands (fewest needless comparisons) that miss at most 1 % of the pairs at `similarity`."""
    widths = (w for w in range(PLACES, 0, -1))
    found = (Bands(PLACES // width, width) for width in widths)
    return next((b for b in found if b.miss_rate(similarity) <= _MISS), Bands(PLACES, 1))


def signatures_of(texts: Sequence[str]) -> Signatures:
    """(R, P), one a text; equal sets of shingles give equal rows, in every process and on every machine."""
    from rensa import RMinHash  # pyright: ignore[reportAttributeAccessIssue] - compiled, without stubs

    rows = RMinHash.digests_from_token_sets([shingles(text) for text in texts], PLACES, _SEED)
    return np.array(rows, dtype=np.uint32).reshape(len(texts), PLACES)


def shingles(text: str) -> list[str]:
    """The text's 5-grams of words and signs; the whole text if it is shorter."""
    tokens = _TOKENS.findall(normalised(text))
    if len(tokens) < _SHINGLE:
        return [" ".join(tokens)]
    return list({" ".join(tokens[i : i + _SHINGLE]) for i in range(len(tokens) - _SHINGLE + 1)})


def first_of_equal(keys: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
    """keys (R, 2) -> (R,) the first row with the same key; a row without an earlier double gives itself."""
    order = np.lexsort((np.arange(len(keys)), keys[:, 1], keys[:, 0]))
    ordered = keys[order]
    starts = np.ones(len(keys), dtype=bool)
    starts[1:] = (ordered[1:] != ordered[:-1]).any(axis=1)
    firsts = order[np.flatnonzero(starts)]
    found = np.empty(len(keys), dtype=np.int64)
    found[order] = firsts[np.cumsum(starts) - 1]
    return found


def near_duplicates(
    signatures: Signatures, similarity: float, protected: npt.NDArray[np.bool_]
) -> npt.NDArray[np.int64]:
    """(R, P), rows by precedence -> (R,) the earlier row that each one is a near-double of, or -1.

    Protected rows (test prompts) are never named doubles, but others may be doubles of them. A row that is a double may have
    been compared with one that turns out to be a double itself: chains of likeness end at a row that stays.
    """
    bands = bands_for(similarity)
    of = np.full(len(signatures), -1, dtype=np.int64)
    for number in range(bands.count):
        columns = slice(number * bands.width, (number + 1) * bands.width)
        alive = np.flatnonzero(of < 0)
        keys = _band_keys(signatures, alive, columns)
        for leaders, others in _bucket_rounds(keys, alive, of):
            likes = _agreement(signatures, leaders, others) >= similarity
            hits = likes & ~protected[others]
            of[others[hits]] = leaders[hits]
    return of


def _band_keys(
    signatures: Signatures, rows: npt.NDArray[np.int64], columns: slice
) -> npt.NDArray[np.uint64]:
    """(R,) one number for a band's places; that unlike bands share one is rare and costs a comparison."""
    keys = np.zeros(len(rows), dtype=np.uint64)
    for start in range(0, len(rows), _COMPARE_ROWS):
        part = slice(start, start + _COMPARE_ROWS)
        for place in signatures[rows[part], columns].T.astype(np.uint64):
            keys[part] = (keys[part] ^ place) * np.uint64(0x9E3779B97F4A7C15)
            keys[part] ^= keys[part] >> np.uint64(29)
    return keys


def _bucket_rounds(
    keys: npt.NDArray[np.uint64], rows: npt.NDArray[np.int64], of: npt.NDArray[np.int64]
) -> Iterator[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]]:
    """(leaders, others) of each round: in every bucket, the first row that is left, and those after it.

    The caller writes doubles into `of` between rounds; they leave their bucket, and so does the leader.
    """
    order = np.argsort(keys, kind="stable")
    rows, keys = rows[order], keys[order]
    for _ in range(_MAX_ROUNDS):
        starts = np.ones(len(keys), dtype=bool)
        starts[1:] = keys[1:] != keys[:-1]
        bucket = np.cumsum(starts) - 1
        alone = np.bincount(bucket)[bucket] == 1 if len(keys) else starts
        rows, keys, starts = rows[~alone], keys[~alone], starts[~alone]
        if not len(rows):
            return
        leaders = rows[np.flatnonzero(starts)][np.cumsum(starts) - 1]
        yield leaders[~starts], rows[~starts]
        stays = ~starts & (of[rows] < 0)
        rows, keys = rows[stays], keys[stays]


def _agreement(
    signatures: Signatures, left: npt.NDArray[np.int64], right: npt.NDArray[np.int64]
) -> npt.NDArray[np.float64]:
    """Share of equal places, pair by pair."""
    found = np.empty(len(left))
    for start in range(0, len(left), _COMPARE_ROWS):
        part = slice(start, start + _COMPARE_ROWS)
        found[part] = (signatures[left[part]] == signatures[right[part]]).mean(axis=1)
    return found


def agreement(signatures: Signatures, left: int, right: int) -> float:
    """Estimated similarity of two rows."""
    return float((signatures[left] == signatures[right]).mean())
