"""A slice of the corpus through the target: batches of similar length in, rows of features on the host out.

`extract_slice` is the whole of it, one step after another; the stage runs the same steps side by side (extract/worker.py), and
the bits are the same. Legend: B sequences, S tokens, D taps, H hidden.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from configs.schema import Config
from data.corpus import CorpusRow
from data.feature_manifest import QuarantinedRow
from data.feature_shards import FeatureRow
from data.soft_labels import SoftLabels
from extract.batches import CorpusSlice, length_batches
from extract.checks import features_problem, ids_problem, padded_batch, token_rms
from extract.copies import HostCopies
from extract.soft_labels import soft_labels_of
from extract.work import shard_name
from target.load import Target
from target.taps import forward_with_taps

logger = logging.getLogger(__name__)

SAME_RMS = 0.05  # a device's own rounding is far below, a fault far above


@dataclass(frozen=True)
class Extracted:
    """A slice of the corpus with its features, in corpus order."""

    index: int
    rows: list[FeatureRow]
    quarantined: list[QuarantinedRow]


@dataclass(frozen=True)
class Batch:
    """What the target made of some rows of a slice, still on its device."""

    members: list[int]
    """Places of the rows in the slice."""
    rows: list[CorpusRow]
    input_ids: Tensor
    """(B, S) int64, as the target read them."""
    features: Tensor
    """(B, S, D, H)."""
    soft_labels: list[SoftLabels] | None
    ready: torch.cuda.Event | None
    """When the device has computed `features`; None on the CPU, where it has."""

    @property
    def num_padding(self) -> int:
        return self.input_ids.numel() - sum(row.num_tokens for row in self.rows)


class SliceForward:
    """The target's side. One forward at a time, from any thread."""

    def __init__(self, config: Config, target: Target):
        self.config, self.target = config, target
        self._lock = threading.Lock()

    def batches(self, part: CorpusSlice) -> Iterator[Batch]:
        """All rows whose ids can be read, in batches that follow from the slice alone."""
        readable = [
            place
            for place, row in enumerate(part.rows)
            if ids_problem(row, self.target.vocab_size) is None
        ]
        lengths = [part.rows[place].num_tokens for place in readable]
        extract = self.config.extract
        for batch in length_batches(lengths, extract.batch_tokens, extract.max_padding):
            members = [readable[i] for i in batch]
            yield self.run(members, [part.rows[place] for place in members])

    def run(self, members: list[int], rows: Sequence[CorpusRow]) -> Batch:
        """Raises ValueError if the batch does not fit the device's memory."""
        with self._lock:
            input_ids, lengths = padded_batch(rows, self.target.device)
            try:
                return self._run(members, list(rows), input_ids, lengths)
            except torch.OutOfMemoryError as error:
                shape = f"{len(rows)} x {input_ids.shape[1]} tokens"
                raise ValueError(
                    f"extract.batch_tokens={self.config.extract.batch_tokens}: a batch of {shape} does not fit "
                    f"{self.target.device}; lower it (or data.max_tokens, for one long row), or set target.device_map=auto"
                ) from error

    def _run(
        self, members: list[int], rows: list[CorpusRow], input_ids: Tensor, lengths: Tensor
    ) -> Batch:
        extract, soft = self.config.extract, None
        output = forward_with_taps(
            self.target,
            input_ids,
            lengths,
            self.config.drafter.target_layer_ids,
            need_last_hidden=extract.soft_labels > 0,
        )
        if output.last_hidden is not None:
            soft = [
                soft_labels_of(self.target, row, hidden, extract)
                for row, hidden in zip(rows, output.last_hidden, strict=True)
            ]
        ready = None
        if self.target.device.type == "cuda":
            ready = torch.cuda.Event()
            ready.record(torch.cuda.current_stream(self.target.device))
        return Batch(members, rows, input_ids, output.features, soft, ready)


class SliceBuilder:
    """The host's side: checks each row, takes its features off the device, and puts the slice together again."""

    def __init__(self, forward: SliceForward, tap_rms: Tensor):
        """tap_rms (D,): the corpus' first rows (extract/checks.py)."""
        self.forward, self.tap_rms = forward, tap_rms
        self._copies = HostCopies(forward.target.device)
        self._rows: dict[int, FeatureRow] = {}
        self._problems: dict[int, str] = {}
        self._reference: tuple[CorpusRow, Tensor] | None = None

    def add(self, batch: Batch) -> None:
        """Raises ValueError if the device does not compute the same twice."""
        with self._copies.of(batch.ready, batch.features):
            problems = self._problems_of(batch)
            if any(problems):
                self._require_sound_device(batch, problems)
            lengths = [row.num_tokens for row in batch.rows]
            features = self._copies.to_host(batch.features, lengths)
            input_ids = batch.input_ids.cpu()
        for at, (place, problem) in enumerate(zip(batch.members, problems, strict=True)):
            if problem is not None:
                self._problems[place] = problem
                continue
            row, soft = batch.rows[at], batch.soft_labels[at] if batch.soft_labels else None
            self._rows[place] = _feature_row(row, input_ids[at, : lengths[at]], features[at], soft)
            if self._reference is None:
                self._reference = row, token_rms(features[at])

    def finish(self, part: CorpusSlice) -> Extracted:
        """The slice, once all its batches were added; the builder is empty again."""
        for place, row in enumerate(part.rows):
            problem = ids_problem(row, self.forward.target.vocab_size)
            if problem is not None:
                self._problems[place] = problem
        assert len(self._rows) + len(self._problems) == len(part.rows), "a batch is missing"
        name = shard_name(part.index)
        extracted = Extracted(
            part.index,
            [self._rows[place] for place in sorted(self._rows)],
            [
                QuarantinedRow(part.rows[place].sample_id, name, self._problems[place])
                for place in sorted(self._problems)
            ],
        )
        self._rows, self._problems = {}, {}
        return extracted

    def _problems_of(self, batch: Batch) -> list[str | None]:
        fed = batch.input_ids.cpu()
        return [
            features_problem(
                row, fed[at, : row.num_tokens], batch.features[at, : row.num_tokens], self.tap_rms
            )
            for at, row in enumerate(batch.rows)
        ]

    def _require_sound_device(self, batch: Batch, problems: Sequence[str | None]) -> None:
        """A row that fails its checks is the row's fault only if it fails again, and a good row is still good here: else a
        broken device would quarantine the corpus, and nobody would make those rows again."""
        again = self.forward.run(batch.members, batch.rows)
        if again.ready is not None:
            again.ready.synchronize()
        found = self._problems_of(again)
        is_same = [p is None for p in found] == [p is None for p in problems]
        if not is_same or not self._reference_is_same():
            reason = next(problem for problem in problems if problem)
            raise ValueError(
                f"{self.forward.target.device} does not compute the same twice ({reason}; then not, or a row that was good "
                "before is bad now): take this device out; other workers go on with its shards"
            )

    def _reference_is_same(self) -> bool:
        if self._reference is None:
            return True
        row, rms = self._reference
        batch = self.forward.run([0], [row])
        if batch.ready is not None:
            batch.ready.synchronize()
        found = token_rms(batch.features[0, : row.num_tokens]).cpu()
        return bool(((found - rms).abs() < SAME_RMS * rms).all())  # false for NaN


def extract_slice(config: Config, target: Target, part: CorpusSlice, tap_rms: Tensor) -> Extracted:
    """Features of a slice's rows on the CPU, in corpus order; rows that fail a check are set apart with the reason."""
    forward = SliceForward(config, target)
    builder = SliceBuilder(forward, tap_rms)
    for batch in forward.batches(part):
        builder.add(batch)
    return builder.finish(part)


def _feature_row(
    row: CorpusRow, fed_ids: Tensor, features: Tensor, soft: SoftLabels | None
) -> FeatureRow:
    return FeatureRow(
        sample_id=row.sample_id,
        source=row.source,
        task=row.task,
        split=row.split,
        input_ids=fed_ids,
        loss_mask=torch.tensor(row.loss_mask),
        features=features,
        soft_labels=soft,
    )
