"""The data stage: the same bytes for any number of ranks and any kill, honest counts, refusals that name the key."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from common.distributed import Ranks
from configs.schema import Config
from data.build import build_corpus, format_counts, prepare_plan, select_only
from data.corpus import CorpusRow, iter_corpus, read_corpus_manifest
from data.labels import label_units, read_chunk_responses, units_of_chunk
from data.plan import Plan, read_plan
from target.generate import Sampling, generate_batch

ROOT = Path(__file__).parent.parent
MakeConfig = Callable[..., Config]
KEEP_ALL = "data.min_response_tokens=1"


def ranks(rank: int = 0, world_size: int = 1) -> Ranks:
    return Ranks(rank, world_size, rank, torch.device("cpu"))


def corpus_of(config: Config) -> Path:
    return config.run.folder / "corpus"


def bytes_of(config: Config) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(corpus_of(config).iterdir())}


def rows_of(config: Config) -> list[CorpusRow]:
    folder = corpus_of(config)
    return list(iter_corpus(folder, read_corpus_manifest(folder)))


def begin(config: Config) -> Plan:
    prepare_plan(config, corpus_of(config))
    return read_plan(corpus_of(config) / "units")


def source(path: Path, **settings: object) -> str:
    return json.dumps({"name": path.stem, "kind": "jsonl", "path": str(path), **settings})


def write_rows(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def prompt(text: str, *answers: str) -> dict:
    turns = [("user", text), *(("assistant", answer) for answer in answers)]
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


def test_every_label_is_the_target_s_own_greedy_answer(tiny_config: MakeConfig, tiny_target):
    config, target = tiny_config(overrides=[KEEP_ALL]), tiny_target()
    build_corpus(config, ranks())
    rows = rows_of(config)
    assert len(rows) == 24
    for row in rows:
        num_prompt = int((~row.loss_mask).sum())
        assert row.loss_mask.tolist() == [False] * num_prompt + [True] * row.num_response_tokens
        ids = row.input_ids.tolist()
        answer = generate_batch(target, [ids[:num_prompt]], 24, Sampling())[0]
        assert ids[num_prompt:] == answer
        assert row.finished == (answer[-1] in target.eos_token_ids)
        *given, last = json.loads(row.messages)
        rendered = target.tokenizer.apply_chat_template(
            given, add_generation_prompt=True, return_dict=False
        )
        assert ids[:num_prompt] == rendered
        assert last["content"] == target.tokenizer.decode(answer, skip_special_tokens=True)


def test_sampled_labels_do_not_depend_on_ranks_or_interruptions(tiny_config: MakeConfig):
    sampled = ["data.responses.temperature=1.0", "data.responses.unit_size=4", KEEP_ALL]
    whole, shared = tiny_config(overrides=sampled), tiny_config(overrides=sampled)
    build_corpus(whole, ranks())
    # rank 1 of 2 alone; then one rank finds its units done and does the others
    plan = begin(shared)
    label_units(shared, plan, ranks(1, 2))
    done = sorted(plan.folder.glob("unit-*.json"))
    assert [path.name for path in done] == [f"unit-0000{i}.json" for i in (1, 3, 5)]
    with pytest.raises(FileNotFoundError, match=r"unit-\d+\.json is missing"):
        read_chunk_responses(plan, 0, 4)
    before = {path: path.stat().st_mtime_ns for path in done}
    label_units(shared, plan, ranks())
    assert {path: path.stat().st_mtime_ns for path in done} == before
    build_corpus(shared, ranks())
    assert bytes_of(shared) == bytes_of(whole)
    assert not plan.folder.exists()
    other = tiny_config(overrides=[*sampled, "run.seed=1"])
    build_corpus(other, ranks())
    assert {r.sample_id for r in rows_of(other)} == {r.sample_id for r in rows_of(whole)}
    assert bytes_of(other) != bytes_of(whole)


def test_kill_9_of_two_ranks_and_resume_gives_the_same_bytes(tiny_config: MakeConfig, tmp_path):
    many = write_rows(tmp_path / "many.jsonl", *(prompt(f"Say {i}.") for i in range(96)))
    overrides = [
        *(f"data.sources=[{source(many)}]", "data.responses.max_new_tokens=40"),
        *("data.responses.unit_size=8", "data.max_tokens=256"),
    ]
    whole, killed = tiny_config(overrides=overrides), tiny_config(overrides=overrides)
    build_corpus(whole, ranks())
    units = corpus_of(killed) / "units"
    stage = [*("-m", "data"), str(killed.run.folder.parent / "tiny.yaml"), *overrides]
    launcher = [*("-m", "common.torchrun", "--standalone", "--nproc-per-node", "2"), *stage]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [sys.executable, *launcher],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as process:
        deadline = time.monotonic() + 120
        while not list(units.glob("unit-*.json")):
            assert process.poll() is None, "the stage ended before its first unit"
            assert time.monotonic() < deadline
            time.sleep(0.005)
        workers = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        for pid in [process.pid, *map(int, workers)]:
            os.kill(pid, signal.SIGKILL)
    num_done = len(list(units.glob("unit-*.json")))
    assert 0 < num_done < 12
    assert not (corpus_of(killed) / "manifest.json").exists()
    (units / ".unit-00011.json.123.tmp").write_text("half")  # what a kill in mid-write leaves
    build_corpus(killed, ranks())
    assert bytes_of(killed) == bytes_of(whole)


def test_a_finished_corpus_is_left_alone_and_other_settings_are_refused(tiny_config: MakeConfig):
    config = tiny_config()
    assert not build_corpus(config, ranks()).was_complete
    before = bytes_of(config)
    assert build_corpus(config, ranks()).was_complete
    changed = config.model_copy(
        update={"data": config.data.model_copy(update={"max_prompt_tokens": 99})}
    )
    with pytest.raises(ValueError, match=r"data\.max_prompt_tokens=128, this run has 99; undo"):
        build_corpus(changed, ranks())
    plan_only = config.model_copy(
        update={"data": config.data.model_copy(update={"num_samples": 5})}
    )
    assert build_corpus(plan_only, ranks()).was_complete
    assert bytes_of(config) == before


def test_a_begun_corpus_of_other_settings_is_refused_too(tiny_config: MakeConfig):
    config = tiny_config()
    begin(config)
    changed = config.model_copy(update={"run": config.run.model_copy(update={"seed": 9})})
    with pytest.raises(ValueError, match=r"run\.seed=0, this run has 9"):
        build_corpus(changed, ranks())


def test_every_input_row_is_accounted_for(tiny_config: MakeConfig, tmp_path):
    story = " ".join(f"word{i}" for i in range(14))
    trains = write_rows(
        tmp_path / "trains.jsonl",
        prompt("What is 3 + 5?"),
        prompt("what is  3 + 5?"),  # a double
        prompt("What is 3 - 5?"),  # not a double
        prompt("x" * 400),  # too long
        prompt("   "),  # empty
        prompt(f"Tell me: {story}."),  # shares 13 words with a test prompt
        prompt("Name the first test."),  # the test prompt itself
        prompt("One more?", "Its own answer is dropped."),
        prompt("And one more?"),
        prompt("And the last one?"),
    )
    tests = write_rows(
        tmp_path / "tests.jsonl", prompt("Name the first test."), prompt(f"Go on: {story}")
    )
    sources = f"[{source(trains, take=4)},{source(tests, split='test', task='exam')}]"
    config = tiny_config(overrides=[f"data.sources={sources}", "data.validation_fraction=0.5"])
    counts = build_corpus(config, ranks()).manifest.counts
    assert counts["trains"]["read"] == 10
    assert counts["trains"]["rejected"] == {
        "beyond take": 1,
        "contaminated by a test prompt": 1,
        "duplicate": 2,
        "empty user turn": 1,
        "prompt too long": 1,
    }
    assert sum(counts["trains"]["done"].values()) == 4
    assert counts["tests"]["done"] == {"train": 0, "validation": 0, "test": 2}
    for entry in counts.values():
        assert entry["read"] == sum(entry["done"].values()) + sum(entry["rejected"].values())
    total = counts["total"]
    assert (total["read"], sum(total["done"].values())) == (12, 6)
    assert "duplicate 2" in format_counts(counts)
    rows = rows_of(config)
    assert {row.task for row in rows if row.split == "test"} == {"exam"}
    splits = [row.split for row in rows]
    assert splits.count("train") + splits.count("validation") == 4


def test_bad_responses_are_counted_rejects(tiny_config: MakeConfig):
    free = tiny_config(overrides=[KEEP_ALL])
    build_corpus(free, ranks())
    lengths = sorted(row.num_response_tokens for row in rows_of(free))
    shortest = lengths[0] + 1
    strict = tiny_config(overrides=[f"data.min_response_tokens={shortest}"])
    counts = build_corpus(strict, ranks()).manifest.counts["total"]
    assert counts["rejected"] == {"response too short": sum(n < shortest for n in lengths)}
    looping = tiny_config(overrides=["data.max_repetition=0.0", KEEP_ALL])
    build_corpus(looping, ranks())
    kept = rows_of(looping)
    for row in kept:
        ids = row.input_ids[row.loss_mask]
        grams = [tuple(ids[i : i + 8]) for i in range(len(ids) - 7)]
        assert len(set(grams)) == len(grams)
    assert {r.sample_id for r in kept} <= {r.sample_id for r in rows_of(free)}


def test_order_and_take_come_from_content_not_from_file_order(tiny_config: MakeConfig, tmp_path):
    rows = [prompt(f"Question number {i}?") for i in range(12)]
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    forward = write_rows(tmp_path / "a" / "rows.jsonl", *rows)
    backward = write_rows(tmp_path / "b" / "rows.jsonl", *rows[::-1])
    found = []
    for path in (forward, backward):
        config = tiny_config(overrides=[f"data.sources=[{source(path, take=5)}]"])
        build_corpus(config, ranks())
        found.append(rows_of(config))
    assert len(found[0]) == 5
    for left, right in zip(*found, strict=True):
        assert left.sample_id == right.sample_id
        assert np.array_equal(left.input_ids, right.input_ids)


def test_the_corpus_own_answers_can_be_the_labels(tiny_config: MakeConfig, tiny_target, tmp_path):
    history = [*prompt("Hi", "Hello")["messages"], *prompt("How are you?", "Fine.")["messages"]]
    path = write_rows(tmp_path / "own.jsonl", {"messages": history}, prompt("Long", "y" * 300))
    own = [f"data.sources=[{source(path)}]", "data.responses.generate=false"]
    config = tiny_config(overrides=own)
    build_corpus(config, ranks())
    long, short = sorted(rows_of(config), key=lambda row: -row.num_tokens)
    decode = tiny_target().tokenizer.decode
    assert decode(short.input_ids[short.loss_mask].tolist()) == "Hello<|im_end|>Fine.<|im_end|>"
    assert short.finished
    assert long.num_tokens == 192  # data.max_tokens
    assert not long.finished
    last = tiny_config(overrides=[*own, "data.responses.turns=last"])
    build_corpus(last, ranks())
    short = min(rows_of(last), key=lambda row: row.num_tokens)
    assert decode(short.input_ids[short.loss_mask].tolist()) == "Fine.<|im_end|>"
    assert decode(short.input_ids[~short.loss_mask].tolist()).count("Hello<|im_end|>") == 1


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (prompt("No answer here"), "has no response"),
        ({"messages": [{"role": "assistant", "content": "hi"}]}, "has no user turn"),
    ],
)
def test_a_conversation_that_cannot_be_labelled_names_its_row(
    tiny_config: MakeConfig, tmp_path, row, message
):
    path = write_rows(tmp_path / "bad.jsonl", prompt("fine", "yes"), row)
    own = [f"data.sources=[{source(path)}]", "data.responses.generate=false"]
    config = tiny_config(overrides=own)
    with pytest.raises(ValueError, match=rf"bad\.jsonl:2: the conversation {message}"):
        build_corpus(config, ranks())
    assert not (corpus_of(config) / "units" / "plan.json").exists()
    write_rows(path, prompt("fine", "yes"))
    assert build_corpus(config, ranks()).manifest.num_rows == 1  # the correction is not refused


def test_selecting_only_writes_prompts_and_no_label(tiny_config: MakeConfig, tmp_path):
    config = tiny_config(overrides=[KEEP_ALL])
    assert select_only(config, tmp_path / "chosen.jsonl") == 24
    chosen = [json.loads(line) for line in (tmp_path / "chosen.jsonl").read_text().splitlines()]
    build_corpus(config, ranks())
    given = {json.dumps(json.loads(row.messages)[:-1]) for row in rows_of(config)}
    assert {json.dumps(row["messages"]) for row in chosen} == given


def test_units_cover_every_row_once_longest_first():
    lengths = [3, 9, 9, 1, 5, 7, 2]
    units = units_of_chunk(2, lengths, 3)
    assert [unit.rows for unit in units] == [(1, 2, 5), (4, 0, 6), (3,)]
    assert [unit.index for unit in units] == [64, 65, 66]


def test_a_corpus_without_a_sample_is_an_error_and_its_correction_is_not_refused(
    tiny_config: MakeConfig,
):
    too_short = ["data.responses.max_new_tokens=1", "data.min_response_tokens=2"]
    config = tiny_config(overrides=too_short)
    with pytest.raises(ValueError, match=r"no sample is left: .*too short.*min_response_tokens"):
        build_corpus(config, ranks())
    assert not (corpus_of(config) / "manifest.json").exists()
    corrected = config.model_copy(update={"data": tiny_config(overrides=[KEEP_ALL]).data})
    assert build_corpus(corrected, ranks()).manifest.num_rows > 0


def test_a_second_run_in_a_folder_at_work_is_refused(tiny_config: MakeConfig, monkeypatch):
    monkeypatch.setattr("data.build._LOCK_PATIENCE_S", 0.2)
    config = tiny_config()
    config.run.folder.mkdir(parents=True)
    with (config.run.folder / ".data.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(ValueError, match=r"another process holds .*\.data\.lock"):
            build_corpus(config, ranks())
