"""Doubles and near-doubles against brute force, and the promises that a million rows need: order, protection, chains."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.dedupe import (
    PLACES,
    bands_for,
    first_of_equal,
    near_duplicates,
    shingles,
    signatures_of,
)


def jaccard(left: str, right: str) -> float:
    a, b = set(shingles(left)), set(shingles(right))
    return len(a & b) / len(a | b)


def random_text(rng: np.random.Generator, num_words: int) -> list[str]:
    return [f"w{i}" for i in rng.integers(0, 5000, num_words)]


def corpus_with_doubles(seed: int, num_rows: int) -> list[str]:
    """Every third text is an earlier one with up to three words changed."""
    rng = np.random.default_rng(seed)
    texts: list[list[str]] = []
    for row in range(num_rows):
        if row % 3 == 2:
            text = list(texts[rng.integers(0, row)])
            for _ in range(rng.integers(0, 4)):
                text[rng.integers(0, len(text))] = "other"
        else:
            text = random_text(rng, int(rng.integers(40, 160)))
        texts.append(text)
    return [" ".join(text) for text in texts]


def none_protected(num_rows: int) -> np.ndarray:
    return np.zeros(num_rows, dtype=bool)


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), max_size=30))
def test_first_of_equal_is_the_brute_force_answer(rows):
    keys = np.array(rows, dtype=np.uint64).reshape(-1, 2)
    assert first_of_equal(keys).tolist() == [rows.index(row) for row in rows]


def test_shingles_keep_signs_and_short_texts_whole():
    assert shingles("What is 3 + 5?") != shingles("What is 3 - 5?")
    assert shingles("Hi  there") == ["hi there"]
    assert set(shingles("a b c d e f")) == {"a b c d e", "b c d e f"}
    assert shingles("你好吗朋友们") == shingles("你好 吗朋友们")
    assert set(shingles("A, b: c")) == {"a , b : c"}


def test_signatures_estimate_jaccard_within_their_error():
    texts = corpus_with_doubles(1, 240)
    signatures = signatures_of(texts)
    pairs = [(i, j) for j in range(2, 240, 3) for i in range(j)]
    exact = np.array([jaccard(texts[i], texts[j]) for i, j in pairs])
    found = np.array([(signatures[i] == signatures[j]).mean() for i, j in pairs])
    related = exact > 0.1
    assert related.sum() > 50
    # at most sqrt(0.25 / 128) = 0.044 a pair; five of them for the worst of a hundred
    assert np.abs(found - exact)[related].max() < 5 * 0.5 / PLACES**0.5
    assert abs((found - exact)[related].mean()) < 0.01


@pytest.mark.parametrize("similarity", [0.5, 0.7, 0.8, 0.9, 0.99])
def test_bands_miss_at_most_one_pair_in_a_hundred(similarity):
    bands = bands_for(similarity)
    assert bands.count * bands.width <= PLACES
    assert bands.miss_rate(similarity) <= 0.01
    wider = bands.width + 1
    assert (1 - similarity**wider) ** (PLACES // wider) > 0.01 or bands.width == PLACES


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("similarity", [0.6, 0.8, 0.9])
def test_near_duplicates_agree_with_comparing_all_pairs(seed, similarity):
    """A row is named a double exactly if some earlier row agrees in enough places; which one it is named after may differ."""
    signatures = signatures_of(corpus_with_doubles(seed, 90))
    of = near_duplicates(signatures, similarity, none_protected(90))
    agree = (signatures[:, None] == signatures[None]).mean(axis=2)
    likes = np.tril(agree >= similarity, -1)
    named = np.flatnonzero(of >= 0)
    assert named.size
    assert all(likes[row, of[row]] for row in named)
    # a leader that was dropped before it could meet a row leaves the row to the chain's other members: none are lost here
    kept = np.flatnonzero(of < 0)
    assert not likes[np.ix_(kept, kept)].any()


def test_protected_rows_stay_and_others_are_doubles_of_them():
    text = " ".join(random_text(np.random.default_rng(0), 60))
    protected = np.array([True, True, False])
    of = near_duplicates(signatures_of([text, text, text]), 0.8, protected)
    assert of.tolist()[:2] == [-1, -1]
    assert of[2] in (0, 1)


def test_order_of_unrelated_rows_changes_no_verdict():
    texts = corpus_with_doubles(3, 60)
    verdict = near_duplicates(signatures_of(texts), 0.8, none_protected(60)) >= 0
    strangers = [" ".join(random_text(np.random.default_rng(100 + i), 50)) for i in range(60)]
    mixed = [text for pair in zip(strangers, texts, strict=True) for text in pair]
    found = near_duplicates(signatures_of(mixed), 0.8, none_protected(120)) >= 0
    assert found[1::2].tolist() == verdict.tolist()
    assert not found[::2].any()


def test_a_bucket_of_thousands_of_equal_rows_is_one_comparison_a_row():
    text = " ".join(random_text(np.random.default_rng(0), 60))
    of = near_duplicates(signatures_of([text] * 3000), 0.8, none_protected(3000))
    assert of[0] == -1
    assert (of[1:] == 0).all()
