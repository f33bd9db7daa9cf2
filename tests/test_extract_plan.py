"""The plan's numbers equal those worked out by hand."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from configs.load import load_config
from data import feature_shards
from data.codecs import blob_columns
from extract.plan import CODEC_RATIO, ExtractPlan, format_bytes, max_row_tokens, plan_extract

MISSION = ExtractPlan(
    num_samples=913_000,
    num_tokens=913_000 * 2_000,
    basis="by hand",
    codec="bf16-planes",
    num_taps=5,
    hidden_size=5120,
    shard_bytes=1_000_000_000,
    tokens_per_s=10_000.0,
    folder=Path("features"),
    free_bytes=100 * 10**12,
)


def test_the_missions_bytes_are_those_of_the_design():
    assert MISSION.bytes_per_token == 51_200
    sizes = {
        codec: format_bytes(MISSION.stored_bytes(codec) or 0)
        for codec in ("bf16", "bf16-planes", "fp8")
    }
    assert sizes == {"bf16": "93.5 TB", "bf16-planes": "65.4 TB", "fp8": "46.9 TB"}
    assert format_bytes(MISSION.stored_bytes("fp32") or 0) == "187.0 TB"


def test_hours_and_disk_rate():
    assert MISSION.hours(1) == pytest.approx(1.826e9 / 1e4 / 3600)  # 50.7 h
    assert MISSION.hours(32) == pytest.approx(1.826e9 / 1e4 / 3600 / 32)
    assert MISSION.gb_per_s(8) == pytest.approx(8 * 1e4 * 51_200 * 0.7 / 1e9)  # 2.87 GB/s
    text = "\n".join(MISSION.lines())
    assert "1 GPU: 50.7 h" in text
    assert "32 GPU: 1.6 h" in text
    assert "fits" in text


def test_shards_hold_whole_tokens():
    # 1e9 B / 51,200 B = 19,531 tokens a shard
    assert MISSION.num_shards == -(-1_826_000_000 // 19_531)
    assert replace(MISSION, codec="fp32").num_shards == -(-1_826_000_000 // 9_765)


def test_unknown_speed_and_size_are_said_not_invented():
    text = "\n".join(replace(MISSION, tokens_per_s=None).lines())
    assert "hours: unknown" in text
    assert " h, " not in text
    unknown = replace(MISSION, num_samples=None, num_tokens=None, basis="set data.num_samples")
    assert "samples: unknown: set data.num_samples" in "\n".join(unknown.lines())
    unknown.require_disk()


def test_a_small_disk_is_refused_with_what_would_fit():
    plan = replace(MISSION, free_bytes=50 * 10**12)
    assert not plan.fits
    with pytest.raises(ValueError, match=r"need 65\.4 TB .* 50\.0 TB free.*--ignore-disk") as error:
        plan.require_disk()
    # 50 / 65.44 = 0.764: 3 of 5 taps, 1528 of 2000 tokens, 697,544 of 913,000 samples
    assert plan.would_fit() == [
        "extract.codec=fp8 (46.9 TB)",
        "3 of 5 drafter.target_layer_ids",
        "data.max_tokens so low that a sample has 1,528 tokens on average",
        "697,544 samples (data.sources[].take)",
    ]
    assert all(option in str(error.value) for option in plan.would_fit())
    assert "DOES NOT FIT" in plan.lines()[-1]
    replace(MISSION, free_bytes=66 * 10**12).require_disk()


def test_a_sample_too_long_for_a_row_is_refused_before_anything_runs():
    overrides = ["data.max_tokens=83884", "extract.free_disk_bytes=100_000_000_000_000"]
    with pytest.raises(ValueError, match=r"data\.max_tokens=83884.*holds at most 83883"):
        plan_extract(load_config("configs/qwen3.6-27b.yaml", overrides))  # (2^31 - 2^16) / 25,600
    overrides[0] = "data.max_tokens=83883"
    plan_extract(load_config("configs/qwen3.6-27b.yaml", overrides))


@pytest.mark.parametrize("codec", CODEC_RATIO)
def test_the_plans_limits_are_those_of_the_files(codec):
    widest = max(column.bytes_per_token for column in blob_columns(codec, 5, 5120))
    assert max_row_tokens(codec, 5, 5120) == feature_shards.MAX_COLUMN_BYTES // widest


def test_tiny_hidden_sizes_count_their_fp8_scales():
    tiny = replace(MISSION, num_taps=3, hidden_size=64)
    assert tiny.stored_bytes_per_token("fp8") == 3 * (64 + 4)


def test_the_mission_recipe_plans_without_torch_model_or_corpus():
    code = (
        "import sys; from configs.load import load_config; from extract.plan import plan_extract;"
        "plan = plan_extract(load_config('configs/qwen3.6-27b.yaml', ['extract.free_disk_bytes=100_000_000_000_000']));"
        "assert 'torch' not in sys.modules; assert 'transformers' not in sys.modules;"
        "text = '\\n'.join(plan.lines()); assert '65.4 TB (this recipe)' in text, text;"
        "assert '1,826,000,000 tokens' in text, text; assert '51,200 bytes a token' in text, text"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_a_disk_is_asked_where_the_features_will_be(tmp_path):
    config = load_config("configs/qwen3.6-27b.yaml", [f"run.output_dir={tmp_path}/a/b"])
    assert 0 < plan_extract(config).free_bytes < 10**18
