"""Splits by content, doubles, decontamination without boilerplate, repetition: compared with numbers derived by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.clean import (
    content_hash,
    double_key,
    evidence_grams,
    is_contaminated,
    normalised,
    repetition,
    split_of,
    words,
)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def numbered(first: int, count: int) -> str:
    return " ".join(f"w{i}" for i in range(first, first + count))


def test_repetition_is_the_share_of_repeated_8_grams():
    assert repetition(list(range(20))) == 0
    assert repetition([5] * 7) == 0  # shorter than one 8-gram
    assert repetition([5] * 11) == pytest.approx(3 / 4)  # four 8-grams, one distinct
    # 16 tokens twice: 25 grams, of which 16 start places are distinct
    assert repetition(list(range(16)) * 2) == pytest.approx(9 / 25)


@given(st.lists(st.integers(0, 3), max_size=60))
def test_repetition_equals_a_brute_force_count(ids):
    grams = [tuple(ids[i : i + 8]) for i in range(len(ids) - 7)]
    repeats = sum(gram in grams[:i] for i, gram in enumerate(grams))
    assert repetition(ids) == pytest.approx(repeats / len(grams) if grams else 0)


def test_normalisation_keeps_what_changes_the_meaning():
    assert normalised("  What  is\n3 + 5? ") == "what is 3 + 5?"
    assert double_key([user("What is 3 + 5?")]) == double_key([user("what is  3 + 5? ")])
    assert double_key([user("What is 3 + 5?")]) != double_key([user("What is 3 - 5?")])
    assert double_key([user("你好吗")]) != double_key([user("再见了")])
    with_system = [{"role": "system", "content": "Be brief."}, user("hi")]
    assert double_key(with_system) != double_key([user("hi")])


def test_words_of_scripts_without_spaces_are_characters():
    assert words("Tell me: 你好 world") == ["tell", "me", "你", "好", "world"]


def test_a_conversation_and_its_longer_cut_fall_on_the_same_side():
    longer = [user("First Question"), {"role": "assistant", "content": "yes"}, user("and then?")]
    for fractions in [(0.5, 0.0), (0.3, 0.3), (0.0, 0.5)]:
        assert split_of(longer, *fractions) == split_of([user("first  question")], *fractions)


def test_split_shares_and_extremes():
    texts = [[user(f"question {i}")] for i in range(4000)]
    splits = [split_of(text, 0.2, 0.1) for text in texts]
    # binomial s.e. of 4000 draws is at most 0.7 %
    assert splits.count("validation") / 4000 == pytest.approx(0.2, abs=0.03)
    assert splits.count("test") / 4000 == pytest.approx(0.1, abs=0.03)
    assert {split_of(text, 0.0, 0.0) for text in texts} == {"train"}
    # growing the test share moves nothing from test to train
    assert all(
        split_of(t, 0.0, 0.2) == "test" for t, s in zip(texts, splits, strict=True) if s == "test"
    )


def test_one_shared_13_gram_contaminates_and_12_words_do_not():
    evidence = evidence_grams([[numbered(0, 20)]], 13)
    assert len(evidence) == 8
    assert is_contaminated([user("please: " + numbered(3, 13) + " thanks")], evidence, 13)
    assert not is_contaminated([user("please: " + numbered(3, 12) + " thanks")], evidence, 13)
    # a turn's end is no place to read on
    halves = [user(numbered(3, 7)), user(numbered(10, 6))]
    assert not is_contaminated(halves, evidence, 13)
    # what the assistant said in the given history is not the prompt
    assert not is_contaminated([{"role": "assistant", "content": numbered(0, 20)}], evidence, 13)


def test_boilerplate_of_a_benchmark_bans_nothing():
    ask = "please reason step by step and put your final answer within a box thank you very much indeed"
    own = [numbered(100 * i, 14) for i in range(10)]
    evidence = evidence_grams([[f"{text} {ask}"] for text in own], 13)
    innocent = user(f"{numbered(5000, 14)} {ask}")
    assert not is_contaminated([innocent], evidence, 13)
    for text in own:
        assert is_contaminated([user(f"quite another wrapper {text}")], evidence, 13)
    # the last words of a test prompt before the boilerplate, with its beginning, are no evidence either
    assert not is_contaminated([user(f"{numbered(9000, 3)} {numbered(8, 6)} {ask}")], evidence, 13)


def test_a_single_test_prompt_has_no_boilerplate():
    assert is_contaminated([user(numbered(0, 13))], evidence_grams([[numbered(0, 13)]], 13), 13)


def test_content_hash_tells_parts_apart():
    assert content_hash("a", "bc") != content_hash("ab", "c")
    assert content_hash("s", [user("x")]) == content_hash("s", [{"content": "x", "role": "user"}])
