"""The coloured view of rows: every token under what it is, and nothing that a terminal would act on."""

from __future__ import annotations

import re
import runpy
import sys
from collections.abc import Callable

import numpy as np
import pytest
import torch

from common.distributed import Ranks
from configs.schema import Config
from data.build import build_corpus
from data.corpus import CorpusRow
from data.show import draw_row, token_kinds, wants_colour
from data.template import ChatTemplate
from target.load import load_tokenizer

MakeConfig = Callable[..., Config]
HISTORY = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nOld<|im_end|>\n"
PROMPT = HISTORY + "<|im_start|>user\nGo\ton \x1b[31mred<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture
def row(tiny_config: MakeConfig):
    """(row, tokenizer, opening): an old reply as context, then a generated one."""
    tokenizer = load_tokenizer(tiny_config().target)
    prompt, made = (tokenizer(text)["input_ids"] for text in (PROMPT, "né<|im_end|>"))
    ids = np.array([*prompt, *made], dtype=np.int32)
    mask = np.arange(len(ids)) >= len(prompt)
    opening = ChatTemplate(tokenizer, {}).turn_opening_ids()
    assert tokenizer.decode(opening) == "<|im_start|>assistant"
    return CorpusRow("id", "s", "t", "train", "[]", ids, mask, True), tokenizer, opening


def test_every_token_is_context_generated_or_masked(row):
    row, tokenizer, opening = row
    kinds = token_kinds(row.input_ids.tolist(), row.loss_mask, opening, tokenizer.eos_token_id)
    parts = {"context": "", "masked": "", "generated": ""}
    for kind, token in zip(kinds, row.input_ids.tolist(), strict=True):
        if kind != "generated":
            parts[kind] += tokenizer.decode([token])
    assert parts["masked"] == ("<|im_start|>assistant\nOld<|im_end|><|im_start|>assistant\n")
    assert parts["context"] == (
        "<|im_start|>user\nHi<|im_end|>\n\n<|im_start|>user\nGo\ton \x1b[31mred<|im_end|>\n"
    )
    assert [kind == "generated" for kind in kinds] == row.loss_mask.tolist()


def test_without_colour_brackets_say_the_same(row):
    row, tokenizer, opening = row
    assert draw_row(row, tokenizer, opening, colour=False) == [
        "<|im_start|>user↵",
        "Hi<|im_end|>↵",
        "⟨<|im_start|>assistant↵",
        "Old<|im_end|>⟩↵",
        "<|im_start|>user↵",
        "Go\ton \\x1b[31mred<|im_end|>↵",
        "⟨<|im_start|>assistant↵",
        "⟩⟦né<|im_end|>⟧",
    ]


def test_colours_end_on_every_line_and_the_text_s_own_escapes_do_not_act(row):
    row, tokenizer, opening = row
    lines = draw_row(row, tokenizer, opening, colour=True)
    for line in lines:
        assert re.fullmatch(r"(\033\[(2|32|33)(;7)?m[^\033]+\033\[0m)*", line), line
    assert lines[-1].startswith("\033[32mné\033[0m\033[32;7m<|im_end|>")
    plain = [re.sub(r"\033\[[0-9;]*m", "", line) for line in lines]
    bare = [re.sub("[⟨⟩⟦⟧]", "", line) for line in draw_row(row, tokenizer, opening, False)]
    assert plain == bare


@pytest.mark.parametrize(
    ("is_terminal", "environment", "expected"),
    [
        (True, {}, True),
        (False, {}, False),
        (True, {"NO_COLOR": "1"}, False),
        (True, {"NO_COLOR": ""}, True),
        (True, {"TERM": "dumb"}, False),
        (False, {"FORCE_COLOR": "1"}, True),
        (True, {"FORCE_COLOR": "1", "NO_COLOR": "1"}, False),
    ],
)
def test_no_color_wins_and_a_pipe_has_none(is_terminal, environment, expected):
    assert wants_colour(is_terminal, environment) is expected


def test_the_command_prints_rows_and_refuses_a_corpus_that_is_not_there(
    tiny_config: MakeConfig, monkeypatch, capsys
):
    config = tiny_config(overrides=["data.min_response_tokens=1"])
    recipe = str(config.run.folder.parent / "tiny.yaml")
    monkeypatch.setattr(sys, "argv", ["data", recipe, "--show", "2"])
    with pytest.raises(SystemExit) as stopped:
        runpy.run_module("data", run_name="__main__")
    assert stopped.value.code == 2
    assert "run the data stage first" in capsys.readouterr().err
    build_corpus(config, Ranks(0, 1, 0, torch.device("cpu")))
    runpy.run_module("data", run_name="__main__")
    shown = capsys.readouterr().out
    assert shown.count("⟦") == 3  # and the legend's
    assert "\033" not in shown
    assert "── 2 of 2: " in shown
