"""SIGTERM to `./launch.sh STAGE`, which is all that a scheduler sends, reaches the stage, whatever starts its ranks."""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
STAGE = """#!/bin/sh
trap 'echo "$@" > told; exit 143' TERM
echo started > started
while :; do sleep 0.05; done
"""
RANK = """
import pathlib, signal, sys, time

def save(*_):
    time.sleep(33)  # longer than the launcher would wait by itself
    pathlib.Path("saved").write_text("")
    sys.exit(143)

signal.signal(signal.SIGTERM, save)
pathlib.Path("started").write_text("")
time.sleep(300)
"""


def wait_for(path: Path, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 120
    while not path.exists():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("stage", "variables", "wanted"),
    [
        ("data", {}, "-m data"),
        ("train", {"NPROC": "1"}, "-m train"),
        ("evaluate", {"NPROC": "1"}, "-m evaluation"),
        ("train", {"NPROC": "2"}, "-m common.torchrun --standalone"),
        ("train", {"NNODES": "2", "MASTER_ADDR": "127.0.0.1"}, "-m common.torchrun --nnodes 2"),
        ("train", {"HOSTFILE": "hosts"}, "-m common.deepspeed --hostfile hosts"),
    ],
)
def test_sigterm_to_the_front_door_reaches_the_stage(
    tmp_path: Path, stage: str, variables: dict[str, str], wanted: str
) -> None:
    """A folder with the real launch.sh and an interpreter that says what it was told."""
    shutil.copy(ROOT / "launch.sh", tmp_path)
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "constraints.txt").touch()
    (tmp_path / "hosts").write_text("localhost slots=2\n")
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(STAGE)
    python.chmod(0o755)
    installed = f"{hashlib.sha256(b'').hexdigest()}  -\n"
    (tmp_path / ".venv" / ".installed").write_text(installed)
    process = subprocess.Popen(
        [str(tmp_path / "launch.sh"), stage, "recipe.yaml"],
        env={"PATH": os.environ["PATH"]} | variables,
    )
    wait_for(tmp_path / "started", process)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 143
    assert (tmp_path / "told").read_text().startswith(wanted)


@pytest.mark.slow
def test_the_deepspeed_launcher_on_one_host_passes_sigterm_on(tmp_path: Path) -> None:
    process = start(tmp_path, "common.deepspeed", "--num_gpus", "1", "--no_local_rank")
    wait_for(tmp_path / "started", process)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=120) == 143
    assert (tmp_path / "told").exists()


@pytest.mark.slow
def test_ranks_that_take_long_to_save_are_waited_for(tmp_path: Path) -> None:
    process = start(tmp_path, "common.torchrun", "--standalone", "--nproc-per-node", "1")
    wait_for(tmp_path / "started", process)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=120) == 143
    assert (tmp_path / "saved").exists()


def start(folder: Path, launcher: str, *options: str) -> subprocess.Popen[bytes]:
    """A script that saves slowly, or that says at once that it was told."""
    script = folder / "rank.py"
    is_slow = launcher == "common.torchrun"
    script.write_text(
        RANK if is_slow else RANK.replace("time.sleep(33)", "").replace("saved", "told")
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu"}
    command = [sys.executable, "-m", launcher, *options, str(script)]
    return subprocess.Popen(command, cwd=folder, env=environment)
