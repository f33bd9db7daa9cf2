"""What no row may do: stop the stage without a name, or reach labels, lists and shards in a form that they cannot hold."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from configs.schema import Config, SourceSection
from data.build import select_only
from data.conversations import Malformed, read_conversations

MakeConfig = Callable[..., Config]
GOOD = [{"messages": [{"role": "user", "content": f"Say {i} in words."}]} for i in range(4)]
ASKED = {"role": "user", "content": "Call it."}
RESULT = {"role": "tool", "content": "done"}


def with_call(call: object) -> str:
    turns = [ASKED, {"role": "assistant", "content": "", "tool_calls": [call]}, RESULT]
    return json.dumps({"messages": turns})


def with_turn(**keys: object) -> str:
    return json.dumps({"messages": [ASKED | keys]})


BAD = {
    "brackets without end": json.dumps({"messages": "[" * 100_000}),
    "a number of 5,000 digits": json.dumps({"messages": "9" * 5000}),
    "half a pair as text of a turn": with_turn(content="\ud800"),
    "half a pair in a name": with_turn(name="\ud800"),
    "half a pair in a schema": json.dumps({"messages": [ASKED], "tools": [{"name": "\ud800"}]}),
    "half a pair in a call": with_call({"function": {"name": "f", "arguments": {"x": "\ud800"}}}),
    "half a pair in what is shown": json.dumps({"messages": "\ud800"}),
    "half a pair as a column": '{"\\ud800": 1}',
    "schemas without end": json.dumps({"messages": [ASKED], "tools": "[" * 100_000}),
    "arguments without end": with_call({"function": {"name": "f", "arguments": "[" * 100_000}}),
    "a call of no function": with_call({"function": {"arguments": "{}"}}),
    "a function that is a text": with_call({"function": "f"}),
    "arguments that are a list": with_call({"function": {"name": "f", "arguments": [1]}}),
    "a name that is a number": with_turn(name=5),
}


def source(path: Path, **settings: object) -> SourceSection:
    kind = path.suffix[1:]
    return SourceSection.model_validate({"name": "s", "kind": kind, "path": str(path), **settings})


@pytest.mark.parametrize("row", BAD.values(), ids=BAD.keys())
def test_a_bad_row_is_named_or_counted_and_the_others_are_kept(tiny_config, tmp_path, row):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(good) + "\n" for good in GOOD) + row + "\n")
    settings = json.dumps([source(path).model_dump(exclude_unset=True) | {"tools_column": "tools"}])
    overrides = [f"data.sources={settings}", "data.max_malformed=0.5"]
    assert select_only(tiny_config(overrides=overrides), tmp_path / "kept.jsonl") == len(GOOD)
    with pytest.raises(Malformed, match=r"rows\.jsonl:5: "):
        list(read_conversations(source(path, tools_column="tools")))


def test_empty_arguments_of_a_call_are_none(tmp_path):
    path = tmp_path / "rows.jsonl"
    for given in ("", None, "{}", {}):
        path.write_text(with_call({"function": {"name": "f", "arguments": given}}))
        (found,) = read_conversations(source(path))
        assert found.messages[1]["tool_calls"] == [{"function": {"name": "f", "arguments": {}}}]


def test_a_schema_of_a_parquet_file_that_holds_a_time_is_named(tmp_path):
    path = tmp_path / "rows.parquet"
    tools = [{"name": "f", "since": datetime.datetime(2026, 1, 1)}]
    pq.write_table(pa.Table.from_pylist([{"messages": [ASKED], "tools": tools}]), path)
    with pytest.raises(Malformed, match=r"row 0: it holds what JSON cannot say .*datetime"):
        list(read_conversations(source(path, tools_column="tools")))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prompt\nHello, you\n", r":2: .*2 cells for 1 columns; quote a cell"),
        ("prompt,level\nHello\n", r":2: .*1 cells for 2 columns"),
        ("prompt,prompt\nHello,you\n", "two columns named 'prompt'; rename"),
    ],
)
def test_no_cell_of_a_csv_file_is_cut_or_lost_in_silence(tmp_path, text, message):
    path = tmp_path / "rows.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        list(read_conversations(source(path, prompt_column="prompt")))


def test_bounds_read_the_numbers_of_a_csv_file(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text("prompt,score\nfive,5\nthree,3.5\nnone,\nword,high\n")
    found = read_conversations(source(path, prompt_column="prompt", filter={"score": {"min": 4}}))
    assert [c.messages[0]["content"] for c in found] == ["five"]


@pytest.mark.parametrize("name", ["total", "", " ", "two\nlines"])
def test_a_source_s_name_is_printable_and_not_that_of_the_sum(name):
    with pytest.raises(ValueError, match="is no name for a source"):
        SourceSection.model_validate({"name": name, "kind": "jsonl", "path": "x.jsonl"})


@pytest.mark.parametrize("template", ["{question", "{}", "no column", "{{question}}"])
def test_a_prompt_template_names_its_columns(template):
    with pytest.raises(ValueError, match="prompt_template="):
        SourceSection.model_validate({"name": "s", "kind": "jsonl", "prompt_template": template})
