"""Every kind of source gives the same rows in the same order; blocks, limits, filters and templates; shapes that are refused."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import data.rows
from configs.schema import Bounds, SourceSection
from data.conversations import Malformed, read_conversations
from data.sources import Places, count_rows, read_blocks

ROWS = [{"question": f"Question {i}?", "level": i, "kind": "ab"[i % 2]} for i in range(10)]
QUESTIONS = [row["question"] for row in ROWS]


def source(path: Path, kind: str, **settings: object) -> SourceSection:
    settings = {"prompt_column": "question"} | settings
    return SourceSection.model_validate({"name": "s", "kind": kind, "path": str(path), **settings})


def prompts(path: Path, kind: str, **settings: object) -> list[str]:
    return [c.messages[0]["content"] for c in read_conversations(source(path, kind, **settings))]


def written(folder: Path) -> dict[str, Path]:
    lines = "".join(json.dumps(row) + "\n" for row in ROWS)
    (folder / "rows.jsonl").write_text(lines)
    with gzip.open(folder / "packed.jsonl.gz", "wt") as file:
        file.write(lines)
    (folder / "rows.json").write_text(json.dumps(ROWS))
    cells = "".join(f'"{r["question"]}",{r["level"]},{r["kind"]}\n' for r in ROWS)
    (folder / "rows.csv").write_text("\ufeffquestion,level,kind\n" + cells)
    pq.write_table(pa.Table.from_pylist(ROWS), folder / "rows.parquet", row_group_size=3)
    return {path.name: path for path in folder.iterdir()}


def test_every_kind_of_file_gives_the_same_rows(tmp_path):
    for name, path in written(tmp_path).items():
        kind = name.removesuffix(".gz").rpartition(".")[2]
        assert prompts(path, kind) == QUESTIONS, name


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "parquet"])
def test_blocks_tile_the_source_and_read_is_a_prefix(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(data.rows, "BLOCK_ROWS", 4)
    path = written(tmp_path)[f"rows.{kind}"]
    for limit in (None, 1, 4, 7, 10, 99):
        chosen = source(path, kind, read=limit)
        blocks = list(read_blocks(chosen, Places()))
        rows = [row.where for block in blocks for row in block.rows()]
        assert [block.number for block in blocks] == list(range(len(blocks)))
        assert (
            len(rows) == len(set(rows)) == sum(b.num_rows for b in blocks) == min(limit or 10, 10)
        )
        assert [c.messages[0]["content"] for c in read_conversations(chosen)] == QUESTIONS[:limit]
        assert count_rows(chosen) in (None, len(rows))


def test_a_block_can_be_read_without_the_others_and_twice(tmp_path, monkeypatch):
    monkeypatch.setattr(data.rows, "BLOCK_ROWS", 4)
    chosen = source(written(tmp_path)["rows.jsonl"], "jsonl")
    last = list(read_blocks(chosen, Places()))[-1]
    first, second = list(last.rows()), list(last.rows())
    assert first == second
    assert len(first) == 2


def test_a_hub_set_is_streamed_from_its_files_and_spread_by_seed(tmp_path):
    folder = tmp_path / "set"
    folder.mkdir()
    written(folder)["rows.jsonl"]
    for name in ("packed.jsonl.gz", "rows.json", "rows.csv", "rows.parquet"):
        (folder / name).unlink()
    whole = source(folder, "datasets")
    assert prompts(folder, "datasets") == QUESTIONS
    assert prompts(folder, "datasets", streaming=False) == QUESTIONS
    part = whole.model_copy(update={"read": 4})

    def chosen(seed: int) -> list[str]:
        blocks = read_blocks(part, Places(seed=seed))
        return [
            row.value["question"] for b in blocks for row in b.rows() if isinstance(row.value, dict)
        ]

    assert chosen(0) == chosen(0)
    assert len(set(chosen(0))) == 4
    assert len({tuple(chosen(seed)) for seed in range(4)}) > 1  # not the head of the set


def test_filters_choose_by_value_and_by_bounds(tmp_path):
    path = written(tmp_path)["rows.parquet"]
    assert prompts(path, "parquet", filter={"kind": ["a"]}) == QUESTIONS[::2]
    assert prompts(path, "parquet", filter={"level": {"min": 3, "max": 5}}) == QUESTIONS[3:6]
    assert prompts(path, "parquet", filter={"level": {"min": 8}, "kind": ["b"]}) == QUESTIONS[9:]
    with pytest.raises(Malformed, match=r"row 0: .*filters by column 'none', the row has"):
        prompts(path, "parquet", filter={"none": ["a"]})
    assert source(path, "parquet", filter={"x": {"min": 1}}).filter["x"] == Bounds(min=1)


def row_file(folder: Path, row: object) -> Path:
    path = folder / "one.jsonl"
    path.write_text(json.dumps(row) + "\n")
    return path


def test_prompts_are_made_of_columns(tmp_path):
    template = {
        "prompt_column": None,
        "prompt_template": "{instruction}\n\n{input}\n\nGive \\boxed{{}}.",
    }
    with_input = row_file(tmp_path, {"instruction": "Add.", "input": "1 2"})
    assert prompts(with_input, "jsonl", **template) == ["Add.\n\n1 2\n\nGive \\boxed{}."]
    without = row_file(tmp_path, {"instruction": "Sing.", "input": ""})
    assert prompts(without, "jsonl", **template) == ["Sing.\n\nGive \\boxed{}."]
    missing = row_file(tmp_path, {"instruction": "Sing."})
    with pytest.raises(Malformed, match="no text in column 'input'"):
        prompts(missing, "jsonl", **template)
    turns = row_file(tmp_path, {"question": ["First?", "Second?"]})
    assert prompts(turns, "jsonl") == ["First?"]


def test_system_response_and_tools_come_from_their_columns(tmp_path):
    schema = {"type": "function", "function": {"name": "f"}}
    row = {"question": "Q", "answer": "A", "system": "S", "tools": json.dumps([schema])}
    columns = {"response_column": "answer", "system_column": "system", "tools_column": "tools"}
    (found,) = read_conversations(source(row_file(tmp_path, row), "jsonl", **columns))
    assert [(m["role"], m["content"]) for m in found.messages] == [
        ("system", "S"),
        ("user", "Q"),
        ("assistant", "A"),
    ]
    assert found.tools == (schema,)
    bad = row_file(tmp_path, row | {"tools": "f(x)"})
    with pytest.raises(Malformed, match="no list of function schemas in column 'tools'"):
        list(read_conversations(source(bad, "jsonl", **columns)))


def test_tool_calls_carry_their_arguments_as_objects_and_private_keys_stay_out(tmp_path):
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    messages = [
        {"role": "developer", "content": "D", "hashed_ip": "secret"},
        {"role": "user", "content": "Q", "header": {"agent": "secret"}},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "1", "tool_call_id": "1"},
    ]
    path = row_file(tmp_path, {"messages": messages})
    (found,) = read_conversations(source(path, "jsonl", prompt_column=None))
    assert found.messages[0] == {"role": "system", "content": "D"}
    assert found.messages[2]["tool_calls"][0]["function"]["arguments"] == {"x": 1}
    assert found.messages[3]["tool_call_id"] == "1"
    assert "secret" not in json.dumps(found.messages)
    call["function"] = {"name": "f", "arguments": "x=1"}
    with pytest.raises(Malformed, match="arguments are no JSON object"):
        list(
            read_conversations(
                source(row_file(tmp_path, {"messages": messages}), "jsonl", prompt_column=None)
            )
        )


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.json", b'{"a": 1}', "expected a list of JSON objects, found dict"),
        ("x.json", b"[1, 2", "is not valid JSON"),
        ("x.csv", b'question\n"open quote', "cannot be read"),
        ("x.csv", b"question\n\xff\xfe\n", "cannot be read"),
        ("x.jsonl.gz", b"no gzip", "cannot be read"),
    ],
)
def test_a_file_that_is_no_such_file_is_named(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"{name}.*{message}"):
        prompts(path, name.removesuffix(".gz").rpartition(".")[2])


def test_settings_that_contradict_each_other_are_refused(tmp_path):
    with pytest.raises(ValueError, match="read=3 is below take=4"):
        source(tmp_path, "jsonl", read=3, take=4)
    with pytest.raises(ValueError, match="both prompt_column and prompt_template"):
        source(tmp_path, "jsonl", prompt_template="{a}")
