"""A rank that dies ends the others within seconds, and everybody learns which one it was."""

from __future__ import annotations

import os
import pkgutil
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from train_runs import ONE_RANK, Interrupted, make_config, make_recipe, read_curve

from configs.load import load_config
from train.engine import join_process_group
from train.loop import train_drafter

ROOT = Path(__file__).parent.parent
RANK = """
import os, signal, socket, sys, threading, time
import torch
import common.lifeline
from common.distributed import distributed, sum_over_ranks

common.lifeline.GRACE_S = 1.0
if sys.argv[2] == "late":  # rank 0 lets the others in a second after they have come
    welcome = common.lifeline.Lifeline._welcome
    common.lifeline.Lifeline._welcome = lambda *given: (time.sleep(1), welcome(*given))
with distributed(1) as ranks:
    sum_over_ranks(torch.ones(1))
    if ranks.rank == int(sys.argv[1]):
        os.kill(os.getpid(), signal.SIGKILL)
    if sys.argv[2] in ("busy", "late"):
        time.sleep(60)  # no collective tells this rank
    sum_over_ranks(torch.ones(1))
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def environment(**more: str) -> dict[str, str]:
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    return os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"} | more


@pytest.mark.parametrize(
    ("victim", "what"), [(0, "busy"), (1, "summing"), (0, "late"), (1, "late")]
)
def test_a_killed_rank_is_named_once_and_ends_the_others(
    tmp_path: Path, victim: int, what: str
) -> None:
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    port = str(free_port())
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), str(victim), what],
            env=environment(
                RANK=str(rank),
                LOCAL_RANK=str(rank),
                WORLD_SIZE="3",
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=port,
            ),
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(3)
    ]
    ranks[victim].wait(timeout=200)
    killed = time.monotonic()
    said = [process.communicate(timeout=200)[1] for process in ranks]
    assert time.monotonic() - killed < 20  # the busy ones would sleep for a minute
    assert [process.returncode for process in ranks] == [
        -signal.SIGKILL if rank == victim else 1 for rank in range(3)
    ]
    name = f"rank {victim} on {socket.gethostname()} (process {ranks[victim].pid}) is gone"
    lines = [line for text in said for line in text.splitlines()]
    assert len(lines) == 1, lines
    assert lines[0].startswith(f"error: {name}")


def test_a_stranger_on_the_port_neither_joins_nor_harms(tmp_path: Path) -> None:
    script = tmp_path / "rank.py"
    script.write_text(
        "import socket\n"
        "import torch\n"
        "from common.distributed import distributed, sum_over_ranks\n"
        "from common import lifeline\n"
        "made = []\n"
        "listening = lifeline._listening\n"
        "lifeline._listening = lambda: made.append(listening()) or made[0]\n"
        "with distributed(1) as ranks:\n"
        "    if ranks.rank == 0:\n"
        "        for word in (b'GET / HTTP/1.1\\n', b'{\"token\": 1, \"rank\": 1}\\n', b'\\xff\\n', b''):\n"
        "            with socket.create_connection(('127.0.0.1', made[0].getsockname()[1])) as stranger:\n"
        "                stranger.sendall(word)\n"
        "    for _ in range(20):\n"
        "        sum_over_ranks(torch.ones(1))\n"
    )
    port = str(free_port())
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script)],
            env=environment(
                RANK=str(rank),
                LOCAL_RANK=str(rank),
                WORLD_SIZE="2",
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=port,
            ),
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    assert [process.communicate(timeout=200)[1] for process in ranks] == ["", ""]
    assert [process.returncode for process in ranks] == [0, 0]


@pytest.mark.slow
def test_a_killed_rank_of_a_training_run_is_named_and_the_run_continues_exactly(
    tmp_path: Path,
) -> None:
    settings = ["train.steps=25", "train.checkpoint_every=3", "train.eval_every=25"]
    recipe, run = make_recipe(tmp_path / "killed"), tmp_path / "killed" / "run"
    command = [
        *(sys.executable, "-m", "common.torchrun", "--standalone", "--nproc-per-node", "2"),
        *("-m", "train", str(recipe), *settings),
    ]
    launcher = subprocess.Popen(
        command, env=environment(), cwd=ROOT, stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 120
    while not (run / "checkpoints" / "step-00000009").is_dir():
        assert launcher.poll() is None, launcher.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.02)
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
    [victim] = [pid for pid in map(int, children) if rank_of(pid) == 1]
    os.kill(victim, signal.SIGKILL)
    killed = time.monotonic()
    said = launcher.communicate(timeout=200)[1]
    assert time.monotonic() - killed < 30
    assert launcher.returncode == 128 + signal.SIGKILL, said
    named = rf"^error: rank 1 on {re.escape(socket.gethostname())} \(process {victim}\) was ended by SIGKILL"
    assert len(re.findall(named, said, re.MULTILINE)) == 1, said
    assert "Traceback" not in said
    join_process_group(ONE_RANK)
    train_drafter(load_config(recipe, settings), ONE_RANK)
    whole = make_config(tmp_path / "whole", *settings)
    train_drafter(whole, ONE_RANK)
    found, wanted = (
        [line["train/loss"] for line in read_curve(folder) if "train/loss" in line]
        for folder in (run, whole.run.folder)
    )
    assert found == pytest.approx(wanted, rel=1e-4)


def rank_of(pid: int) -> int | None:
    for entry in Path(f"/proc/{pid}/environ").read_text().split("\0"):
        if entry.startswith("RANK="):
            return int(entry.removeprefix("RANK="))
    return None


POINTS = [
    ("train.checkpoint.save_file", 2),
    ("train.checkpoint.write_json", 3),  # state.json of the second checkpoint
    ("train.checkpoint.write_json", 4),  # the index that lists it
    ("train.checkpoint.shutil.rmtree", 1),  # of the one no longer kept
]


SAVING = [
    *("train.steps=6", "train.checkpoint_every=2", "train.keep_checkpoints=1"),
    *("train.eval_every=6", "train.lr_decay_fraction=0"),
]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with SAVING that nothing happened to."""
    join_process_group(ONE_RANK)
    config = make_config(tmp_path_factory.mktemp("undisturbed"), *SAVING)
    train_drafter(config, ONE_RANK)
    return config.run.folder


@pytest.mark.parametrize(("function", "call"), POINTS)
def test_a_kill_at_any_point_of_a_save_loses_at_most_that_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, undisturbed: Path, function: str, call: int
) -> None:
    config = make_config(tmp_path, *SAVING)
    original, calls = pkgutil.resolve_name(function), []

    def dies(*arguments: Any, **more: Any) -> Any:
        calls.append(arguments)
        if len(calls) == call:
            raise Interrupted
        return original(*arguments, **more)

    with monkeypatch.context() as patch:
        patch.setattr(function, dies)
        with pytest.raises(Interrupted):
            train_drafter(config, ONE_RANK)
    train_drafter(config, ONE_RANK)
    assert read_curve(config.run.folder) == read_curve(undisturbed)
    found, wanted = (
        sorted(path.name for path in (run / "checkpoints").iterdir())
        for run in (config.run.folder, undisturbed)
    )
    assert found == wanted


@pytest.mark.slow
def test_a_death_is_named_under_every_launcher_of_a_run(tmp_path: Path) -> None:
    """Two launchers of two ranks stand for two machines: the other one's only news comes over the lifeline."""
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    port = str(free_port())
    launchers = [
        subprocess.Popen(
            [
                *(
                    sys.executable,
                    "-m",
                    "common.torchrun",
                    "--nnodes",
                    "2",
                    "--nproc-per-node",
                    "2",
                ),
                *("--node-rank", str(node), "--master-addr", "127.0.0.1", "--master-port", port),
                *(str(script), "3", "busy"),
            ],
            env=environment(),
            cwd=ROOT,
            stderr=subprocess.PIPE,
            text=True,
        )
        for node in range(2)
    ]
    far, near = (launcher.communicate(timeout=200)[1] for launcher in launchers)
    assert [launcher.returncode for launcher in launchers] == [1, 128 + signal.SIGKILL]
    assert re.search(
        r"^error: rank 3 on \S+ \(process \d+\) was ended by SIGKILL", near, re.MULTILINE
    )
    assert re.search(
        r"^error: rank 3 on \S+ \(process \d+\) is gone without a word", far, re.MULTILINE
    )
    assert far.count("error:") == near.count("error:") == 1
    assert "Traceback" not in far + near
