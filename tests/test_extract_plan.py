"""The plan's numbers equal those worked out by hand."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from configs.load import load_config
from data import feature_shards
from data.codecs import blob_columns
from data.lengths import Lengths
from extract import checks, footprint, soft_labels
from extract.footprint import ASSUMED_FLOPS, target_size
from extract.plan import CODEC_RATIO, ExtractPlan, format_bytes, max_row_tokens, plan_extract


def equal_lengths(num_samples, num_tokens):
    return Lengths(np.array([float(num_tokens)]), np.array([float(num_samples)]), "by hand")


MISSION = ExtractPlan(
    lengths=equal_lengths(913_000, 2_000),
    codec="bf16-planes",
    num_taps=5,
    hidden_size=5120,
    shard_bytes=1_000_000_000,
    tokens_per_s=10_000.0,
    location="features",
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
    unknown = replace(MISSION, lengths=None)
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
        "data.max_tokens=1528 (cuts 100% of the samples short, 24% of the tokens are lost)",
        "697,544 samples (data.sources[].take)",
    ]
    assert all(option in str(error.value) for option in plan.would_fit())
    assert "DOES NOT FIT" in plan.lines()[-1]
    replace(MISSION, free_bytes=66 * 10**12).require_disk()


def test_a_shorter_maximum_is_worked_out_from_the_histogram():
    """900 samples of 100 and 100 of 10,000 tokens: at 2,000 the long ones lose 80 % and all is 290,000 of 1,090,000 tokens."""
    lengths = Lengths(np.array([100.0, 10_000.0]), np.array([900.0, 100.0]), "by hand")
    plan = replace(MISSION, lengths=lengths, codec="fp8", free_bytes=0)
    plan = replace(plan, free_bytes=int(290_000 * plan.stored_bytes_per_token("fp8")))
    option = "data.max_tokens=2000 (cuts 10% of the samples short, 73% of the tokens are lost)"
    assert option in plan.would_fit()
    assert plan.lengths is not None
    cut = replace(plan, lengths=plan.lengths.cut(2000))
    assert cut.fits
    assert not replace(plan, lengths=plan.lengths.cut(2001)).fits


def test_a_maximum_that_would_cut_nearly_everything_is_no_advice():
    plan = replace(MISSION, free_bytes=10**12)
    assert not any("max_tokens" in option for option in plan.would_fit())


def test_every_change_that_is_said_to_fit_fits():
    for free in (1, 3, 10, 30, 50, 60):
        plan = replace(MISSION, free_bytes=free * 10**12, num_soft_labels=16)
        for option in plan.would_fit():
            name, _, value = option.split(" (")[0].rpartition("=")
            words = option.split()
            if name == "extract.codec":
                assert replace(plan, codec=value).fits
            elif "of 5" in option:
                assert replace(plan, num_taps=int(words[0])).fits
                assert not replace(plan, num_taps=int(words[0]) + 1).fits
            elif "samples (" in option:
                assert replace(
                    plan, lengths=equal_lengths(int(words[0].replace(",", "")), 2000)
                ).fits
            else:
                codec = "fp8" if "fp8" in option else plan.codec
                shorter = equal_lengths(913_000, int(value))
                assert replace(plan, codec=codec, lengths=shorter).fits


def test_a_bucket_has_no_limit():
    plan = replace(MISSION, location="s3://bucket/features", free_bytes=None)
    plan.require_disk()
    assert "no limit known" in plan.lines()[-1]


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
    assert 0 < (plan_extract(config).free_bytes or 0) < 10**18


def test_a_ranks_memory_by_hand():
    """27e9 weights of 2 B; taps twice 32,768 x 5 x 5120 x 2 B; a layer 32,768 x (6 x 5120 + 3 x 17,920) x 2 B."""
    overrides = ["target.num_parameters=27_000_000_000", "data.max_tokens=18432"]
    found = plan_extract(load_config("configs/qwen3.6-27b.yaml", overrides)).footprint
    assert found is not None
    assert found.weights == 54e9
    assert found.taps == 2 * 32_768 * 5 * 5120 * 2
    assert found.layer == 32_768 * (6 * 5120 + 3 * 17_920) * 2
    assert found.head == 256 * 248_320 * 10
    assert found.gpu_gb == 80
    # 27e9 less embedding and head, of which 62 of 64 layers run
    layers = (27e9 - 2 * 248_320 * 5120) * 62 / 64
    assert found.tokens_per_s == pytest.approx(ASSUMED_FLOPS / (2 * layers))


def test_a_target_beyond_one_gpu_is_counted_in_gpus():
    overrides = ["target.num_parameters=235_000_000_000"]
    found = plan_extract(load_config("configs/qwen3.6-27b.yaml", overrides)).footprint
    assert found is not None
    assert found.gpu_gb is None
    # 470 GB over 80 GB / 1.1 less 9.5 GB of one batch's own
    assert found.num_gpus(80) == -(-470 // (80 / 1.1 - 9.5))


def test_a_targets_own_files_are_counted(tiny_config, tiny_target):
    size = target_size(tiny_config("llama").target)
    assert size is not None
    parameters = {id(p): p.numel() for p in tiny_target("llama").model.parameters()}
    assert size.num_parameters == sum(parameters.values())


def test_a_target_too_small_to_fill_a_gpu_gets_no_guessed_speed(tiny_config):
    plan = plan_extract(tiny_config("llama"))
    assert plan.footprint is not None
    assert plan.speed is None


def test_constants_kept_apart_so_that_plans_load_no_torch_are_equal():
    assert footprint.HEAD_CHUNK_ROWS == checks.HEAD_CHUNK_ROWS == soft_labels.CHUNK_ROWS
