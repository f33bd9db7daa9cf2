"""Pushing to the hub: a server of our own stands for it and records what arrives. Nothing is sent unless asked and logged in."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from drafter_cases import TINY, tiny_drafter

from drafter.folder import write_drafter
from export.push import card_metadata, push_folder, require_publishable

ROOT = Path(__file__).parent.parent
CARD = "---\nlicense: apache-2.0\nbase_model: owner/target\n---\n\n# a drafter\n"
PUSH = """
import sys
from pathlib import Path
from export.push import push_folder
for visibility in sys.argv[2:]:
    try:
        print(push_folder(Path(sys.argv[1]), "me/drafter", public=visibility == "public"))
    except ValueError as error:
        print("error:", error)
"""


@dataclass
class Hub:
    """What the server saw, in order."""

    address: str = ""
    refuse: bool = False
    requests: list[tuple[str, str, str | None]] = field(default_factory=list)
    """(method, path, authorization)."""
    created: list[dict[str, Any]] = field(default_factory=list)
    files: dict[str, bytes] = field(default_factory=dict)

    def answer(self, path: str, body: bytes) -> dict[str, Any]:
        if path == "/api/repos/create":
            self.created.append(json.loads(body))
            return {"url": f"{self.address}/me/drafter", "name": "me/drafter", "id": "me/drafter"}
        if path.endswith("/preupload/main"):
            names = [file["path"] for file in json.loads(body)["files"]]
            plain = {"uploadMode": "regular", "shouldIgnore": False}
            return {"files": [{"path": name, **plain} for name in names]}
        if path.endswith("/commit/main"):
            for line in body.splitlines():
                entry = json.loads(line)
                if entry["key"] == "file":
                    content = base64.b64decode(entry["value"]["content"])
                    self.files[entry["value"]["path"]] = content
            commit = f"{self.address}/me/drafter/commit/{'a' * 40}"
            return {"success": True, "commitOid": "a" * 40, "commitUrl": commit, "hookOutput": ""}
        return {"errors": [], "warnings": []}


@pytest.fixture
def hub() -> Iterator[Hub]:
    seen = Hub()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            seen.requests.append((self.command, self.path, self.headers.get("Authorization")))
            answer = {"error": "no"} if seen.refuse else seen.answer(self.path, body)
            content = json.dumps(answer).encode()
            self.send_response(403 if seen.refuse else 200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST  # the name that http.server looks for

        def log_message(self, format: str, *args: object) -> None:
            """Silent."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    seen.address = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield seen
    server.shutdown()
    server.server_close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "export"
    write_drafter(path, TINY, tiny_drafter().state_dict(), torch.bfloat16)
    (path / "README.md").write_text(CARD)
    (path / "tokenizer.json").write_text("{}")
    (path / "left-over").mkdir()
    return path


def push(hub: Hub, folder: Path, home: Path, token: str | None, *visibility: str) -> list[str]:
    """In a process of its own: the library reads its endpoint when it is imported."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING"))}
    environment |= {
        "HF_ENDPOINT": hub.address,
        "HF_HOME": str(home),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "NO_PROXY": "127.0.0.1",
        "PYTHONPATH": str(ROOT),
        **({"HF_TOKEN": token} if token else {}),
    }
    done = subprocess.run(
        [sys.executable, "-c", PUSH, str(folder), *visibility],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_every_file_arrives_and_the_repository_is_private_unless_asked(hub, folder, tmp_path):
    said = push(hub, folder, tmp_path / "home", "hf_secret", "private", "public")
    assert said == [f"{hub.address}/me/drafter"] * 2
    assert [(made["organization"], made["name"]) for made in hub.created] == [("me", "drafter")] * 2
    assert [made.get("visibility", "public") for made in hub.created] == ["private", "public"]
    assert hub.files == {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file()}
    sent = {token for method, _, token in hub.requests if method == "POST"}
    assert sent == {"Bearer hf_secret"}


def test_nothing_is_sent_without_a_login(hub, folder, tmp_path):
    (said,) = push(hub, folder, tmp_path / "home", None, "private")
    assert said.startswith("error: --push: nobody is logged in to the hub; run `hf auth login`")
    assert hub.requests == []


def test_a_refusal_is_one_line(hub, folder, tmp_path):
    hub.refuse = True
    said = push(hub, folder, tmp_path / "home", "hf_secret", "private")
    assert said[0].startswith("error: --push me/drafter: the hub refused or is out of reach")
    assert hub.files == {}


@pytest.mark.parametrize("base_model", ["/abs/target", "outputs/targets/smollm2", "target", "."])
def test_a_card_that_names_a_folder_here_is_not_published(folder, base_model):
    (folder / "README.md").write_text(CARD.replace("owner/target", base_model))
    with pytest.raises(ValueError, match=r"names .* as target, which is a folder here; set export"):
        require_publishable(folder)


@pytest.mark.parametrize("name", ["README.md", "config.json", "model.safetensors"])
def test_half_an_export_is_not_published(folder, name):
    (folder / name).unlink()
    with pytest.raises(ValueError, match=f"{name} is missing; export first"):
        push_folder(folder, "me/drafter")


def test_a_hub_out_of_reach_is_one_line(hub, folder, tmp_path):
    hub.address = "http://127.0.0.1:9"
    (said,) = push(hub, folder, tmp_path / "home", "hf_secret", "private")
    assert "is out of reach; the export" in said


def test_the_front_matter_is_read_whatever_the_names_hold(folder):
    card = CARD.replace("owner/target", "owner/tar---get")
    (folder / "README.md").write_text(card)
    assert card_metadata(folder)["base_model"] == "owner/tar---get"
