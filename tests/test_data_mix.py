"""The mission's recipe adds up to what it says, sections may include files, and the plan's table shows the mix."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from configs.load import load_config
from configs.schema import Config
from data.mix import plan_data

ROOT = Path(__file__).parent.parent
MISSION = ROOT / "configs" / "qwen3.6-27b.yaml"


@pytest.fixture(scope="module")
def mission() -> Config:
    return load_config(MISSION)


def test_the_mission_takes_exactly_913_000_samples_of_every_category(mission):
    trained = [source for source in mission.data.sources if source.split != "test"]
    assert sum(source.take or 0 for source in trained) == mission.data.num_samples == 913_000
    categories = {source.category for source in trained}
    wanted = [
        "math",
        "code",
        "chat",
        "stem",
        "instruction",
        "tools",
        "multilingual",
        "long_context",
    ]
    assert categories == set(wanted)
    for source in trained:
        assert source.take is not None
        available = source.read or source.num_rows
        assert available is None or available > source.take, source.name  # something may be dropped
        assert source.thinking is not None
        assert source.facts != "unverified", source.name
    modes = {(s.path, s.thinking) for s in mission.data.sources if s.split == "test"}
    assert {path for path, _ in modes} == {path for path, mode in modes if mode is True}
    assert {path for path, _ in modes} == {path for path, mode in modes if mode is False}


def test_a_total_that_does_not_add_up_is_refused():
    with pytest.raises(ValueError, match=r"take 913000 samples, data\.num_samples says 900000"):
        load_config(MISSION, ["data.num_samples=900000"])
    with pytest.raises(ValueError, match=r"expected_tokens=3000, but the sources' .* average 1994"):
        load_config(MISSION, ["data.expected_tokens=3000"])


def test_the_plan_shows_each_source_each_category_and_the_whole(mission):
    lines = plan_data(mission.data)
    text = "\n".join(lines)
    for source in mission.data.sources:
        assert any(line.startswith(f"{source.name} ") for line in lines)
    (total,) = [line for line in lines if line.startswith("total")]
    assert total.split() == ["total", "913,000", "100%", "1.82", "G"]
    # 120,000 and 80,000 of 2,700 tokens each
    assert any(line.split() == ["math", "200,000", "21.9%", "540.0", "M"] for line in lines)
    assert "unverified: gsm8k" in text
    assert "36 hub sources name no commit" in text


def write(path: Path, tree: object) -> Path:
    path.write_text(yaml.safe_dump(tree))
    return path


def test_a_section_includes_files_under_its_own_keys(tmp_path):
    def source(name: str) -> dict[str, str]:
        return {"name": name, "kind": "jsonl", "path": f"{name}.jsonl"}

    write(
        tmp_path / "one.yaml",
        {"max_tokens": 100, "max_prompt_tokens": 50, "sources": [source("a")]},
    )
    write(tmp_path / "two.yaml", {"max_prompt_tokens": 60, "sources": [source("b")]})
    tree = yaml.safe_load((ROOT / "configs" / "debug.yaml").read_text())
    tree["data"] = {
        "include": ["one.yaml", "two.yaml"],
        "sources": [source("c")],
        "rows_per_shard": 7,
    }
    data = load_config(write(tmp_path / "run.yaml", tree), ["data.max_tokens=90"]).data
    assert (data.max_tokens, data.max_prompt_tokens, data.rows_per_shard) == (90, 60, 7)
    assert [s.name for s in data.sources] == ["a", "b", "c"]
    tree["data"]["include"] = "none.yaml"
    with pytest.raises(FileNotFoundError, match=r"include: 'none\.yaml' is no file in"):
        load_config(write(tmp_path / "run.yaml", tree))
