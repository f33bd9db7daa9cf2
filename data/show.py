"""Rows of a corpus as a person reads them: what the target saw, what it generated, and what of its turns is not in the loss.

    context     system, user and tool turns, and whatever else the template wrote
    generated   loss_mask is true: tokens that the target made here, thinking included
    masked      assistant turns outside the loss: the turn's opening, and earlier replies as the template shows them again

Colour where the terminal has it, brackets elsewhere. A line break shows as `↵` before it breaks the line, so that those the
target generated are seen; other characters that do not print are written out.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from transformers import PreTrainedTokenizerBase

from data.corpus import CorpusManifest, CorpusRow, iter_corpus
from data.template import ChatTemplate

Kind = Literal["context", "generated", "masked"]

_SEARCHED_ROWS = 2048
_SHOWN_CHARACTERS: Mapping[Kind, int] = {"context": 1600, "masked": 1600, "generated": 6000}
"""Of one piece; a longer one loses its middle."""
_COLOURS: Mapping[Kind, str] = {"context": "2", "generated": "32", "masked": "33"}
_BRACKETS: Mapping[Kind, tuple[str, str]] = {
    "context": ("", ""),
    "generated": ("⟦", "⟧"),
    "masked": ("⟨", "⟩"),
}


@dataclass(frozen=True)
class Piece:
    """Neighbouring tokens of one kind; added tokens (<|im_end|>, <think>) stand alone."""

    kind: Kind
    is_special: bool
    text: str


def show_rows(
    folder: Path,
    manifest: CorpusManifest,
    tokenizer: PreTrainedTokenizerBase,
    template: ChatTemplate,
    num_rows: int,
    colour: bool,
) -> Iterator[str]:
    """A legend and `num_rows` rows, taken from the sources in turn, as lines to print. Reads as few shards as it needs."""
    yield from _legend(colour)
    rows = _chosen(folder, manifest, num_rows)
    opening = template.turn_opening_ids()
    for number, row in enumerate(rows, start=1):
        yield ""
        yield _styled(_heading(row, number, len(rows)), "1", colour)
        yield from draw_row(row, tokenizer, opening, colour)


def draw_row(
    row: CorpusRow, tokenizer: PreTrainedTokenizerBase, opening: Sequence[int], colour: bool
) -> list[str]:
    """The row's text in lines. opening: ids that begin an assistant's turn."""
    kinds = token_kinds(row.input_ids.tolist(), row.loss_mask, opening, tokenizer.eos_token_id)
    pieces = pieces_of(row.input_ids.tolist(), kinds, tokenizer)
    if colour:
        text = "".join(map(_coloured, pieces))
    else:
        runs = [list(run) for _, run in itertools.groupby(pieces, key=lambda piece: piece.kind)]
        text = "".join(_bracketed(run[0].kind, run) for run in runs)
    return text.split("\n")


def token_kinds(
    ids: Sequence[int], loss_mask: np.ndarray, opening: Sequence[int], eos: object
) -> list[Kind]:
    """Of each token. An assistant's turn reaches from its opening to the next EOS token."""
    kinds: list[Kind] = []
    inside, wanted = False, list(opening)
    for place, token in enumerate(ids):
        if wanted and list(ids[place + 1 - len(wanted) : place + 1]) == wanted:
            inside = True
            for earlier in range(len(kinds) - len(wanted) + 1, len(kinds)):
                kinds[earlier] = "masked"
        if loss_mask[place]:
            kinds.append("generated")
        else:
            kinds.append("masked" if inside else "context")
        inside = inside and token != eos
    return kinds


def pieces_of(
    ids: Sequence[int], kinds: Sequence[Kind], tokenizer: PreTrainedTokenizerBase
) -> list[Piece]:
    """Decoded in runs, never token by token: a character may take several."""
    added = tokenizer.added_tokens_decoder
    marked = zip(kinds, (token in added for token in ids), ids, strict=True)
    pieces: list[Piece] = []
    for _, run in itertools.groupby(marked, key=lambda item: item[:2]):
        kept = list(run)
        kind, is_special, tokens = kept[0][0], kept[0][1], [token for _, _, token in kept]
        for part in [[token] for token in tokens] if is_special else [tokens]:
            text = tokenizer.decode(part, skip_special_tokens=False)
            assert isinstance(text, str)
            pieces.append(Piece(kind, is_special, text))
    return pieces


def wants_colour(is_terminal: bool, environment: Mapping[str, str]) -> bool:
    """NO_COLOR (https://no-color.org) forbids it, FORCE_COLOR asks for it, else a terminal that is not dumb has it."""
    if environment.get("NO_COLOR"):
        return False
    if environment.get("FORCE_COLOR"):
        return True
    return is_terminal and environment.get("TERM") != "dumb"


def _chosen(folder: Path, manifest: CorpusManifest, num_rows: int) -> list[CorpusRow]:
    """The first rows of each source in turn, of the first rows of the corpus; they are in mixed order there."""
    by_source: dict[str, list[CorpusRow]] = {}
    for row in itertools.islice(iter_corpus(folder, manifest), _SEARCHED_ROWS):
        # a view into the batch it came from would keep that alive
        by_source.setdefault(row.source, []).append(
            dataclasses.replace(row, input_ids=row.input_ids.copy(), loss_mask=row.loss_mask.copy())
        )
    turns = itertools.zip_longest(*by_source.values())
    return list(itertools.islice((row for turn in turns for row in turn if row), num_rows))


def _heading(row: CorpusRow, number: int, total: int) -> str:
    edges = np.diff(row.loss_mask.astype(np.int8), prepend=0)
    num_turns = int((edges == 1).sum())
    thinking = {None: "", True: ", thinking", False: ", not thinking"}[row.thinking]
    ended = "" if row.finished else ", CUT at the limit"
    return (
        f"── {number} of {total}: {row.sample_id[:12]}, {row.source}, {row.split}{thinking}{ended}: "
        f"{row.num_tokens} tokens, {row.num_response_tokens} generated in {num_turns} "
        f"turn{'s' if num_turns != 1 else ''}"
    )


def _legend(colour: bool) -> Iterator[str]:
    told: list[tuple[Kind, str]] = [
        ("context", "context the target saw"),
        ("generated", "generated by the target, in the loss"),
        ("masked", "assistant turn, not in the loss"),
    ]
    pieces = [Piece(kind, False, text) for kind, text in told]
    yield "   ".join(_coloured(p) if colour else _bracketed(p.kind, [p]) for p in pieces)
    special = _coloured(Piece("context", True, "<token>")) if colour else "<token>"
    yield f"{special} an added token   ↵ a line break   … left out here, not in the corpus"


def _coloured(piece: Piece) -> str:
    codes = f"{_COLOURS[piece.kind]};7" if piece.is_special else _COLOURS[piece.kind]
    # a line at a time: pagers forget colours at line breaks
    return "\n".join(_styled(line, codes, True) for line in _text_of(piece).split("\n"))


def _bracketed(kind: Kind, pieces: Sequence[Piece]) -> str:
    left, right = _BRACKETS[kind]
    return f"{left}{''.join(map(_text_of, pieces))}{right}"


def _text_of(piece: Piece) -> str:
    return "".join(map(_visible, _shortened(piece)))


def _shortened(piece: Piece) -> str:
    most = _SHOWN_CHARACTERS[piece.kind]
    if len(piece.text) <= most:
        return piece.text
    left_out = len(piece.text) - most
    return f"{piece.text[: most // 2]} …{left_out} characters… {piece.text[-(most // 2) :]}"


def _visible(character: str) -> str:
    if character == "\n":
        return "↵\n"
    if character == "\t" or character.isprintable():
        return character
    # escapes of a terminal must not act in it
    return character.encode("unicode_escape").decode()


def _styled(text: str, codes: str, colour: bool) -> str:
    return f"\033[{codes}m{text}\033[0m" if colour and text else text
