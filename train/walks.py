"""Where real verify passes start: anchors that decoding meets, instead of any response token.

Every `train.walk_refresh_steps` steps the documents of the steps to come are decoded again with the drafter as it is, at
train.tree_budget; the starts of the passes are kept until the next time, in checkpoints too, so that a run continues exactly.
A document's starts depend on the drafter and the document alone, not on ranks (but for near-ties that rounding flips).

The recorded response says what each pass accepts (evaluation/replay.py), so a pass costs one block. Replay drafts from every
token instead, which answers for every budget but is several times the work; here many documents walk together.

R documents at once, K block size, L = K-1 slots.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, takewhile

import torch
import torch.distributed as dist
from torch import Tensor, nn

from common.distributed import Ranks, raise_together, sum_over_ranks
from common.progress import Progress
from configs.schema import TrainSection
from data.features import FeatureRow, FeatureSet, RowEntry
from ddtree.build import build_trees
from ddtree.replay import accepted, ranks_in
from drafter.cache import ContextCache, draft
from drafter.model import Drafter, block_embeddings
from evaluation.scores import Response, find_responses, score_slots
from target.head import TargetHead
from train.vocabulary import TrainingHead

WalkStarts = dict[str, list[int]]
"""By sample id, positions of the anchors of a document's verify passes, rising."""

MAX_DOCUMENTS, MAX_CACHED_TOKENS = 64, 2**17
"""Walked at once on a rank, at most: with eight key-value heads of 128 in five layers 2.7 GB of context in bfloat16."""


def find_walk_starts(
    drafter: Drafter,
    embedding: Tensor,
    head: TrainingHead,
    features: FeatureSet,
    entries: Iterable[RowEntry],
    train: TrainSection,
    ranks: Ranks,
    is_stopping: Callable[[], bool] = lambda: False,
) -> WalkStarts | None:
    """Of the distinct `entries`, shared out to the ranks. Collective; the same on every rank. None if one is told to stop.

    embedding: (V, H) of the target; head: what training's softmax runs over, with train.vocabulary=corpus fewer tokens than
    serving's, so that trees hold nothing else.
    """
    distinct = list({entry.sample_id: entry for entry in entries}.values())
    own = distinct[ranks.rank :: ranks.world_size]
    found: WalkStarts = {}
    was_training = drafter.training
    drafter.eval()
    progress = Progress("walk starts", len(own), "documents")
    with raise_together(ranks):
        for length, alike in _by_length(own, train.max_tokens):
            rows = (features.read(entry) for entry in alike)
            most = min(len(alike), MAX_DOCUMENTS)  # an idle row of the cache would cost as much
            walks = walk_documents(drafter, embedding, head, rows, train, length, most)
            for sample_id, starts in takewhile(lambda _: not is_stopping(), walks):
                found[sample_id] = starts
                progress.advance()
    drafter.train(was_training)
    if sum_over_ranks(torch.tensor(float(is_stopping()))) > 0:
        return None
    return _merged(found, ranks)


def _by_length(
    entries: Iterable[RowEntry], max_tokens: int
) -> Iterator[tuple[int, list[RowEntry]]]:
    """Documents of one power of two, the longest first, with the longest's tokens: the cache is as long as that in every row."""
    tokens = {entry: min(entry.num_tokens, max_tokens) for entry in entries}
    falling = sorted(tokens, key=lambda entry: -tokens[entry])
    for _, alike in groupby(falling, lambda entry: tokens[entry].bit_length()):
        group = list(alike)
        yield tokens[group[0]], group


@torch.no_grad()
def walk_documents(
    drafter: Drafter,
    embedding: Tensor,
    head: TrainingHead,
    rows: Iterator[FeatureRow],
    train: TrainSection,
    num_tokens: int,
    max_documents: int = MAX_DOCUMENTS,
) -> Iterator[tuple[str, list[int]]]:
    """Sample id and pass starts of every document, as they end; they are cut at `num_tokens`, the longest one's.

    A document that ends gives its place in the cache to the next.
    """
    size = max(1, min(max_documents, MAX_CACHED_TOKENS // num_tokens))
    walks = _Walks(drafter, embedding, head, train, num_tokens, size)
    places: list[Walk | None] = [None] * size
    while True:
        for place in range(size):
            while places[place] is None and (row := next(rows, None)) is not None:
                walk = Walk(row.sample_id, find_responses(row.loss_mask[:num_tokens]), [])
                if walk.begin_response():
                    walks.append(place, row)
                    places[place] = walk
                else:
                    yield walk.sample_id, walk.starts
        if not any(places):
            return
        for place, (walk, count) in enumerate(zip(places, walks.accepted(places), strict=True)):
            if walk is not None and not walk.advance(count):
                yield walk.sample_id, walk.starts
                places[place] = None


@dataclass
class Walk:
    """One document on its way."""

    sample_id: str
    responses: list[Response]
    """The one at hand comes first."""
    starts: list[int]

    @property
    def last(self) -> int:
        """Position of the last token of the response at hand."""
        return self.responses[0].first + self.responses[0].num_drafted

    def begin_response(self) -> bool:
        """Stand at the next response's first token; False if none is left."""
        if self.responses:
            self.starts.append(self.responses[0].first)
        return bool(self.responses)

    def advance(self, num_accepted: int) -> bool:
        """Past the draft tokens that were accepted and the bonus token; False at the document's end."""
        following = self.starts[-1] + num_accepted + 1
        if following < self.last:
            self.starts.append(following)
            return True
        del self.responses[0]
        return self.begin_response()


class _Walks:
    """The tensors of R documents: contexts in a cache, tokens beside it."""

    def __init__(
        self,
        drafter: Drafter,
        embedding: Tensor,
        head: TrainingHead,
        train: TrainSection,
        num_tokens: int,
        size: int,
    ):
        self.drafter, self.train = drafter, train
        self.rows_of, self.head = head.labels, TargetHead(embedding, head.weight)
        self.cache = ContextCache(drafter, num_tokens, size)
        self.input_ids = torch.zeros((size, num_tokens), dtype=torch.int64, device=embedding.device)

    def append(self, place: int, row: FeatureRow) -> None:
        """The whole document, of which drafts see what stands before their anchors."""
        count = min(len(row.input_ids), self.input_ids.shape[1])
        features: list[Tensor | None] = [None] * len(self.cache.lengths)
        features[place] = row.features[:count].to(self.input_ids.device)
        self.cache.start(place)
        self.cache.append(features)
        self.input_ids[place, :count] = row.input_ids[:count].to(self.input_ids.device)

    def accepted(self, places: Sequence[Walk | None]) -> list[int]:
        """Draft tokens that a pass from each document's anchor accepts: one forward, and one transfer back."""
        config, device = self.drafter.config, self.input_ids.device
        for place, walk in enumerate(places):
            if walk is not None:
                self.cache.seek(place, walk.starts[-1])
        ends = [0 if walk is None else walk.last for walk in places]
        starts, lasts = torch.tensor([self.cache.lengths, ends], device=device)
        slots = torch.arange(1, config.block_size, device=device)
        tokens = self.input_ids.gather(1, starts[:, None])  # (R, 1)
        wanted = torch.minimum(starts[:, None] + slots, lasts[:, None])
        blocks = block_embeddings(
            self.head.embedding, tokens, config.mask_token_id, config.block_size
        )
        num_gold = (lasts - starts).clamp(0, len(slots))
        [scores] = score_slots(
            draft(self.drafter, self.cache, blocks[:, 0])[:, 1:],
            self.rows_of(self.input_ids.gather(1, wanted)),
            num_gold,
            self.head,
            self.train.tree_budget,
            [torch.ones(len(slots))],
            self.train.head_chunk_rows,
        )
        trees = build_trees(scores.top_log_probs, self.train.tree_budget)
        ranks = ranks_in(trees, scores.gold_child_ranks, num_gold)
        return accepted(ranks, num_gold, self.train.tree_budget).tolist()


def _merged(own: WalkStarts, ranks: Ranks) -> WalkStarts:
    if ranks.world_size == 1:
        return own
    text = torch.frombuffer(bytearray(json.dumps(own).encode()), dtype=torch.uint8)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(ranks.world_size)]
    dist.all_gather(sizes, torch.tensor([len(text)]))
    longest = int(torch.cat(sizes).max())
    parts = [torch.zeros(longest, dtype=torch.uint8) for _ in sizes]
    dist.all_gather(parts, nn.functional.pad(text, (0, longest - len(text))))
    merged: WalkStarts = {}
    for part, size in zip(parts, sizes, strict=True):
        merged |= json.loads(bytes(part[: int(size)].tolist()))
    return merged
