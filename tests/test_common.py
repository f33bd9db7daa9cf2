"""Files whole or absent, one fingerprint, progress with a rate, exit codes."""

from __future__ import annotations

import functools
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from common import files, progress, waiting
from common.command import StoppedElsewhere, run_command, stage_parser
from common.distributed import Ranks, distributed, raise_together, sum_over_ranks
from common.files import (
    atomic_path,
    fields_of,
    only_writer,
    read_json,
    remove_leftovers,
    sha256_file,
    write_json,
)
from common.fingerprint import fingerprint, require_equal
from common.progress import Progress, format_duration


def start_child(act: Callable[[], None]) -> int:
    """Run `act` in a forked process, which saves the seconds of importing torch; its process id."""
    child = os.fork()
    if child == 0:
        try:
            act()
            os._exit(0)
        finally:
            os._exit(1)
    return child


def exit_code_of(child: int) -> int:
    """Negative for a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def kill_self() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def write_then_die(path: Path) -> None:
    with atomic_path(path) as aside:
        aside.write_text("half")
        kill_self()


def test_a_killed_writer_leaves_the_old_file_and_a_leftover_that_is_cleared(
    tmp_path: Path,
) -> None:
    path = tmp_path / "x.json"
    path.write_text("old")
    assert exit_code_of(start_child(lambda: write_then_die(path))) == -signal.SIGKILL
    assert path.read_text() == "old"
    assert len(list(tmp_path.iterdir())) == 2
    remove_leftovers(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["x.json"]


def test_a_folder_killed_between_its_two_names_gets_the_old_one_back(tmp_path: Path) -> None:
    folder = tmp_path / "a.b"

    def replace_then_die() -> None:
        with atomic_path(folder) as aside:
            aside.mkdir()
            (aside / "version").write_text("new")
            rename = Path.rename

            def die_at_second(path: Path, to: Path) -> Path:
                if path == aside:
                    kill_self()
                return rename(path, to)

            Path.rename = die_at_second  # pyright: ignore[reportAttributeAccessIssue]  # the child's alone

    folder.mkdir()
    (folder / "version").write_text("old")
    assert exit_code_of(start_child(replace_then_die)) == -signal.SIGKILL
    assert not folder.exists(), "the moment at issue"
    remove_leftovers(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["a.b"]
    assert (folder / "version").read_text() == "old"


def test_a_failed_writer_leaves_nothing(tmp_path: Path) -> None:
    def write() -> None:
        with atomic_path(tmp_path / "x") as aside:
            aside.mkdir()
            (aside / "part").write_text("half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        write()
    assert not list(tmp_path.iterdir())


def test_the_path_is_absent_until_the_block_ends_and_parents_are_made(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "x"
    with atomic_path(path) as aside:
        assert aside.parent == path.parent
        aside.write_text("new")
        assert not path.exists()
    assert path.read_text() == "new"


def test_a_folder_takes_the_place_of_an_older_one(tmp_path: Path) -> None:
    path = tmp_path / "folder"
    for generation in ("first", "second"):
        with atomic_path(path) as aside:
            (aside / "sub").mkdir(parents=True)
            (aside / "sub" / generation).write_text(generation)
    assert [p.name for p in path.rglob("*") if p.is_file()] == ["second"]
    assert [p.name for p in tmp_path.iterdir()] == ["folder"]


def test_everything_is_on_disk_before_the_rename(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """fsync of every file, then of the folder that holds the new name."""
    synced: list[str] = []
    monkeypatch.setattr(files, "fsync_path", lambda path: synced.append(path.name))
    with atomic_path(tmp_path / "folder") as aside:
        aside.mkdir()
        (aside / "a").write_text("")
        (aside / "b").write_text("")
    assert synced[:2] == ["a", "b"]
    assert synced[-1] == tmp_path.name


def test_json_is_equal_bytes_for_equal_values_and_keeps_the_order(tmp_path: Path) -> None:
    for name in "ab":
        write_json(tmp_path / name, {"z": 1, "a": "é"})
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert list(json.loads((tmp_path / "a").read_text())) == ["z", "a"]
    assert read_json(tmp_path / "a", "remedy") == {"z": 1, "a": "é"}


def test_json_that_cannot_be_read_ends_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="is missing; run extract"):
        read_json(tmp_path / "none", "run extract")
    for content in (b'{"a": ', b"\xff\xfe", b'{"a": ' + b"9" * 5000 + b"}"):
        (tmp_path / "bad").write_bytes(content)
        with pytest.raises(ValueError, match="bad is not valid JSON; run extract"):
            read_json(tmp_path / "bad", "run extract")


def test_what_would_be_read_for_ever_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "device").symlink_to("/dev/zero")
    (tmp_path / "folder").mkdir()
    for path in tmp_path.iterdir():
        with pytest.raises(ValueError, match=f"{path.name} is no file; run extract"):
            read_json(path, "run extract")


def test_a_json_file_of_another_content_ends_with_the_remedy(tmp_path: Path) -> None:
    for value in ({}, [], 3, None, {"a": None}):
        with (
            pytest.raises(ValueError, match=r"x does not hold what it should .*; run extract"),
            fields_of(tmp_path / "x", "run extract"),
        ):
            dict(value["a"])  # type: ignore[index, arg-type]


def test_sha256_is_the_known_one(tmp_path: Path) -> None:
    (tmp_path / "abc").write_bytes(b"abc")
    assert sha256_file(tmp_path / "abc").startswith("ba7816bf8f01cfea414140de5dae2223")


def test_a_fingerprint_ignores_the_order_of_keys_and_nothing_else() -> None:
    value = {"a": [1, 2, {"x": None}], "b": True}
    assert fingerprint(value) == fingerprint({"b": True, "a": [1, 2, {"x": None}]})
    others = [{"a": [2, 1, {"x": None}], "b": True}, {"a": value["a"], "b": 1}, {"a": value["a"]}]
    assert len({fingerprint(v) for v in [value, *others]}) == 4
    # fixed for ever: manifests hold it
    assert fingerprint({"b": 1, "a": "é"}) == sha256_of('{"a":"é","b":1}')


def sha256_of(text: str) -> str:
    done = subprocess.run(["sha256sum"], input=text.encode(), capture_output=True, check=True)
    return done.stdout.decode().split()[0]


def test_settings_that_differ_are_named_with_both_values() -> None:
    require_equal("corpus", {"taps": [1], "more": 2}, {"taps": [1]}, "remedy")
    with pytest.raises(ValueError, match=r"corpus was made with taps=\[1\].*\[2\]; run data again"):
        require_equal("corpus", {"taps": [1]}, {"taps": [2]}, "run data again")
    with pytest.raises(ValueError, match="taps=None"):
        require_equal("corpus", {}, {"taps": [2]}, "run data again")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.4, "0s"),
        (59.4, "59s"),
        (59.6, "1m00s"),
        (185, "3m05s"),
        (3599.7, "1h00m"),
        (25_320, "7h02m"),
        (12 * 86_400 + 4 * 3600, "12d04h"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


def test_progress_counts_only_what_this_run_did(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Resumed at 40 of 100, 20 rows in 10 s: 2/s and 20 s to go, not 6/s. Silent in between."""
    clock = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    caplog.set_level(logging.INFO, logger="progress")
    bar = Progress("extract", 100, "rows", done=40)
    for clock[0], amount in ((1.0, 2), (4.9, 8), (10.0, 10), (11.0, 1)):
        bar.advance(amount)
    assert [r.getMessage() for r in caplog.records] == [
        "extract: 60/100 rows, 2.0/s, ETA 20s",
    ]
    clock[0] = 30.0
    bar.advance(39, "never printed at the end")
    bar.finish("done")
    assert caplog.records[-1].getMessage() == "extract: 100/100 rows, 2.0/s, took 30s, done"
    assert len(caplog.records) == 2


def exit_code(
    main: Callable[[Namespace], None], monkeypatch: pytest.MonkeyPatch, *arguments: str
) -> int:
    monkeypatch.setattr(sys, "argv", ["stage", *arguments])
    handler, root = signal.getsignal(signal.SIGTERM), logging.getLogger()
    handlers, level = root.handlers[:], root.level
    try:
        run_command(stage_parser("data", "x"), main)
    except SystemExit as stopped:
        return int(str(stopped.code))
    finally:
        signal.signal(signal.SIGTERM, handler)
        root.handlers[:], root.level = handlers, level
    return 0


def failing(error: BaseException) -> Callable[[Namespace], None]:
    def main(options: Namespace) -> None:
        raise error

    return main


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (ValueError("train.steps=0:\n   use 1"), 2, "error: train.steps=0: use 1\n"),
        (FileNotFoundError("no config x"), 2, "error: no config x\n"),
        (OSError(28, "No space left", "x"), 2, "error: [Errno 28] No space left: 'x'\n"),
        (StoppedElsewhere(1, 2), 2, ""),
        (StoppedElsewhere(1, 1), 1, ""),
        (KeyboardInterrupt(), 130, "stopped; the same command continues where it was\n"),
    ],
)
def test_a_users_mistake_is_one_line_and_its_exit_code(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    code: int,
    message: str,
) -> None:
    assert exit_code(failing(error), monkeypatch, "c.yaml") == code
    assert capsys.readouterr().err == message


def test_our_own_mistakes_and_debug_keep_the_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AssertionError):
        exit_code(failing(AssertionError()), monkeypatch, "c.yaml")
    with pytest.raises(ValueError, match="shown"):
        exit_code(failing(ValueError("shown")), monkeypatch, "c.yaml", "--debug")


def test_overrides_reach_the_stage_and_launcher_arguments_do_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[Namespace] = []
    code = exit_code(
        seen.append, monkeypatch, "--local_rank=1", "c.yaml", "a.b=1", "--debug", "c.d=2"
    )
    assert code == 0
    assert (seen[0].config, seen[0].overrides, seen[0].debug) == (
        "c.yaml",
        ["a.b=1", "c.d=2"],
        True,
    )


def test_sigterm_is_an_orderly_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    cleaned: list[bool] = []

    def main(_: Namespace) -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            signal.pause()
        finally:
            cleaned.append(True)

    assert exit_code(main, monkeypatch, "c.yaml") == 143
    assert cleaned == [True]


def test_one_process_needs_no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    with distributed(cpu_threads=1) as ranks:
        assert ranks.is_main
        assert ranks.world_size == 1
        values = torch.tensor([1.0, 2.0])
        assert sum_over_ranks(values) is values
        with pytest.raises(ValueError, match="mine"), raise_together(ranks):
            raise ValueError("mine")


def one_of_two_ranks(rank: int, port: int, report: Path) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    signal.alarm(60)  # a rank that waits for ever is the fault looked for
    with distributed(cpu_threads=1) as ranks:
        total = sum_over_ranks(torch.tensor([rank + 1.0])).item()
        try:
            with raise_together(ranks):
                if rank == 1:
                    raise ValueError("broken shard")
        except (ValueError, RuntimeError) as error:
            report.write_text(f"{total} {type(error).__name__}: {error}")
        kinds: list[str] = []
        for errors in ((ValueError, OSError), (RuntimeError, ValueError)):
            try:
                with raise_together(ranks):
                    raise errors[rank]("both")
            except StoppedElsewhere as error:
                kinds.append(f"rank {error.rank}, exit code {error.exit_code}")
            except (ValueError, OSError, RuntimeError) as error:
                kinds.append(type(error).__name__)
        report.with_suffix(".both").write_text(str(kinds))


def test_ranks_sum_and_stop_together(tmp_path: Path) -> None:
    """The rank that failed keeps its error, the other learns which one it was; nobody hangs."""
    port = free_port()
    reports = [tmp_path / "0", tmp_path / "1"]
    children = [
        start_child(functools.partial(one_of_two_ranks, rank, port, reports[rank]))
        for rank in range(2)
    ]
    assert [exit_code_of(child) for child in children] == [0, 0]
    assert reports[1].read_text() == "3.0 ValueError: broken shard"
    assert reports[0].read_text().startswith("3.0 StoppedElsewhere: rank 1 stopped with an error")

    both = [report.with_suffix(".both").read_text() for report in reports]
    assert both[0] == "['ValueError', 'RuntimeError']"  # the first says it, once
    assert both[1] == "['rank 0, exit code 2', 'rank 0, exit code 1']"


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def test_ranks_is_main_is_rank_zero() -> None:
    assert Ranks(0, 2, 0, torch.device("cpu")).is_main
    assert not Ranks(1, 2, 1, torch.device("cpu")).is_main


def test_a_folder_has_one_writer_and_a_dead_ones_lock_is_gone(tmp_path: Path) -> None:
    holder = [
        sys.executable,
        "-c",
        "import sys, time, pathlib\n"
        "from common.files import only_writer\n"
        "with only_writer(pathlib.Path(sys.argv[1])):\n"
        "    print('held', flush=True)\n"
        "    time.sleep(60)\n",
        str(tmp_path / "lock"),
    ]
    with subprocess.Popen(holder, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        with (
            pytest.raises(ValueError, match="another process holds"),
            only_writer(tmp_path / "lock"),
        ):
            pass
        process.kill()
    with only_writer(tmp_path / "lock"):
        pass


@pytest.mark.skipif(sys.platform != "linux", reason="the parent-death signal is Linux's")
def test_ranks_end_when_their_launcher_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "rank.py"
    script.write_text(
        "import os, pathlib, sys, time\n"
        "from common.distributed import distributed\n"
        "with distributed(1) as ranks:\n"
        "    pathlib.Path(sys.argv[1], f'pid-{ranks.rank}').write_text(str(os.getpid()))\n"
        "    time.sleep(60)\n"
    )
    launcher = subprocess.Popen(
        [
            *(sys.executable, "-m", "common.torchrun", "--standalone", "--nproc-per-node", "2"),
            *(str(script), str(tmp_path)),
        ],
        env=os.environ | {"PYTHONPATH": str(Path.cwd())},
    )
    pids = [int(read_when_there(tmp_path / f"pid-{rank}")) for rank in range(2)]
    launcher.kill()
    launcher.wait()
    deadline = time.monotonic() + 30
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline, "ranks outlive their launcher"
        time.sleep(0.05)


def test_a_process_whose_parent_died_before_it_asked_ends() -> None:
    code = "import time; from common.distributed import end_with_parent; end_with_parent(1); time.sleep(60)"
    done = subprocess.run([sys.executable, "-c", code], cwd=Path.cwd(), timeout=50, check=False)
    assert done.returncode == -signal.SIGTERM


def read_when_there(path: Path, timeout_s: float = 60.0) -> str:
    deadline = time.monotonic() + timeout_s
    while not path.exists() or not path.read_text():
        assert time.monotonic() < deadline, f"{path} was not written"
        time.sleep(0.05)
    return path.read_text()


def test_who_waits_for_a_lock_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(waiting, "FIRST_LINE_S", 0.0)
    with (
        caplog.at_level(logging.INFO),
        only_writer(tmp_path / "lock"),
        pytest.raises(ValueError, match="another process holds"),
        only_writer(tmp_path / "lock", patience_s=0.2),
    ):
        pass
    assert f"waiting for the process that holds {tmp_path / 'lock'}" in caplog.text
