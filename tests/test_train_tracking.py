"""W&B: nothing leaves without a key, the workspace shows every metric once, mistakes are one line."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_train_report import example
from train_runs import make_config

from train.tracking import METRICS, Tracker, metric_pattern
from train.workspace import (
    REST,
    all_workspace_panels,
    build_workspace,
    metric_regex,
    save_workspace,
)

ROOT = Path(__file__).parent.parent


class Listener:
    """A server on this machine that stands for W&B and for every proxy on the way there; it notes who comes."""

    def __init__(self) -> None:
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.port: int = self.socket.getsockname()[1]
        self.calls: list[str] = []
        self.thread = threading.Thread(target=self._serve, daemon=True)
        self.thread.start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self.socket.accept()
            except OSError:
                return
            with connection:
                connection.settimeout(5)
                self.calls.append(connection.recv(200).decode(errors="replace"))

    def environment(self) -> dict[str, str]:
        """Sends everything that speaks HTTP here, the Python side and wandb's own process alike."""
        address = f"http://127.0.0.1:{self.port}"
        proxies = {f"{kind}_PROXY": address for kind in ("HTTP", "HTTPS", "ALL")}
        return {
            **proxies,
            **{name.lower(): value for name, value in proxies.items()},
            "NO_PROXY": "",
            "no_proxy": "",
            "WANDB_BASE_URL": address,
        }


@pytest.fixture
def listener() -> Iterator[Listener]:
    found = Listener()
    yield found
    found.socket.close()


TRACK = """
import socket, sys
looked_up = []
look_up = socket.getaddrinfo
def noted(host, *rest, **named):
    looked_up.append(host)
    return look_up(host, *rest, **named)
socket.getaddrinfo = noted
from configs.load import load_config
from train.tracking import Tracker
overrides = [f"run.output_dir={sys.argv[1]}/run", "train.wandb_project=tiny"]
tracker = Tracker(load_config("configs/debug.yaml", overrides), None, 0)
tracker.log(1, {"train/loss": 2.5})
tracker.finish()
assert set(looked_up) <= {"localhost", "127.0.0.1"}, looked_up
"""


def track(folder: Path, listener: Listener, **environment: str) -> subprocess.CompletedProcess[str]:
    names = ("PATH", "HOME", "TMPDIR", "PYTHONPATH")
    kept = {name: os.environ[name] for name in names if name in os.environ}
    return subprocess.run(
        [sys.executable, "-c", TRACK, str(folder)], cwd=ROOT, capture_output=True, text=True, check=False,
        env=kept | listener.environment() | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | environment,
    )  # fmt: skip


def test_without_a_key_nobody_is_called(tmp_path: Path, listener: Listener) -> None:
    done = track(tmp_path, listener, WANDB_MODE="online")
    assert done.returncode == 0, done.stderr
    assert listener.calls == []
    assert list((tmp_path / "run" / "logs" / "wandb").glob("offline-run-*"))


def test_the_listener_would_have_heard_a_call(tmp_path: Path, listener: Listener) -> None:
    """With a key W&B is called, and the run goes on without an answer."""
    call = (
        "import wandb\n"
        "try:\n"
        "    wandb.Api(api_key='k' * 40, timeout=2).default_entity\n"
        "except Exception as error:\n"
        "    print(type(error).__name__)\n"
    )
    environment = os.environ | listener.environment() | {"WANDB_API_KEY": "k" * 40}
    subprocess.run(
        [sys.executable, "-c", call], cwd=tmp_path, env=environment, capture_output=True, check=False, timeout=120
    )  # fmt: skip
    assert listener.calls


def panels_of(spec: Any) -> dict[str, list[Any]]:
    return {s.name: s.panels for s in spec.spec.section.panel_bank_config.sections}


def shows(config: Any, name: str) -> bool:
    """Whether a saved line plot shows the metric."""
    if config.use_metric_regex:
        return re.match(config.metric_regex, name) is not None
    return name in config.metrics


def test_the_workspace_shows_every_metric_in_exactly_one_panel() -> None:
    sections = panels_of(build_workspace("somebody", "a-project")._to_model())
    configs = [panel.config for panels in sections.values() for panel in panels]
    for pattern in METRICS:
        for name in example(pattern):
            assert sum(shows(config, name) for config in configs) == 1, name
    assert not any(shows(config, "system/gpu.0.memory") for config in configs)
    titles = [config.chart_title for config in configs]
    assert len(set(titles)) == len(titles)
    assert list(sections)[:2] == ["Acceptance", "Loss"]


def test_every_panel_names_metrics_that_exist() -> None:
    for panel in all_workspace_panels():
        assert set(panel.patterns) <= set(METRICS)
    assert {p.section for p in all_workspace_panels() if p.patterns == ("speed/mfu",)} == {REST}


def test_the_pattern_of_a_name_is_the_one_that_matches_it() -> None:
    for pattern in METRICS:
        for name in example(pattern):
            assert metric_pattern(name) == pattern
            others = [other for other in METRICS if other != pattern]
            assert re.match(metric_regex([pattern]), name)
            assert not re.match(metric_regex(others), name)


@pytest.mark.parametrize(
    ("environment", "override", "message"),
    [
        ({}, "train.wandb_project=tiny", "WANDB_API_KEY is not set"),
        ({"WANDB_API_KEY": "k", "WANDB_MODE": "offline"}, "train.wandb_project=tiny", "WANDB_MODE=offline"),
        ({"WANDB_API_KEY": "k"}, "train.wandb_project=null", "train.wandb_project=null"),
    ],
)  # fmt: skip
def test_a_workspace_that_cannot_be_sent_says_what_to_do(
    environment: dict[str, str],
    override: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=message) as caught:
        save_workspace(make_config(tmp_path, override), None)
    assert "\n" not in str(caught.value)


def test_without_the_extra_one_line_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(ValueError, match=r"pip install -e '\.\[workspace\]'"):
        build_workspace("e", "p")


def test_a_run_without_a_project_imports_no_wandb(tmp_path: Path) -> None:
    tracker = Tracker(make_config(tmp_path), None, 0)
    assert tracker.wandb_run_id is None
