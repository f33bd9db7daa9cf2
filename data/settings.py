"""The recipe's data section as flat settings, carried by every manifest, and the refusal of one that has changed since."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from common.fingerprint import require_equal
from configs.schema import DataSection

# stated for plans made before the corpus exists: they change no row
_PLAN_ONLY = {"num_samples", "expected_tokens", "expected_response_tokens"}


def data_recipe(data: DataSection) -> dict[str, Any]:
    """`data.*` settings that decide the corpus, by dotted key; sources by name, with their order."""
    recipe = _flat("data", data.model_dump(mode="json", exclude=_PLAN_ONLY))
    for source in data.sources:
        key = f"data.sources.{source.name}"
        del recipe[f"{key}.license"]
        if source.kind in ("jsonl", "parquet"):
            del recipe[f"{key}.path"]  # equal files elsewhere are the same source
    return recipe


def require_same_data(what: str, settings: Mapping[str, Any], data: DataSection) -> None:
    """Raises ValueError naming the first data setting that is not what made `what`, whose manifest holds `settings`."""
    wanted = data_recipe(data)
    found = {
        key: value
        for key, value in settings["recipe"].items()
        if key.startswith("data.") and not key.endswith(".content")
    }
    remedy = "set it back, or make the corpus and all that follows again in another run.output_dir"
    require_equal(what, found, {key: wanted.get(key) for key in found}, remedy)


def _flat(prefix: str, value: Any) -> dict[str, Any]:
    """Dotted keys of nested settings; sources by name, with their order (the first of two doubles stays)."""
    if isinstance(value, list) and value and isinstance(value[0], dict):
        named = {item.pop("name"): item for item in value}
        return {prefix: list(named), **_flat(prefix, named)}
    if isinstance(value, dict):
        return {
            k: v for key, item in value.items() for k, v in _flat(f"{prefix}.{key}", item).items()
        }
    return {prefix: value}
