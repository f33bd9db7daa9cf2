"""`./launch.sh data CONFIG --pin`: write the commit of every hub set into the recipe, comments and layout kept.

A set that changes between two runs, or is taken over (it has happened), is then refused instead of read.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml

from common.files import atomic_path


@dataclass(frozen=True)
class Pinned:
    path: str
    """Hub id."""
    before: str | None
    commit: str


def pin_file(file: Path, commit_of: Callable[[str], str]) -> list[Pinned]:
    """Set `revision` of every `kind: datasets` mapping in a YAML file that has a `path` and no local folder there.

    commit_of: hub id -> commit hash. Nothing is written if it raises.
    """
    text = file.read_text(encoding="utf-8")
    edits: list[tuple[int, int, str]] = []
    pinned = []
    for entry in _hub_entries(yaml.compose(text, yaml.SafeLoader)):
        path, old = entry.scalars["path"].value, entry.scalars.get("revision")
        commit = commit_of(path)
        before = None if old is None or old.value in ("null", "~", "") else old.value
        pinned.append(Pinned(path, before, commit))
        edits.append(_edit(entry, old, commit))
    for start, end, new in sorted(edits, reverse=True):
        text = text[:start] + new + text[end:]
    with atomic_path(file) as aside:
        aside.write_text(text, encoding="utf-8")
    return pinned


def included_files(file: Path) -> list[Path]:
    """The recipe itself and what its data section includes."""
    tree = yaml.safe_load(file.read_text(encoding="utf-8"))
    data = tree.get("data") if isinstance(tree, dict) else None
    names = data.get("include", []) if isinstance(data, dict) else []
    return [file, *(file.parent / name for name in ([names] if isinstance(names, str) else names))]


@functools.cache
def hub_commit(path: str) -> str:
    """The set's newest commit. Raises FileNotFoundError, in one line, if the hub does not say it."""
    import httpx
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    try:
        commit = HfApi().dataset_info(path, timeout=30).sha
    except (HfHubHTTPError, OfflineModeIsEnabled, httpx.HTTPError, OSError) as error:
        reason = " ".join(str(error).split())
        raise FileNotFoundError(
            f"the hub does not tell the commit of {path} ({reason}); no revision was written, run again online "
            "(a gated set needs HF_TOKEN)"
        ) from error
    assert commit is not None
    return commit


@dataclass(frozen=True)
class _Entry:
    """A mapping that describes a hub set."""

    scalars: dict[str, yaml.ScalarNode]
    """Its values that are scalars, by key."""
    path_key: yaml.ScalarNode
    in_flow: bool
    """{a: b, c: d}, on whatever number of lines."""


def _hub_entries(node: yaml.Node | None) -> Iterator[_Entry]:
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            yield from _hub_entries(item)
    elif isinstance(node, yaml.MappingNode):
        scalars = {k.value: v for k, v in node.value if isinstance(v, yaml.ScalarNode)}
        kind, path = scalars.get("kind"), scalars.get("path")
        if kind is not None and kind.value == "datasets" and path and not Path(path.value).exists():
            path_key = next(k for k, v in node.value if v is path)
            yield _Entry(scalars, path_key, bool(node.flow_style))
        for _, value in node.value:
            yield from _hub_entries(value)


def _edit(entry: _Entry, old: yaml.ScalarNode | None, commit: str) -> tuple[int, int, str]:
    """(start, end, new text): in place of the old revision, or beside the path in its mapping's own style."""
    # quoted: a hash of digits and one e would be a number
    quoted = f'"{commit}"'
    if old is not None:
        # an empty value begins right behind its colon
        gap = "" if old.value else " "
        return old.start_mark.index, old.end_mark.index, gap + quoted
    if entry.in_flow:
        end = entry.scalars["path"].end_mark.index
        return end, end, f", revision: {quoted}"
    # before the path: behind it there may be a comment, or the lines of a folded text
    start = entry.path_key.start_mark
    return start.index, start.index, f"revision: {quoted}\n{' ' * start.column}"
