"""Every kind of source gives the same conversations, and a row of another shape is one line that names it."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from configs.schema import SourceSection
from data.conversations import read_conversations
from data.sources import source_identity
from data.template import ChatTemplate

TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Wie geht's? 你好"},
    {"role": "assistant", "content": "Gut."},
    {"role": "user", "content": "And now?"},
]
SHAREGPT = [
    {"from": {"user": "human", "assistant": "gpt"}.get(t["role"], t["role"]), "value": t["content"]}
    for t in TURNS
]


def jsonl(folder: Path, *rows: object, name: str = "rows.jsonl") -> Path:
    path = folder / name
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return path


def read(path: Path | str, **settings: object) -> list[list[dict]]:
    values = {"name": "s", "kind": "jsonl", "path": str(path)} | settings
    source = SourceSection.model_validate(values)
    return [list(conversation.messages) for conversation in read_conversations(source)]


def test_jsonl_parquet_and_datasets_agree(tmp_path):
    rows = [{"messages": TURNS}, {"messages": TURNS[1:2]}]
    path = jsonl(tmp_path, *rows)
    table = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist(rows), table)
    wanted = [TURNS, TURNS[1:2]]
    assert read(path) == wanted
    assert read(table, kind="parquet") == wanted
    import datasets

    saved = tmp_path / "saved"
    datasets.Dataset.from_list(rows).save_to_disk(str(saved))
    assert read(saved, kind="datasets") == wanted
    datasets.DatasetDict({"train": datasets.Dataset.from_list(rows)}).save_to_disk(
        str(tmp_path / "dict")
    )
    assert read(tmp_path / "dict", kind="datasets") == wanted


def test_the_common_shapes_are_understood(tmp_path):
    parts = [{"type": "text", "text": "Wie geht's?"}, {"type": "text", "text": " 你好"}]
    user = {"role": "user", "content": "Wie geht's? 你好"}
    assert read(jsonl(tmp_path, {"conversations": SHAREGPT})) == [TURNS]
    assert read(jsonl(tmp_path, {"chat": TURNS}), messages_column="chat") == [TURNS]
    assert read(jsonl(tmp_path, {"messages": json.dumps(TURNS)})) == [TURNS]
    assert read(jsonl(tmp_path, {"q": user["content"]}), prompt_column="q") == [[user]]
    assert read(jsonl(tmp_path, {"messages": [{"role": "user", "content": parts}]})) == [[user]]
    call = {"role": "assistant", "content": "", "tool_calls": [{"name": "f"}]}
    row = {"messages": [user, {**call, "content": None}]}
    assert read(jsonl(tmp_path, row)) == [[user, call]]


def test_folders_and_globs_are_read_in_order_of_names(tmp_path):
    for name in ("b.jsonl", "a.jsonl", "c.jsonl"):
        jsonl(tmp_path, {"prompt": name}, name=name)
    wanted = [[{"role": "user", "content": f"{name}.jsonl"}] for name in "abc"]
    assert read(tmp_path, prompt_column="prompt") == wanted
    assert read(tmp_path / "[ac].jsonl", prompt_column="prompt") == [wanted[0], wanted[2]]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": "x"}, "no conversation in column 'conversations'"),
        ({"messages": []}, "no conversation in column 'messages'"),
        ({"messages": "not json"}, "no conversation in column 'messages'"),
        ({"messages": ["hello"]}, "a turn is not {role, content}"),
        ({"messages": [{"role": "user"}]}, "with text"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "with text"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "unknown role 'wizard'"),
        ([1, 2], "expected a JSON object, found list"),
    ],
)
def test_a_row_of_another_shape_names_file_and_row(tmp_path, row, message):
    path = jsonl(tmp_path, {"messages": TURNS}, row)
    with pytest.raises(ValueError, match=r"rows\.jsonl:2: ") as error:
        read(path)
    assert message in str(error.value)


def test_what_is_missing_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"data\.sources 's': no jsonl file at"):
        read(tmp_path / "none.jsonl")
    with pytest.raises(ValueError, match="needs a path"):
        list(read_conversations(SourceSection(name="s", kind="jsonl")))
    with pytest.raises(ValueError, match="no text in column 'q'"):
        read(jsonl(tmp_path, {"p": "x"}), prompt_column="q")
    (tmp_path / "bad.jsonl").write_text('{"messages": \n')
    with pytest.raises(ValueError, match=r"bad\.jsonl:1: not valid JSON"):
        read(tmp_path / "bad.jsonl")


def test_a_source_is_known_by_its_content(tmp_path):
    one = jsonl(tmp_path, {"prompt": "a"})
    source = SourceSection(name="s", kind="jsonl", path=str(one))
    before = source_identity(source)
    assert source_identity(source) == before
    jsonl(tmp_path, {"prompt": "b"})
    assert source_identity(source) != before


def test_prompt_and_response_ids_are_what_the_template_writes(tiny_target):
    """The tiny tokenizer has a token a byte, so the ids can be read: bytes and <|im_start|>, <|im_end|>."""
    tokenizer = tiny_target().tokenizer
    template = ChatTemplate(tokenizer, {})
    user, answer = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}
    prompt = template.prompt_ids([user], "here")
    assert tokenizer.decode(prompt) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    response = template.response_ids([user], answer, "here")
    assert (
        tokenizer.decode(response) == "yo<|im_end|>"
    )  # the line break after it is never generated
    assert response[-1] == tokenizer.eos_token_id
    assert template.text(response) == "yo"


def test_a_template_that_is_not_prefix_stable_is_refused(tiny_target):
    """enable_thinking=false opens the tiny template's answer with an empty thought, which a given answer lacks."""
    template = ChatTemplate(tiny_target().tokenizer, {"enable_thinking": False})
    user, answer = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}
    with pytest.raises(ValueError, match="rows:7: the chat template is not prefix-stable"):
        template.response_ids([user], answer, "rows:7")


@pytest.mark.parametrize(
    "line",
    [
        b'{"prompt": "\xe9"}',
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"prompt": ' + b"9" * 5000 + b"}",
        b'\xef\xbb\xbf{"prompt": "x"}',
        rb'{"prompt": "\ud800"}',
        rb'{"messages": [{"role": "user", "content": "half \ud800"}]}',
    ],
    ids=["latin-1", "binary", "deep", "long number", "BOM", "surrogate", "surrogate in a turn"],
)
def test_a_line_that_is_no_json_text_is_named(tmp_path, line):
    (tmp_path / "x.jsonl").write_bytes(b'{"prompt": "fine"}\n' + line + b"\n")
    column = None if b"messages" in line else "prompt"
    if column is None:
        (tmp_path / "x.jsonl").write_bytes(b"\n" + line + b"\n")
    with pytest.raises(ValueError, match=r"x\.jsonl:2: ") as error:
        read(tmp_path / "x.jsonl", prompt_column=column)
    assert "\n" not in str(error.value)


def test_a_parquet_file_that_is_none_is_named(tmp_path):
    for content in (b"", b"PAR1garbage", b"PAR1" * 10):
        (tmp_path / "x.parquet").write_bytes(content)
        with pytest.raises(ValueError, match=r"x\.parquet cannot be read"):
            read(tmp_path / "x.parquet", kind="parquet")
