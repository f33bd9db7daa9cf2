"""Which child was taken: the place in its slot's list of every draft token that decoding emitted.

0 is the drafter's first choice. Replay and live decoding count the same thing: a pass's accepted tokens, cut where the
response is cut.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from evaluation.decoded import PassRecord


def replay_child_ranks(
    gold_child_ranks: Sequence[Sequence[int]], accepted: Sequence[int], passes: Sequence[int]
) -> list[list[int]]:
    """A list a pass of one replayed response.

    gold_child_ranks[i], accepted[i]: the recorded tokens' places after anchor i, and how many of them are accepted there;
    never more than the record holds, so no pass is cut inside its accepted path.
    passes: emitted tokens a pass (ddtree.replay.replay_walk); each starts where the one before ended.
    """
    found, anchor = [], 0
    for emitted in passes:
        found.append(list(gold_child_ranks[anchor][: accepted[anchor]]))
        anchor += emitted
    return found


def live_child_ranks(records: Iterable[PassRecord]) -> list[list[int]]:
    """A list a pass."""
    return [
        record.tree.child_ranks[record.accepted.nodes[1:]].tolist()[: record.num_emitted]
        for record in records
    ]


def count_child_ranks(passes: Iterable[Iterable[int]]) -> list[int]:
    """How many tokens came from each place, up to the last place that was taken."""
    flat = [rank for ranks in passes for rank in ranks]
    counts = [0] * (max(flat, default=-1) + 1)
    for rank in flat:
        counts[rank] += 1
    return counts
