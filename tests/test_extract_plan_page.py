"""The page of a plan: the verdict first, and each remedy it names removes what it is named for."""

import shlex
import shutil

import pytest

from configs.load import load_config
from train.plan_page import plan_page

MISSION = "configs/qwen3.6-27b.yaml"
TB = 10**12


def page(tmp_path, *overrides, free_tb=200.0):
    # the disk of the tests must not decide what is said
    stated = [f"run.output_dir={tmp_path}", f"extract.free_disk_bytes={int(free_tb * TB)}"]
    return plan_page(load_config(MISSION, [*stated, *overrides]), MISSION)


@pytest.fixture(autouse=True)
def _large_disk(monkeypatch):
    monkeypatch.setattr("train.plan_page.free_bytes", lambda _: 10 * TB)


def stops(found):
    return [finding for finding in found.findings() if finding.kind == "stop"]


def test_a_run_that_fits_says_go_with_its_cost_in_the_first_line(tmp_path):
    first = page(tmp_path).lines()[0]
    assert first.startswith("qwen3.6-27b: GO: 65.4 TB of features; on 8 GPUs: extract 7.6 h, train")


def test_a_run_that_does_not_fit_says_so_first_and_every_remedy_mends_it(tmp_path):
    found = page(tmp_path, free_tb=50)
    [stop] = stops(found)
    assert found.lines()[0] == "qwen3.6-27b: DO NOT START: 1 thing cannot end"
    assert "features need 65.4 TB" in stop.what
    remedies = [remedy.split(" (")[0].split(": ")[0] for remedy in stop.remedies]
    settings = [remedy for remedy in remedies if "=" in remedy]
    assert len(settings) == 3  # codec, maximum, stream
    for remedy in settings:
        if "max_tokens" not in remedy:  # that one is by the histogram: tests/test_extract_plan.py
            assert stops(page(tmp_path, *shlex.split(remedy), free_tb=50)) == []


def test_a_stream_is_measured_by_its_ring(tmp_path):
    stream = ["train.source=stream", "train.shuffle_window=4"]
    small = page(tmp_path, *stream, "train.stream_bytes=1_000_000_000_000", free_tb=2)
    assert stops(small) == []
    # 0.2 % of 65.4 TB are held out
    assert small.extract.planned_bytes == pytest.approx(TB + 0.002 * 65.44e12, rel=1e-3)
    large = page(tmp_path, *stream, "train.stream_bytes=3_000_000_000_000", free_tb=2)
    assert [stop.remedies[0] for stop in stops(large)] == ["a smaller train.stream_bytes"]


def test_checkpoints_need_room_too(tmp_path, monkeypatch):
    monkeypatch.setattr("train.plan_page.free_bytes", lambda _: 50 * 10**9)
    [stop] = stops(page(tmp_path))
    assert "checkpoints need 103.8 GB" in stop.what


def test_a_target_beyond_one_gpu_needs_a_device_map(tmp_path):
    large = "target.num_parameters=235_000_000_000"
    [stop] = stops(page(tmp_path, large))
    assert "more than any one GPU" in stop.what
    assert stops(page(tmp_path, large, "target.device_map=auto")) == []


def test_tokens_that_are_stored_and_never_trained_on_are_told(tmp_path):
    found = page(tmp_path, "train.max_tokens=4096", "train.pack_tokens=18432")
    [mind] = [f for f in found.findings() if "never trained on" in f.what]
    lengths = found.extract.lengths
    assert lengths is not None
    assert mind.what.startswith(f"{lengths.share_above(4096)[1]:.0%} of the tokens")


def test_steps_that_see_a_part_of_the_samples_are_told(tmp_path):
    minds = [f.what for f in page(tmp_path, "train.steps=10_000").findings()]
    assert any("see 35% of the training samples" in what for what in minds)


def test_no_line_is_wider_than_the_page_and_the_recipe_is_named(tmp_path):
    lines = page(tmp_path, free_tb=20).lines()
    assert max(map(len, lines)) <= 116
    assert f"  ./launch.sh extract {MISSION}" in lines


def test_a_recipe_without_sizes_says_what_to_set(tmp_path):
    shutil.copy("configs/debug.yaml", tmp_path)
    config = load_config(tmp_path / "debug.yaml", [f"run.output_dir={tmp_path}/none"])
    first = plan_page(config, "debug.yaml").lines()[0]
    assert "UNKNOWN SIZE: set data.num_samples" in first
