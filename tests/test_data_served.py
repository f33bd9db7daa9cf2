"""Labels from servers: the tokens are the target's own, whatever servers and networks do; nothing is lost or done twice."""

from __future__ import annotations

import email.utils
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from label_server import (
    RUBBISH,
    Body,
    LabelServer,
    ascii_answers,
    fails_always,
    fails_first,
    target_answers,
)

from common.distributed import Ranks
from configs.load import load_config
from configs.schema import Config
from data.build import build_corpus
from data.client import retry_after_s
from data.corpus import CorpusRow, iter_corpus, read_corpus_manifest
from data.servers import Server
from data.settings import require_same_data
from target.load import load_target, load_tokenizer

ROOT = Path(__file__).parent.parent
EOS = 258
MakeConfig = Callable[..., Config]
ALONE = Ranks(0, 1, 0, torch.device("cpu"))
KEEP_ALL = "data.min_response_tokens=1"


def served(*servers: LabelServer, **settings: object) -> str:
    """The override that sends a run to these servers."""
    given = {"urls": [server.url for server in servers], "timeout_s": 20, "concurrency": 8}
    return "data.responses.server=" + json.dumps(given | settings)


def shard_sums(config: Config) -> list[str]:
    return [s.sha256 for s in read_corpus_manifest(config.run.folder / "corpus").shards]


def rows_of(config: Config) -> list[CorpusRow]:
    folder = config.run.folder / "corpus"
    return list(iter_corpus(folder, read_corpus_manifest(folder)))


def made_up(config: Config, **settings) -> LabelServer:
    """A server with the run's tokenizer whose answers are made up."""
    return LabelServer(load_tokenizer(config.target), ascii_answers(EOS), EOS, **settings)


def lines(path: Path, rows: list[list[tuple[str, str]]]) -> str:
    """Override of the sources by conversations given as (role, content) turns."""
    conversations = [{"messages": [{"role": r, "content": c} for r, c in row]} for row in rows]
    path.write_text("".join(json.dumps(row) + "\n" for row in conversations))
    return f"data.sources=[{json.dumps({'name': path.stem, 'kind': 'jsonl', 'path': str(path)})}]"


@pytest.mark.parametrize("stream", [False, True])
def test_a_server_s_tokens_are_those_of_the_target_in_this_process(
    tiny_config: MakeConfig, tiny_target, tmp_path, stream
):
    turns = [("user", "Hello you"), ("assistant", "x"), ("user", "And now?")]
    talks = lines(tmp_path / "talks.jsonl", [[("user", f"Say {i}.")] for i in range(6)] + [turns])
    overrides = [talks, KEEP_ALL, "data.responses.batch_size=1"]
    here, there = tiny_config(overrides=overrides), tiny_target()
    build_corpus(here, ALONE)
    with LabelServer(there.tokenizer, target_answers(there), EOS) as server:
        remote = tiny_config(overrides=[*overrides, served(server, stream=stream)])
        build_corpus(remote, ALONE)
    assert shard_sums(remote) == shard_sums(here)
    assert Counter(len(row.messages) for row in rows_of(remote))


def test_what_is_asked_states_every_sampling_setting_and_a_seed_a_row(tiny_config: MakeConfig):
    config = tiny_config()
    with made_up(config) as server:
        sampled = ["data.responses.temperature=0.7", "data.responses.top_k=20"]
        again = [tiny_config(overrides=[*sampled, KEEP_ALL, served(server)]) for _ in range(2)]
        for run in again:
            build_corpus(run, ALONE)
    bodies = server.requests
    assert len(bodies) == 48
    for body in bodies:
        assert (body["temperature"], body["top_k"], body["top_p"]) == (0.7, 20, 1.0)
        assert (body["repetition_penalty"], body["min_p"]) == (1.0, 0.0)
        assert body["return_token_ids"] is True
    seeds = {json.dumps(body["prompt"]): body["seed"] for body in bodies}
    assert len(set(seeds.values())) == 24
    assert all(seeds[json.dumps(body["prompt"])] == body["seed"] for body in bodies)
    assert shard_sums(again[0]) == shard_sums(again[1])


@pytest.mark.parametrize("stream", [False, True])
def test_every_passing_fault_leaves_the_corpus_as_it_would_be(tiny_config: MakeConfig, stream):
    """24 prompts, each first met by one of the faults; the second try of each is well."""
    faults = ["429", "503", "502", "500", "408", "cut", "cut_body", *RUBBISH]
    faults += ["other_prompt", "out_of_vocab", "after_eos", "no_eos", "lost_token", "abort"]
    faults += ["cut_short"]
    config = tiny_config(overrides=[KEEP_ALL])
    with made_up(config) as server:
        well = tiny_config(overrides=[KEEP_ALL, served(server)])
        build_corpus(well, ALONE)
    with made_up(config, fault=fails_first(*faults)) as server:
        shaken = tiny_config(overrides=[KEEP_ALL, served(server, stream=stream)])
        counts = build_corpus(shaken, ALONE).manifest.counts["total"]
    assert shard_sums(shaken) == shard_sums(well)
    assert (sum(counts["done"].values()), counts["rejected"]) == (24, {})
    assert set(faults) <= set(server.statuses)
    # in a stream a piece without choices is no fault: servers send their usage so
    assert len(server.requests) == (47 if stream else 48)


@pytest.mark.parametrize(("stream", "fault"), [(False, "stall"), (True, "stall_stream")])
def test_a_silent_server_is_left_after_the_timeout(tiny_config: MakeConfig, stream, fault):
    config = tiny_config()
    with made_up(config, fault=lambda body, seen: fault if seen == 0 else None) as server:
        patient = served(server, stream=stream, timeout_s=0.3, concurrency=32)
        run = tiny_config(overrides=[KEEP_ALL, patient])
        assert build_corpus(run, ALONE).manifest.counts["total"]["rejected"] == {}
    assert server.statuses[fault] == 24


def test_rows_that_no_server_can_answer_are_rejected_with_their_reason(tiny_config: MakeConfig):
    """Every input row ends as done or rejected by reason, and a row out of attempts is tried again by the next run only."""
    config = tiny_config()
    decode = load_tokenizer(config.target).decode

    def is_poison(body: Body) -> bool:
        return "3 to" in decode(body["prompt"])

    def is_refused(body: Body) -> bool:
        return "from 11 to" in decode(body["prompt"])

    bad = fails_always(["500", "bad_json", "cut"], is_poison)
    refused = fails_always(["400"], is_refused)
    with made_up(config, fault=lambda body, n: bad(body, n) or refused(body, n)) as server:
        settings = served(server, max_failed=0.5, max_attempts=3)
        run = tiny_config(overrides=[KEEP_ALL, settings])
        counts = build_corpus(run, ALONE).manifest.counts["total"]
    assert counts["rejected"] == {
        "no usable answer from a server": 3,  # 3, 13, 23
        "refused by the server": 1,
    }
    assert counts["read"] == sum(counts["done"].values()) + 4 == 24
    asked = Counter(json.dumps(body["prompt"]) for body in server.requests)
    assert sorted(asked.values()) == [1] * 21 + [3] * 3


def test_too_many_failures_stop_the_run_and_the_next_one_goes_on(tiny_config: MakeConfig):
    config = tiny_config(overrides=[KEEP_ALL])
    with made_up(config, fault=lambda body, seen: "500") as server:
        run = tiny_config(overrides=[KEEP_ALL, served(server, max_attempts=1)])
        with pytest.raises(
            ValueError, match=r"prompts got no answer.*server error 500.*max_failed"
        ):
            build_corpus(run, ALONE)
        assert len(server.requests) < 24
        server.fault = lambda body, seen: None
        counts = build_corpus(run, ALONE).manifest.counts["total"]
    assert counts["rejected"] == {}


def test_a_dead_server_rejects_nothing_and_is_given_up_in_one_line(tiny_config: MakeConfig):
    config = tiny_config()
    with made_up(config) as server:
        url = server.url
        server.fault = lambda body, seen: "cut" if len(server.requests) > 5 else None
        settings = served(server, give_up_s=0.2, max_attempts=1000)
        run = tiny_config(overrides=[KEEP_ALL, settings])
        with pytest.raises(ValueError, match=r"no server has answered for 0 s.*run the data stage"):
            build_corpus(run, ALONE)
    kept = run.run.folder / "corpus" / "units" / "answers.journal"
    assert kept.read_text().count("is_last") > 0
    with pytest.raises(ValueError, match=rf"{url}/models cannot be reached.*start the server"):
        build_corpus(run, ALONE)


def test_servers_share_the_work_within_their_limits(tiny_config: MakeConfig):
    config = tiny_config()
    with made_up(config, delay_s=0.02) as fast, made_up(config, delay_s=0.1) as slow:
        run = tiny_config(overrides=[KEEP_ALL, served(fast, slow, concurrency=3)])
        build_corpus(run, ALONE)
    assert fast.most_open == slow.most_open == 3
    assert len(fast.requests) + len(slow.requests) == 24
    assert len(fast.requests) > len(slow.requests) >= 3


def test_a_rate_limited_server_is_asked_less(tiny_config: MakeConfig, tmp_path):
    """It takes two requests at a time, sixteen are allowed here: the limit falls, few are refused, nothing fails."""
    config = tiny_config()
    rows = lines(tmp_path / "many.jsonl", [[("user", f"Say {i}.")] for i in range(160)])
    with made_up(config, delay_s=0.002) as server:
        server.fault = lambda body, seen: "429" if server.num_open >= 2 else None
        run = tiny_config(overrides=[rows, KEEP_ALL, served(server, concurrency=16)])
        counts = build_corpus(run, ALONE).manifest.counts["total"]
    assert (sum(counts["done"].values()), counts["rejected"]) == (160, {})
    assert 0 < server.statuses["429"] < 160


def test_trouble_halves_a_server_s_limit_once_an_event_and_answers_raise_it_again():
    server = Server("http://one/v1/", 16)
    assert server.url == "http://one/v1"
    for expected in (8, 4, 2, 1, 1):
        server.troubled("cut", time.monotonic(), None)
        server.troubled("cut", 0.0, None)  # sent before: the same crash
        assert server.limit == expected
    assert server.num_troubles == 5
    assert (
        4 < server.rest_until - time.monotonic() <= 8
    )  # 0.5 s doubled four times, less up to half
    server.rest_until = 0.0
    server.in_flight = 1
    assert not server.is_free(time.monotonic())
    for _ in range(60):
        server.answered()
    assert server.limit == 16
    assert server.troubled_since is None
    server.troubled("busy (429)", time.monotonic(), 30.0)
    assert 29 < server.rest_until - time.monotonic() <= 30


def test_retry_after_is_seconds_or_a_date():
    date = email.utils.formatdate(time.time() + 90, usegmt=True)
    assert 85 < (retry_after_s(date) or 0) < 91
    assert [retry_after_s(v) for v in ("2.5", "-1", "soon", None)] == [2.5, 0.0, None, None]


def test_a_lost_server_s_work_goes_to_the_other(tiny_config: MakeConfig):
    config = tiny_config()
    with made_up(config, delay_s=0.01) as good, made_up(config) as bad:
        bad.fault = lambda body, seen: "cut"
        run = tiny_config(overrides=[KEEP_ALL, served(bad, good, max_attempts=20)])
        counts = build_corpus(run, ALONE).manifest.counts["total"]
    assert (sum(counts["done"].values()), counts["rejected"]) == (24, {})
    assert good.statuses["ok"] == 24 + 3  # and the handshake's
    assert good.most_open <= 8


def test_kill_9_keeps_every_answer_and_the_resumed_corpus_is_the_same(
    tiny_config: MakeConfig, tmp_path
):
    turns = [
        ("user", "A{}"),
        ("assistant", "-"),
        ("user", "B{}"),
        ("assistant", "-"),
        ("user", "C"),
    ]
    rows = [[(role, text.format(i)) for role, text in turns] for i in range(24)]
    talks = lines(tmp_path / "talks.jsonl", rows)
    config = tiny_config()
    with made_up(config, delay_s=0.03) as server:
        overrides = [talks, KEEP_ALL, served(server, concurrency=4)]
        whole, killed = tiny_config(overrides=overrides), tiny_config(overrides=overrides)
        build_corpus(whole, ALONE)
        server.requests.clear()
        journal = killed.run.folder / "corpus" / "units" / "answers.journal"
        recipe = str(killed.run.folder.parent / "tiny.yaml")
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "data", recipe, *overrides]
        with subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.DEVNULL) as run:
            deadline = time.monotonic() + 120
            while not journal.is_file() or journal.read_bytes().count(b"\n") < 20:
                assert run.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.005)
            os.kill(run.pid, signal.SIGKILL)
        num_kept = journal.read_bytes().count(b"\n") - 1
        with journal.open("ab") as file:
            file.write(b'1234abcd {"place":3,"tu')  # what a power cut leaves of a line
        build_corpus(killed, ALONE)
    assert shard_sums(killed) == shard_sums(whole)
    # asked again: at most what was in flight at the kill
    assert 72 <= len(server.requests) <= 72 + 4
    assert 19 <= num_kept < 72


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "other"}, None),
        ({"max_model_len": 100}, r"sequences of 100 tokens, data.max_tokens is 192.*max-model-len"),
        ({"gives_ids": False}, r"returns no token ids.*retokenise=true"),
        ({"eos": 257}, r"known prompt: it stopped without an EOS token"),
    ],
)
def test_a_server_of_another_kind_is_refused_before_the_first_row(
    tiny_config: MakeConfig, change, message
):
    config = tiny_config()
    tokenizer, eos = load_tokenizer(config.target), change.get("eos", EOS)
    known = lambda body: [64, eos] if body["max_tokens"] <= 2 else ascii_answers(EOS)(body)  # noqa: E731
    with LabelServer(tokenizer, known, **({"eos": EOS} | change)) as server:
        run = tiny_config(overrides=[KEEP_ALL, served(server)])
        if message is None:
            build_corpus(run, ALONE)
            return
        with pytest.raises(ValueError, match=message):
            build_corpus(run, ALONE)
    assert not server.requests


def test_another_model_name_tokenizer_or_template_is_refused(tiny_config: MakeConfig):
    config = tiny_config()
    with made_up(config) as server:
        wrong = tiny_config(overrides=[served(server, model="qwen")])
        with pytest.raises(ValueError, match=r"server.model=qwen, it serves tiny; set one"):
            build_corpus(wrong, ALONE)
        tokenizer = server.tokenizer
        template = str(tokenizer.chat_template)
        tokenizer.chat_template = template.replace("'\\n' + message", "' ' + message")
        run = tiny_config(overrides=[served(server)])
        with pytest.raises(
            ValueError, match=r"chat template \(its defaults\) is not that of target"
        ):
            build_corpus(run, ALONE)
        server.tokenizer = load_tokenizer(config.target)
        server.tokenizer.add_tokens(["Naïve"])
        with pytest.raises(
            ValueError, match=r"its tokenizer is not that of target.*from token 0 on"
        ):
            build_corpus(run, ALONE)
    assert not server.requests


def test_text_is_tokenised_again_only_when_asked_and_only_if_the_count_fits(
    tiny_config: MakeConfig, caplog
):
    config = tiny_config()
    with made_up(config) as server:
        with_ids = tiny_config(overrides=[KEEP_ALL, served(server)])
        build_corpus(with_ids, ALONE)
    with made_up(config, gives_ids=False, fault=fails_first("lost_token")) as server:
        without = tiny_config(overrides=[KEEP_ALL, served(server, retokenise=True)])
        build_corpus(without, ALONE)
    assert "its text is tokenised again" in caplog.text
    assert shard_sums(without) == shard_sums(with_ids)  # letters are their own tokens
    recipe = read_corpus_manifest(without.run.folder / "corpus").settings["recipe"]
    assert recipe["data.responses.server.retokenise"] is True
    # servers are named on the data stage's command line: later stages do not know them
    require_same_data("the corpus", {"recipe": recipe}, tiny_config(overrides=[KEEP_ALL]).data)
    other = tiny_config(overrides=[KEEP_ALL, "data.responses.max_new_tokens=5"])
    with pytest.raises(ValueError, match=r"responses\.max_new_tokens"):
        require_same_data("the corpus", {"recipe": recipe}, other.data)


def test_a_key_comes_from_the_environment(tiny_config: MakeConfig, monkeypatch):
    config = tiny_config()
    with made_up(config) as server:
        run = tiny_config(overrides=[KEEP_ALL, served(server, api_key_variable="LABEL_KEY")])
        with pytest.raises(ValueError, match="LABEL_KEY is not set in the environment"):
            build_corpus(run, ALONE)
        monkeypatch.setenv("LABEL_KEY", "secret")
        build_corpus(run, ALONE)
    text = (run.run.folder / "corpus" / "manifest.json").read_text()
    assert "secret" not in text
    assert server.url not in text


@pytest.mark.slow
@pytest.mark.parametrize("turns", ["every", "last"])
def test_smollm2_behind_a_server_gives_the_tokens_it_gives_in_this_process(tmp_path, turns):
    """float32, greedy: a conversation of three turns, a long answer that is cut, and some that end."""
    recipe = ROOT / "configs" / "demo.yaml"
    talk = [("user", "Name a fruit."), ("assistant", "-"), ("user", "Another one?")]
    rows = [[*talk, ("assistant", "-"), ("user", "Which of them is red?")]]
    rows += [[("user", f"What is {i} plus {i + 1}?")] for i in range(4)]
    overrides = [
        *(lines(tmp_path / "talks.jsonl", rows), "target.dtype=float32", "data.max_tokens=400"),
        *(f"data.responses.turns={turns}", "data.responses.max_new_tokens=24", KEEP_ALL),
        "data.max_repetition=1.0",
    ]
    here = load_config(recipe, [*overrides, f"run.output_dir={tmp_path}/here"])
    build_corpus(here, ALONE)
    target = load_target(here.target, "cpu")
    eos = target.eos_token_ids[0]
    with LabelServer(target.tokenizer, target_answers(target), eos, max_model_len=None) as server:
        there = served(server, concurrency=4, timeout_s=300)
        remote = load_config(recipe, [*overrides, there, f"run.output_dir={tmp_path}/there"])
        build_corpus(remote, ALONE)
    assert shard_sums(remote) == shard_sums(here)
    made = rows_of(remote)
    assert {row.finished for row in made} == {True, False}
    assert sum(row.num_response_tokens for row in made) > 60
