"""Read a run's YAML with dotted overrides. Every mistake is one line that names the key and the remedy."""

from __future__ import annotations

import difflib
import re
import types
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from configs.schema import Config


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """The validated run in `path`, with `section.key=value` overrides (values are YAML).

    Raises FileNotFoundError if the file is missing and ValueError, in one line, for everything else.
    """
    path = Path(path)
    if not path.is_file():
        known = ", ".join(sorted(str(p) for p in Path("configs").glob("*.yaml"))) or "none here"
        raise FileNotFoundError(f"no config file {path}; recipes in configs/: {known}")
    tree = _read_mapping(path, "sections (run:, target:, ...)")
    tree = {key: _included(section, path.parent) for key, section in tree.items()}
    for override in overrides:
        _apply(tree, override)
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        raise ValueError(_one_line(path, error)) from error


def _read_mapping(path: Path, what: str) -> dict[str, Any]:
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(tree, dict):
        raise ValueError(f"{path} must hold {what}, found {type(tree).__name__}")
    return tree


def _included(section: Any, folder: Path) -> Any:
    """A section with `include: FILE` (beside the recipe) is that file's keys, with the section's own put over them.

    `sources` of both are kept, the file's first; a file that is included may include no other.
    """
    if not isinstance(section, dict) or "include" not in section:
        return section
    own = dict(section)
    names = own.pop("include")
    merged: dict[str, Any] = {}
    for name in [names] if isinstance(names, str) else names:
        if not isinstance(name, str) or not (folder / name).is_file():
            raise FileNotFoundError(f"include: {name!r} is no file in {folder}; correct the name")
        merged = _merged(merged, _read_mapping(folder / name, "a section's keys"))
    return _merged(merged, own)


def _merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    both = {**base, **over}
    if "sources" in base and "sources" in over:
        both["sources"] = [*base["sources"], *over["sources"]]
    return both


def _apply(tree: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    parts = key.strip().split(".")
    if not separator or len(parts) < 2 or not all(parts):
        raise ValueError(f"override {override!r} is not of the form section.key=value")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"override {override!r}: the value is not valid YAML") from error
    if isinstance(value, str) and re.fullmatch(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+", value):
        value = float(value)  # YAML 1.1 reads 3e-4 as a string
    node = tree
    for part in parts[:-1]:
        child = node.setdefault(part, {})
        if not isinstance(child, dict):
            raise ValueError(f"override {override!r}: {part!r} is a value, not a section")
        node = child
    node[parts[-1]] = value


def _one_line(path: Path, error: ValidationError) -> str:
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"])
    more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    if first["type"] == "extra_forbidden":
        names = _fields_at(first["loc"][:-1])
        near = difflib.get_close_matches(str(first["loc"][-1]), names, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"valid here: {', '.join(names)}"
        return f"{path}: unknown key {key!r}; {hint}{more}"
    if first["type"] == "missing":
        return f"{path}: {key!r} is required{more}"
    message = first["msg"].removeprefix("Value error, ")
    got = "" if not key or isinstance(first["input"], dict) else f" (got {first['input']!r})"
    return f"{path}: {key + ': ' if key else ''}{message}{got}{more}"


def _fields_at(location: tuple[int | str, ...]) -> list[str]:
    """Valid keys of the section at `location`; list indices and union tags in it are stepped over."""
    models: list[type[BaseModel]] = [Config]
    for part in location:
        below = [
            model
            for parent in models
            if part in parent.model_fields
            for model in _models_in(parent.model_fields[str(part)].annotation)
        ]
        models = below or models
    return sorted({name for model in models for name in model.model_fields})


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if typing.get_origin(annotation) in (typing.Union, types.UnionType, tuple, typing.Annotated):
        return [model for arg in typing.get_args(annotation) for model in _models_in(arg)]
    return []
