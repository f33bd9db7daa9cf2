"""The plan of an unfinished corpus: its settings, the chosen prompts in corpus order, and what was rejected on the way.

    corpus/units/prompts.parquet     a row group a chunk
    corpus/units/plan.json           written last; with it, a resumed run neither reads nor selects again

Every rank reads it, and so does every run after a kill. It goes when the corpus is complete.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from common.files import fields_of, read_json, sha256_file, write_json
from common.fingerprint import fingerprint
from data.prompts import Prompt, SourceCounts

PROMPT_SCHEMA = pa.schema(
    [
        ("sample_id", pa.string()),
        ("source", pa.string()),
        ("task", pa.string()),
        ("split", pa.string()),
        ("where", pa.string()),
        ("license", pa.string()),
        ("messages", pa.string()),
        ("prompt_ids", pa.list_(pa.int32())),
        ("response_ids", pa.list_(pa.int32())),
        ("tools", pa.string()),
        ("thinking", pa.bool_()),
    ]
)
_JSON_COLUMNS = ("messages", "tools")


@dataclass(frozen=True)
class Plan:
    folder: Path
    """corpus/units"""
    settings: dict[str, Any]
    prompts_sha256: str
    chunk_size: int
    """Prompts a chunk; work units are cut inside it."""
    counts: dict[str, SourceCounts]
    """Rejected while selecting; `done` is still empty."""

    @property
    def fingerprint(self) -> str:
        """Of settings and prompts; finished work units carry it."""
        return fingerprint([self.settings, self.prompts_sha256])

    @property
    def num_prompts(self) -> int:
        return pq.read_metadata(self._prompts_file).num_rows

    @property
    def num_chunks(self) -> int:
        return pq.read_metadata(self._prompts_file).num_row_groups

    def thinking_modes(self) -> list[bool | None]:
        """Every `Prompt.thinking` that occurs."""
        column = pq.read_table(self._prompts_file, columns=["thinking"])["thinking"]
        return sorted(set(column.to_pylist()), key=str)

    @property
    def _prompts_file(self) -> Path:
        return prompts_path(self.folder)

    def chunk(self, index: int) -> list[Prompt]:
        with pq.ParquetFile(self._prompts_file) as file:
            table = file.read_row_group(index)
        ids = [column.combine_chunks() for column in table.select(["prompt_ids", "response_ids"])]
        plain = table.drop_columns(["prompt_ids", "response_ids"]).to_pylist()
        return [
            Prompt(
                **{**row, **{key: tuple(json.loads(row[key])) for key in _JSON_COLUMNS}},
                prompt_ids=ids[0][i].values.to_numpy(),
                response_ids=ids[1][i].values.to_numpy() if ids[1][i].is_valid else None,
            )
            for i, row in enumerate(plain)
        ]


def plan_path(folder: Path) -> Path:
    return folder / "plan.json"


def prompts_path(folder: Path) -> Path:
    return folder / "prompts.parquet"


def write_plan(
    folder: Path, settings: dict[str, Any], counts: Mapping[str, SourceCounts], chunk_size: int
) -> Plan:
    """Call when the prompts file is there, a row group a chunk: with the plan the selection is over."""
    plan = Plan(folder, settings, sha256_file(prompts_path(folder)), chunk_size, dict(counts))
    write_json(
        plan_path(folder),
        {
            "settings": settings,
            "prompts_sha256": plan.prompts_sha256,
            "chunk_size": chunk_size,
            "counts": {name: vars(c) for name, c in counts.items()},
        },
    )
    return plan


def read_plan(folder: Path) -> Plan:
    remedy = f"remove {folder.parent} and run the data stage again"
    found = read_json(plan_path(folder), remedy)
    with fields_of(plan_path(folder), remedy):
        counts = {
            name: SourceCounts(c["read"], Counter(c["done"]), Counter(c["rejected"]))
            for name, c in found["counts"].items()
        }
        return Plan(folder, found["settings"], found["prompts_sha256"], found["chunk_size"], counts)


def prompt_record(prompt: Prompt) -> dict[str, Any]:
    """A row of PROMPT_SCHEMA."""
    values = vars(prompt)
    return values | {key: json.dumps(values[key], ensure_ascii=False) for key in _JSON_COLUMNS}
