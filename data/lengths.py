"""How long the samples are: the corpus' real lengths, or those that a recipe states before the corpus exists.

Plans need more than the mean: what a shorter maximum would save, how full batches and packs become, the longest row. Loads no
torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist

import numpy as np
import pyarrow.parquet as pq

from configs.schema import DataSection, SourceSection
from data.corpus import CorpusManifest

SPREAD = 0.8
"""Sigma of log length inside a source that states its mean alone: answers vary by a factor of two or so. An assumption."""
POINTS = 400  # of a stated distribution; means are kept exactly, quantiles within 1 %


@dataclass(frozen=True)
class Lengths:
    """Tokens (prompt and response) of the samples of a corpus, as a weighted histogram."""

    tokens: np.ndarray
    """(n,) float64, rising."""
    samples: np.ndarray
    """(n,) float64: how many samples are that long."""
    basis: str
    """Where this comes from, for the page."""

    @property
    def num_samples(self) -> int:
        return round(float(self.samples.sum()))

    @property
    def num_tokens(self) -> int:
        return round(float(self.tokens @ self.samples))

    @property
    def mean(self) -> float:
        return self.num_tokens / max(1, self.num_samples)

    @property
    def longest(self) -> int:
        return math.ceil(float(self.tokens[-1])) if len(self.tokens) else 0

    def quantile(self, share: float) -> float:
        """Tokens of the shortest sample with `share` of the samples at or below it."""
        below = np.cumsum(self.samples)
        index = int(np.searchsorted(below, share * below[-1] * (1 - 1e-12)))
        return float(self.tokens[min(index, len(self.tokens) - 1)])

    def cut(self, max_tokens: float) -> Lengths:
        """The same samples, none longer than `max_tokens`."""
        return Lengths(np.minimum(self.tokens, max_tokens), self.samples, self.basis)

    def longest_cut(self, num_tokens: float) -> int:
        """The largest maximum under which all samples together have at most `num_tokens`; 0 if there is none."""
        low, high = 0, self.longest
        while low < high:
            middle = (low + high + 1) // 2
            fits = float(np.minimum(self.tokens, middle) @ self.samples) <= num_tokens
            low, high = (middle, high) if fits else (low, middle - 1)
        return low

    def share_above(self, max_tokens: float) -> tuple[float, float]:
        """Of the samples, and of all tokens, the shares that a maximum would cut."""
        cut = self.tokens > max_tokens
        lost = (self.tokens - np.minimum(self.tokens, max_tokens)) @ self.samples
        return float(self.samples[cut].sum() / self.samples.sum()), float(lost) / self.num_tokens


def corpus_lengths(folder: Path, manifest: CorpusManifest) -> Lengths:
    """Of a finished corpus; one column of every shard is read. Raises FileNotFoundError if a shard is gone."""
    parts = [np.zeros(0, np.int32)]
    for shard in manifest.shards:
        path = folder / shard.file
        if not path.is_file():
            raise FileNotFoundError(f"corpus shard {path} is missing; run the data stage again")
        table = pq.read_table(path, columns=["num_tokens"])
        parts.append(table.column("num_tokens").to_numpy())
    tokens, samples = np.unique(np.concatenate(parts), return_counts=True)
    return Lengths(tokens.astype(np.float64), samples.astype(np.float64), "from the corpus")


def stated_lengths(data: DataSection) -> Lengths | None:
    """As the recipe states them: by data.expected_lengths, else by its sources' means, else by one mean; None if it does not.

    Means are kept; inside a source lengths are assumed to be log-normal, cut where the recipe cuts.
    """
    if data.num_samples is None:
        return None
    if data.expected_lengths is not None:
        found = from_quantiles(data.expected_lengths, data.num_samples)
        return Lengths(*found, "stated by data.expected_lengths")
    mixed = [source for source in data.sources if source.split != "test"]
    known = [s for s in mixed if s.take is not None and s.expected_tokens is not None]
    if known and len(known) == len(mixed):
        parts = [
            log_normal(s.expected_tokens or 0, s.take or 0, source_limit(s, data)) for s in known
        ]
        tokens = np.concatenate([part[0] for part in parts])
        samples = np.concatenate([part[1] for part in parts])
        if data.expected_tokens is not None:  # the recipe's own mean is the total it speaks of
            tokens *= data.expected_tokens * samples.sum() / (tokens @ samples)
        order = np.argsort(tokens, kind="stable")
        basis = "stated means of the sources, lengths assumed log-normal inside each"
        return Lengths(tokens[order], samples[order], basis)
    if data.expected_tokens is None:
        return None
    found = log_normal(data.expected_tokens, data.num_samples, data.max_tokens)
    return Lengths(*found, "data.num_samples x data.expected_tokens, lengths assumed log-normal")


def source_limit(source: SourceSection, data: DataSection) -> int:
    """Tokens that no sample of the source exceeds."""
    if not data.responses.generate:
        return data.max_tokens
    prompt = source.max_prompt_tokens or data.max_prompt_tokens
    return min(data.max_tokens, prompt + data.responses.max_new_tokens)


def log_normal(mean: float, num_samples: float, limit: float) -> tuple[np.ndarray, np.ndarray]:
    """(tokens, samples) of POINTS equal shares, none above `limit`, their mean `mean` (or `limit`, if that is less)."""
    shares = [(i + 0.5) / POINTS for i in range(POINTS)]
    shape = np.exp(SPREAD * np.array([NormalDist().inv_cdf(share) for share in shares]))
    low, high = 0.0, limit / float(shape[0])
    for _ in range(60):  # the scale at which the cut lengths have the mean
        scale = (low + high) / 2
        low, high = (
            (scale, high) if np.minimum(scale * shape, limit).mean() < mean else (low, scale)
        )
    return np.minimum(high * shape, limit), np.full(POINTS, num_samples / POINTS)


def from_quantiles(
    quantiles: Mapping[float, int], num_samples: float
) -> tuple[np.ndarray, np.ndarray]:
    """(tokens, samples), linear between the quantiles, from one token at 0."""
    at = [0.0, *sorted(quantiles)]
    values = [1.0, *(float(quantiles[share]) for share in sorted(quantiles))]
    shares = (np.arange(POINTS) + 0.5) / POINTS
    return np.interp(shares, at, values), np.full(POINTS, num_samples / POINTS)


def length_table(lengths: Lengths) -> list[str]:
    """Lines: a range of lengths, the share of samples and of all tokens. Ranges double, from where the shortest 3 % end."""
    first = math.ceil(math.log2(max(2.0, lengths.quantile(0.03))))
    bins = [2**power for power in range(first, 40) if 2**power < lengths.longest]
    lines, start = [f"{'tokens':>14}{'samples':>10}{'of all tokens':>15}"], 0
    for end in [*bins, lengths.longest]:
        inside = (lengths.tokens > start) & (lengths.tokens <= end)
        samples = lengths.samples[inside].sum() / lengths.samples.sum()
        tokens = lengths.tokens[inside] @ lengths.samples[inside] / lengths.num_tokens
        lines.append(f"{f'{start + 1:,}-{end:,}':>14}{samples:>10.1%}{tokens:>15.1%}")
        start = end
    return lines
