"""Where real verify passes start: anchors that decoding meets, instead of any response token.

Every `train.walk_refresh_steps` steps the documents of the steps to come are replayed with the drafter as it is, at
train.tree_budget; the starts of the passes are kept until the next time, in checkpoints too, so that a run continues exactly.
A document's starts depend on the drafter and the document alone, never on ranks.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from common.distributed import Ranks, raise_together
from common.progress import Progress
from configs.schema import TrainSection
from data.features import FeatureSet, RowEntry
from drafter.model import Drafter
from evaluation.acceptors import tree_acceptor
from evaluation.replay import ReplayOptions, replay_row
from evaluation.scores import find_responses
from target.head import TargetHead

WalkStarts = dict[str, list[int]]
"""By sample id, positions of the anchors of a document's verify passes, rising."""


def find_walk_starts(
    drafter: Drafter,
    head: TargetHead,
    features: FeatureSet,
    entries: Iterable[RowEntry],
    train: TrainSection,
    ranks: Ranks,
) -> WalkStarts:
    """Of the distinct `entries`, shared out to the ranks. Collective; the same on every rank."""
    distinct = list({entry.sample_id: entry for entry in entries}.values())
    own = distinct[ranks.rank :: ranks.world_size]
    options = ReplayOptions(
        (train.tree_budget,), head_chunk_rows=train.head_chunk_rows, names=("tree",)
    )
    key = tree_acceptor(train.tree_budget).key
    found: WalkStarts = {}
    was_training = drafter.training
    drafter.eval()
    progress = Progress("walk starts", len(own), "documents")
    with raise_together(ranks):
        for entry in own:
            row = features.read(entry)
            passes = replay_row(drafter, head, row, options).passes[key]
            found[entry.sample_id] = pass_starts(row.loss_mask, passes)
            progress.advance()
    drafter.train(was_training)
    return _merged(found, ranks)


def pass_starts(loss_mask: Tensor, passes: Sequence[int]) -> list[int]:
    """Positions of the anchors of `passes`, tokens emitted by each, over the responses of one document in turn."""
    starts, emitted = [], iter(passes)
    for response in find_responses(loss_mask):
        done = 0
        while done < response.num_drafted:
            starts.append(response.first + done)
            done += next(emitted)
    assert next(emitted, None) is None, "passes beyond the document's responses"
    return starts


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
