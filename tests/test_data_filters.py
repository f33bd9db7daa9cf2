"""Filters of one conversation: what is broken is found, what is only unusual is not."""

# ruff: noqa: RUF001 - the signs that look like others are what is tested
from __future__ import annotations

import pytest

from data.filters import broken_unicode, other_language, repeats_itself, wrong_order


def turns(*roles: str) -> list[dict[str, str]]:
    return [{"role": role, "content": "x"} for role in roles]


@pytest.mark.parametrize(
    "roles",
    [
        "user",
        "system user",
        "user assistant user",
        "assistant user",  # a greeting
        "system user assistant tool assistant user",
        "user assistant tool tool assistant assistant user",
        "user assistant tool",
    ],
)
def test_orders_that_a_server_would_take(roles):
    assert wrong_order(turns(*roles.split())) is None


@pytest.mark.parametrize(
    ("roles", "problem"),
    [
        ("user system", "system turn at place 1"),
        ("system system user", "system turn at place 1"),
        ("user user", "user turn after user turn"),
        ("tool user", "tool turn after nothing"),
        ("user tool", "tool turn after user"),
        ("user assistant tool user", "user turn after tool turn"),
    ],
)
def test_orders_that_no_chat_has(roles, problem):
    assert wrong_order(turns(*roles.split())) == problem


@pytest.mark.parametrize(
    "text",
    [
        "Plain text,\nwith lines\tand tabs.",
        "Schöne Grüße, naïve façade — “quoted” … €5, 20 °C, ½ Å² and ×",
        "Привет, мир! 你好，世界。 こんにちは שלום مرحبا สวัสดี",
        "emoji 👩‍👩‍👧 with joiners, e\u0301 combining, private \ue000",
        "São Paulo à noite: Ça va? Ñandú",
    ],
)
def test_real_text_of_any_script_is_not_broken(text):
    assert broken_unicode(text) is None


@pytest.mark.parametrize(
    "sentence", ["It’s “fine” – really…", "Grüße aus Köln, schöne Straße", "déjà vu, très bien"]
)
@pytest.mark.parametrize("encoding", ["cp1252", "latin-1"])
def test_utf8_that_was_read_as_something_else_is_found(sentence, encoding):
    wrong = sentence.encode().decode(encoding, errors="ignore")
    assert "another encoding" in (broken_unicode(wrong) or "") or "control" in (
        broken_unicode(wrong) or ""
    )


def test_one_sign_of_three_wrong_letters_is_enough_and_a_pair_is_not():
    assert "another encoding" in (broken_unicode("It’s fine".encode().decode("cp1252")) or "")
    assert broken_unicode("an area of 3 Å²") is None


@pytest.mark.parametrize(
    ("text", "sign"),
    [
        ("a \ufffd b", "U+FFFD"),
        ("bell \x07", "U+0007"),
        ("c1 \x88", "U+0088"),
        ("\uffff", "U+FFFF"),
    ],
)
def test_what_no_keyboard_writes_is_named(text, sign):
    assert sign in (broken_unicode(text) or "")


ENGLISH = (
    "The quick brown fox jumps over the lazy dog, and then it walks home through the old forest. "
    * 2
)
GERMAN = (
    "Der schnelle braune Fuchs springt über den faulen Hund und läuft dann durch den Wald nach Hause. "
    * 2
)


def test_only_sure_and_long_texts_of_another_language_are_rejected():
    assert other_language(ENGLISH, ["en"]) is None
    assert other_language(GERMAN, ["en"]) == "de"
    assert other_language(GERMAN, ["en", "de"]) is None
    assert other_language(GERMAN, []) is None  # no list: all
    assert other_language("Guten Tag", ["en"]) is None  # too short to tell
    assert (
        other_language(
            "写一个函数来计算两个数的和，并解释它是如何工作的，谢谢你的帮助，非常感谢。", ["en"]
        )
        == "zh"
    )


def test_code_blocks_are_no_language():
    code = "```python\n" + "def summe(werte):\n    return ergebnis\n" * 20 + "```"
    assert other_language(f"{ENGLISH}\n{code}", ["en"]) is None
    assert other_language(code, ["de"]) is None


def test_repetition_is_judged_by_the_worst_turn():
    loop = "again and again and " * 30
    assert repeats_itself([ENGLISH[: len(ENGLISH) // 2], loop], 0.7)
    assert repeats_itself([ENGLISH[: len(ENGLISH) // 2]], 0.7) is None
    assert repeats_itself([loop], 1.0) is None
