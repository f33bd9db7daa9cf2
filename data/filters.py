"""Filters that judge one conversation by itself: order of roles, broken Unicode, language, repetition.

Each gives None, or what is wrong in a few words for the list of rejected rows.
"""

from __future__ import annotations

import functools
import re
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

from data.clean import repetition, words

_CODE_BLOCK = re.compile(r"```.*?(```|$)", re.DOTALL)
_LINE_CONTROLS = "\t\n\r\f\v"
# UTF-8 read as Windows-1252 or Latin-1: a lead byte's letter, then one to three continuation bytes' signs
_CONTINUATION = r"[\u0080-\u00bf\u0152\u0153\u0160\u0161\u0178\u017d\u017e\u0192\u02c6\u02dc\u2013-\u2022\u2026\u2030\u2039\u203a\u20ac\u2122]"
_DOUBLE_ENCODED = re.compile(rf"[\u00c2-\u00f4]{_CONTINUATION}{{1,3}}")
_LANGUAGE_CHARS = 2000
_LANGUAGE_LETTERS = 60
"""Shorter texts are not judged: a language is guessed badly from a few words."""
_LANGUAGE_SURE = 0.9


def wrong_order(messages: Sequence[Mapping[str, Any]]) -> str | None:
    """A conversation is an optional system turn, then user turns, each answered before the next one; tool results follow a
    call. An assistant's turn may be several messages, and may open the conversation (a greeting)."""
    before = None
    for place, message in enumerate(messages):
        role = message["role"]
        if role == "system" and place > 0:
            return f"system turn at place {place}"
        if role == "tool" and before not in ("assistant", "tool"):
            return f"tool turn after {before or 'nothing'}"
        if role == "user" and before in ("user", "tool"):
            return f"user turn after {before} turn"
        before = role
    return None


def broken_unicode(text: str) -> str | None:
    """Replacement characters, control characters, non-characters, text that was decoded with the wrong encoding."""
    for character in set(text):
        if character == "\ufffd":
            return "replacement character U+FFFD"
        category = unicodedata.category(character)
        if category == "Cc" and character not in _LINE_CONTROLS:
            return f"control character U+{ord(character):04X}"
        if category == "Cn" and ord(character) & 0xFFFE == 0xFFFE:
            return f"non-character U+{ord(character):04X}"
    wrong = [m[0] for m in _DOUBLE_ENCODED.finditer(text) if _is_double_encoded(m[0])]
    # a pair of signs may be meant (Å² is a unit); several pairs, or three signs that make one, are not
    if len(wrong) > 1 or any(len(found) > 2 for found in wrong):
        return f"UTF-8 read in another encoding: {wrong[0]!r}"
    return None


def other_language(text: str, languages: Sequence[str]) -> str | None:
    """The language of the prose in `text` (code blocks aside) if it surely is none of `languages` (ISO 639-1)."""
    prose = _CODE_BLOCK.sub(" ", text)[:_LANGUAGE_CHARS]
    letters = sum(character.isalpha() for character in prose)
    # a Han, kana or hangul sign says more than a letter
    weight = letters + 2 * sum("\u3040" <= character <= "\ud7af" for character in prose)
    if not languages or weight < _LANGUAGE_LETTERS:
        return None
    language, probability = _identifier().classify(prose)
    if language in languages or probability < _LANGUAGE_SURE:
        return None
    return str(language)


def repeats_itself(texts: Sequence[str], max_repetition: float) -> str | None:
    """By the share of 8-grams of words that occurred before in the same turn."""
    worst = max((repetition(words(text)) for text in texts), default=0.0)
    return f"{worst:.2f} of its 8-grams" if worst > max_repetition else None


def _is_double_encoded(found: str) -> bool:
    for encoding in ("cp1252", "latin-1"):
        try:
            decoded = found.encode(encoding).decode("utf-8")
        except UnicodeError:
            continue
        # two signs that happen to be valid together are no proof; letters and typographic signs are what gets broken
        return unicodedata.category(decoded[0])[0] in "LPSZ"
    return False


@functools.cache
def _identifier() -> Any:
    # half a second and 60 MB that only recipes with languages pay
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    return LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
