"""Pinning edits only the revisions of hub sets: comments, layout and everything else stay; a refusal writes nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from data.pin import included_files, pin_file

RECIPE = """# a comment
data:
  include: parts/more.yaml
  sources:
    - {name: a, kind: datasets, path: org/a, take: 5}   # flow, without revision
    - name: b            # block, with one
      kind: datasets
      path: org/b
      revision: null
      take: 7
    - name: c
      kind: datasets
      path: "org/c"      # quoted
    - {name: d, kind: datasets, revision: "0123", path: org/a}
    - {name: local, kind: datasets, path: LOCAL}
    - {name: file, kind: jsonl, path: rows.jsonl}
"""


def commit_of(path: str) -> str:
    return {"org/a": "1" * 40, "org/b": "0e" + "1" * 38, "org/c": "abc"}[path]


def test_only_revisions_of_hub_sets_change(tmp_path):
    file = tmp_path / "recipe.yaml"
    file.write_text(RECIPE.replace("LOCAL", str(tmp_path)))
    before = yaml.safe_load(file.read_text())
    pinned = pin_file(file, commit_of)
    assert [(p.path, p.before) for p in pinned] == [
        ("org/a", None),
        ("org/b", None),
        ("org/c", None),
        ("org/a", "0123"),
    ]
    after = yaml.safe_load(file.read_text())
    for source in before["data"]["sources"]:
        if source["name"] in "abcd":
            source["revision"] = commit_of(source["path"])  # a string, 0e1111 too
    assert after == before
    text = file.read_text()
    for comment in ("# a comment", "# flow, without revision", "# block, with one", "# quoted"):
        assert comment in text
    pin_file(file, commit_of)
    assert file.read_text() == text


LAYOUTS = """sources:
  - {name: my-path, kind: datasets,
     path: org/a, take: 3}
  - {
      kind: datasets,
      path: "org/b"
    }
  - path: org/c
    kind: datasets
  - kind: datasets
    path: >-
      org/a
    name: folded
  - "kind": "datasets"
    "path": "org/b"   # quoted keys
  - kind: datasets
    path: org/c
    revision:         # to be pinned
"""


def test_whatever_the_layout_what_is_written_is_the_same_recipe_with_revisions(tmp_path):
    file = tmp_path / "recipe.yaml"
    file.write_text(LAYOUTS)
    wanted = yaml.safe_load(LAYOUTS)
    assert len(pin_file(file, commit_of)) == len(wanted["sources"])
    for source in wanted["sources"]:
        source["revision"] = commit_of(source["path"])
    assert yaml.safe_load(file.read_text()) == wanted


def test_a_hub_that_does_not_answer_leaves_the_file_alone(tmp_path):
    file = tmp_path / "recipe.yaml"
    file.write_text(RECIPE)

    def silent(path: str) -> str:
        if path == "org/b":
            raise FileNotFoundError("out of reach")
        return "1"

    with pytest.raises(FileNotFoundError):
        pin_file(file, silent)
    assert file.read_text() == RECIPE
    assert included_files(file) == [file, tmp_path / "parts" / "more.yaml"]


def test_the_mission_s_recipe_can_be_pinned_and_still_loads(tmp_path):
    for name in ("qwen3.6-27b-913k", "evaluation-hub"):
        file = tmp_path / f"{name}.yaml"
        file.write_bytes((Path(__file__).parent.parent / "configs/corpus" / file.name).read_bytes())
        pinned = pin_file(file, lambda path: json.dumps(path)[1:9])
        sources = yaml.safe_load(file.read_text())["sources"]
        assert len(pinned) == len(sources)
        assert all(s["revision"] == s["path"][:8] for s in sources)
