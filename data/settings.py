"""The recipe's data section as flat settings, carried by every manifest, and the refusal of one that has changed since."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from common.fingerprint import require_equal
from configs.schema import DataSection

# stated for plans made before the corpus exists, or shown beside it: they change no row
_PLAN_ONLY = {"num_samples", "expected_tokens", "expected_response_tokens", "expected_lengths"}
_SHOWN_ONLY = ("license", "facts", "category", "num_rows", "expected_tokens")
# a setting that is off decides nothing: a corpus made before it existed is still of this recipe
_OFF = {
    "reject_broken_unicode": False,
    "max_prompt_repetition": 1.0,
    "near_duplicate_similarity": None,
    "max_malformed": 0.0,
    "spare_fraction": 0.0,
}
_SOURCE_OFF = {
    "reject_broken_unicode": False,
    "streaming": True,
    "prompt_template": None,
    "response_column": None,
    "system_column": None,
    "tools_column": None,
    "filter": {},
    "languages": [],
    "thinking": None,
    "read": None,
    "min_prompt_tokens": 0,
    "max_prompt_tokens": None,
}


# of the servers that make labels, only what may change an id: a run may continue on others
_RESPONSES_OFF = {"turns": "last", "server": None}
_SERVER = "data.responses.server."


def data_recipe(data: DataSection) -> dict[str, Any]:
    """`data.*` settings that decide the corpus, by dotted key; sources by name, with their order."""
    settings = _without(data.model_dump(mode="json", exclude=_PLAN_ONLY), _OFF)
    responses = _without(settings["responses"], _RESPONSES_OFF)
    if "server" in responses:
        responses["server"] = {"retokenise": responses["server"]["retokenise"]}
    settings["responses"] = responses
    settings["sources"] = [_source_settings(source) for source in settings["sources"]]
    return _flat("data", settings)


def _source_settings(source: dict[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in source.items() if key not in _SHOWN_ONLY}
    if source["kind"] not in ("datasets", "packages"):
        del kept["path"]  # equal files elsewhere are the same source
    return _without(kept, _SOURCE_OFF)


def _without(settings: dict[str, Any], off: Mapping[str, Any]) -> dict[str, Any]:
    return {k: value for k, value in settings.items() if k not in off or value != off[k]}


def require_same_data(what: str, settings: Mapping[str, Any], data: DataSection) -> None:
    """Raises ValueError naming the first data setting that is not what made `what`, whose manifest holds `settings`.

    Where labels came from is for the data stage alone: it may be told the servers on its command line.
    """
    wanted = data_recipe(data)
    found = {
        key: value
        for key, value in settings["recipe"].items()
        if key.startswith("data.") and not key.endswith(".content") and not key.startswith(_SERVER)
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
