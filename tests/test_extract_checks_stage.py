"""Gates at work: every kind of fault is quarantined with its reason and counted; a corpus of another target stops the stage."""

import json
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch

import extract.slices as slices
from common.distributed import Ranks
from data.corpus import CorpusRow, write_corpus
from data.feature_manifest import read_feature_manifest
from data.features import open_features
from data.settings import data_recipe
from extract.checks import FirstRows, measure_first_rows, require_parity, require_sampled_match
from extract.run import run_extract
from target.generate import Sampling, generate_batch
from target.identity import target_identity

FAULTS = {
    250: (lambda f: f[5, 1, 3].fill_(float("nan")), "features are not finite"),
    251: (lambda f: f[:, 0].zero_(), "tap 0 has RMS 0"),
    252: (lambda f: f[:, 2].mul_(50), "tap 2 has RMS"),
    253: (lambda f: f[:, 1].mul_(0.01), "tap 1 has RMS"),
    254: (lambda f: f[:, 1].copy_(f[:1, 1].expand(len(f), -1)), "tap 1 is the same at every token"),
    255: (lambda f: f.fill_(float("inf")), "features are not finite"),
}
"""By a row's first token: what happens to its features, and the reason that it is to be given."""


def faulty(real):
    """The target's forward on a device that spoils the features of marked rows, the same way each time."""

    def forward(target, input_ids, lengths, layer_ids, need_last_hidden):
        output = real(target, input_ids, lengths, layer_ids, need_last_hidden)
        features = output.features.clone()
        for place, length in enumerate(lengths.tolist()):
            fault = FAULTS.get(int(input_ids[place, 0]))
            if fault:
                fault[0](features[place, :length])
        return replace(output, features=features)

    return forward


def test_injected_faults_of_every_kind_are_named_listed_and_add_up(tiny_config, monkeypatch):
    config = tiny_config("llama", ["data.responses.generate=false", "extract.max_quarantined=0.2"])
    generator = np.random.default_rng(5)
    rows, wanted = [], {}
    for index in range(60):
        ids = generator.integers(0, 240, int(generator.integers(20, 120))).astype(np.int32)
        mask = np.arange(len(ids)) >= 8
        rows.append(CorpusRow(f"sample-{index:02d}", "toy", "t", "train", "[]", ids, mask, True))
    for place, (marker, (_, reason)) in enumerate(FAULTS.items()):
        row = rows[20 + 5 * place]
        row.input_ids[0] = marker
        wanted[row.sample_id] = reason
    rows[18].input_ids[3] = 320
    wanted["sample-18"] = "token id 320 is outside the vocabulary of 320"
    settings = target_identity(config.target) | {"data": "toy", "recipe": data_recipe(config.data)}
    write_corpus(config.run.folder / "corpus", rows, settings, {}, 64)
    monkeypatch.setattr(slices, "forward_with_taps", faulty(slices.forward_with_taps))
    run_extract(config, Ranks(0, 1, 0, torch.device("cpu")))

    folder = config.run.folder / "features"
    manifest = read_feature_manifest(folder)
    found = {row.sample_id: row.reason for row in manifest.quarantined}
    assert found.keys() == wanted.keys()
    assert all(reason in found[sample] for sample, reason in wanted.items())
    entries = open_features(folder).entries
    assert len(entries) + len(found) == 60
    assert not {entry.sample_id for entry in entries} & set(found)
    by_shard = Counter(row.shard for row in manifest.quarantined)
    cut = [shard.num_rows + by_shard[shard.file] for shard in manifest.shards]
    assert sum(cut) == 60
    for line, row in zip(
        (folder / "quarantine.jsonl").read_text().splitlines(), manifest.quarantined, strict=True
    ):
        assert json.loads(line) == vars(row)
    assert manifest.first_rows is not None
    assert len(manifest.first_rows["tap_rms"]) == 3


TEMPERATURE = 0.3  # a random target's distribution is flat; this makes one text unlike another


@pytest.fixture(scope="module")
def sampled(tiny_target):
    """(target, rows it sampled itself at TEMPERATURE)."""
    target = tiny_target("llama")
    generator = np.random.default_rng(1)
    prompts = [generator.integers(0, 256, 8).tolist() for _ in range(12)]
    sampling = Sampling(temperature=TEMPERATURE)
    seeded = torch.Generator().manual_seed(0)
    responses = generate_batch(target, prompts, 48, sampling, seeded)
    rows = []
    for index, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        ids = np.array(prompt + response, dtype=np.int32)
        mask = np.arange(len(ids)) >= len(prompt)
        rows.append(CorpusRow(f"s-{index}", "toy", "t", "train", "[]", ids, mask, True))
    return target, rows


def test_a_targets_own_samples_surprise_it_by_nothing(sampled):
    target, rows = sampled
    first = measure_first_rows(target, rows, [1, 2, 4], 1024, TEMPERATURE)
    assert first.num_tokens == sum(row.num_response_tokens for row in rows)
    assert abs(first.surprise_nats) < 5 * first.surprise_error
    require_sampled_match(first)
    recipe = {"data.responses.generate": True, "data.responses.temperature": TEMPERATURE}
    assert "surprise the target by" in require_parity(first, recipe, 0.95)


def test_shifted_ids_stop_a_sampled_corpus(sampled):
    target, rows = sampled
    shifted = [replace(row, input_ids=np.roll(row.input_ids, 1)) for row in rows]
    first = measure_first_rows(target, shifted, [1, 2, 4], 1024, TEMPERATURE)
    with pytest.raises(ValueError, match=r"sampled response tokens surprise this target"):
        require_sampled_match(first)


def test_a_corpus_that_the_target_did_not_answer_is_described_and_not_judged():
    first = FirstRows(torch.ones(3), 100, 0.02, 4.5, 0.1)
    recipe = {"data.responses.generate": False, "data.responses.temperature": 0.0}
    assert "not the target's own" in require_parity(first, recipe, 0.95)
    for temperature, reason in ((0.0, "recorded greedy"), (1.0, "recorded sampled")):
        recipe = {"data.responses.generate": True, "data.responses.temperature": temperature}
        with pytest.raises(ValueError, match=reason):
            require_parity(first, recipe, 0.95)


def test_nothing_measured_is_no_pass_for_nan():
    with pytest.raises(ValueError, match="surprise"):
        require_sampled_match(FirstRows(torch.ones(3), 100, 1.0, float("nan"), 0.1))
