"""Loss masks from chat templates: a row is what the target saw and made, and only what it made there is in the loss."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from configs.load import load_config
from configs.schema import Config, DataSection
from data.conversations import Message
from data.dialogue import COMPLETE, Dialogue, answer_from_corpus
from data.prompts import Prompt
from data.replies import reply_of_text
from data.template import ChatTemplate
from data.turns import Response, Row, Turn, first_context
from target.load import load_tokenizer
from target.prepare import prepare_target

TEMPLATE = (Path(__file__).parent / "thinking_template.jinja").read_text()
MakeConfig = Callable[..., Config]
REAL_TARGET = os.environ.get("REAL_TARGET", "")
"""A local folder of a real target, e.g. Qwen3.6-27B's tokenizer files: its own template passes the same tests."""

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        },
    },
}
CALL = "<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>"


@pytest.fixture(scope="module")
def byte_tokenizer(tiny_config: MakeConfig) -> PreTrainedTokenizerBase:
    """The tiny target's tokenizer with a template that rewrites history."""
    tokenizer = load_tokenizer(tiny_config().target)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


class Played:
    """A conversation with a target that says what it is told to, and what it was shown at each turn."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        turns: Sequence[tuple[str, str] | Message],
        replies: Sequence[str],
        tools: Sequence[dict[str, Any]] = (),
        thinking: bool | None = None,
        **data: Any,
    ):
        self.tokenizer, self.arguments = tokenizer, {}
        if thinking is not None:
            self.arguments["enable_thinking"] = thinking
        messages = [{"role": t[0], "content": t[1]} if isinstance(t, tuple) else t for t in turns]
        template = ChatTemplate(tokenizer, {})
        section = data_section(**data)
        first = first_context(messages, section.responses.turns)
        ids = template.prompt_ids(first, "here", tools, thinking)
        prompt = Prompt(
            *("id", "source", "task", "train", "here", "license", tuple(messages)),
            np.array(ids, dtype=np.int32),
            None,
            tuple(tools),
            thinking,
        )
        self.dialogue = Dialogue(prompt, template, section)
        self.turns: list[Turn] = []
        self.responses: list[list[int]] = []
        for reply in replies:
            turn = self.dialogue.next_turn()
            assert turn is not None, self.dialogue.ended
            ids = tokenizer(reply, add_special_tokens=False)["input_ids"]
            self.turns.append(turn)
            self.responses.append(ids)
            self.dialogue.accept(Response(ids, ids[-1] == tokenizer.eos_token_id))

    @property
    def texts(self) -> list[str]:
        """Rows with the generated parts in [[ ]]."""
        return [marked(self.tokenizer, row) for row in self.dialogue.rows]

    def check(self) -> None:
        """Every turn is one run of one row, after exactly the ids that the target was shown."""
        runs = [run for row in self.dialogue.rows for run in runs_of(row)]
        assert runs == [(t.prompt_ids, r) for t, r in zip(self.turns, self.responses, strict=True)]


def runs_of(row: Row) -> list[tuple[list[int], list[int]]]:
    """(all ids before, generated ids) of each run of the mask."""
    edges = np.flatnonzero(np.diff(np.array([False, *row.loss_mask, False]).astype(int)))
    return [(row.input_ids[:a], row.input_ids[a:b]) for a, b in edges.reshape(-1, 2)]


def marked(tokenizer: PreTrainedTokenizerBase, row: Row) -> str:
    text, end = "", 0
    for before, made in runs_of(row):
        text += f"{tokenizer.decode(before[end:])}[[{tokenizer.decode(made)}]]"
        end = len(before) + len(made)
    assert end == len(row.input_ids), "a row ends with what was generated"
    return text


def data_section(**settings: Any) -> DataSection:
    values = {"max_tokens": 2000, "min_response_tokens": 1, "max_repetition": 1.0} | settings
    return DataSection.model_validate({"sources": [{"name": "s", "kind": "jsonl"}], **values})


def test_thinking_that_the_template_strips_makes_a_row_a_turn(byte_tokenizer):
    replies = ["They greet.\n</think>\n\nHello!<|im_end|>", "Sum.\n</think>\n\n42.<|im_end|>"]
    turns = [("user", "Hi"), ("assistant", "recorded"), ("user", "6*7?")]
    played = Played(byte_tokenizer, turns, replies)
    assert played.texts == [
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n"
        "[[They greet.\n</think>\n\nHello!<|im_end|>]]",
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello!<|im_end|>\n"
        "<|im_start|>user\n6*7?<|im_end|>\n<|im_start|>assistant\n<think>\n"
        "[[Sum.\n</think>\n\n42.<|im_end|>]]",
    ]
    played.check()
    assert played.dialogue.ended == COMPLETE


def test_a_row_that_does_not_think_is_shown_without_thinking(byte_tokenizer):
    played = Played(
        byte_tokenizer, [("system", "Short."), ("user", "Hi")], ["Hello!<|im_end|>"], thinking=False
    )
    assert played.texts == [
        "<|im_start|>system\nShort.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\n[[Hello!<|im_end|>]]"
    ]


def test_tool_results_are_spliced_in_and_thinking_stays_within_one_question(byte_tokenizer):
    """The call's arguments are the target's own; the recorded result answers the same function."""
    recorded = {"id": "c7", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    turns = [
        ("user", "Oslo?"),
        {"role": "assistant", "content": "", "tool_calls": [recorded]},
        {"role": "tool", "content": "-3", "tool_call_id": "c7"},
    ]
    replies = [f"Look.\n</think>\n\n{CALL}<|im_end|>", "So.\n</think>\n\nMinus 3.<|im_end|>"]
    played = Played(byte_tokenizer, turns, replies, tools=[WEATHER])
    head = f"<|im_start|>system\nTools:\n{json.dumps(WEATHER)}<|im_end|>\n<|im_start|>user\nOslo?<|im_end|>\n"
    assert played.texts == [
        f"{head}<|im_start|>assistant\n<think>\n[[Look.\n</think>\n\n{CALL}<|im_end|>]]\n"
        "<|im_start|>user\n<tool_response>\n-3\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n<think>\n[[So.\n</think>\n\nMinus 3.<|im_end|>]]"
    ]
    played.check()
    call = played.dialogue.history[1]["tool_calls"][0]
    assert call["function"] == {"name": "weather", "arguments": {"city": "Oslo", "days": 2}}
    assert call["id"] == "c7"


def test_recorded_calls_are_context_when_only_the_last_turn_is_a_label(byte_tokenizer):
    """Their arguments come as JSON text and reach the template as a mapping; text that is no JSON names its row."""
    recorded = {"id": "c7", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    turns = [
        ("user", "Rome?"),
        {"role": "assistant", "content": "", "tool_calls": [recorded]},
        {"role": "tool", "content": "21", "tool_call_id": "c7"},
    ]
    last: dict[str, Any] = {"responses": {"turns": "last"}}
    played = Played(byte_tokenizer, turns, ["Warm.<|im_end|>"], thinking=False, **last)
    assert played.texts[0].endswith(
        "<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n</function>\n</tool_call><|im_end|>\n"
        "<|im_start|>user\n<tool_response>\n21\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\n[[Warm.<|im_end|>]]"
    )
    recorded["function"]["arguments"] = "{city"
    with pytest.raises(
        ValueError, match=r"here: the arguments of tool call 'weather' are not JSON"
    ):
        Played(byte_tokenizer, turns, [], **last)


@pytest.mark.parametrize(
    ("reply", "ended"),
    [
        ("No idea.<|im_end|>", "recorded results are of other tool calls"),
        (
            CALL.replace("weather", "time") + "<|im_end|>",
            "recorded results are of other tool calls",
        ),
        (
            "<tool_call>\n{broken\n</tool_call><|im_end|>",
            "recorded results are of other tool calls",
        ),
        ("I am still thi", "cut at the limit"),
    ],
)
def test_results_that_answer_no_call_end_the_conversation_after_the_turn(
    byte_tokenizer, reply, ended
):
    call = {"function": {"name": "weather", "arguments": "{}"}}
    turns = [
        ("user", "Oslo?"),
        {"role": "assistant", "content": "", "tool_calls": [call]},
        ("tool", "-3"),
    ]
    played = Played(byte_tokenizer, turns, [f"x\n</think>\n\n{reply}"], tools=[WEATHER])
    assert played.dialogue.ended == ended
    assert len(played.dialogue.rows) == 1
    assert played.dialogue.rows[0].finished == reply.endswith("<|im_end|>")
    played.check()


def test_a_call_that_no_result_was_recorded_for_ends_the_conversation(byte_tokenizer):
    turns = [("user", "Oslo?"), ("assistant", "cold"), ("user", "Thanks")]
    played = Played(byte_tokenizer, turns, [f"x\n</think>\n\n{CALL}<|im_end|>"], tools=[WEATHER])
    assert played.dialogue.ended == "tool call without a recorded result"
    assert len(played.dialogue.rows) == 1


def test_a_bad_turn_ends_the_conversation_before_it(byte_tokenizer):
    turns = [("user", "A"), ("assistant", "-"), ("user", "B"), ("assistant", "-"), ("user", "C")]
    fine, loop = "t\n</think>\n\nfine<|im_end|>", "t\n</think>\n\n" + "ab" * 40 + "<|im_end|>"
    played = Played(byte_tokenizer, turns, [fine, loop], max_repetition=0.3)
    assert played.dialogue.ended == "response repeats itself"
    assert [runs_of(row)[0][1] for row in played.dialogue.rows] == played.responses[:1]
    assert Played(byte_tokenizer, turns, [loop], max_repetition=0.3).dialogue.rows == []


def test_a_conversation_ends_where_the_next_turn_has_no_room(byte_tokenizer):
    turns = [("user", "A"), ("assistant", "-"), ("user", "B" * 300)]
    played = Played(byte_tokenizer, turns, ["t\n</think>\n\nfine<|im_end|>"], max_tokens=250)
    assert played.dialogue.ended == "no room for the next turn"
    assert len(played.dialogue.rows) == 1


def test_ids_that_are_not_the_tokenizer_s_spelling_are_kept_and_the_next_turn_sees_what_serving_shows(
    tiny_config,
):
    """Half a character: its text is U+FFFD, which a server would tokenise as that."""
    tokenizer = load_tokenizer(tiny_config().target)  # a template that strips nothing
    turns = [("user", "A"), ("assistant", "-"), ("user", "B")]
    whole = Played(tokenizer, turns, ["é!<|im_end|>", "ok<|im_end|>"])
    assert len(whole.dialogue.rows) == 1
    assert len(runs_of(whole.dialogue.rows[0])) == 2
    dialogue = Played(tokenizer, turns, []).dialogue
    odd = [tokenizer("é")["input_ids"][0], tokenizer.eos_token_id]
    dialogue.accept(Response(odd, True))
    turn = dialogue.next_turn()
    assert turn is not None
    assert "\ufffd<|im_end|>" in tokenizer.decode(turn.prompt_ids)
    dialogue.accept(Response(odd, True))
    assert [runs_of(row)[-1] for row in dialogue.rows][1] == (turn.prompt_ids, odd)
    assert [sum(row.loss_mask) for row in dialogue.rows] == [2, 2]


WORDS = st.text("ab \n</think>é你<|", max_size=12)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_conversation_s_rows_are_what_the_target_saw_and_made(byte_tokenizer, data):
    """The prompt of every turn is the rendering of all messages before it; every turn is one run after exactly that."""
    thinks, last = data.draw(st.sampled_from([None, True, False])), data.draw(st.booleans())
    num_turns = data.draw(st.integers(1, 4))
    turns: list[tuple[str, str]] = []
    for _ in range(num_turns):
        turns += [("user", "q" + data.draw(WORDS)), ("assistant", data.draw(WORDS))]
    ways = st.builds("{}\n</think>\n\n{}".format, WORDS, WORDS) | WORDS
    replies = [data.draw(ways) + "<|im_end|>" for _ in range(1 if last else num_turns)]
    responses = {"turns": "last" if last else "every"}
    played = Played(byte_tokenizer, turns[:-1], replies, thinking=thinks, responses=responses)
    played.check()
    assert played.dialogue.ended == COMPLETE
    users = [i for i, m in enumerate(played.dialogue.history) if m["role"] == "user"]
    shown = users if not last else users[-1:]
    for turn, place in zip(played.turns, shown, strict=True):
        text = byte_tokenizer.apply_chat_template(
            played.dialogue.history[: place + 1],
            tokenize=False,
            add_generation_prompt=True,
            **played.arguments,
        )
        assert turn.prompt_ids == byte_tokenizer(text, add_special_tokens=False)["input_ids"]


def test_the_corpus_own_turns_are_labels_with_their_thinking(byte_tokenizer):
    template = ChatTemplate(byte_tokenizer, {})
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello!", "reasoning_content": "Greet."},
        {"role": "user", "content": "Bye"},
    ]
    last = {"role": "assistant", "content": "<think>\nLeave.\n</think>\n\nCiao."}
    ids = template.response_ids(messages, last, "here")
    first = np.array(template.prompt_ids(messages[:1], "here"), dtype=np.int32)
    prompt = Prompt(
        *("id", "s", "t", "train", "here", "l", tuple(messages)), first, np.array(ids), (), None
    )
    dialogue = Dialogue(prompt, template, data_section())
    answer_from_corpus(dialogue, template)
    assert [marked(byte_tokenizer, row).partition("[[")[2] for row in dialogue.rows] == [
        "Greet.\n</think>\n\nHello!<|im_end|>]]",
        "Leave.\n</think>\n\nCiao.<|im_end|>]]",
    ]


@pytest.mark.parametrize(
    ("text", "opened", "expected"),
    [
        ("plain", False, {"content": "plain"}),
        ("a\n</think>\n\nb", True, {"reasoning_content": "a", "content": "b"}),
        ("<think>\na\n</think>\n\nb", False, {"reasoning_content": "a", "content": "b"}),
        ("never closed", True, {"reasoning_content": "never closed", "content": ""}),
    ],
)
def test_a_reply_s_thinking_is_told_from_its_answer(text, opened, expected):
    assert reply_of_text(text, True, opened) == {"role": "assistant", **expected}
    kept = reply_of_text(text, False, False)
    assert kept == {"role": "assistant", "content": text}  # a template that knows no thinking


def test_what_a_template_ignores_is_known(byte_tokenizer, tiny_target):
    reads = ChatTemplate(byte_tokenizer, {})
    assert (reads.reads_thinking, reads.reads_tools) == (True, True)
    tokenizer = copy.deepcopy(tiny_target().tokenizer)
    tokenizer.chat_template = "{% for m in messages %}{{ m.role + ': ' + m.content }}\n{% endfor %}"
    ignores = ChatTemplate(tokenizer, {})
    assert (ignores.reads_thinking, ignores.reads_tools) == (False, False)


@pytest.mark.parametrize(
    ("body", "arguments"),
    [
        (
            '{"name": "weather", "arguments": {"city": "Oslo", "days": 2}}',
            {"city": "Oslo", "days": 2},
        ),
        (
            CALL.removeprefix("<tool_call>").removesuffix("</tool_call>"),
            {"city": "Oslo", "days": 2},
        ),
        ("<function=weather>\n<parameter=city>\na\nb\n</parameter>\n</function>", {"city": "a\nb"}),
        ("<function=weather>\n<parameter=days>\nmany\n</parameter>\n</function>", {"days": "many"}),
        ("<function=weather>\n</function>", {}),
        ('{"name": "weather"', None),
        ('{"name": 3, "arguments": {}}', None),
        ("[1]", None),
        ("<function=weather", None),
        ('{"name": "weather", "arguments": {"days": ' + "9" * 5000 + "}}", None),
        ('{"name": "weather", "arguments": {"city": "\\ud800"}}', None),
        ('{"name": "weather", "arguments": ' + "[" * 100_000, None),
        (
            f"<function=weather>\n<parameter=days>\n{'9' * 5000}\n</parameter>\n</function>",
            {"days": "9" * 5000},
        ),
    ],
)
def test_tool_calls_are_read_in_both_spellings_and_malformed_ones_stay_text(body, arguments):
    text = f"Let me see.\n\n<tool_call>\n{body}\n</tool_call>"
    reply = reply_of_text(text, True, False, [WEATHER])
    if arguments is None:
        assert reply == {"role": "assistant", "content": text}
    else:
        assert reply["content"] == "Let me see."
        assert reply["tool_calls"][0]["function"] == {"name": "weather", "arguments": arguments}
    cut = reply_of_text(text[:-3], True, False, [WEATHER])
    assert cut["content"] == text[:-3]


@pytest.mark.slow
def test_smollm2_s_turns_are_runs_of_one_row():
    """A template that rewrites nothing; a real tokenizer, whose own spelling the replies are."""
    config = load_config("configs/demo.yaml")
    prepare_target(config)
    tokenizer = load_tokenizer(config.target)
    turns = [("user", "Hi there"), ("assistant", "-"), ("user", "And 6*7?")]
    played = Played(tokenizer, turns, ["Hello! How are you?<|im_end|>", "42, of course.<|im_end|>"])
    assert played.texts == [
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi there<|im_end|>\n"
        "<|im_start|>assistant\n[[Hello! How are you?<|im_end|>]]\n"
        "<|im_start|>user\nAnd 6*7?<|im_end|>\n"
        "<|im_start|>assistant\n[[42, of course.<|im_end|>]]"
    ]
    played.check()


@pytest.mark.slow
@pytest.mark.skipif(not REAL_TARGET, reason="REAL_TARGET names no local folder of a real target")
@pytest.mark.parametrize("thinking", [True, False])
def test_a_real_target_s_template(thinking):
    """Qwen3.5's and Qwen3.6's, or any ChatML one whose generation prompt opens thinking."""
    tokenizer = AutoTokenizer.from_pretrained(REAL_TARGET)
    opened = "They greet.\n</think>\n\n" if thinking else ""
    call = {"function": {"name": "weather", "arguments": {"city": "Rome", "days": 1}}}
    turns = [
        *(("system", "Be brief."), ("user", "Hi"), ("assistant", "-"), ("user", "Oslo?")),
        {"role": "assistant", "content": "", "tool_calls": [call]},
        ("tool", "-3"),
    ]
    replies = [
        f"{opened}Hello!<|im_end|>",
        f"{opened}{CALL}<|im_end|>",
        f"{opened}Minus 3.<|im_end|>",
    ]
    played = Played(tokenizer, turns, replies, tools=[WEATHER], thinking=thinking)
    played.check()
    assert played.dialogue.ended == COMPLETE
    made = [text.partition("[[")[2] for text in played.texts]
    assert made[0] == f"{replies[0]}]]"
    shown_again = played.texts[-1].partition("[[")[0]
    assert "They greet." not in shown_again
    assert "Hello!<|im_end|>" in shown_again
