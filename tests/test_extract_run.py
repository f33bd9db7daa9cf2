"""The stage on a tiny target: features are the target's own, and any history of runs gives the same bytes."""

import shutil
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch
import yaml
from extract_runs import (
    ONE,
    assert_same_folder,
    bytes_of,
    features_of,
    make_rows,
    start_worker,
    write_rows,
)

import extract.run as stage
from data.corpus import CorpusRow
from data.feature_manifest import manifest_path, read_feature_manifest
from data.features import open_features, verify_features
from extract import slices, worker
from extract.run import run_extract
from extract.work import open_work, plan_work
from target.generate import Sampling, generate_batch
from target.identity import target_identity
from target.taps import forward_with_taps


@pytest.fixture(scope="module")
def make_run(tiny_config):
    """A run whose corpus is `rows`; features are not extracted yet."""

    def make(rows, *overrides, family="llama"):
        # the toy responses are nobody's argmax
        config = tiny_config(family, ["data.responses.generate=false", *overrides])
        write_rows(config, rows)
        return config

    return make


@pytest.mark.parametrize(("family", "codec"), [("llama", "fp32"), ("qwen3_sliding", "bf16-planes")])
def test_features_are_the_targets_own_unpadded_in_corpus_order(
    make_run, tiny_target, family, codec
):
    rows = make_rows(30)
    config = make_run(rows, f"extract.codec={codec}", family=family)
    run_extract(config, ONE)
    features = open_features(features_of(config))
    assert [entry.sample_id for entry in features.entries] == [row.sample_id for row in rows]
    assert len(read_feature_manifest(features_of(config)).shards) > 1
    for entry, row in zip(features.entries, rows, strict=True):
        found = features.read(entry)
        assert found.input_ids.tolist() == row.input_ids.tolist()
        assert found.loss_mask.tolist() == row.loss_mask.tolist()
        assert (entry.split, entry.num_response_tokens) == (row.split, row.loss_mask.sum())
        alone = forward_with_taps(
            tiny_target(family),
            found.input_ids[None],
            torch.tensor([row.num_tokens]),
            [1, 2, 4],
            False,
        ).features[0]
        tolerance = 1e-5 if codec == "fp32" else 0.01
        torch.testing.assert_close(found.features.float(), alone, rtol=tolerance, atol=tolerance)


def test_manifest_carries_the_settings_and_counts_every_row(make_run):
    rows = make_rows(20)
    config = make_run(rows)
    run_extract(config, ONE)
    manifest = read_feature_manifest(features_of(config))
    assert manifest.settings["target_layer_ids"] == [1, 2, 4]
    assert "hidden_states[i+1]" in manifest.settings["tap_convention"]
    assert manifest.settings.items() >= target_identity(config.target).items()
    assert sum(shard.num_tokens for shard in manifest.shards) == sum(r.num_tokens for r in rows)
    assert {path.name for path in features_of(config).iterdir()} == {
        "manifest.json",
        "rows.parquet",
        "target_head.safetensors",
        *(shard.file for shard in manifest.shards),
    }
    assert verify_features(features_of(config)) == len(manifest.shards) + 2


def one_at_a_time(load):
    """Workers are processes; in threads of one, transformers must not load twice at once."""
    lock = threading.Lock()

    def load_alone(section, device):
        with lock:
            return load(section, device)

    return load_alone


@pytest.mark.parametrize("num_workers", [2, 3])
def test_workers_at_once_share_the_shards_and_give_the_same_bytes(
    make_run, num_workers, monkeypatch
):
    rows = make_rows(60)
    whole, shared = make_run(rows), make_run(rows)
    run_extract(whole, ONE)
    made = []
    real = worker.write_extracted

    def spy(work, layout, extracted):
        made.append(extracted.index)
        return real(work, layout, extracted)

    monkeypatch.setattr(worker, "write_extracted", spy)
    monkeypatch.setattr(stage, "load_target", one_at_a_time(stage.load_target))
    with ThreadPoolExecutor(num_workers) as pool:
        for future in [pool.submit(run_extract, shared, ONE) for _ in range(num_workers)]:
            future.result()  # each ends, and only when all is there
    shards = read_feature_manifest(features_of(shared)).shards
    assert sorted(made) == list(range(len(shards)))  # nothing twice
    assert_same_folder(features_of(shared), features_of(whole))


def test_what_is_done_is_not_done_again(make_run, monkeypatch):
    rows = make_rows(60)
    whole, stopped = make_run(rows), make_run(rows)
    run_extract(whole, ONE)
    made = []
    real = worker.write_extracted

    def stops_at_four(work, layout, extracted):
        if len(made) == 4:
            raise OSError(5, "Input/output error")
        made.append(extracted.index)
        return real(work, layout, extracted)

    with monkeypatch.context() as patch:
        patch.setattr(worker, "write_extracted", stops_at_four)
        with pytest.raises(OSError, match="Input/output"):
            run_extract(stopped, ONE)
    assert not list(features_of(stopped).glob("claims/*"))  # given up, not left to lapse
    assert len(made) == 4
    first, made = {*made}, []
    monkeypatch.setattr(
        worker, "write_extracted", lambda w, y, e: made.append(e.index) or real(w, y, e)
    )
    run_extract(stopped, ONE)
    assert not first & {*made}
    assert_same_folder(features_of(stopped), features_of(whole))


def test_kill_minus_nine_of_two_ranks_then_one_rank_gives_the_same_bytes(make_run, tmp_path):
    rows = make_rows(400)
    whole, killed = make_run(rows), make_run(rows)
    run_extract(whole, ONE)
    recipe = tmp_path / "killed.yaml"
    recipe.write_text(yaml.safe_dump(killed.model_dump(mode="json")))
    folder = features_of(killed)

    processes = [start_worker(recipe) for _ in range(2)]
    deadline = time.monotonic() + 240
    while len(list(folder.glob("shard-*.json"))) < 4:
        assert time.monotonic() < deadline, processes[0].poll()
        time.sleep(0.002)
    for process in processes:
        process.kill()
    for process in processes:
        process.wait()
    done = len(list(folder.glob("shard-*.json")))
    total = len(read_feature_manifest(features_of(whole)).shards)
    assert 4 <= done < total
    assert not manifest_path(folder).exists()

    # what a kill in the middle of a write may leave
    unfinished = next(i for i in range(total) if not (folder / f"shard-{i:06d}.json").exists())
    (folder / f"shard-{unfinished:06d}.parquet").write_bytes(b"whole by name only")
    writer = f"{socket.gethostname()}~{processes[0].pid}~7"
    (folder / f".shard-{unfinished:06d}.parquet~{writer}.tmp").write_bytes(b"half")
    run_extract(killed, ONE)
    assert_same_folder(folder, features_of(whole))


def test_a_finished_shard_of_another_size_is_made_again_and_only_that(make_run, monkeypatch):
    rows = make_rows(60)
    whole, resumed = make_run(rows), make_run(rows)
    run_extract(whole, ONE)
    with monkeypatch.context() as patch:
        patch.setattr(stage, "finish_work", lambda *_: sys.exit(143))
        with pytest.raises(SystemExit):
            run_extract(resumed, ONE)
    torn, flipped = (features_of(resumed) / f"shard-00000{i}.parquet" for i in (1, 2))
    torn.write_bytes(torn.read_bytes()[:-7])
    data = bytearray(flipped.read_bytes())
    data[len(data) // 2] ^= 4
    flipped.write_bytes(data)
    run_extract(resumed, ONE)
    assert torn.read_bytes() == (features_of(whole) / torn.name).read_bytes()
    # no finished shard is read again on resume: bits that flip on the disk are for the command that reads everything
    with pytest.raises(ValueError, match=flipped.name):
        verify_features(features_of(resumed))


def test_deleting_a_bad_shard_and_running_again_repairs_the_set(make_run):
    rows = make_rows(60)
    rows[5].input_ids[1] = 320  # quarantined, in another shard
    config = make_run(rows, "extract.max_quarantined=0.05")
    run_extract(config, ONE)
    before = bytes_of(features_of(config))
    (features_of(config) / "shard-000002.parquet").unlink()
    with pytest.raises(ValueError, match=r"shard-000002\.parquet is missing"):
        open_features(features_of(config))
    run_extract(config, ONE)
    assert bytes_of(features_of(config)) == before


def test_complete_features_are_left_alone_and_other_settings_are_refused(make_run, caplog):
    config = make_run(make_rows(20))
    run_extract(config, ONE)
    before = {path: path.stat().st_mtime_ns for path in features_of(config).iterdir()}
    with caplog.at_level("INFO"):
        run_extract(config, ONE)
    assert "nothing to do" in caplog.text
    assert {path: path.stat().st_mtime_ns for path in features_of(config).iterdir()} == before
    other = config.model_copy(
        update={"extract": config.extract.model_copy(update={"codec": "fp8"})}
    )
    with pytest.raises(ValueError, match="codec='fp32', this run has 'fp8'"):
        run_extract(other, ONE)


def test_an_unfinished_extraction_with_other_settings_is_refused(make_run):
    config = make_run(make_rows(20))
    open_work(plan_work(config))
    taps = config.drafter.model_copy(update={"target_layer_ids": (0, 2)})
    with pytest.raises(ValueError, match=r"target_layer_ids=\[1, 2, 4\], this run has \[0, 2\]"):
        run_extract(config.model_copy(update={"drafter": taps}), ONE)


def test_a_corpus_of_another_target_is_refused_with_both_values(make_run, tiny_config):
    rows = make_rows(8)
    config = make_run(rows)
    other = tiny_config("qwen3")
    shutil.copytree(config.run.folder / "corpus", other.run.folder / "corpus")
    with pytest.raises(ValueError, match=r"model='.*llama', this run has '.*qwen3'"):
        run_extract(other, ONE)
    template = {"chat_template_kwargs": {"enable_thinking": False}}
    changed = config.model_copy(update={"target": config.target.model_copy(update=template)})
    with pytest.raises(ValueError, match=r"chat_template_kwargs=\{\}, this run has \{'enable_th"):
        run_extract(changed, ONE)


def test_no_corpus_is_one_line(tiny_config):
    with pytest.raises(FileNotFoundError, match="run the data stage"):
        run_extract(tiny_config("llama"), ONE)


def test_too_small_a_disk_is_refused_before_anything_is_written(make_run):
    config = make_run(make_rows(20), "extract.free_disk_bytes=1000")
    with pytest.raises(ValueError, match=r"features need .* free; what would fit"):
        run_extract(config, ONE)
    assert not features_of(config).exists()
    run_extract(config, ONE, ignore_disk=True)
    open_features(features_of(config))


@pytest.mark.parametrize("num_rows", [5, 60])  # one shard, several
def test_an_error_of_the_writing_thread_stops_the_stage(make_run, monkeypatch, num_rows):
    config = make_run(make_rows(num_rows))

    def full_disk(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(worker, "write_shard", full_disk)
        with pytest.raises(OSError, match="No space left"):
            run_extract(config, ONE)
    run_extract(config, ONE)  # and goes on from there
    assert len(open_features(features_of(config)).entries) == num_rows


def test_bad_rows_are_quarantined_with_their_reason_and_counted(make_run, tiny_target):
    rows = make_rows(40)
    rows[18].input_ids[2] = 320  # one past the vocabulary
    config = make_run(rows, "extract.max_quarantined=0.03")
    run_extract(config, ONE)
    features = open_features(features_of(config))
    manifest = read_feature_manifest(features_of(config))
    assert [(row.sample_id, row.reason) for row in manifest.quarantined] == [
        ("sample-018", "token id 320 is outside the vocabulary of 320")
    ]
    assert len(features.entries) == 39
    assert "sample-018" not in {entry.sample_id for entry in features.entries}


def test_too_many_bad_rows_stop_the_stage(make_run):
    rows = make_rows(40)
    for index in (17, 20):
        rows[index].input_ids[0] = -1
    config = make_run(rows, "extract.max_quarantined=0.03")
    with pytest.raises(ValueError, match=r"2 of 40 rows failed.*sample-017"):
        run_extract(config, ONE)
    assert not manifest_path(features_of(config)).exists()


def with_nan(output, rows):
    """`rows`: (B,) bool, whose second token's features are NaN."""
    features = output.features.clone()
    features[rows, 1, 1, 3] = float("nan")
    return replace(output, features=features)


def test_a_row_that_the_target_cannot_take_is_quarantined(make_run, monkeypatch):
    rows = make_rows(40)
    config = make_run(rows, "extract.max_quarantined=0.5")
    real = slices.forward_with_taps

    def broken(target, input_ids, *rest, **kind):
        return with_nan(real(target, input_ids, *rest, **kind), input_ids[:, 0] % 4 == 1)

    monkeypatch.setattr(slices, "forward_with_taps", broken)
    run_extract(config, ONE)
    manifest = read_feature_manifest(features_of(config))
    assert {row.reason for row in manifest.quarantined} == {"features are not finite"}
    assert {row.sample_id for row in manifest.quarantined} == {
        row.sample_id for row in rows if row.input_ids[0] % 4 == 1
    }
    assert len(manifest.quarantined) + manifest.num_rows == 40
    for entry in (features := open_features(features_of(config))).entries:
        assert features.read(entry).features.isfinite().all()


@pytest.mark.parametrize("is_for_good", [False, True])
def test_a_device_that_breaks_quarantines_nothing_and_leaves_its_shards_to_others(
    make_run, monkeypatch, is_for_good
):
    rows = make_rows(60)
    whole, config = make_run(rows), make_run(rows, "extract.max_quarantined=1.0")
    run_extract(whole, ONE)
    real, calls = slices.forward_with_taps, []

    def breaks_at_the_third(target, input_ids, *rest, **kind):
        calls.append(None)
        is_broken = len(calls) >= 3 if is_for_good else len(calls) == 3
        return with_nan(
            real(target, input_ids, *rest, **kind), torch.full((len(input_ids),), is_broken)
        )

    with monkeypatch.context() as patch:
        patch.setattr(slices, "forward_with_taps", breaks_at_the_third)
        with pytest.raises(ValueError, match="cpu does not compute the same twice"):
            run_extract(config, ONE)
    assert not manifest_path(features_of(config)).exists()
    run_extract(config, ONE)  # sound
    assert_same_folder(features_of(config), features_of(whole))


def greedy_rows(target, num_rows=6):
    generator = np.random.default_rng(3)
    prompts = [generator.integers(0, 256, 9 + i).tolist() for i in range(num_rows)]
    responses = generate_batch(target, prompts, 24, Sampling())
    return [
        CorpusRow(
            f"greedy-{index}",
            "toy",
            "task",
            "train",
            "[]",
            np.array(prompt + response, dtype=np.int32),
            np.arange(len(prompt) + len(response)) >= len(prompt),
            True,
        )
        for index, (prompt, response) in enumerate(zip(prompts, responses, strict=True))
    ]


@pytest.mark.parametrize("family", ["llama", "qwen3_sliding"])
def test_the_parity_gate_passes_greedy_answers_and_stops_on_anything_else(
    tiny_config, tiny_target, family, caplog
):
    rows = greedy_rows(tiny_target(family))
    config = tiny_config(family)
    write_rows(config, rows)
    with caplog.at_level("INFO"):
        run_extract(config, ONE)
    assert "argmax is 100.0% of" in caplog.text

    config = tiny_config(family)
    shifted = [
        replace(row, input_ids=np.where(row.loss_mask, row.input_ids ^ 1, row.input_ids))
        for row in rows
    ]
    write_rows(config, shifted)
    with pytest.raises(ValueError, match=r"extract\.min_greedy_match=0\.95.*run data again"):
        run_extract(config, ONE)
    assert not manifest_path(features_of(config)).exists()


def test_a_slip_in_the_recipe_does_not_refuse_its_correction(make_run):
    config = make_run(make_rows(8))
    target = config.target.model_copy(update={"num_layers": 7})
    with pytest.raises(ValueError, match=r"target\.num_layers=7"):
        run_extract(config.model_copy(update={"target": target}), ONE)
    assert not features_of(config).exists()
    run_extract(config, ONE)


def test_a_data_recipe_that_has_changed_since_is_refused(make_run):
    config = make_run(make_rows(8))
    changed = config.model_copy(
        update={"data": config.data.model_copy(update={"max_prompt_tokens": 99})}
    )
    with pytest.raises(ValueError, match=r"data\.max_prompt_tokens=\d+, this run has 99"):
        plan_work(changed)
    stated = config.model_copy(update={"data": config.data.model_copy(update={"num_samples": 5})})
    assert plan_work(stated).settings == plan_work(config).settings  # only plans read it
