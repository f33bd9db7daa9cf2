"""Who starts workers, what they say, and what they try again."""

from __future__ import annotations

import argparse
import errno
import re
import subprocess

import pytest

from common.storage import LocalStorage
from data.feature_manifest import QuarantinedRow, ShardEntry
from extract.batches import cut_lengths
from extract.claims import Claims
from extract.launch import exit_code, main, worker_environment
from extract.patience import WAITS_S, PatientStorage
from extract.reporter import Reporter
from extract.work import ExtractWork, ShardRecord, record_name, shard_name, write_record


def test_workers_of_a_machine_share_its_gpus_and_see_no_others():
    gpus = ["0", "1", "2", "3", "4", "5", "6", "7"]
    eight = [worker_environment(i, 8, 8, gpus) for i in range(8)]
    assert [e["CUDA_VISIBLE_DEVICES"] for e in eight] == gpus
    assert [e["RANK"] for e in eight] == [str(8 + i) for i in range(8)]  # the second machine
    two_each = [worker_environment(i, 4, 0, gpus)["CUDA_VISIBLE_DEVICES"] for i in range(4)]
    assert two_each == ["0,1", "2,3", "4,5", "6,7"]  # a target that needs two
    assert {worker_environment(i, 4, 0, gpus)["LOCAL_RANK"] for i in range(4)} == {"0"}
    assert "CUDA_VISIBLE_DEVICES" not in worker_environment(0, 2, 0, [])


def test_one_worker_that_saw_the_set_complete_is_success():
    assert exit_code([0, 0]) == 0
    assert exit_code([2, 0, -9]) == 0
    assert exit_code([2, 1]) == 2
    assert exit_code([-9, 2]) == 137
    assert exit_code([143, 143]) == 143


@pytest.mark.parametrize("is_verify", [False, True])
def test_verification_is_one_process_whose_code_counts(monkeypatch, caplog, is_verify):
    """Else those that have nothing to read would say that all is well."""
    started = []

    class Ended:
        returncode = 2

        def __init__(self, command, env):
            started.append((env["RANK"], env["WORLD_SIZE"]))

        def wait(self):
            return self.returncode

    monkeypatch.setattr(subprocess, "Popen", Ended)
    monkeypatch.setattr("extract.launch.visible_gpus", list)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    monkeypatch.setenv("NPROC", "3")
    monkeypatch.setenv("NODE_RANK", "1")
    options = argparse.Namespace(config="configs/debug.yaml", overrides=[], verify=is_verify)
    with pytest.raises(SystemExit, match="2"):
        main(options)
    assert started == ([("1", "1")] if is_verify else [("3", "3"), ("4", "3"), ("5", "3")])
    assert "the others go on" not in caplog.text  # none is left
    assert caplog.text.count("ended with exit code 2") == len(started)


def test_what_no_worker_could_start_with_is_said_once(monkeypatch):
    options = argparse.Namespace(config="configs/debug.yaml", overrides=[], verify=False)
    monkeypatch.setattr("extract.launch.visible_gpus", list)
    monkeypatch.setenv("NODE_RANK", "first")
    with pytest.raises(ValueError, match="NODE_RANK=first: give a number"):
        main(options)
    monkeypatch.setattr("extract.launch.visible_gpus", lambda: ["0"])
    monkeypatch.setenv("NPROC", "2")
    with pytest.raises(ValueError, match="NPROC=2, but 1 GPUs are visible"):
        main(options)
    options.overrides = ["extract.codek=1"]
    with pytest.raises(ValueError, match=r"extract\.codek"):
        main(options)


class Failing(LocalStorage):
    """Raises the errors it is given, one a call, then works."""

    def __init__(self, folder, *errors):
        super().__init__(folder)
        self.errors = list(errors)

    def write(self, name, data):
        if self.errors:
            raise self.errors.pop(0)
        super().write(name, data)


def test_a_hiccup_is_tried_again_and_what_cannot_pass_is_not(tmp_path):
    slept = []
    hiccup = OSError(errno.EIO, "Input/output error")
    stale = OSError(errno.ESTALE, "Stale file handle")
    PatientStorage(Failing(tmp_path, hiccup, stale), slept.append).write("a", b"1")
    assert slept == list(WAITS_S[:2])
    assert (tmp_path / "a").read_bytes() == b"1"
    for_good = [OSError(errno.ESTALE, "Stale file handle")] * 99
    with pytest.raises(OSError, match="Stale"):
        PatientStorage(Failing(tmp_path, *for_good), lambda _: None).write("b", b"1")
    for final in (OSError(errno.ENOSPC, "No space left"), PermissionError(13, "denied")):
        slept.clear()
        with pytest.raises(OSError, match=r"No space left|denied"):
            PatientStorage(Failing(tmp_path, final), slept.append).write("c", b"1")
        assert not slept


@pytest.fixture
def work(tmp_path):
    return ExtractWork(tmp_path, LocalStorage(tmp_path / "features"), None, {"codec": "bf16"})  # pyright: ignore[reportArgumentType]  # no corpus is read


def a_record(work, cut, num_bytes, num_bad):
    bad = [QuarantinedRow(f"bad-{i}", shard_name(cut.index), "no tokens") for i in range(num_bad)]
    rows = cut.num_rows - num_bad
    entry = ShardEntry(shard_name(cut.index), rows, cut.num_tokens, num_bytes, "", [])
    write_record(work, ShardRecord(entry, bad))
    return ShardRecord(entry, bad)


def test_the_line_counts_all_workers_by_the_folder_and_this_one_by_its_work(work, caplog):
    cuts = cut_lengths([100] * 10, 200)  # five shards of two rows
    now = [0.0]
    reporter = Reporter(work, cuts, clock=lambda: now[0])
    reporter.begin()
    a_record(work, cuts[0], 40_000_000, 0)  # another worker's
    reporter.add_record(3, own := a_record(work, cuts[3], 60_000_000, 1))
    reporter.add_quarantined(own.quarantined)
    reporter.add_batch(250, 50)
    other = Claims(work.storage, 60.0)
    assert other.take(shard_name(1))
    now[0] = 10.0
    metrics = reporter.metrics(reporter.totals())
    assert metrics == {
        "extract/rows": 4,
        "extract/tokens_per_s": pytest.approx(40.0),
        "extract/gb_per_s": pytest.approx(0.01),
        "extract/quarantined": 1,
        "extract/workers": 1,
        "extract/worker_rows": 2,
        "extract/worker_tokens_per_s": pytest.approx(20.0),
        "extract/worker_quarantined": 1,
        "extract/padding": pytest.approx(0.2),
    }
    logged = []
    reporter.curve = Curve(logged)
    with caplog.at_level("INFO"):
        reporter.report()
    line = caplog.messages[-1]
    assert re.search(r"4/10 rows, 40 tokens/s, 0\.01 GB/s, ETA 15s, 1 quarantined, 1 worker;", line)
    assert logged[0]["extract/rows"] == 4


class Curve:
    id = "run"

    def __init__(self, logged):
        self.logged = logged

    def log(self, data, step=None):
        self.logged.append(data)

    def finish(self): ...


def test_another_settings_sidecar_is_not_counted_as_stored(work):
    cuts = cut_lengths([100] * 4, 200)
    other = ExtractWork(work.corpus_folder, work.storage, work.corpus, {"codec": "fp8"})
    a_record(other, cuts[1], 7, 0)
    assert work.storage.exists(record_name(1))
    assert Reporter(work, cuts).totals().num_bytes == 0
