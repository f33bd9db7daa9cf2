"""Test prompts inside training data: every hit is listed with the test prompt and the n-gram, and nothing else is hit."""

from __future__ import annotations

import json

from hypothesis import given, settings
from hypothesis import strategies as st

from data.clean import evidence_grams, is_contaminated
from data.contamination import Evidence, Hit, TestPrompt, hit_line


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def numbered(first: int, count: int) -> str:
    return " ".join(f"w{i}" for i in range(first, first + count))


def evidence(*texts: str, n: int = 5) -> Evidence:
    return Evidence.of([TestPrompt("bench", f"row {i}", (t,)) for i, t in enumerate(texts)], n)


def test_a_hit_names_the_prompt_and_the_words():
    found = evidence(numbered(0, 9), numbered(20, 9))
    assert found.hit([user(f"Please: {numbered(22, 5)}!")]) == Hit(
        "w22 w23 w24 w25 w26", "bench", "row 1"
    )
    assert found.hit([user(numbered(22, 4))]) is None
    assert found.hit([{"role": "assistant", "content": numbered(20, 9)}]) is None
    line = json.loads(hit_line("train", "file:7", Hit("a b", "bench", "row 1")))
    assert line == {
        "source": "train",
        "row": "file:7",
        "ngram": "a b",
        "test_source": "bench",
        "test_where": "row 1",
    }


texts = st.lists(st.sampled_from("abcd"), min_size=1, max_size=14).map(" ".join)


@settings(max_examples=60, deadline=None)
@given(st.lists(texts, min_size=1, max_size=4), texts)
def test_a_hit_is_exactly_a_shared_telling_ngram(tests, text):
    """Against the plain set of all n-grams, which the index only has to look up faster."""
    grams = evidence_grams([[t] for t in tests], 3)
    assert (evidence(*tests, n=3).hit([user(text)]) is not None) == is_contaminated(
        [user(text)], grams, 3
    )


def test_evidence_reads_back_what_was_written(tmp_path):
    found = evidence(numbered(0, 9))
    found.write(tmp_path / "evidence.json")
    again = Evidence.read(tmp_path / "evidence.json")
    assert again.num_grams == found.num_grams == 5
    assert again.hit([user(numbered(0, 9))]) == found.hit([user(numbered(0, 9))])
