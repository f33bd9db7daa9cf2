"""Selection on disk: ranks, blocks and kills change no byte; every row that was read is accounted for; takes are exact."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

import data.rows
from common.distributed import Ranks
from configs.schema import Config
from data.build import build_corpus, corpus_settings, prepare_plan
from data.choose import corpus_order
from data.page import Wanted, write_page
from data.plan import Plan, read_plan
from data.prompts import Prompt
from data.scan import Scan, begin_scan, scan_sources
from data.sources import Places
from data.template import ChatTemplate
from data.verify import verify_corpus
from target.load import load_tokenizer

MakeConfig = Callable[..., Config]


def ranks(rank: int = 0, world_size: int = 1) -> Ranks:
    return Ranks(rank, world_size, rank, torch.device("cpu"))


def source(path: Path, **settings: object) -> dict[str, object]:
    return {"name": path.stem, "kind": "jsonl", "path": str(path), **settings}


def write_prompts(path: Path, *prompts: str) -> Path:
    rows = [{"messages": [{"role": "user", "content": prompt}]} for prompt in prompts]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def unlike(count: int, seed: int = 0) -> list[str]:
    rng = np.random.default_rng(seed)
    return [
        f"{i}: " + " ".join(f"w{w}" for w in rng.integers(0, 300, 8)) + "?" for i in range(count)
    ]


def near(prompt: str) -> str:
    return f"{prompt} Please"


def config_of(tiny_config: MakeConfig, *sources: dict[str, object], **settings: object) -> Config:
    overrides = [f"data.sources={json.dumps(list(sources))}", "data.near_duplicate_similarity=0.7"]
    return tiny_config(
        overrides=[*overrides, *(f"data.{k}={json.dumps(v)}" for k, v in settings.items())]
    )


def planned(config: Config, folder: Path) -> tuple[Plan, list[Prompt], dict[str, bytes]]:
    prepare_plan(config, folder)
    units = folder / "units"
    plan = read_plan(units)
    prompts = [prompt for chunk in range(plan.num_chunks) for prompt in plan.chunk(chunk)]
    return plan, prompts, {p.name: p.read_bytes() for p in units.iterdir() if p.is_file()}


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data.rows, "BLOCK_ROWS", 5)
    monkeypatch.setattr("data.selection._BUCKET_ROWS", 7)
    monkeypatch.setattr("data.selection.UNITS_PER_CHUNK", 1)


@pytest.fixture
def mixed(tmp_path: Path, tiny_config: MakeConfig) -> Config:
    """Two sources with doubles, near-doubles and a contaminated row, and a test source."""
    first, second = unlike(30), unlike(20, seed=1)
    story = " ".join(f"s{i}" for i in range(14))
    a = write_prompts(tmp_path / "a.jsonl", *first, first[3], near(first[5]), f"x {story} y")
    b = write_prompts(tmp_path / "b.jsonl", *second, first[0], near(first[1]))
    exam = write_prompts(tmp_path / "exam.jsonl", f"Go on: {story}", "Name it, please.")
    return config_of(
        tiny_config,
        source(a, take=20),
        source(b),
        source(exam, split="test"),
        validation_fraction=0.1,
        test_fraction=0.0,
    )


def test_blocks_and_buckets_change_no_byte(mixed, tmp_path, monkeypatch):
    _, _, whole = planned(mixed, tmp_path / "whole")
    monkeypatch.setattr(data.rows, "BLOCK_ROWS", 5)
    monkeypatch.setattr("data.selection._BUCKET_ROWS", 7)
    _, _, blocks = planned(mixed, tmp_path / "blocks")
    assert whole["prompts.parquet"] == blocks["prompts.parquet"]
    assert whole["findings.json"] == blocks["findings.json"]
    assert whole["decontamination.jsonl"] == blocks["decontamination.jsonl"]
    tables = [
        pq.read_table(tmp_path / run / "units" / "rejected.parquet") for run in ("whole", "blocks")
    ]
    assert tables[0].equals(tables[1])


def scan_of(config: Config, folder: Path) -> Scan:
    scan = Scan(folder / "units" / "scan", config.data.sources)
    scan.folder.mkdir(parents=True, exist_ok=True)
    begin_scan(scan.folder, corpus_settings(config), offline=False)
    return scan


def test_three_ranks_and_a_kill_between_parts_give_the_same_bytes(
    mixed, tmp_path, small_blocks, monkeypatch
):
    _, _, whole = planned(mixed, tmp_path / "whole")
    folder = tmp_path / "shared"
    scan = scan_of(mixed, folder)
    template = ChatTemplate(load_tokenizer(mixed.target), {})
    for rank in (2, 0):  # rank 1 was killed before its first part
        before = set(scan.folder.glob("*-*.parquet"))
        scan_sources(mixed, scan, Places(), template, ranks(rank, 3))
        new = set(scan.folder.glob("*-*.parquet")) - before
        assert {int(path.stem.partition("-")[2]) % 3 for path in new} == {rank}
    parts = sorted(scan.folder.glob("*-*.parquet"))
    made = {path.name: path.stat().st_mtime_ns for path in parts}
    assert 0 < len(made) < 7 + 5 + 1
    (scan.folder / ".000-00001.parquet.77.tmp").write_text("half")  # a kill in mid-write
    judged: dict[str, int] = {}

    def spy(found: Scan, _: float) -> None:  # called when every part is there, before they go
        judged.update({p.name: p.stat().st_mtime_ns for p in found.folder.glob("*-*.parquet")})

    monkeypatch.setattr("data.selection.refuse_malformed", spy)
    _, _, resumed = planned(mixed, folder)
    assert resumed == whole
    assert {name: judged[name] for name in made} == made  # done parts were not made again


def test_verdicts_come_with_their_reason_and_partner(mixed, tmp_path):
    plan, prompts, _ = planned(mixed, tmp_path)
    rejected = pq.read_table(tmp_path / "units" / "rejected.parquet").to_pylist()
    found = {
        (r["source"], r["row"].rpartition(":")[2]): (r["reason"], r["detail"]) for r in rejected
    }
    a, b = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    assert found["a", "31"] == ("duplicate", f"of a: {a}:4")
    assert found["a", "32"] == ("near duplicate", f"of a: {a}:6")
    assert found["b", "21"] == ("duplicate", f"of a: {a}:1")
    assert found["b", "22"] == ("near duplicate", f"of a: {a}:2")
    reason, detail = found["a", "33"]
    assert reason == "contaminated by a test prompt"
    assert json.loads(detail) == {
        "ngram": " ".join(f"s{i}" for i in range(13)),
        "test_source": "exam",
        "test_where": f"{tmp_path / 'exam.jsonl'}:1",
    }
    report = (tmp_path / "units" / "decontamination.jsonl").read_text().splitlines()
    assert [json.loads(line)["row"] for line in report] == [f"{a}:33"]
    assert b.is_file()
    chosen = Counter(prompt.source for prompt in prompts)
    assert chosen == {"a": 20, "b": 20, "exam": 2}
    for name, counts in plan.counts.items():
        assert counts.read == chosen[name] + counts.rejected.total()
    assert Counter(r["source"] for r in rejected)["a"] == plan.counts["a"].rejected.total() == 13
    findings = json.loads((tmp_path / "units" / "findings.json").read_text())
    assert findings["doubles_of"]["b"] == {"duplicate": {"a": 1}, "near duplicate": {"a": 1}}
    assert {tuple(pair["sources"]) for pair in findings["near_pairs"]} == {("a", "a"), ("b", "a")}


def test_spares_replace_rejected_responses_up_to_the_exact_take(tiny_config, tmp_path):
    """Responses of a random target differ in length, so a minimum length rejects some of them."""
    path = write_prompts(tmp_path / "many.jsonl", *unlike(40))
    free = config_of(tiny_config, source(path), min_response_tokens=1)
    build_corpus(free, ranks())
    counts = build_corpus(free, ranks()).manifest.counts
    assert counts["many"]["read"] == 40
    config = config_of(
        tiny_config, source(path, take=10), spare_fraction=0.5, min_response_tokens=4
    )
    built = build_corpus(config, ranks()).manifest
    entry = built.counts["many"]
    assert sum(entry["done"].values()) == 10
    assert entry["read"] == 40 == 10 + sum(entry["rejected"].values())
    folder = config.run.folder / "corpus"
    listed = Counter(pq.read_table(folder / "rejected.parquet")["reason"].to_pylist())
    assert listed == entry["rejected"]
    verified = verify_corpus(config)
    assert (verified.num_conversations, verified.num_rejected) == (10, 30)


def test_thinking_is_a_share_by_content_and_test_prompts_may_have_both_modes(tiny_config, tmp_path):
    path = write_prompts(tmp_path / "many.jsonl", *unlike(200))
    exam = write_prompts(tmp_path / "exam.jsonl", "Name it, please.")
    sources = [
        source(path, thinking=0.3),
        source(exam, split="test", thinking=True) | {"name": "exam-thinking"},
        source(exam, split="test", thinking=False),
    ]
    _, prompts, _ = planned(config_of(tiny_config, *sources), tmp_path / "one")
    modes = {prompt.where: prompt.thinking for prompt in prompts if prompt.source == "many"}
    assert len(modes) == 200
    assert 40 <= sum(mode is True for mode in modes.values()) <= 80  # 60 expected, s.d. 6.5
    exams = {prompt.source: prompt for prompt in prompts if prompt.split == "test"}
    assert exams["exam"].thinking is False
    assert exams["exam-thinking"].thinking is True
    assert exams["exam"].sample_id != exams["exam-thinking"].sample_id
    tokenizer = load_tokenizer(config_of(tiny_config, *sources).target)
    assert "<think>" in tokenizer.decode(exams["exam"].prompt_ids.tolist())  # its empty thought
    half = write_prompts(tmp_path / "half.jsonl", *unlike(200)[::2])
    _, fewer, _ = planned(config_of(tiny_config, source(half, thinking=0.3)), tmp_path / "two")
    again = [p.thinking for p in fewer]
    assert again.count(True) == sum(modes[f"{path}:{i + 1}"] is True for i in range(0, 200, 2))


def test_malformed_rows_are_counted_up_to_the_limit_and_then_stop(tiny_config, tmp_path):
    path = write_prompts(tmp_path / "rows.jsonl", *unlike(18))
    with path.open("a") as file:
        file.write('{"text": "no conversation"}\n{"messages": 3}\n')
    allowed = config_of(tiny_config, source(path), max_malformed=0.1)
    plan, prompts, _ = planned(allowed, tmp_path / "one")
    assert len(prompts) == 18
    assert plan.counts["rows"].rejected["unknown shape"] == 2
    strict = config_of(tiny_config, source(path), max_malformed=0.05)
    with pytest.raises(
        ValueError, match=r"'rows': 2 of 20 rows are of an unknown shape.*rows.jsonl:19"
    ):
        prepare_plan(strict, tmp_path / "two")
    wrong = config_of(tiny_config, source(path, messages_column="chat"), max_malformed=0.9)
    with pytest.raises(ValueError, match=r"rows.jsonl:1: no conversation in column 'chat'"):
        prepare_plan(wrong, tmp_path / "three")


def test_settings_that_the_template_ignores_are_told(tiny_config, tmp_path, caplog):
    path = write_prompts(tmp_path / "rows.jsonl", *unlike(4))
    planned(
        config_of(tiny_config, source(path, thinking=True, tools_column="tools")), tmp_path / "one"
    )
    assert "ignores data.sources[].tools_column of rows" in caplog.text
    assert "sources[].thinking" not in caplog.text  # which this template reads


def test_corpus_order_is_that_of_the_hash_bytes():
    keys = np.array([[2, 0], [1, 9], [1, 3]], dtype=np.uint64)
    rows = type("Rows", (), {"order": keys})()
    assert corpus_order(rows, np.arange(3)).tolist() == [2, 1, 0]  # pyright: ignore[reportArgumentType] - only this column


def test_verify_finds_what_was_changed(tiny_config, tmp_path):
    path = write_prompts(tmp_path / "m.jsonl", *unlike(20))
    config = config_of(tiny_config, source(path), min_response_tokens=1)
    build_corpus(config, ranks())
    folder = config.run.folder / "corpus"
    assert verify_corpus(config).num_rows == 20
    manifest = json.loads((folder / "manifest.json").read_text())
    broken = json.loads(json.dumps(manifest))
    broken["counts"]["m"]["read"] += 1
    (folder / "manifest.json").write_text(json.dumps(broken))
    with pytest.raises(ValueError, match="source m: 21 rows were read, 20 are done and 0 rejected"):
        verify_corpus(config)
    broken = json.loads(json.dumps(manifest))
    broken["counts"]["total"]["read"] += 1
    broken["counts"]["total"]["done"]["train"] += 1
    (folder / "manifest.json").write_text(json.dumps(broken))
    with pytest.raises(ValueError, match=r"21 rows were read in total, the sources' add up to 20"):
        verify_corpus(config)
    (folder / "manifest.json").write_text(json.dumps(manifest))
    other = config.model_copy(
        update={"data": config.data.model_copy(update={"test_fraction": 0.7})}
    )
    # a changed recipe is not the corpus' fault
    with pytest.raises(ValueError, match=r"made with data.test_fraction=0.2, this run has 0.7"):
        verify_corpus(other)
    manifest["settings"]["recipe"]["data.test_fraction"] = 0.7
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match=r"its split is .*, its first user turn says test"):
        verify_corpus(other)
    manifest["settings"]["recipe"]["data.test_fraction"] = 0.2
    (folder / "manifest.json").write_text(json.dumps(manifest))
    (folder / "rejected.parquet").unlink()
    with pytest.raises(FileNotFoundError, match=r"rejected\.parquet is missing"):
        verify_corpus(config)


def test_the_page_stands_alone_and_escapes_what_it_shows(tiny_config, tmp_path):
    bad = "<script>alert(1)</script> & 'quotes'"
    path = write_prompts(tmp_path / "m.jsonl", *unlike(20), unlike(1)[0])
    evil = write_prompts(tmp_path / "evil.jsonl", bad)
    config = config_of(
        tiny_config, source(path, take=30), source(evil, license="MIT"), min_response_tokens=1
    )
    build_corpus(config, ranks())
    folder = config.run.folder / "corpus"
    wanted = {"m": Wanted(30, "MIT", False), "evil": Wanted(None, "MIT", True)}
    page = write_page(folder, "run", wanted)
    text = page.read_text()
    assert "<script" not in text
    assert "&lt;script&gt;alert(1)" in text
    assert not any(word in text for word in ("src=", "href=", "http:", "https:", "@import"))
    assert "m has 20 of 30" in text  # short of the recipe
    assert text.count("<details>") >= 3
    before = page.read_bytes()
    write_page(folder, "run", wanted)
    assert page.read_bytes() == before
