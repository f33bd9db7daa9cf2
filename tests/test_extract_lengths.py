"""Histograms of sample lengths: equal to the list they stand for, and to what a recipe states."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.load import load_config
from data.corpus import read_corpus_manifest
from data.lengths import (
    Lengths,
    corpus_lengths,
    from_quantiles,
    length_table,
    log_normal,
    stated_lengths,
)

MISSION = "configs/qwen3.6-27b.yaml"
LISTS = st.lists(st.integers(1, 500), min_size=1, max_size=40)


def lengths_of(values):
    tokens, samples = np.unique(np.array(values), return_counts=True)
    return Lengths(tokens.astype(float), samples.astype(float), "by hand")


@given(values=LISTS, limit=st.integers(1, 600), budget=st.integers(0, 20_000))
def test_sums_and_cuts_are_those_of_the_list(values, limit, budget):
    lengths = lengths_of(values)
    assert (lengths.num_samples, lengths.num_tokens) == (len(values), sum(values))
    assert lengths.cut(limit).num_tokens == sum(min(value, limit) for value in values)
    fitting = [m for m in range(max(values) + 1) if sum(min(v, m) for v in values) <= budget]
    assert lengths.longest_cut(budget) == max(fitting)
    samples, tokens = lengths.share_above(limit)
    assert samples == pytest.approx(sum(v > limit for v in values) / len(values))
    assert tokens == pytest.approx(1 - sum(min(v, limit) for v in values) / sum(values))


@given(values=LISTS, share=st.floats(0.001, 1.0))
def test_a_quantile_is_the_shortest_sample_with_that_share_at_or_below(values, share):
    found = lengths_of(values).quantile(share)
    assert found in values
    assert sum(v <= found for v in values) >= share * len(values) * (1 - 1e-9)
    assert sum(v < found for v in values) < share * len(values) * (1 + 1e-9)


@given(values=LISTS)
def test_the_table_covers_everything_once(values):
    rows = [line.split() for line in length_table(lengths_of(values))[1:]]
    for column in (1, 2):
        assert sum(float(row[column].rstrip("%")) for row in rows) == pytest.approx(100, abs=0.5)
    assert rows[-1][0].split("-")[1].replace(",", "") == str(max(values))


@given(mean=st.floats(1, 500), limit=st.integers(1000, 5000))
def test_an_assumed_spread_keeps_the_stated_mean_and_limit(mean, limit):
    tokens, samples = log_normal(mean, 7.0, limit)
    assert (tokens @ samples) / samples.sum() == pytest.approx(mean, rel=1e-6)
    assert samples.sum() == pytest.approx(7.0)
    assert tokens.max() <= limit
    assert tokens[len(tokens) // 2] < mean  # skewed, as lengths are


def test_stated_quantiles_come_back():
    tokens, samples = from_quantiles({0.5: 1000, 0.9: 3000, 1.0: 9000}, 100.0)
    lengths = Lengths(tokens, samples, "")
    assert lengths.quantile(0.5) == pytest.approx(1000, rel=0.02)
    assert lengths.quantile(0.9) == pytest.approx(3000, rel=0.02)
    # a uniform piece each: 0.5 x 500 + 0.4 x 2000 + 0.1 x 6000
    assert lengths.mean == pytest.approx(1650, rel=0.01)


def test_the_missions_histogram_has_its_stated_total_and_a_long_tail():
    lengths = stated_lengths(load_config(MISSION).data)
    assert lengths is not None
    assert lengths.num_samples == 913_000
    assert lengths.num_tokens == 1_826_000_000  # data.num_samples x data.expected_tokens
    assert lengths.quantile(0.999) > 10_000  # the long-context source
    assert lengths.longest <= 18_432


def test_a_recipe_may_state_quantiles_or_nothing():
    stated = "data.expected_lengths={0.5: 100, 1.0: 300}"
    lengths = stated_lengths(load_config(MISSION, [stated]).data)
    assert lengths is not None
    assert lengths.mean == pytest.approx(0.5 * 50 + 0.5 * 200, rel=0.01)
    assert stated_lengths(load_config("configs/debug.yaml").data) is None


@pytest.mark.parametrize("value", ["{0.5: 300, 1.0: 100}", "{0.5: 100}"])
def test_quantiles_that_fall_or_have_no_end_are_refused(value):
    with pytest.raises(ValueError, match=r"data\.expected_lengths=.*rise.*end with 1\.0"):
        load_config(MISSION, [f"data.expected_lengths={value}"])


def test_a_corpus_own_lengths_are_read_from_its_shards(corpus_run):
    config, rows = corpus_run
    folder = config.run.folder / "corpus"
    manifest = read_corpus_manifest(folder)
    lengths = corpus_lengths(folder, manifest)
    assert lengths.num_tokens == manifest.num_tokens == sum(row.num_tokens for row in rows)
    assert lengths.longest == max(row.num_tokens for row in rows)
    (folder / manifest.shards[0].file).unlink()
    with pytest.raises(FileNotFoundError, match="is missing; run the data stage again"):
        corpus_lengths(folder, manifest)


@pytest.fixture
def corpus_run(tiny_config):
    from test_extract_run import make_rows, write_rows  # its rows of random ids

    config, rows = tiny_config("llama"), make_rows(20)
    write_rows(config, rows)
    return config, rows
